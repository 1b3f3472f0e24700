"""The texts that a config names, their keys, and what a check can tell without reading them.

Nothing here imports numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from titanlite.config.data_sections import Data, DataSource, Validation
from titanlite.config.sections import Training
from titanlite.config.urls import is_url
from titanlite.data import DataError
from titanlite.data.token_paths import is_of_tokens

if TYPE_CHECKING:
    from titanlite.data.file_kinds import Format
    from titanlite.data.listing import UnclearTextError


def training_texts(training: Training, data: Data) -> dict[str, DataSource]:
    """Return the texts of training by section, see `key_of`."""
    if data.source:
        return _by_number("data.source", data.source)
    text = DataSource(
        name=training.dataset,
        path=training.dataset_path,
        subset=data.subset,
        split=data.split,
        format=data.format or "auto",
        epochs=training.epochs,
    )
    return {"training": text}


def held_out_texts(validation: Validation) -> dict[str, DataSource]:
    """Return the texts of validation by section."""
    if validation.sources:
        return _by_number("validation.sources", validation.sources)
    text = DataSource(
        name=validation.dataset,
        path=validation.dataset_path,
        split=validation.split,
        format=validation.format or "auto",
    )
    return {"validation": text}


def _by_number(key: str, sources: list[DataSource]) -> dict[str, DataSource]:
    return {f"{key}[{number}]": source for number, source in enumerate(sources)}


def key_of(section: str, field: Literal["name", "path"] = "name") -> str:
    """Return the key of a text's name or path."""
    if section.endswith("]"):
        return f"{section}.{field}"
    return f"{section}.dataset_path" if field == "path" else f"{section}.dataset"


def open_choices(
    training: Training, data: Data, validation: Validation
) -> Iterator[UnclearTextError]:
    """Yield the errors of folders that leave open which files are meant."""
    texts = training_texts(training, data)
    if validation.enable:
        texts |= held_out_texts(validation)
    for section, source in texts.items():
        if source.path is None or is_url(source.path) or is_of_tokens(source):
            continue
        from titanlite.data.listing import Place, UnclearTextError
        from titanlite.data.local_files import list_text

        kind: Format = "auto" if source.format == "tokens" else source.format
        try:
            list_text(Place(source.path, key_of(section, "path"), source.split, kind))
        except UnclearTextError as error:
            yield error
        except (DataError, OSError):
            # The folder may be filled before the run, which says the same.
            continue
