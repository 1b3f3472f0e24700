"""`titanlite push`: export a checkpoint and upload it with a model card."""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path
from typing import Any

from titanlite import exit_codes
from titanlite.checkpoint.manifest import progress, read_manifest
from titanlite.checkpoint.paths import to_path
from titanlite.checkpoint.retention import pinned
from titanlite.cli.exchange import DTYPE, PRECISIONS
from titanlite.cli.parser import BASE, EMA, Commands, new_command
from titanlite.cli.processes import Stopped, stoppable
from titanlite.config import trust
from titanlite.contrib.hub.card import README, files_beside
from titanlite.contrib.hub.upload import MAIN, HubError, open_repository, upload
from titanlite.contrib.hub.weights import BEST, LATEST, Weights, commit_title, find_weights
from titanlite.features.lora.settings import RECORD
from titanlite.runs.links import refuse_links
from titanlite.utils import say


def add_command(commands: Commands) -> None:
    """Add `push` to argparse."""
    parser = new_command(
        commands,
        _run,
        "push",
        "upload a checkpoint with a model card to the Hugging Face hub",
        "Export a checkpoint as a Hugging Face folder, write a model card from its run, and upload "
        "both to a repository of the hub. Adapters go up in PEFT's format. HF_TOKEN, or a login of "
        "huggingface_hub, gives the token. After a failure the same command sends only what the "
        "hub does not have.",
        f"Exit status: {exit_codes.CONFIG} where the hub refuses, {exit_codes.CHECKPOINT} for "
        "weights that cannot be used.",
    )
    what = "a run, its folder of checkpoints, one step-N, or exported weights"
    parser.add("source", what, "RUN_OR_CHECKPOINT", type=to_path)
    parser.add("repository", "of the model", "OWNER/NAME", type=_repository)
    steps = "a step, latest (the default) or best (the lowest validation loss)"
    parser.add("--step", steps, "N", type=_step)
    branch = "where to; made if it is not there; may be given several times (default: main)"
    parser.add("--branch", branch, "NAME", action="append")
    parser.add("--private", "make a new repository private")
    parser.add("--license", "for the card, such as apache-2.0", "ID")
    parser.add("--dtype", DTYPE, choices=PRECISIONS)
    parser.add("--ema", EMA)
    parser.add("--merged", "upload adapters merged with the weights under them")
    parser.add("--base", BASE, "PATH", type=to_path)
    folder = "where the export waits for its upload (default: the working directory)"
    parser.add("--folder", folder, "FOLDER", type=Path, default=Path())
    parser.add("--dry-run", "print the card; upload nothing")
    trust.add_argument(parser.add_argument)


def _repository(text: str) -> str:
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text):
        raise argparse.ArgumentTypeError(f"expected OWNER/NAME, got {text!r}")
    return text


def _step(text: str) -> str:
    if text not in (LATEST, BEST) and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number, latest or best, got {text!r}")
    return text


def _run(arguments: argparse.Namespace) -> Any:
    with stoppable():
        try:
            return _push(arguments)
        except Stopped as stopped:
            return "", exit_codes.after_signal(stopped.number)


def _push(arguments: argparse.Namespace) -> str:
    weights = find_weights(arguments.source, arguments.step)
    branches = arguments.branch or [MAIN]
    if weights.manifest is None:
        for name in ("dtype", "ema", "merged", "base"):
            if getattr(arguments, name):
                raise HubError(f"{weights.path} is exported already: --{name} says nothing here")
    if arguments.dry_run:
        place = (arguments.repository, branches[0])
        card = files_beside(weights, None, place, arguments.license)[README]
        return f"{weights.path} → {arguments.repository}, {', '.join(branches)}\n\n{card.decode()}"
    api = open_repository(arguments.repository, True if arguments.private else None)
    title = commit_title(weights.path)
    lines = []
    work: Path = arguments.folder
    # A folder of somebody else could lead elsewhere.
    refuse_links(work.parent, work)
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="titanlite-push-", dir=work) as folder:
        exported = export(weights, Path(folder) / "weights", arguments)
        files: dict[str, Path | bytes] = {}
        for file in sorted(exported.iterdir()):
            if file.is_file() and not file.name.startswith("."):
                files[file.name] = file
            else:
                say(f"not uploaded: {file.name}")
        for branch in branches:
            place = (arguments.repository, branch)
            files |= files_beside(weights, exported, place, arguments.license)
            url = upload(api, arguments.repository, branch, files, title)
            lines.append(f"{url}: {title}, branch {branch}")
    return "\n".join(lines)


def export(weights: Weights, target: Path, arguments: argparse.Namespace) -> Path:
    """Write a checkpoint as a folder of Hugging Face's or PEFT's; return it.

    Exported weights are where they are. Raises CheckpointError.
    """
    if weights.manifest is None:
        assert isinstance(weights.path, Path)
        return weights.path
    from titanlite.cli.hub.convert import convert

    say(f"exporting {weights.path}")
    is_adapters = RECORD in weights.manifest.config and not arguments.merged
    with pinned(weights.path):
        # It may have been deleted just before the pin.
        read_manifest(weights.path)
        convert(
            weights.path,
            target,
            "peft" if is_adapters else "hf",
            arguments.dtype,
            progress(say, "exported "),
            ema=arguments.ema,
            trust_code=arguments.trust_code,
            base=arguments.base,
        )
    return target
