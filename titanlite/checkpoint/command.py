"""`titanlite checkpoint` on the command line."""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from titanlite import exit_codes
from titanlite.checkpoint.integrity import algorithm_of
from titanlite.checkpoint.manifest import CheckpointError, Manifest, parse_manifest, step_folder, steps_in
from titanlite.checkpoint.place import Place, place, sizes
from titanlite.checkpoint.shelf import (
    INVALID,
    NEWER,
    VALID,
    Entry,
    Verdict,
    checkpoint_of,
    look,
    remove,
    root_of,
    shelf,
    verify,
)
from titanlite.config.errors import ConfigError, Problem
from titanlite.utils import Table, counted, escape, human_bytes, human_time, render

if TYPE_CHECKING:
    from titanlite.checkpoint.contents import TensorDifference

Answer = tuple[str, int]
#: Exit status of `diff`, as that of the program of that name.
DIFFERENT = 1
#: How often something long says how far it has come where there is no terminal.
_TELL_SECONDS = 10.0
_PATH = "the folder of a run or of its checkpoints, or a URL such as s3://bucket/run/checkpoint"


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `checkpoint` with its own commands to argparse."""
    checkpoint = commands.add_parser(
        "checkpoint", help="list, inspect, verify, compare, convert and delete checkpoints", allow_abbrev=False
    )
    checkpoint.set_defaults(run=lambda *_: checkpoint.format_help().rstrip())
    actions = checkpoint.add_subparsers(title="commands", metavar="COMMAND")

    def add(name: str, run: Any, help: str, description: str, code: str = "") -> argparse.ArgumentParser:
        parser = actions.add_parser(
            name,
            help=help,
            description=description,
            epilog=f"Exit status: 0; {code}{exit_codes.CHECKPOINT} when there is no such checkpoint.",
            allow_abbrev=False,
        )
        parser.set_defaults(run=run)
        return parser

    ls = add(
        "ls",
        _ls,
        "what is there, and whether it is valid",
        "List checkpoints with size, state and age. valid: manifest and sizes are right (`verify` reads the contents "
        "too); invalid: the reason stands below; set aside: an invalid one that a later save of its step made way "
        "for; partial: a save under way or cut short; pinned: holds a file KEEP, and no run deletes it.",
    )
    ls.add_argument("path", nargs="?", type=place, default=Path("outputs"), metavar="FOLDER", help=_PATH)
    ls.add_argument("--json", action="store_true", help="print a JSON list, one object per folder")

    inspect = add(
        "inspect",
        _inspect,
        "what one holds: step, run, files, tensors",
        "Show what a checkpoint's manifest says: where it comes from, its files with their hashes, its tensors.",
    )
    inspect.add_argument("path", type=place, metavar="FOLDER", help="a checkpoint (step-N), or the newest valid one of")
    inspect.add_argument("--config", action="store_true", help="print the config of the run that wrote it, as TOML")
    inspect.add_argument("--json", action="store_true", help="print the manifest as it is")

    check = add(
        "verify",
        _verify,
        "read every byte and compare with the hashes",
        "Read every file of the checkpoints and compare it with the hash taken when it was written.",
        f"{exit_codes.CHECKPOINT} when one is damaged, ",
    )
    check.add_argument(
        "paths", nargs="+", type=place, metavar="FOLDER", help="checkpoints (step-N), or folders of them"
    )

    diff = add(
        "diff",
        _diff,
        "how the tensors of two differ",
        "Compare two checkpoints tensor by tensor: which only one has, types, shapes, the largest absolute and "
        "relative difference. They are read one tensor at a time, without a GPU.",
        f"{DIFFERENT} when they differ, ",
    )
    for side in ("left", "right"):
        diff.add_argument(side, type=place, metavar="FOLDER", help="a checkpoint (step-N), or the newest valid one of")

    conversion = add(
        "convert",
        _convert,
        "its weights in another format",
        "Write the weights in SOURCE to TARGET. SOURCE: a checkpoint (or the newest valid one of a folder), a folder "
        "of Hugging Face's layout, or a file made with --to torch; checkpoints are compared with their hashes first. "
        "TARGET appears when it is whole, and what is there is never overwritten. No GPU is needed, and memory for a "
        "few tensors only.",
    )
    conversion.add_argument("source", type=place, metavar="SOURCE", help="what to convert")
    conversion.add_argument("target", type=place, metavar="TARGET", help="where to")
    conversion.add_argument(
        "--to",
        required=True,
        choices=("hf", "torch", "checkpoint"),
        help="hf: a folder with config.json and model.safetensors, for `transformers`; torch: one file for torch.load; "
        "checkpoint: a checkpoint of weights only in the folder TARGET, for checkpoint.initial_load_path",
    )
    conversion.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="precision of the weights; as they are without it"
    )

    rm = add(
        "rm",
        _rm,
        "delete checkpoints",
        "Delete folders of checkpoints, also what crashes have left. Refused, before anything is deleted: pinned ones, "
        "saves that may be under way, and what would leave no good checkpoint behind (one of those that stay is read "
        "in full to be sure).",
    )
    rm.add_argument("paths", nargs="+", type=place, metavar="FOLDER", help="checkpoints: .../step-N")
    rm.add_argument("--force", action="store_true", help="delete what would be refused")
    rm.add_argument("--dry-run", action="store_true", help="delete nothing, tell what would be")


def _ls(arguments: argparse.Namespace, flags: Sequence[str], _style: object) -> str:
    _refuse(flags)
    root = root_of(arguments.path)
    entries = shelf(root)
    if arguments.json:
        return json.dumps([_entry_json(entry) for entry in entries], indent=1)
    rows = [
        (
            entry.folder.name,
            entry.words,
            human_bytes(entry.size),
            "–" if entry.manifest is None else str(entry.manifest.world_size),
            human_age(time.time() - entry.written),
        )
        for entry in entries
    ]
    table = Table(("checkpoint", "state", "size", "ranks", "age"), rows, left=(0, 1))
    # The reason of an invalid one names its files; that of one that was renamed since names them by the old name.
    notes = [
        f"note: {entry.reason if entry.state in (INVALID, NEWER) else f'{entry.folder.name}: {entry.reason}'}"
        for entry in entries
        if entry.reason
    ]
    valid = [entry for entry in entries if entry.state == VALID]
    newest = f"newest valid: {valid[-1].folder.name}" if valid else "none is valid"
    total = f"{root}: {human_bytes(sum(entry.size for entry in entries))}, {newest}"
    return "\n".join([render(table, sys.stdout.isatty()), *notes, total])


def _entry_json(entry: Entry) -> dict[str, Any]:
    return {
        "folder": str(entry.folder),
        "step": entry.step,
        "state": entry.state,
        "reason": entry.reason or None,
        "pinned": entry.pinned,
        "bytes": entry.size,
        "written": entry.written,
        "ranks": entry.manifest.world_size if entry.manifest else None,
        "format": entry.manifest.format if entry.manifest else None,
    }


def human_age(seconds: float) -> str:
    """`45 s`, `12 min`, `5 h`, `3 days`: one unit."""
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"


def _inspect(arguments: argparse.Namespace, flags: Sequence[str], _style: object) -> str:
    _refuse(flags)
    folder = checkpoint_of(arguments.path)
    manifest = parse_manifest(folder)
    if arguments.json:
        return manifest.to_json()
    if arguments.config:
        config = manifest.config.get("toml")
        if not isinstance(config, str):
            raise CheckpointError(f"{folder} holds no config: it was not written by train.py")
        return config.removesuffix("\n")
    entry = look(folder)
    lines = [str(folder), *(f"  {label:<13} {text}" for label, text in _facts(manifest, entry))]
    terminal = sys.stdout.isatty()
    files = [(name, f"{size:,}", manifest.hashes.get(name, "–")) for name, size in sorted(manifest.files.items())]
    tensors = [
        (name, dtype, " x ".join(map(str, shape)) or "scalar") for name, (dtype, shape) in manifest.tensors.items()
    ]
    return "\n\n".join(
        [
            "\n".join(lines),
            render(Table(("file", "bytes", "hash"), files, left=(0, 2)), terminal),
            render(Table(("tensor", "type", "shape"), tensors, left=(0, 1, 2)), terminal),
        ]
    )


def _facts(manifest: Manifest, entry: Entry) -> list[tuple[str, str]]:
    git = manifest.git
    changed = " with uncommitted changes" if git.get("dirty") else ""
    commit = f"{git['commit']}{changed}" if git.get("commit") else ""
    hashes = ", ".join(sorted({algorithm_of(digest) for digest in manifest.hashes.values()}))
    counts = [manifest.tensors[name][1] for name in manifest.tensors if name.startswith("model.")]
    numbers = sum(_product(shape) for shape in counts)
    extra = list(manifest.trackers.items())
    if manifest.validation_loss is not None:
        extra.insert(0, ("validation", f"loss {manifest.validation_loss:.4f}"))
    if manifest.weights_only:
        extra.insert(0, ("holds", f"weights only{f', as {manifest.dtype}' if manifest.dtype else ''}"))
    ranks = counted(manifest.world_size, "ranks")
    return [
        ("state", f"{entry.words}{f': {entry.reason}' if entry.reason else ''}"),
        ("step", f"{manifest.step:,}"),
        ("written", f"{datetime.fromtimestamp(manifest.created):%Y-%m-%d %H:%M:%S} by {ranks}"),
        ("size", f"{human_bytes(manifest.size)} in {counted(len(manifest.files), 'files')}"),
        ("model", f"{counted(len(counts), 'tensors')}, {numbers:,} parameters"),
        *extra,
        ("format", f"{manifest.format}, {f'hashes by {hashes}' if hashes else 'without hashes'}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
        *([("commit", commit)] if commit else []),
        *((f"{name}", value) for name, value in manifest.fingerprints.items() if name != "model"),
        ("train", json.dumps(manifest.train)),
    ]


def _product(shape: Sequence[int]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


def _verify(arguments: argparse.Namespace, flags: Sequence[str], _style: object) -> Answer:
    _refuse(flags)
    folders: list[Place] = []
    for path in arguments.paths:
        if steps_in(path) or not path.name.startswith("step-"):
            root = root_of(path)
            folders += [step_folder(root, step) for step in steps_in(root)]
        else:
            folders.append(checkpoint_of(path))
    if not folders:
        raise CheckpointError(f"{', '.join(map(str, arguments.paths))}: no checkpoints there")
    lines: list[str] = []
    bad = 0
    folders = list(dict.fromkeys(folders))
    with _Progress(sys.stderr) as progress:
        for folder in folders:
            verdict = verify(folder, functools.partial(progress.show, f"{folder}: "))
            bad += bool(verdict.problems)
            lines += _verdict_lines(verdict)
    if bad:
        lines.append(
            f"{bad} of {len(folders)} damaged: bring the files back from a copy, or delete it with "
            "`titanlite checkpoint rm`; a run passes over it"
        )
    return "\n".join(lines), exit_codes.CHECKPOINT if bad else exit_codes.DONE


def _verdict_lines(verdict: Verdict) -> list[str]:
    if verdict.problems:
        return [f"{verdict.folder}: DAMAGED", *(f"  {problem}" for problem in verdict.problems)]
    assert verdict.manifest is not None
    manifest = verdict.manifest
    checked = "hashes are right" if manifest.hashes else "sizes are right; it is of a time without hashes"
    size = f"{counted(len(manifest.files), 'files')}, {human_bytes(manifest.size)}, {human_time(verdict.seconds)}"
    found = [f"{verdict.folder}: {checked} ({size})"]
    if verdict.strangers:
        found.append(f"  not of the checkpoint: {', '.join(verdict.strangers)}")
    return found


def _diff(arguments: argparse.Namespace, flags: Sequence[str], _style: object) -> Answer:
    from titanlite.checkpoint.contents import Contents, compare

    _refuse(flags)
    left, right = (Contents(checkpoint_of(path)) for path in (arguments.left, arguments.right))
    found = list(compare(left, right))
    differing = [one for one in found if one.elements or not one.comparable or one.left != one.right]
    head = f"--- {left.folder}\n+++ {right.folder}"
    equal = len(found) - len(differing)
    if not differing:
        return f"{head}\nall {equal} tensors are equal", exit_codes.DONE
    table = Table(("tensor", "", "differ", "largest", "relative"), [_row(one) for one in differing], left=(0, 1))
    rest = f"{len(differing)} tensors differ, {equal} are equal"
    return f"{head}\n{render(table, sys.stdout.isatty())}\n{rest}", DIFFERENT


def _row(one: TensorDifference) -> tuple[str, str, str, str, str]:
    left, right = (None if side is None else f"{side[0]}{side[1]}" for side in (one.left, one.right))
    if left is None or right is None:
        return one.name, f"only in {'+++' if left is None else '---'}: {left or right}", "", "", ""
    if not one.comparable:
        return one.name, f"{left} and {right}", "", "", ""
    words = left if left == right else f"{left} and {right}"
    if not one.elements:
        return one.name, words, "0", "0", "0"
    return one.name, words, f"{one.elements:,}", f"{one.absolute:.3g}", f"{one.relative:.3g}"


def _convert(arguments: argparse.Namespace, flags: Sequence[str], _style: object) -> str:
    from titanlite.checkpoint.convert import convert

    _refuse(flags)
    started = time.perf_counter()
    with _Progress(sys.stderr) as progress:
        show = functools.partial(progress.show, "")
        written = convert(arguments.source, arguments.target, arguments.to, arguments.dtype, show)
    size = human_bytes(sum(sizes(written).values()) if written.is_dir() else written.stat().st_size)
    return f"{written}: {size} in {human_time(time.perf_counter() - started)}"


class _Progress:
    """How far something long has come: one line that is renewed on a terminal, elsewhere a line every ten seconds."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._every = 0.1 if self._terminal else _TELL_SECONDS
        self._told = time.monotonic()
        self._width = 0

    def show(self, what: str, done: int, total: int) -> None:
        """what: is done, to be put before the numbers. done, total: bytes."""
        now = time.monotonic()
        if now - self._told < self._every:
            return
        self._told = now
        text = f"{escape(what)}{human_bytes(done)} of {human_bytes(total)}"
        self._stream.write(f"\r{text:<{self._width}}" if self._terminal else f"{text}\n")
        self._width = len(text)
        self._stream.flush()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal and self._width:
            self._stream.write(f"\r{'':<{self._width}}\r")


def _rm(arguments: argparse.Namespace, flags: Sequence[str], _style: object) -> str:
    _refuse(flags)
    with _Progress(sys.stderr) as progress:
        gone = remove(arguments.paths, arguments.force, arguments.dry_run, progress.show)
    did = "would delete" if arguments.dry_run else "deleted"
    lines = [f"{did} {entry.folder}: {entry.words}, {human_bytes(entry.size)}" for entry in gone]
    freed = human_bytes(sum(entry.size for entry in gone))
    return "\n".join([*lines, f"{freed} {'would be freed' if arguments.dry_run else 'freed'}"])


def _refuse(flags: Sequence[str]) -> None:
    if flags:
        raise ConfigError([Problem("command line", flags[0], "is a config key; this command takes none")])
