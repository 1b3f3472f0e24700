"""`titanlite data`: prepare text, and look at the text of a run. No process group and no GPU."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite import exit_codes
from titanlite.config import trust
from titanlite.data import DataError
from titanlite.tools.cli import FLAGS, Commands, no_flags
from titanlite.utils import Style

if TYPE_CHECKING:
    from titanlite.tools.commands.look import Run

_CONFIG = "TOML file; also looked up in train_configs/"


def add_commands(commands: Commands) -> None:
    """Add `titanlite data` to argparse."""
    data = commands.add_parser(
        "data", help="prepare text, and look at the text of a run", allow_abbrev=False
    )
    data.set_defaults(run=lambda *_: data.format_help().rstrip())
    actions = data.add_subparsers(title="commands", metavar="COMMAND")

    def add(name: str, run: Any, help: str, more: str) -> argparse.ArgumentParser:
        about = f"{help[0].upper()}{help[1:]}. {more}"
        parser = actions.add_parser(name, help=help, description=about, allow_abbrev=False)
        parser.set_defaults(run=run)
        return parser

    there = (
        "Files that are there stay; after a crash the same command continues. HF_TOKEN opens "
        "private data sets."
    )
    fetch = add(
        "fetch", _fetch, "copy files of a data set of the hub, or files behind a URL", there
    )
    fetch.add_argument(
        "source", metavar="SOURCE", help="registered name (c4), id of the hub (owner/name) or URL"
    )
    fetch.add_argument(
        "--out", required=True, type=Path, metavar="FOLDER", help="where the files go"
    )
    fetch.add_argument(
        "--files", metavar="N-M,…", help="numbers of the files, from 0 (default: all)"
    )
    fetch.add_argument(
        "--subset", metavar="NAME", help="part of the data set (default: the usual one)"
    )
    fetch.add_argument("--split", metavar="NAME", help="split of the data set (default: train)")

    again = "After a crash the same command goes on where it was, and the result is the same."
    prepare = add(
        "prepare",
        _prepare,
        "tokenize text once, into a folder that training maps into memory",
        again,
    )
    prepare.add_argument(
        "source", metavar="SOURCE", help="file, folder, pattern, URL, name of text, id of the hub"
    )
    prepare.add_argument(
        "--out", required=True, type=Path, metavar="FOLDER", help="where the tokens go"
    )
    prepare.add_argument(
        "--subset", metavar="NAME", help="part of a data set of the hub (default: the usual one)"
    )
    split = (
        "split of a data set of the hub (default: train), or of a folder that has several; all: "
        "each of them"
    )
    prepare.add_argument("--split", metavar="NAME", help=split)
    prepare.add_argument(
        "--tokenizer", metavar="PATH", help="as model.tokenizer_path (default: the bundled one)"
    )
    fields = {
        "text": "holds the text (default: text)",
        "prompt": "is read and not trained on",
        "completion": "follows the prompt and is trained on",
        "messages": "holds conversations",
    }
    for field, what in fields.items():
        prepare.add_argument(f"--{field}-key", metavar="KEY", help=f"field that {what}")
    prepare.add_argument(
        "--chat-template", metavar="FILE", help="as data.chat_template (default: the tokenizer's)"
    )
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    prepare.add_argument(
        "--workers", type=int, default=cores, metavar="N", help="cores to use (default: all)"
    )
    tokens = "tokens of a part, about; it is part of the fingerprint (default: 134,217,728)"
    prepare.add_argument("--part-tokens", type=int, default=1 << 27, metavar="N", help=tokens)

    all_parts = (
        "Sizes, offsets and hashes of all parts. Files of other programs have no hashes: what "
        "they tell is checked"
    )
    verify = add("verify", _verify, "read token files again, and compare their hashes", all_parts)
    verify.add_argument(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="prepared folder, or files of Megatron-LM or numpy",
    )
    verify.add_argument(
        "--workers",
        type=int,
        default=min(cores, 8),
        metavar="N",
        help="threads (default: cores, 8 at most)",
    )
    verify.add_argument("--json", action="store_true", help="print JSON")

    ranks = "ranks of the run (default: as for `titanlite config check`)"
    peek = add("peek", _peek, "print the first sequences of a run as the model sees them", FLAGS)
    peek.set_defaults(verbatim=True)  # it shows documents
    peek.add_argument("file", nargs="?", metavar="CONFIG", help=_CONFIG)
    peek.add_argument(
        "--rows", type=int, default=2, metavar="N", help="sequences to print (default: 2)"
    )
    peek.add_argument(
        "--step", type=int, default=1, metavar="N", help="from this step on (default: 1)"
    )
    peek.add_argument("--rank", type=int, metavar="R", help="only those of one data-parallel rank")
    peek.add_argument("--ids", action="store_true", help="print the ids, too")
    peek.add_argument("--validation", action="store_true", help="the validation's text instead")
    peek.add_argument("--world-size", type=int, metavar="N", help=ranks)
    trust.add_argument(peek.add_argument)

    which = f"CONFIG may also be the folder of a run, or a checkpoint. {FLAGS}"
    at_step = add("at-step", _at_step, "list the documents of the batch of a step", which)
    at_step.add_argument("step", type=int, metavar="N", help="the step, from 1")
    at_step.add_argument("file", nargs="?", metavar="CONFIG", help=_CONFIG)
    at_step.add_argument("--json", action="store_true", help="print JSON")
    at_step.add_argument("--world-size", type=int, metavar="N", help=ranks)
    trust.add_argument(at_step.add_argument)

    figures = add("stats", _stats, "count the documents and tokens of a config's text", FLAGS)
    figures.add_argument("file", nargs="?", metavar="CONFIG", help=_CONFIG)
    figures.add_argument("--json", action="store_true", help="print JSON")
    figures.add_argument("--world-size", type=int, metavar="N", help=ranks)
    trust.add_argument(figures.add_argument)


def _fetch(arguments: argparse.Namespace, flags: list[str], _: Style) -> str | tuple[str, int]:
    from titanlite.tools.hub.fetch import fetch

    no_flags(flags)
    try:
        return fetch(
            arguments.source, arguments.out, arguments.files, arguments.subset, arguments.split
        )
    except KeyboardInterrupt:
        print("stopped: the same command goes on", file=sys.stderr)
        return "", exit_codes.INTERRUPTED


def _prepare(arguments: argparse.Namespace, flags: list[str], _: Style) -> str | tuple[str, int]:
    from titanlite.config.data_sections import Data
    from titanlite.tools.commands.prepare import prepare
    from titanlite.tools.commands.prepare_tasks import Options

    no_flags(flags)
    if arguments.workers < 1 or arguments.part_tokens < 1:
        raise DataError("--workers and --part-tokens: expected whole numbers >= 1")
    if (arguments.prompt_key is None) != (arguments.completion_key is None):
        raise DataError("--prompt-key and --completion-key: give both or none")
    names = ("text_key", "prompt_key", "completion_key", "messages_key", "chat_template")
    keys = Data(**{name: getattr(arguments, name) for name in names})
    options = Options.of(arguments.source, arguments.tokenizer, keys, arguments.part_tokens)
    try:
        return prepare(
            arguments.source,
            arguments.out,
            options,
            arguments.workers,
            arguments.subset,
            arguments.split,
        )
    except KeyboardInterrupt:
        print("stopped: finished parts are kept; the same command goes on", file=sys.stderr)
        return "", exit_codes.INTERRUPTED


def _verify(arguments: argparse.Namespace, flags: list[str], _: Style) -> tuple[str, int]:
    from titanlite.tools.commands.verify_tokens import verify

    no_flags(flags)
    if arguments.workers < 1:
        raise DataError("--workers: expected a whole number >= 1")
    verdict = verify(arguments.folder, arguments.workers)
    text = json.dumps(asdict(verdict), indent=1) if arguments.json else "\n".join(verdict.lines())
    return text, exit_codes.ERROR if verdict.problems else exit_codes.DONE


def _peek(arguments: argparse.Namespace, flags: list[str], style: Style) -> str:
    from titanlite.tools.commands import look

    run = _open(arguments, flags, arguments.validation)
    return look.peek(run, arguments.rows, arguments.step, arguments.rank, arguments.ids, style)


def _at_step(arguments: argparse.Namespace, flags: list[str], _: Style) -> str:
    from titanlite.tools.commands import look

    return look.at_step(_open(arguments, flags), arguments.step, arguments.json)


def _stats(arguments: argparse.Namespace, flags: list[str], _: Style) -> str:
    from titanlite.tools.commands import look

    return look.stats(_open(arguments, flags), arguments.json)


def _open(arguments: argparse.Namespace, flags: list[str], validation: bool = False) -> Run:
    """Return the run that CONFIG and the flags of a command name."""
    from titanlite.tools.commands import look

    file, ranks = arguments.file, arguments.world_size
    return look.open_run(file, flags, ranks, validation, arguments.trust_code)
