"""`titanlite eval`: the losses of a checkpoint on held-out text.

It trains nothing and writes nothing.

Model, text and numbers are those of a validation in training: the same config builds them
(`titanlite.assembly.build`). With `validation.ema` the weights are the averages in the checkpoint.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite import exit_codes
from titanlite.checkpoint.manifest import FILE, CheckpointError, Manifest, read_manifest
from titanlite.checkpoint.store_paths import AnyPath
from titanlite.cli.checkpoint_folders import checkpoint_of
from titanlite.cli.run_figures import to_json
from titanlite.config import trust
from titanlite.config.errors import Problem
from titanlite.config.load import read, read_text
from titanlite.config.unsupported_keys import NAMES, UNSUPPORTED
from titanlite.dist.launch_env import read_launch_env
from titanlite.resolve.load import resolve
from titanlite.run.config import RunConfig
from titanlite.runs.text_tables import Table, render
from titanlite.utils import logger, require, say

if TYPE_CHECKING:
    import torch

    from titanlite.data.rows import Rows
    from titanlite.data.tokenizer import Tokenizer
    from titanlite.dist.dist_env import DistEnv
    from titanlite.validation import HeldOutLoss, ValidationResult

#: Seconds for the hashes of prepared tokens that were read.
_PATIENCE = 600.0
#: Sections that only training needs: what they hold may be of another version, or missing here.
_OF_TRAINING = ("eval", "guard", "ladder", "launch", "lr_scheduler", "profiling", "sdc", "stall")
#: Sections whose keys do not change the model, its numbers or its text.
_HARMLESS = (
    *_OF_TRAINING,
    "activation_checkpoint",
    "checkpoint",
    "comm",
    "compile",
    "debug",
    "fault_tolerance",
    "job",
    "metrics",
    "optimizer",
    "sample",
)
#: Keys of earlier versions and other trainers that a kept config may have. A record made the text.
_GONE = {*UNSUPPORTED, *NAMES["gone"]} - {"data.record"}
#: Takes from the other sections what only training needs.
_NO_TRAINING = (
    "--data.phase=[]",
    "--data.packing=split",
    "--training.dataset=c4_test",
    "--training.dataset_path=none",
    "--data.source=[]",
    "--data.skip_steps=[]",
    "--training.global_batch_size=-1",
    "--optimizer.name=AdamW",
    "--job.callbacks=[]",
    "--metrics.enable_wandb=false",
    "--metrics.trackers=[]",
    "--validation.enable",
    "--checkpoint.enable_checkpoint",
    "--checkpoint.folder=checkpoint",
    "--checkpoint.start=from",
    "--checkpoint.load_step=-1",
    "--checkpoint.exclude_from_loading=[]",
    "--checkpoint.initial_load_model_only",
    "--checkpoint.initial_load_in_hf=false",
    "--checkpoint.create_seed_checkpoint=false",
    "--checkpoint.hub=",
    "--checkpoint.local_folder=none",
)


def config_of(
    folder: AnyPath,
    manifest: Manifest,
    file: str | None,
    flags: Sequence[str],
    world_size: int,
    trust_code: bool = False,
) -> RunConfig:
    """Return the config of a file, or the checkpoint's own, with flags, to evaluate it by.

    trust_code: let the checkpoint's config name code and variables (`titanlite.config.trust`).
    Raises ConfigError, and CheckpointError for a checkpoint without a config.
    """
    # The weights under adapters are where the config says.
    key = "lora.adapter" if "lora" in manifest.config else "checkpoint.initial_load_path"
    over = [*_NO_TRAINING, f"--{key}={folder}"]
    if file is not None:
        config, problems = read([f"--job.config_file={file}", *over, *flags])
    else:
        toml = manifest.config.get("toml")
        if not isinstance(toml, str):
            raise CheckpointError(
                f"{folder} holds no config: give one, `titanlite eval {folder} CONFIG`"
            )
        place = Path(str(folder / FILE))
        # It is a folder of compiled code, which this machine can make.
        over.append("--compile.cache_dir=none")
        config, found = read_text(toml, place, [*over, *flags], trust.foreign(trust_code))
        problems = [problem for problem in found if not _is_of_another_version(problem)]
        gone = ", ".join(problem.key for problem in found if problem not in problems)
        if gone and os.environ.get("RANK", "0") == "0":
            say(f"warning: {place}: passed over, as this version does not take it: {gone}")
    config = config.without(_OF_TRAINING)
    return resolve(config, world_size, problems, machine=True, texts=True)[1]


def _is_of_another_version(problem: Problem) -> bool:
    """Return whether evaluation can do without what a kept config has here.

    An unknown key may change the model or its numbers, unless its section cannot.
    """
    section = problem.key.strip("[]").partition(".")[0]
    if problem.where == "command line" or section == "model":
        return False
    if problem.code in ("missing-package", "unknown-key", "unknown-section", "unsupported"):
        return section in _HARMLESS or problem.key in _GONE
    is_value = problem.code in ("out-of-range", "unknown-value", "wrong-type")
    return is_value and section in _OF_TRAINING


def evaluate_rank(arguments: argparse.Namespace) -> int:
    """Be one rank, to its end; rank 0 prints the losses. Return the exit code."""
    from titanlite.assembly import error_exit

    try:
        env = read_launch_env()
        folder = checkpoint_of(arguments.checkpoint)
        manifest = read_manifest(folder)
        given = (arguments.file, arguments.flags, env.world_size, arguments.trust_code)
        run = config_of(folder, manifest, *given)
        require("torch")  # what follows imports it
        from titanlite.assembly.preflight import check_machine
        from titanlite.dist.dist_env import DistEnv, connect_store
        from titanlite.dist.process_settings import kernel_order
        from titanlite.dist.rendezvous import report_failure
        from titanlite.metrics.console import setup_console

        setup_console(env.rank, run.metrics.enable_color_printing, sys.stderr)
        store = connect_store()
        seconds = run.comm.init_timeout_seconds
        with report_failure(store, env.rank, env.world_size):
            check_machine(run)
            texts = read_texts(run, folder, manifest)
            with (
                DistEnv.open(store=store, init_timeout_seconds=seconds, trace_buf_size=0) as world,
                kernel_order(world.device.type, run.training.attention_kernel),
            ):
                result = evaluate(run, world, *texts)
    except Exception as error:
        if exit_codes.code_of(error) == exit_codes.ERROR:
            raise
        return error_exit.print_error(str(error), exit_codes.code_of(error))
    if env.rank == 0:
        single = run.validation.dataset_path or run.validation.dataset
        losses = {name or single: one for name, one in result.sources.items()}
        if arguments.json:
            about = {"checkpoint": str(folder), "step": manifest.step, "ranks": env.world_size}
            found = {**about, **_figures(result.all)}
            found["sources"] = {name: _figures(one) for name, one in losses.items()}
            print(to_json(found))
        else:
            shown = dict(losses)
            if len(losses) > 1:
                shown["all"] = result.all
            cells = [
                (name, f"{one.loss:.4f}", f"{one.perplexity:.4g}", f"{one.tokens:,}")
                for name, one in shown.items()
            ]
            print(render(Table(("text", "loss", "perplexity", "tokens"), cells, title=str(folder))))
    return exit_codes.DONE


def read_texts(
    run: RunConfig, folder: AnyPath, manifest: Manifest
) -> tuple[Tokenizer, dict[str, Rows]]:
    """Read tokenizer and held-out texts; no process group is needed.

    Raises DataError and ConfigError as training does, CheckpointError if the weights do not fit.
    """
    from titanlite.assembly.datasets import read_held_out
    from titanlite.assembly.fingerprints import weights_fingerprints
    from titanlite.assembly.preflight import check_model
    from titanlite.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(run.model.tokenizer_path, run.model.name)
    check_model(run, tokenizer.vocab_size)
    prints = weights_fingerprints(run.model.name, run.model_args(tokenizer.vocab_size), tokenizer)
    others = [name for name, value in prints.items() if manifest.fingerprints.get(name) != value]
    if others and not {*others} <= {*run.checkpoint.allow_changes}:
        raise CheckpointError(
            f"{folder} was trained with another {' and '.join(others)} than this config has. If "
            f"that is meant, say so: --checkpoint.allow_changes={','.join(others)}"
        )
    return tokenizer, read_held_out(run, tokenizer)


def evaluate(
    run: RunConfig, world: DistEnv, tokenizer: Tokenizer, texts: Mapping[str, Rows]
) -> ValidationResult:
    """Measure the weights of `checkpoint.initial_load_path`. All ranks call it together."""
    from titanlite.assembly.loaders import build_validation
    from titanlite.assembly.model import build_model
    from titanlite.checkpoint.load import Loader
    from titanlite.data.text_report import checks_of
    from titanlite.models.args import as_record
    from titanlite.parallel.init import use_deterministic

    parts = build_model(run, world, tokenizer.vocab_size)
    if run.debug.deterministic:
        use_deterministic(run.debug.deterministic_warn_only)
    held_out = build_validation(run, parts.mesh, texts)
    averages: dict[str, torch.Tensor] = {}
    ema = run.features.ema
    if ema is not None and run.validation.ema:
        average = ema.begin(parts.model)
        averages = average.tensors
        held_out = replace(held_out, weights=average.applied)
    section = run.checkpoint
    prints: dict[str, str] = {}
    about: dict[str, Any] = {}
    lora = run.features.lora
    if lora is not None:
        about["model"] = as_record(run.model.name, parts.args)
        lora.base(run, world, parts.args, prints, about).load(parts.model)
        section = lora.checkpoint(section)
    loaded = Loader(section, world, prints, about, averages=averages).load_weights(parts.model)
    if averages and "ema" in loaded.left_out and world.rank == 0:
        logger.info(f"{loaded.folder} holds no average of the weights: its weights are measured")
    result = held_out.measure(parts.model, world.device, parts.runner, parts.factors)
    for check in checks_of(texts.values()):
        check.settle(_PATIENCE)
    return result


def _figures(one: HeldOutLoss) -> dict[str, float]:
    return {"loss": one.loss, "perplexity": one.perplexity, "tokens": one.tokens}
