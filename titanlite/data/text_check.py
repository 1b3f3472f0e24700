"""What the check of a config can tell of its local text without reading it.

Nothing here imports numpy.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from titanlite.config.data_sections import Data, TextFormat, Validation
from titanlite.config.sections import Training
from titanlite.config.urls import is_url
from titanlite.data import DataError
from titanlite.data.token_paths import INDEX, is_index, is_tokens

if TYPE_CHECKING:
    from titanlite.data.kinds import Format
    from titanlite.data.listing import UnclearTextError

#: Passes over a text after which another one teaches a model little (docs/data.md).
MOST_PASSES = 8
#: Follows the name of a text in the warning.
PASSES = ": the run reads this text"


class _Text(NamedTuple):
    """A local text that a config names, and the key of its path."""

    key: str
    path: str
    split: str | None
    #: None: token files.
    reader: Format | None

    @property
    def is_of_tokens(self) -> bool:
        return self.reader is None or self.reader == "auto" and is_tokens(self.path)


def open_choices(
    training: Training, data: Data, validation: Validation
) -> Iterator[tuple[str, UnclearTextError]]:
    """Yield the keys of folders that leave open which of their files are meant, and the errors that
    say so.
    """
    for text in _local_texts(training, data, validation):
        if text.is_of_tokens or not _exists(text.path):
            continue
        error = _choice_in(text)
        if error is not None:
            yield text.key, error


def _choice_in(text: _Text) -> UnclearTextError | None:
    """Return the error of a text that leaves open which of its files are meant; None otherwise."""
    from titanlite.data.listing import Place, UnclearTextError
    from titanlite.data.local_files import list_text

    try:
        list_text(Place(text.path, text.key, text.split, text.reader or "auto"))
    except UnclearTextError as error:
        return error
    except (DataError, OSError):
        # The folder may be filled before the run, which says the same.
        return None
    return None


def _exists(path: str) -> bool:
    return os.path.exists(path) or any(glob.iglob(path, recursive=True))


def _local_texts(training: Training, data: Data, validation: Validation) -> Iterator[_Text]:
    """Yield the local texts of training and, if it is on, of validation."""
    if not data.source:
        path = training.dataset_path
        yield from _local("training.dataset_path", path, data.split, data.format)
    for number, source in enumerate(data.source):
        yield from _local(f"data.source[{number}].path", source.path, source.split, source.format)
    if not validation.enable:
        return
    if not validation.sources:
        path = validation.dataset_path
        split = validation.split
        yield from _local("validation.dataset_path", path, split, validation.format)
    for number, source in enumerate(validation.sources):
        key = f"validation.sources[{number}].path"
        yield from _local(key, source.path, source.split, source.format)


def _local(
    key: str,
    path: str | None,
    split: str | None,
    form: TextFormat | None = None,
) -> Iterator[_Text]:
    """Yield a text if it is local."""
    if path is not None and not is_url(path):
        yield _Text(key, path, split, None if form == "tokens" else form or "auto")


# Passes


def passes_warning(name: str, passes: float) -> str | None:
    """Return what to say of this number of passes over a text; None if they are not too many."""
    if passes <= MOST_PASSES:
        return None
    return (
        f"{name}{PASSES} {passes:.3g} times. More than {MOST_PASSES} passes teach a model little "
        "and it begins to repeat the text: take more text, or fewer steps"
    )


def planned_passes(training: Training, data: Data, tokens: int | None) -> dict[str, float]:
    """Return the passes over each training text that are known without reading it, by its name.

    tokens: of the whole run; None: the text decides how long it is.
    """
    if data.source:
        passes = {}
        for source in data.source:
            if source.epochs:
                passes[source.name or source.path or ""] = float(source.epochs)
        return passes
    name = training.dataset_path or training.dataset
    if training.epochs is not None:
        return {name: float(training.epochs)}
    size = prepared_tokens(training.dataset_path)
    return {name: tokens / size} if tokens and size else {}


def prepared_tokens(path: str | None) -> int | None:
    """Return the tokens of a prepared folder; None for another path, and for an index that cannot
    be read.
    """
    if path is None or is_url(path):
        return None
    file = os.path.join(path, INDEX)
    if not is_index(file):
        return None
    try:
        with open(file, "rb") as stream:
            found: Mapping[str, Any] = json.load(stream)
        return int(found["tokens"]) or None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None  # the error comes when it is opened
