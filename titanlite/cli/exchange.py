"""`titanlite export` and `titanlite import`: weights as a Hugging Face folder, and back.

Torch is imported late.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from titanlite import exit_codes
from titanlite.checkpoint.manifest import progress
from titanlite.checkpoint.paths import files_in, to_path
from titanlite.cli.checkpoint_folders import check_weights
from titanlite.cli.parser import BASE, EMA, Commands, Parser, new_command
from titanlite.config import trust
from titanlite.config.text_names import BUNDLED_TOKENIZER_NAME
from titanlite.utils import human_bytes, human_time, say

if TYPE_CHECKING:
    from titanlite.cli.hub.convert import ModelOf

PRECISIONS = ("float32", "bfloat16", "float16")
DTYPE = "precision of the weights; as they are without it"


def add_commands(commands: Commands) -> None:
    """Add `export` and `import` to argparse."""
    parser = _add(
        commands,
        "export",
        "write a checkpoint as a Hugging Face folder",
        "Write the weights of a checkpoint as a folder that AutoModelForCausalLM.from_pretrained "
        "and vLLM read.",
    )
    run = "a run, its folder of checkpoints (the newest valid one), or one step-N"
    _add_paths(parser, ("RUN_OR_CHECKPOINT", run), ("FOLDER", "a new folder"))
    parser.add("--ema", EMA)
    parser.add("--base", BASE, "PATH", type=to_path)
    parser.set_defaults(to="hf")
    trust.add_argument(parser.add_argument)

    parser = _add(
        commands,
        "import",
        "read a Hugging Face folder into a checkpoint",
        "Write published weights as a checkpoint of weights only, for "
        "checkpoint.initial_load_path, which also takes FOLDER itself.",
    )
    folder = "config.json and safetensors files"
    target = "folder or URL of checkpoints; step-0 in it is made"
    _add_paths(parser, ("FOLDER", folder), ("CHECKPOINT", target))
    parser.set_defaults(to="checkpoint", ema=False, base=None)
    trust.add_argument(parser.add_argument)


def _add_paths(parser: Parser, source: tuple[str, str], target: tuple[str, str]) -> None:
    """Add the paths and the precision. source, target: name and help of each path."""
    for name, (metavar, help) in (("source", source), ("target", target)):
        parser.add(name, help, metavar, type=to_path)
    parser.add("--dtype", DTYPE, choices=PRECISIONS)


def _add(commands: Commands, name: str, help: str, text: str) -> Parser:
    checked = (
        "The files of the tokenizer and generation_config.json come along. At the end the logits "
        "of 64 random tokens are computed from what was read and from what was written, with "
        "`transformers` for the folder if it is installed and has the memory. If they differ, "
        "nothing is published. Nothing is overwritten. It needs no GPU, and otherwise memory for "
        "one file of 4 GB."
    )
    exits = (
        f"Exit status: {exit_codes.CHECKPOINT} for weights that cannot be used or logits that "
        "differ."
    )
    return new_command(commands, _run, name, help, f"{text} {checked}", exits)


def _run(arguments: argparse.Namespace) -> str:
    return convert_weights(arguments, report=say)


def convert_weights(
    arguments: argparse.Namespace, report: Callable[[str], None] | None = None
) -> str:
    """Write weights in another format; return what was written, for people.

    arguments: `source`, `target`, `to`, `dtype`, `ema`, `base` and `trust_code` of a command.
    report: takes the lines of the comparison of logits.
    """
    check_weights(arguments.source)
    from titanlite.cli.hub.convert import convert

    started = time.perf_counter()
    written = convert(
        arguments.source,
        arguments.target,
        arguments.to,
        arguments.dtype,
        progress(say, ""),
        ema=arguments.ema,
        report=report,
        trust_code=arguments.trust_code,
        base=arguments.base,
        described=_model_of(arguments.config) if getattr(arguments, "config", None) else None,
    )
    size = sum(file.st_size for file in files_in(written).values())
    # A file holds no files.
    size = size or written.stat().st_size
    return f"{written}: {human_bytes(size)} in {human_time(time.perf_counter() - started)}"


def _model_of(file: str) -> ModelOf:
    """Return the model of a TOML file. Raises ConfigError."""
    from titanlite.cli.hub.convert import ModelOf
    from titanlite.resolve.load import check_config

    run = check_config([f"--job.config_file={file}"], training=False)[1]
    tokenizer = run.model.tokenizer_path
    return ModelOf(
        run.spec, run.model_args(), None if tokenizer == BUNDLED_TOKENIZER_NAME else tokenizer
    )
