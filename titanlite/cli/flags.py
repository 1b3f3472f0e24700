"""The `--section.key value` flags of a command line, apart from the words of argparse."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import get_origin

from titanlite.config.aliases import type_of_name
from titanlite.config.key_types import base, choices, members
from titanlite.config.raw_values import CONFIG_FILE, begins_option, flag_name


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide a command line into argparse's part and `--section.key value` flags.

    argparse would take a flag's value for the config file.
    """
    ours: list[str] = []
    flags: list[str] = []
    place = 0
    while place < len(argv):
        word = argv[place]
        place += 1
        if begins_option(word) and names_key(word):
            plain = list(itertools.takewhile(lambda word: not begins_option(word), argv[place:]))
            end = place + value_words(word, plain)
            flags += [word, *argv[place:end]]
            place = end
        else:
            ours.append(word)
    return ours, flags


def names_key(option: str) -> bool:
    """Return whether it is a `--section.key` flag, right or wrong, and no option."""
    name = option.removeprefix("--").partition("=")[0]
    return "." in name or name in CONFIG_FILE


def value_words(flag: str, words: Sequence[str]) -> int:
    """Return how many of the words behind a `--section.key` flag are its value.

    words: those up to the next option. A switch takes a truth value, a list all words up to the
    name of a TOML file, and any other key one. A negated flag and one with `=` take none.
    """
    option, equals, _ = flag.removeprefix("--").partition("=")
    name, negated = flag_name(option)
    if equals or negated or not words:
        return 0
    if name == "job.config_file":
        return len(words)
    if name is None:
        return 1
    type_ = type_of_name(name)
    kinds = [base(member) for member in members(type_)]
    if any(get_origin(kind) is list for kind in kinds):
        files = [place for place, word in enumerate(words) if word.endswith(".toml")]
        return files[0] if files else len(words)
    if bool in kinds:
        is_value = words[0].lower() in _TRUTH_VALUES or words[0] in choices(type_)
        return 1 if is_value else 0
    return 1


#: Words behind a switch that are meant as its value, right or wrong.
_TRUTH_VALUES = ("true", "false", "yes", "no", "on", "off", "1", "0", "none")
