"""`titanlite export`: weights as a Hugging Face folder, or adapters as a folder of PEFT's.

Torch is imported late.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from titanlite import exit_codes
from titanlite.checkpoint.manifest import progress
from titanlite.checkpoint.store_paths import files_in, to_path
from titanlite.cli.argument_parser import BASE, EMA, Commands, new_command
from titanlite.cli.checkpoint_folders import check_weights
from titanlite.config import trust
from titanlite.config.dataset_registry import BUNDLED_TOKENIZER_NAME
from titanlite.utils import human_bytes, human_time, say

if TYPE_CHECKING:
    from titanlite.cli.hub.export_weights import ModelOf


PRECISIONS = ("float32", "bfloat16", "float16")
DTYPE = "precision of the weights (default: that of the source)"


def add_command(commands: Commands) -> None:
    """Add `export` to argparse."""
    parser = new_command(
        commands,
        _run,
        "export",
        "write a checkpoint as a Hugging Face folder",
        "Write the weights of a checkpoint as a folder that AutoModelForCausalLM.from_pretrained "
        "and vLLM read. The files of the tokenizer and generation_config.json come along. "
        "Checkpoints are compared with their hashes first, and adapters are merged into their "
        "weights. At the end the logits of 64 random tokens are computed from what was read and "
        "from what was written, with `transformers` if it is installed and has the memory. If they "
        "differ, nothing is published. Nothing is overwritten. It needs no GPU, and otherwise "
        "memory for one file of 4 GB.",
        f"Exit status: {exit_codes.CHECKPOINT} for weights that cannot be used or logits that "
        "differ.",
    )
    add = parser.add
    source = (
        "a run, its folder of checkpoints (the newest valid one), one step-N, also of torchtitan "
        "with --config, or a folder of Hugging Face's or PEFT's layout"
    )
    add("source", source, "SOURCE", type=to_path)
    add("target", "a new folder", "FOLDER", type=to_path)
    add("--dtype", DTYPE, choices=PRECISIONS)
    add("--ema", EMA)
    add("--base", BASE, "PATH", type=to_path)
    add("--peft", "write the adapters alone, for `peft`")
    add("--config", "TOML file of the run of torchtitan that wrote SOURCE", "FILE")
    add("--unchecked", "publish without a comparison of logits and ids")
    trust.add_argument(add)


def _run(arguments: argparse.Namespace) -> str:
    check_weights(arguments.source)
    from titanlite.cli.hub.export_weights import convert

    started = time.perf_counter()
    written = convert(
        arguments.source,
        arguments.target,
        "peft" if arguments.peft else "hf",
        arguments.dtype,
        progress(say, ""),
        ema=arguments.ema,
        report=None if arguments.unchecked else say,
        trust_code=arguments.trust_code,
        base=arguments.base,
        described=_model_of(arguments.config) if arguments.config else None,
    )
    size = sum(file.st_size for file in files_in(written).values())
    return f"{written}: {human_bytes(size)} in {human_time(time.perf_counter() - started)}"


def _model_of(file: str) -> ModelOf:
    from titanlite.cli.hub.export_weights import ModelOf
    from titanlite.resolve.load import check_config

    run = check_config([f"--job.config_file={file}"], training=False)[1]
    tokenizer = run.model.tokenizer_path
    return ModelOf(
        run.spec, run.model_args(), None if tokenizer == BUNDLED_TOKENIZER_NAME else tokenizer
    )
