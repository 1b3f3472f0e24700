"""`titanlite data`: prepare text, and look at the text of a run. No process group and no GPU."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import get_args

from titanlite import exit_codes
from titanlite.cli.argument_parser import FLAGS, Commands, add_group, add_to_group
from titanlite.config.data_sections import Format
from titanlite.data import DataError
from titanlite.utils import cores, say

#: Keys of [data] that are options of `titanlite data prepare`, too.
_KEYS = (
    "text_key",
    "prompt_key",
    "completion_key",
    "messages_key",
    "format",
    "chat_template",
    "template_date",
)


def add_commands(commands: Commands) -> None:
    """Add `titanlite data` to argparse."""
    actions = add_group(commands, "data", "prepare text, and look at the text of a run")
    help = "tokenize text once, into a folder that training maps into memory"
    more = "After a crash the same command continues where it was, and the result is the same."
    add = add_to_group(actions, _prepare, help, more).add
    add("source", "file, folder, pattern, URL, name of text, id of the hub", "SOURCE")
    add("--out", "folder in which the tokens are written", "FOLDER", required=True, type=Path)
    add("--subset", "part of a data set of the hub (default: the usual one)", "NAME")
    split = (
        "split of a data set of the hub (default: train), or of a folder that has several; all: "
        "each of them"
    )
    add("--split", split, "NAME")
    add("--tokenizer", "tokenizer file or folder of the model, or bundled", "PATH", required=True)
    add("--text-key", "field that holds the text (default: text)", "KEY")
    add("--prompt-key", "field that is read and not trained on", "KEY")
    add("--completion-key", "field that follows the prompt and is trained on", "KEY")
    add("--messages-key", "field that holds conversations", "KEY")
    kinds = ", ".join(get_args(Format)[1:])
    add("--format", f"{kinds} (default: by content)", "KIND", choices=get_args(Format))
    add("--chat-template", "as data.chat_template (default: the tokenizer's)", "FILE")
    add("--template-date", "as data.template_date, for templates that write one", "DAY")
    add("--workers", "cores to use (default: all)", "N", type=int, default=cores())
    tokens = "tokens per part, roughly; the fingerprint depends on it (default: 134,217,728)"
    add("--part-tokens", tokens, "N", type=int, default=1 << 27)
    help = "print the figures of a config's text, and sequences as the model sees them"
    parser = add_to_group(actions, _peek, help, FLAGS)
    # It shows documents.
    parser.set_defaults(verbatim=True)
    parser.add("file", "TOML file; also looked up in train_configs/", "CONFIG", nargs="?")
    parser.add("--rows", "sequences or texts to print (default: 2)", "N", type=int, default=2)
    first = "number of the first one, as in guard.jsonl (default: 0)"
    parser.add("--first", first, "N", type=int, default=0)
    worst = "documents of this bad step by loss, from the guard.jsonl of the config's run"
    parser.add("--bad-step", worst, "N", type=int)
    parser.add("--validation", "show the text of validation (default: that of training)")


def _prepare(arguments: argparse.Namespace) -> str | tuple[str, int]:
    from titanlite.cli.prepare import prepare
    from titanlite.cli.prepare_work_units import Options, list_source
    from titanlite.config.data_sections import Data
    from titanlite.data.text_files import columns_of
    from titanlite.data.tokenizer import load_tokenizer

    if arguments.workers < 1 or arguments.part_tokens < 1:
        raise DataError("--workers and --part-tokens: expected whole numbers >= 1")
    if (arguments.prompt_key is None) != (arguments.completion_key is None):
        raise DataError("--prompt-key and --completion-key: give both or none")
    keys = Data(**{name: getattr(arguments, name) for name in _KEYS})
    source = arguments.source
    path = source if os.path.exists(source) else None
    kind = None if keys.format == "tokens" else keys.format
    try:
        tokenizer = load_tokenizer(arguments.tokenizer)
        columns = columns_of(keys, source, path, None, tokenizer)
        options = Options(arguments.tokenizer, columns, arguments.part_tokens, kind)
        shards = list_source(source, options, arguments.subset, arguments.split)
        name = " ".join(filter(None, (source, arguments.subset, arguments.split)))
        text = prepare(name, shards, arguments.out, options, tokenizer, arguments.workers)
        return _as_options(text)
    except DataError as error:
        raise DataError(_as_options(str(error))) from error
    except KeyboardInterrupt:
        say("stopped: finished parts are kept; the same command continues")
        return "", exit_codes.INTERRUPTED


def _as_options(text: str) -> str:
    text = text.replace("model.tokenizer_path", "--tokenizer")
    for name in _KEYS:
        text = re.sub(rf"\bdata\.{name}\b", f"--{name.replace('_', '-')}", text)
    return text


def _peek(arguments: argparse.Namespace) -> str:
    from titanlite.cli.peek import peek, peek_bad_step
    from titanlite.resolve.load import check_config

    if arguments.rows < 0 or arguments.first < 0:
        raise DataError("--rows and --first: expected whole numbers >= 0")
    files = [f"--job.config_file={arguments.file}"] if arguments.file else []
    _, run = check_config([*files, *arguments.flags], None)
    if arguments.bad_step is not None:
        return peek_bad_step(run, arguments.bad_step, arguments.rows)
    return peek(run, arguments.validation, arguments.first, arguments.rows, arguments.style)
