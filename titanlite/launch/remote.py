"""Checks of jobs whose containers have their own variables and files."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Collection, Iterator, Mapping

from titanlite.config.errors import Problem
from titanlite.config.text_names import BUNDLED_TOKENIZER_NAME
from titanlite.config.urls import is_url
from titanlite.runs.provenance import config_values, is_secret
from titanlite.utils import public

_VARIABLE = re.compile(r"(?<!\$)\$\{(\w+)\}")
#: Variables of any container.
_USUAL = ("HOME", "HOSTNAME", "PATH", "USER")
_PATHS = (
    "model.tokenizer_path",
    "training.dataset_path",
    "validation.dataset_path",
    "checkpoint.initial_load_path",
    "lora.adapter",
)


def secrets(names: Collection[str]) -> list[str]:
    """Return the names of variables that look like secrets. A tokenizer's settings are none."""
    return [name for name in names if is_secret(name) and not name.startswith("TOKENIZERS_")]


def checkpoint_folder(toml: str, run_folder: str, variables: Mapping[str, str]) -> str:
    """Return checkpoint.folder as the container has it: a URL or an absolute path.

    An unknown variable stays.
    """
    folder = str(config_values(toml)["checkpoint.folder"])
    folder = _VARIABLE.sub(lambda match: variables.get(match[1], match[0]), folder)
    if is_url(folder):
        return folder
    return posixpath.normpath(posixpath.join(run_folder, folder))


def unset_variables(toml: str, given: Collection[str], pattern: str) -> Iterator[Problem]:
    """Yield a problem for each variable of a config that the container lacks.

    pattern: names that it sets itself.
    """
    for key, value in config_values(toml).items():
        for name in dict.fromkeys(_VARIABLE.findall(json.dumps(value, default=str))):
            if name not in (*given, *_USUAL) and not re.fullmatch(pattern, name):
                message = f"the containers have no environment variable {name}"
                hint = f"set launch.environment.{name}, or write $${{ for a literal ${{"
                yield Problem("does-not-fit", key, message, hint)


def shown_urls(toml: str) -> list[str]:
    """Return the keys of a config whose URLs have a login or a signature.

    Readers of the job would see them.
    """
    texts = {key: json.dumps(value, default=str) for key, value in config_values(toml).items()}
    return [key for key, text in texts.items() if public(text) != text]


def relative_paths(toml: str, hint: str) -> list[str]:
    """Return a warning for each relative path of data.

    hint: the folder in which the container looks for it.
    """
    values = config_values(toml)
    found = []
    for key in _PATHS:
        path = values.get(key)
        if path == BUNDLED_TOKENIZER_NAME:
            continue
        if isinstance(path, str) and path and not is_url(path) and path[0] not in "/~$":
            found.append(f"{key} = {path!r} is relative: {hint}")
    return found
