"""`titanlite push`: export a checkpoint and upload it with a card to the hub of Hugging Face."""

from __future__ import annotations

import argparse
import json
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite import __version__, exit_codes
from titanlite.checkpoint.paths import AnyPath, to_path
from titanlite.cli.exchange import DTYPE, PRECISIONS
from titanlite.cli.parser import BASE, EMA, Commands, new_command
from titanlite.cli.processes import Stopped, stoppable
from titanlite.cli.push.subject import BEST, LATEST, Subject, find_subject
from titanlite.config import trust
from titanlite.dist.signals import end_with_parent
from titanlite.features.hub.branches import README, heads, read_branch, refuse_others
from titanlite.features.hub.contact import Access, HubError, check_access, current_token
from titanlite.features.hub.record import note
from titanlite.runs import ATTEMPTS, HUB
from titanlite.runs.record import CONFIG
from titanlite.utils import human_bytes, human_time, say

MAIN = "main"
#: Where exports wait that no folder of a run is known for.
_ELSEWHERE = Path("titanlite-hub")


def add_command(commands: Commands) -> None:
    """Add `push` to argparse."""
    parser = new_command(
        commands,
        _run,
        "push",
        "upload a checkpoint with a model card to the Hugging Face hub",
        "Export a checkpoint as `titanlite export` does, and write a model card from "
        "its run. Upload both to a repository of the Hugging Face hub. Adapters go up in PEFT's "
        "format. HF_TOKEN, or a login of huggingface_hub, gives the token. A push that was cut "
        "short goes on with the same command, and sends no file twice.",
        f"Exit status: {exit_codes.CONFIG} where the hub refuses, "
        f"{exit_codes.CHECKPOINT} for weights that cannot be used or logits that differ.",
    )
    what = "a run, its folder of checkpoints, one step-N, or exported weights"
    parser.add_argument("source", type=to_path, metavar="RUN_OR_CHECKPOINT", help=what)
    parser.add_argument("repository", type=_repository, metavar="OWNER/NAME", help="of the model")
    parser.add_argument(
        "--step",
        action="append",
        type=_step,
        metavar="N",
        help="a step, latest (the default) or best (the lowest validation loss); given several "
        "times, each step goes to its branch step-N",
    )
    parser.add_argument(
        "--branch",
        action="append",
        metavar="NAME",
        help="where to; made if it is not there; may be given several times (default: main)",
    )
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    parser.add_argument("--message", metavar="TEXT", help="first line of the commit")
    parser.add_argument("--dtype", choices=PRECISIONS, help=DTYPE)
    parser.add_argument("--ema", action="store_true", help=EMA)
    merged = "upload adapters merged with the weights under them"
    parser.add_argument("--merged", action="store_true", help=merged)
    parser.add_argument("--base", type=to_path, metavar="PATH", help=BASE)
    without = "do not compare logits and ids of the export"
    parser.add_argument("--no-verify", action="store_true", help=without)
    force = "replace weights of another run on the branch"
    parser.add_argument("--force", action="store_true", help=force)
    work = f"where an export waits for its upload (default: {HUB} in the run)"
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help=work)
    dry = "show what would be uploaded, and the card; change nothing"
    parser.add_argument("--dry-run", action="store_true", help=dry)
    parser.add_argument("--json", action="store_true", help="print the commits as JSON")
    parser.add_argument("--of-run", type=int, help=argparse.SUPPRESS)
    trust.add_argument(parser.add_argument)


def _repository(text: str) -> str:
    if not re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", text) or ".." in text or "--" in text:
        raise argparse.ArgumentTypeError(f"expected OWNER/NAME, got {text!r}")
    return text


def _step(text: str) -> str:
    if text not in (LATEST, BEST) and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number, latest or best, got {text!r}")
    return text


@dataclass(frozen=True)
class _Push:
    """One set of weights, and the branches that it goes to."""

    subject: Subject
    branches: tuple[str, ...]


def _run(arguments: argparse.Namespace) -> Any:
    if arguments.of_run is not None:
        # A run that dies takes its uploads along.
        end_with_parent(signal.SIGTERM, arguments.of_run)
    with stoppable():
        try:
            return _push_all(arguments)
        except Stopped as stopped:
            say("stopped; the same command continues")
            return "", exit_codes.after_signal(stopped.number)


def _push_all(arguments: argparse.Namespace) -> str:
    work = arguments.folder or _work_of(arguments.source)
    pushes = _pushes(arguments, work)
    if arguments.dry_run and current_token() is None:
        access = Access("nobody yet: there is no token", None)
    else:
        access = check_access(arguments.repository)
    if access.exists and not arguments.force:
        _refuse_foreign(arguments.repository, pushes)
    if arguments.dry_run:
        return "\n\n".join(_plan(arguments, push, access) for push in pushes)
    from titanlite.cli.push.stage import locked
    from titanlite.cli.push.upload import make_repository

    make_repository(arguments.repository, True if arguments.private else None)
    done: list[dict[str, Any]] = []
    with locked(work):
        for push in pushes:
            done += _push(arguments, push, work)
    if arguments.json:
        return json.dumps(done, indent=1)
    return "\n".join(f"{one['url']}: {one['text']}" for one in done)


def _work_of(source: AnyPath) -> Path:
    """Return the folder in which exports wait: in the run's, if that is known."""
    if isinstance(source, Path):
        here = source.absolute()
        for folder in (here, here.parent, here.parent.parent):
            if (folder / CONFIG).is_file() or (folder / ATTEMPTS).is_file():
                return folder / HUB
    return _ELSEWHERE


def _pushes(arguments: argparse.Namespace, work: Path) -> list[_Push]:
    """Return what goes where. Raises CheckpointError, HubError."""
    steps = arguments.step or [None]
    if len(steps) > 1 and arguments.branch:
        raise HubError("--branch is for one step: several steps go to branches step-N")
    found = []
    for step in steps:
        subject = find_subject(arguments.source, step, work)
        if subject.manifest is None:
            _refuse_forms(arguments)
        branches = tuple(arguments.branch or [MAIN])
        if len(steps) > 1:
            branches = (f"step-{subject.step}",)
        found.append(_Push(subject, branches))
    return found


def _refuse_forms(arguments: argparse.Namespace) -> None:
    """Raise HubError for options about an export where the weights are exported already."""
    for name in ("dtype", "ema", "merged", "base"):
        if getattr(arguments, name):
            raise HubError(f"{arguments.source} is exported already: --{name} says nothing here")


def _refuse_foreign(repository: str, pushes: Sequence[_Push]) -> None:
    """Raise HubError where a branch holds weights of another run, before anything is exported."""
    known = heads(repository)
    for push in pushes:
        for branch in push.branches:
            if branch in known:
                own = push.subject.run_id
                refuse_others(repository, branch, *read_branch(repository, branch), own)


def _plan(arguments: argparse.Namespace, push: _Push, access: Access) -> str:
    """Return what a push would do, and the card."""
    from titanlite.cli.push.card import Place, make_card, merged
    from titanlite.cli.push.curve import picture
    from titanlite.cli.push.facts import rows_until

    subject = push.subject
    branches = ", ".join(push.branches)
    there = {True: "which is there", False: "which would be made", None: "not asked"}[access.exists]
    if not access.exists and arguments.private:
        there += ", private"
    place = Place(arguments.repository, push.branches[0])
    curve = picture(rows_until(subject), place.repository)
    card = make_card(subject, None, place, (), curve is not None)
    lines = [
        f"{subject.path} → {arguments.repository}, {there}, branch {branches}, as {access.user}"
    ]
    own = ""
    if subject.manifest is None:
        assert isinstance(subject.path, Path)
        own = _readme_of(subject.path)
        lines += _left_out(subject.path)
    known = ""
    if access.exists and place.branch in heads(place.repository):
        known = read_branch(place.repository, place.branch)[1]
    return "\n\n".join([*lines, merged(card, known, own).strip()])


def _readme_of(folder: Path) -> str:
    """Return the README.md of exported weights; "" without one."""
    file = folder / README
    return file.read_text(encoding="utf-8-sig", errors="replace") if file.is_file() else ""


def _left_out(folder: Path) -> list[str]:
    """Return a line with what is not uploaded of a folder; none where all is."""
    names = []
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            names.append(f"{path.name}/")
        elif path.name.startswith(".") or not path.is_file():
            names.append(path.name)
    return [f"not uploaded, as folder, hidden or broken link: {', '.join(names)}"] if names else []


def _push(arguments: argparse.Namespace, push: _Push, work: Path) -> list[dict[str, Any]]:
    """Export and upload one set of weights; return a record of each branch."""
    from titanlite.cli.push.facts import weights_in
    from titanlite.cli.push.stage import Form, discard, stage
    from titanlite.cli.push.upload import push_branch

    subject = push.subject
    form = Form(
        dtype=arguments.dtype,
        ema=arguments.ema,
        merged=arguments.merged,
        base=arguments.base,
        trust_code=arguments.trust_code,
        verify=not arguments.no_verify,
    )
    staged = stage(subject, form, work)
    weights = weights_in(staged.folder)
    for line in _left_out(staged.folder):
        say(line)
    done = []
    for branch in push.branches:
        began = time.perf_counter()
        parcel = _parcel(arguments, subject, staged, weights, branch)
        commit = push_branch(arguments.repository, branch, parcel, arguments.force)
        size = sum(file.stat().st_size for file in parcel.files.values() if isinstance(file, Path))
        took = human_time(time.perf_counter() - began)
        done.append(
            {
                "repository": arguments.repository,
                "branch": branch,
                "step": subject.step,
                "commit": commit.oid,
                "url": str(commit.commit_url),
                "bytes": size,
                "text": f"branch {branch}, {human_bytes(size)} in {took}",
            }
        )
    if subject.manifest is not None and subject.step is not None and work != _ELSEWHERE:
        note(work, arguments.repository, subject.step, subject.manifest.created, push.branches)
    discard(staged)
    return done


def _parcel(
    arguments: argparse.Namespace, subject: Subject, staged: Any, weights: Any, branch: str
) -> Any:
    """Return the files of a branch."""
    from titanlite.cli.push.card import CONFIG_FILE, Place, make_card
    from titanlite.cli.push.curve import FILE as CURVE
    from titanlite.cli.push.curve import picture
    from titanlite.cli.push.facts import rows_until, shown_config
    from titanlite.cli.push.upload import Parcel

    files: dict[str, Path | bytes] = {}
    for file in sorted(staged.folder.iterdir()):
        if file.is_file() and not file.name.startswith(".") and file.name != README:
            files[file.name] = file
    files |= weights.public_files
    config = shown_config(subject)
    if config:
        files[CONFIG_FILE] = f"{config}\n".encode()
    place = Place(arguments.repository, branch)
    curve = picture(rows_until(subject), f"Loss of {place.repository.partition('/')[2]}")
    if curve is not None:
        files[CURVE] = curve.encode()
    card = make_card(subject, weights, place, staged.lines, curve is not None)
    step = "weights" if subject.step is None else f"step {subject.step:,}"
    message = arguments.message or f"Upload {step} with titanlite {__version__}"
    return Parcel(files, card, message, _readme_of(staged.folder))
