"""The texts that a config names, and their keys. Nothing here imports numpy."""

from __future__ import annotations

from typing import Literal

from titanlite.config.data_sections import Data, DataSource, Validation
from titanlite.config.sections import Training


def training_texts(training: Training, data: Data) -> dict[str, DataSource]:
    """Return the texts of training by their sections, see `key_of`."""
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
    """Return the texts of validation by their sections."""
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
    """Return the key of a text's name or path: of `data.source[0]`, or of `training` and
    `validation`.
    """
    if section.endswith("]"):
        return f"{section}.{field}"
    return f"{section}.dataset_path" if field == "path" else f"{section}.dataset"
