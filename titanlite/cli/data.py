"""`titanlite data`: prepare text, and look at the text of a run. No process group and no GPU."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from titanlite import exit_codes
from titanlite.cli.parser import FLAGS, Commands, Parser, add_group, add_to_group
from titanlite.config import trust
from titanlite.config.data_sections import RecordForm, TextFormat
from titanlite.data import DataError
from titanlite.utils import cores, say

if TYPE_CHECKING:
    from titanlite.cli.look import Run

#: Keys of [data] that are options of `titanlite data prepare`, too.
_KEYS = (
    "text_key",
    "prompt_key",
    "completion_key",
    "messages_key",
    "record",
    "format",
    "chat_template",
    "template_date",
)
_CONFIG = "TOML file; also looked up in train_configs/"


def add_commands(commands: Commands) -> None:
    """Add `titanlite data` to argparse."""
    actions = add_group(commands, "data", "prepare text, and look at the text of a run")
    _add_fetch(actions)
    _add_prepare(actions)
    _add_verify(actions)
    _add_peek(actions)
    _add_at_step(actions)
    _add_stats(actions)


def _add_fetch(actions: Commands) -> None:
    more = (
        "Files that are there stay; after a crash the same command continues. HF_TOKEN opens "
        "private data sets."
    )
    help = "copy files of a data set of the hub, or files behind a URL"
    add = add_to_group(actions, _fetch, help, more).add
    add("source", "registered name (c4), id of the hub (owner/name) or URL", "SOURCE")
    add("--out", "where the files go", "FOLDER", required=True, type=Path)
    add("--files", "numbers of the files, from 0 (default: all)", "N-M,…")
    add("--subset", "part of the data set (default: the usual one)", "NAME")
    add("--split", "split of the data set (default: train)", "NAME")


def _add_prepare(actions: Commands) -> None:
    help = "tokenize text once, into a folder that training maps into memory"
    more = "After a crash the same command continues where it was, and the result is the same."
    add = add_to_group(actions, _prepare, help, more).add
    add("source", "file, folder, pattern, URL, name of text, id of the hub", "SOURCE")
    add("--out", "where the tokens go", "FOLDER", required=True, type=Path)
    add("--subset", "part of a data set of the hub (default: the usual one)", "NAME")
    split = (
        "split of a data set of the hub (default: train), or of a folder that has several; all: "
        "each of them"
    )
    add("--split", split, "NAME")
    add("--tokenizer", "as model.tokenizer_path: the model's, or bundled", "PATH", required=True)
    add("--text-key", "field that holds the text (default: text)", "KEY")
    add("--prompt-key", "field that is read and not trained on", "KEY")
    add("--completion-key", "field that follows the prompt and is trained on", "KEY")
    add("--messages-key", "field that holds conversations", "KEY")
    record = "text, completion, messages, sharegpt or alpaca (default: recognised by the fields)"
    add("--record", record, "FORM", choices=get_args(RecordForm))
    kind = "json, parquet, arrow, csv, text or source (default: by content)"
    formats = [one for one in get_args(TextFormat) if one != "tokens"]
    add("--format", kind, "KIND", choices=formats)
    add("--chat-template", "as data.chat_template (default: the tokenizer's)", "FILE")
    add("--template-date", "as data.template_date, for templates that write one", "DAY")
    add("--workers", "cores to use (default: all)", "N", type=int, default=cores())
    tokens = "tokens per part, roughly; the fingerprint depends on it (default: 134,217,728)"
    add("--part-tokens", tokens, "N", type=int, default=1 << 27)


def _add_verify(actions: Commands) -> None:
    help = "read token files again, and compare their hashes"
    more = (
        "Sizes, offsets and hashes of all parts. Files of other programs have no hashes: what "
        "they tell is checked"
    )
    add = add_to_group(actions, _verify, help, more).add
    add("folder", "prepared folder, or files of Megatron-LM or numpy", "FOLDER", type=Path)
    add("--workers", "threads (default: cores, 8 at most)", "N", type=int, default=min(cores(), 8))
    add("--json", "print JSON")


def _add_peek(actions: Commands) -> None:
    help = "print the first sequences of a run as the model sees them"
    parser = add_to_group(actions, _peek, help, FLAGS)
    # It shows documents.
    parser.set_defaults(verbatim=True)
    add = parser.add
    add("file", _CONFIG, "CONFIG", nargs="?")
    add("--rows", "sequences to print (default: 2)", "N", type=int, default=2)
    add("--step", "from this step on (default: 1)", "N", type=int, default=1)
    add("--rank", "only those of one data-parallel rank", "R", type=int)
    add("--ids", "print the ids, too")
    add("--validation", "the validation's text instead")
    _add_ranks(parser)


def _add_at_step(actions: Commands) -> None:
    help = "list the documents of the batch of a step"
    more = f"CONFIG may also be the folder of a run, or a checkpoint. {FLAGS}"
    parser = add_to_group(actions, _at_step, help, more)
    parser.add("step", "the step, from 1", "N", type=int)
    parser.add("file", _CONFIG, "CONFIG", nargs="?")
    parser.add("--json", "print JSON")
    _add_ranks(parser)


def _add_stats(actions: Commands) -> None:
    help = "count the documents and tokens of a config's text"
    parser = add_to_group(actions, _stats, help, FLAGS)
    parser.add("file", _CONFIG, "CONFIG", nargs="?")
    parser.add("--json", "print JSON")
    _add_ranks(parser)


def _add_ranks(parser: Parser) -> None:
    ranks = "ranks of the run (default: as for `titanlite config check`)"
    parser.add("--world-size", ranks, "N", type=int)
    trust.add_argument(parser.add_argument)


def _fetch(arguments: argparse.Namespace) -> str | tuple[str, int]:
    from titanlite.cli.hub.fetch import fetch

    try:
        return fetch(
            arguments.source, arguments.out, arguments.files, arguments.subset, arguments.split
        )
    except KeyboardInterrupt:
        say("stopped: the same command continues")
        return "", exit_codes.INTERRUPTED


def _prepare(arguments: argparse.Namespace) -> str | tuple[str, int]:
    from titanlite.cli.prepare import prepare
    from titanlite.cli.prepare_tasks import Options
    from titanlite.config.data_sections import Data

    if arguments.workers < 1 or arguments.part_tokens < 1:
        raise DataError("--workers and --part-tokens: expected whole numbers >= 1")
    if (arguments.prompt_key is None) != (arguments.completion_key is None):
        raise DataError("--prompt-key and --completion-key: give both or none")
    keys = Data(**{name: getattr(arguments, name) for name in _KEYS})
    try:
        options = Options.of(arguments.source, arguments.tokenizer, keys, arguments.part_tokens)
        text = prepare(
            arguments.source,
            arguments.out,
            options,
            arguments.workers,
            arguments.subset,
            arguments.split,
        )
        return _as_options(text)
    except DataError as error:
        raise DataError(_as_options(str(error))) from error
    except KeyboardInterrupt:
        say("stopped: finished parts are kept; the same command continues")
        return "", exit_codes.INTERRUPTED


def _as_options(text: str) -> str:
    """Return words about keys of the config as words about options of a command."""
    text = text.replace("model.tokenizer_path", "--tokenizer")
    for name in _KEYS:
        text = re.sub(rf"\bdata\.{name}\b", f"--{name.replace('_', '-')}", text)
    return text


def _verify(arguments: argparse.Namespace) -> tuple[str, int]:
    from titanlite.cli.verify_tokens import verify

    if arguments.workers < 1:
        raise DataError("--workers: expected a whole number >= 1")
    verdict = verify(arguments.folder, arguments.workers)
    text = json.dumps(asdict(verdict), indent=1) if arguments.json else "\n".join(verdict.lines())
    return text, exit_codes.ERROR if verdict.problems else exit_codes.DONE


def _peek(arguments: argparse.Namespace) -> str:
    from titanlite.cli import look

    run = _open(arguments, arguments.validation)
    a = arguments
    return look.peek(run, a.rows, a.step, a.rank, a.ids, a.style)


def _at_step(arguments: argparse.Namespace) -> str:
    from titanlite.cli import look

    return look.at_step(_open(arguments), arguments.step, arguments.json)


def _stats(arguments: argparse.Namespace) -> str:
    from titanlite.cli import look

    return look.stats(_open(arguments), arguments.json)


def _open(arguments: argparse.Namespace, validation: bool = False) -> Run:
    """Return the run that CONFIG and the flags of a command name."""
    from titanlite.cli import look

    a = arguments
    return look.open_run(a.file, a.flags, a.world_size, validation, a.trust_code)
