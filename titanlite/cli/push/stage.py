"""The export that a push uploads. It waits in a folder, so that an upload that was cut short goes
on with the same bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from titanlite.checkpoint.manifest import FILE, PARTIAL, Manifest, progress, read_manifest
from titanlite.checkpoint.paths import AnyPath
from titanlite.checkpoint.pin import pinned
from titanlite.cli.push.subject import Subject
from titanlite.features.hub.record import NOTES
from titanlite.features.lora.settings import RECORD
from titanlite.runs.links import refuse_links
from titanlite.utils import atomic_write, not_a_link, parse_json, say

_LOCK = "lock"
_COMPARISON = "comparison.json"


@dataclass(frozen=True)
class Form:
    """How weights are exported."""

    dtype: str | None = None
    #: The average of the weights (optimizer.ema_decay).
    ema: bool = False
    #: Adapters and the weights under them as one model.
    merged: bool = False
    base: AnyPath | None = None
    trust_code: bool = False
    #: Compare logits and ids.
    verify: bool = True

    def kind(self, manifest: Manifest) -> Literal["hf", "peft"]:
        """Return the format for a checkpoint."""
        return "peft" if RECORD in manifest.config and not self.merged else "hf"


@dataclass(frozen=True)
class Staged:
    """Exported weights, and what their comparison said."""

    folder: Path
    lines: tuple[str, ...] = ()
    #: Beside an export that was made for the upload, and goes after it.
    notes: Path | None = None


@contextlib.contextmanager
def locked(work: Path) -> Iterator[None]:
    """Let one process at a time export into a folder and upload from it.

    The lock goes at the end, and the folder if nothing else is there. Raises LinkError for a link
    in it: the folder of the run may come from somebody else.
    """
    refuse_links(work.parent, work, inside=True)
    with _acquire(work):
        try:
            yield
        finally:
            (work / _LOCK).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                work.rmdir()


def _acquire(work: Path) -> BinaryIO:
    """Return the open lock of a folder, held by this process."""
    while True:
        # Lock and folder may go with a push that ends.
        with contextlib.suppress(FileNotFoundError):
            work.mkdir(parents=True, exist_ok=True)
            stream = open(work / _LOCK, "wb", opener=not_a_link)  # noqa: SIM115
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"another push works in {work}: waiting for its end")
                fcntl.flock(stream, fcntl.LOCK_EX)
            except OSError:
                # A file system without locks: exports have names that tell their content.
                return stream
            if os.fstat(stream.fileno()).st_nlink:
                return stream
            stream.close()


def stage(subject: Subject, form: Form, work: Path) -> Staged:
    """Return the export of a checkpoint, made now if it does not wait in `work` already.

    Exported weights are taken as they are. Raises CheckpointError.
    """
    manifest = subject.manifest
    if manifest is None:
        assert isinstance(subject.path, Path)
        return Staged(subject.path)
    target = work / _name(manifest, form)
    notes = notes_of(target, manifest.step)
    if not target.is_dir():
        _remove_parts(work)
        lines: list[str] = []
        with pinned(subject.path, say):
            # It may have been deleted just before the pin.
            read_manifest(subject.path)
            notes.mkdir(parents=True, exist_ok=True)
            atomic_write(notes / FILE, manifest.to_json())
            _export(subject.path, target, manifest, form, lines)
        atomic_write(notes / _COMPARISON, json.dumps(lines))
    return Staged(target, _lines(notes / _COMPARISON), notes.parent)


def notes_of(export: Path, step: int) -> Path:
    """Return the folder beside an export that keeps the manifest: the checkpoint may go before the
    upload ends.
    """
    return export.with_name(f"{export.name}{NOTES}") / f"step-{step}"


def discard(staged: Staged) -> None:
    """Delete an export that is uploaded."""
    if staged.notes is not None:
        shutil.rmtree(staged.folder, ignore_errors=True)
        shutil.rmtree(staged.notes, ignore_errors=True)


def _name(manifest: Manifest, form: Form) -> str:
    """Return a name that differs for other weights and for another form of them."""
    about = [manifest.to_json(), form.dtype, form.ema, form.merged, str(form.base)]
    digest = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:12]
    return f"step-{manifest.step}-{digest}"


def _export(path: AnyPath, target: Path, manifest: Manifest, form: Form, lines: list[str]) -> None:
    from titanlite.cli.hub.convert import convert

    def report(line: str) -> None:
        say(line)
        lines.append(line)

    kind = form.kind(manifest)
    say(f"exporting {path}")
    convert(
        path,
        target,
        kind,
        form.dtype,
        progress(say, "exported "),
        ema=form.ema,
        report=report if form.verify else None,
        trust_code=form.trust_code,
        base=form.base,
    )


def _lines(notes: Path) -> tuple[str, ...]:
    """Return what the comparison said; nothing where a killed process left no note."""
    try:
        found = parse_json(notes.read_bytes())
    except (OSError, ValueError):
        return ()
    return tuple(str(line) for line in found) if isinstance(found, list) else ()


def _remove_parts(work: Path) -> None:
    """Delete exports that a killed process left half written. The caller holds the lock."""
    for part in work.glob(f"{PARTIAL}*"):
        shutil.rmtree(part, ignore_errors=True)
