"""`titanlite push`: export a checkpoint and upload it with a model card."""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path

from titanlite import exit_codes
from titanlite.checkpoint.manifest import progress, read_manifest
from titanlite.checkpoint.retention import pinned
from titanlite.checkpoint.store_paths import files_in, to_path
from titanlite.cli.argument_parser import EMA, Commands, new_command
from titanlite.cli.export import DTYPE, PRECISIONS
from titanlite.config import trust
from titanlite.contrib.hub.card import files_beside
from titanlite.contrib.hub.push_source import Weights, find_weights
from titanlite.contrib.hub.upload import MAIN, HubError, open_repository, upload
from titanlite.contrib.processes import stoppable
from titanlite.features.lora.settings import RECORD
from titanlite.runs.symlink_checks import refuse_links
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
    what = "a run or its folder of checkpoints (the newest), one step-N, or exported weights"
    parser.add("source", what, "RUN_OR_CHECKPOINT", type=to_path)
    parser.add("repository", "of the model", "OWNER/NAME", type=_repository)
    branch = "where to; made if it is not there; may be given several times (default: main)"
    parser.add("--branch", branch, "NAME", action="append")
    parser.add("--private", "make a new repository private")
    parser.add("--license", "for the card, such as apache-2.0", "ID")
    parser.add("--dtype", DTYPE, choices=PRECISIONS)
    parser.add("--ema", EMA)
    folder = "where the export waits for its upload (default: the working directory)"
    parser.add("--folder", folder, "FOLDER", type=Path, default=Path())
    trust.add_argument(parser.add_argument)


def _repository(text: str) -> str:
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text):
        raise argparse.ArgumentTypeError(f"expected OWNER/NAME, got {text!r}")
    return text


def _run(arguments: argparse.Namespace) -> str:
    weights = find_weights(arguments.source)
    if weights.manifest is None and (arguments.dtype or arguments.ema):
        raise HubError(f"{weights.path} is exported already: --dtype and --ema say nothing here")
    title = f"Weights of {weights.path.name}" if weights.step is None else f"Step {weights.step}"
    lines = []
    work: Path = arguments.folder
    # A folder of somebody else could lead elsewhere.
    refuse_links(work.parent, work)
    api = open_repository(arguments.repository, arguments.private or None)
    work.mkdir(parents=True, exist_ok=True)
    with stoppable(), tempfile.TemporaryDirectory(prefix="titanlite-push-", dir=work) as folder:
        exported = export(weights, Path(folder) / "weights", arguments)
        files: dict[str, Path | bytes] = {}
        for file in sorted(exported.iterdir()):
            if file.is_file() and not file.name.startswith("."):
                files[file.name] = file
            else:
                say(f"not uploaded: {file.name}")
        for branch in arguments.branch or [MAIN]:
            place = (arguments.repository, branch)
            files |= files_beside(weights, exported, place, arguments.license)
            url = upload(api, arguments.repository, branch, files, title)
            lines.append(f"{url}: {title}, branch {branch}")
    return "\n".join(lines)


def export(weights: Weights, target: Path, arguments: argparse.Namespace) -> Path:
    """Write a checkpoint as a folder of Hugging Face's or PEFT's; return it. Raises
    CheckpointError.

    Exported weights stay where they are, or are fetched from a store.
    """
    if isinstance(weights.path, Path) and weights.manifest is None:
        return weights.path
    if weights.manifest is None:
        target.mkdir()
        for name in files_in(weights.path):
            (target / name).write_bytes((weights.path / name).read_bytes())
        return target
    from titanlite.cli.hub.export_weights import convert

    say(f"exporting {weights.path}")
    with pinned(weights.path):
        # It may have been deleted just before the pin.
        read_manifest(weights.path)
        convert(
            weights.path,
            target,
            "peft" if RECORD in weights.manifest.config else "hf",
            arguments.dtype,
            progress(say, "exported "),
            ema=arguments.ema,
            trust_code=arguments.trust_code,
        )
    return target
