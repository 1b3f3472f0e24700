"""What the check of a config can tell of its local text without reading it.

Nothing here imports numpy.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from titanlite.config.data_sections import Data, DataSource, Validation
from titanlite.config.sections import Training
from titanlite.config.urls import is_url
from titanlite.data import DataError
from titanlite.data.text_keys import held_out_texts, key_of, training_texts
from titanlite.data.token_paths import INDEX, is_index, is_of_tokens

if TYPE_CHECKING:
    from titanlite.data.kinds import Format
    from titanlite.data.listing import UnclearTextError

#: Passes over a text after which another one teaches a model little (docs/data.md).
MOST_PASSES = 8
#: Follows the name of a text in the warning.
PASSES = ": the run reads this text"


def open_choices(
    training: Training, data: Data, validation: Validation
) -> Iterator[tuple[str, UnclearTextError]]:
    """Yield the keys of folders that leave open which of their files are meant, and the errors that
    say so.
    """
    texts = training_texts(training, data)
    if validation.enable:
        texts |= held_out_texts(validation)
    for section, source in texts.items():
        key = key_of(section, "path")
        error = _choice_in(source, key)
        if error is not None:
            yield key, error


def _choice_in(source: DataSource, key: str) -> UnclearTextError | None:
    """Return the error of a local text that leaves open which of its files are meant; None
    otherwise. key: of its path.
    """
    path = source.path
    if path is None or is_url(path) or is_of_tokens(source) or not _exists(path):
        return None
    from titanlite.data.listing import Place, UnclearTextError
    from titanlite.data.local_files import list_text

    kind: Format = "auto" if source.format == "tokens" else source.format
    try:
        list_text(Place(path, key, source.split, kind))
    except UnclearTextError as error:
        return error
    except (DataError, OSError):
        # The folder may be filled before the run, which says the same.
        return None
    return None


def _exists(path: str) -> bool:
    return os.path.exists(path) or any(glob.iglob(path, recursive=True))


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
        return {source.title: float(source.epochs) for source in data.source if source.epochs}
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
