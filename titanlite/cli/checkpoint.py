"""`titanlite checkpoint`: list, verify and compare.

No torch until it is needed.
"""

from __future__ import annotations

import argparse
import time
from datetime import datetime
from typing import Any

from titanlite import exit_codes
from titanlite.checkpoint.manifest import (
    FILE,
    CheckpointError,
    progress,
    root_of,
    step_folder,
    step_of,
    steps_in,
)
from titanlite.checkpoint.selection import form_of
from titanlite.checkpoint.store_paths import AnyPath, to_path
from titanlite.cli.argument_parser import Commands, add_group, add_to_group
from titanlite.cli.checkpoint_folders import (
    INVALID,
    NEWER,
    VALID,
    checkpoint_of,
    list_checkpoints,
    verify,
)
from titanlite.runs.text_tables import Table, render
from titanlite.utils import counted, human_bytes, human_time, say

Answer = tuple[str, int]
#: Exit status of `diff`, as that of the program of that name.
DIFFERENT = 1


def add_commands(commands: Commands) -> None:
    """Add `checkpoint` with its own commands to argparse."""
    about = "list, verify and compare checkpoints"
    actions = add_group(commands, "checkpoint", about)
    _add_ls(actions)
    _add_verify(actions)
    _add_diff(actions)


_FOLDER: dict[str, Any] = {"type": to_path, "metavar": "FOLDER"}
_ONE = {**_FOLDER, "help": "a checkpoint (step-N), or the newest valid one of"}
_PATHS = "runs, their folders of checkpoints, or URLs such as s3://bucket/run/checkpoint"
#: Exit codes of all, in words.
_CODES = f"Exit status: 0; {exit_codes.CHECKPOINT} when there is no such checkpoint"


def _add_ls(actions: Commands) -> None:
    more = (
        "valid: manifest and sizes are right (`verify` reads the contents too); invalid: the "
        "reason stands below; set aside: an invalid one, renamed when its step was saved again; "
        "partial: a save under way or cut short; pinned: holds a file KEEP, and no run deletes it."
    )
    help = "list checkpoints with size, state and time"
    add = add_to_group(actions, _ls, help, more, _CODES).add
    add("paths", nargs="+", **_FOLDER, help=_PATHS)


def _add_verify(actions: Commands) -> None:
    help = "read every byte and compare with the hashes taken when it was written"
    add = add_to_group(actions, _verify, help, "", f"{_CODES}, or one is damaged.").add
    add("paths", nargs="+", **_FOLDER, help="checkpoints (step-N), folders of them, or runs")


def _add_diff(actions: Commands) -> None:
    more = (
        "Shown are types and shapes, how many elements differ, and by how much at most. They are "
        "read one tensor at a time, without a GPU."
    )
    code = f"{_CODES}; {DIFFERENT} when they differ."
    add = add_to_group(actions, _diff, "compare two, tensor by tensor", more, code).add
    add("left", **_ONE)
    add("right", **_ONE)


def _ls(arguments: argparse.Namespace) -> str:
    return "\n\n".join(_listing(root_of(path)) for path in arguments.paths)


def _listing(root: AnyPath) -> str:
    found = list_checkpoints(root)
    rows = []
    notes = []
    for entry in found:
        ranks = written = "–"
        if entry.manifest is not None:
            ranks = str(entry.manifest.world_size)
            written = f"{datetime.fromtimestamp(entry.manifest.created):%Y-%m-%d %H:%M:%S}"
        size = human_bytes(entry.size)
        rows.append((entry.folder.name, entry.description, size, ranks, written))
        if entry.reason:  # of a quarantined one it names the files by their old name
            named = "" if entry.state in (INVALID, NEWER) else f"{entry.folder.name}: "
            notes.append(f"note: {named}{entry.reason}")
    table = Table(("checkpoint", "state", "size", "ranks", "written"), rows, left=(0, 1, 4))
    valid = [entry for entry in found if entry.state == VALID]
    newest = f"newest valid: {valid[-1].folder.name}" if valid else "none is valid"
    total = f"{root}: {human_bytes(sum(entry.size for entry in found))}, {newest}"
    return "\n".join([render(table), *notes, total])


def _verify(arguments: argparse.Namespace) -> Answer:
    folders: dict[AnyPath, None] = {}
    for path in arguments.paths:
        if step_of(path) is not None or (path / FILE).is_file():
            folders[checkpoint_of(path)] = None
            continue
        root = root_of(path)
        folders.update((step_folder(root, step), None) for step in steps_in(root))
    if not folders:
        raise CheckpointError(f"{', '.join(map(str, arguments.paths))}: no checkpoints there")
    lines = []
    bad = 0
    for folder in folders:
        started = time.perf_counter()
        manifest, problems = verify(folder, progress(say, f"{folder}: "))
        bad += bool(problems)
        if problems or manifest is None:
            lines += [f"{folder}: DAMAGED", *(f"  {problem}" for problem in problems)]
            continue
        result = "sizes are right; it was written without hashes"
        if manifest.hashes:
            result = "hashes are right"
        size = f"{counted(len(manifest.files), 'files')}, {human_bytes(manifest.size)}"
        lines.append(f"{folder}: {result} ({size}, {human_time(time.perf_counter() - started)})")
    if bad:
        lines.append(
            f"{bad} of {len(folders)} damaged: bring the files back from a copy, or delete the "
            "folder; a run passes over it"
        )
    return "\n".join(lines), exit_codes.CHECKPOINT if bad else exit_codes.DONE


def _diff(arguments: argparse.Namespace) -> Answer:
    folders = [checkpoint_of(path) for path in (arguments.left, arguments.right)]
    from titanlite.cli.hub.compare_checkpoints import Contents, compare

    found = list(compare(*map(Contents, folders)))
    rows = []
    for one in found:
        figures = (f"{one.elements:,}", f"{one.largest:.3g}") if one.elements else ("", "")
        if one.elements or one.left != one.right:
            rows.append((one.name, form_of(one.left), form_of(one.right), *figures))
    head = "--- {}\n+++ {}".format(*folders)
    if not rows:
        return f"{head}\nall {len(found)} tensors are equal", exit_codes.DONE
    table = Table(("tensor", "---", "+++", "differ", "largest"), rows, left=(0, 1, 2))
    rest = f"{len(rows)} tensors differ, {len(found) - len(rows)} are equal"
    return f"{head}\n{render(table)}\n{rest}", DIFFERENT
