"""The texts that a config names, their keys, and what a check can tell without reading them.

Nothing here imports numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from titanlite.config.data_sections import Data, DataSource, Validation
from titanlite.config.dataset_registry import hub_text
from titanlite.config.errors import Problem
from titanlite.config.sections import Training
from titanlite.config.toml import quote
from titanlite.config.urls import is_url
from titanlite.data import DataError
from titanlite.data.token_paths import is_of_tokens
from titanlite.utils import is_dotted

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


def is_of_hub(source: DataSource) -> bool:
    """Return whether a text is streamed from the hub by its name."""
    return source.path is None and hub_text(source.name or "") is not None


def is_stream(source: DataSource, streaming: Literal["auto"] | bool) -> bool | None:
    """Return whether a text is read while training; None: the size of its files decides."""
    if is_of_tokens(source) or (source.path is None and is_dotted(source.name or "")):
        return False
    is_remote = is_of_hub(source) or is_url(source.path or "")
    if streaming == "auto":
        return is_remote or None
    return streaming and (is_remote or source.path is not None)


def stream_problems(data: Data, source: DataSource, section: str) -> Iterator[Problem]:
    """Find what a stream of training text cannot do."""
    needs = f"the length of all of {quote(source.title)}, which is read as a stream"
    if data.packing == "best-fit":
        remedy = "prepare its tokens by `titanlite data prepare`, or set data.streaming = false"
        yield Problem("conflict", "data.packing", f'is "best-fit" and needs {needs}', remedy)
    if source.epochs is not None:
        remedy = "give training.steps or training.tokens, or data.streaming = false"
        yield Problem("conflict", f"{section}.epochs", f"needs {needs}", remedy)


def text_problems(training: Training, data: Data, validation: Validation) -> Iterator[Problem]:
    """Find what contradicts the texts, whatever is in their files."""
    for section, source in training_texts(training, data).items():
        if is_stream(source, data.streaming):
            yield from stream_problems(data, source, section)
    if validation.enable and validation.steps == -1:
        for source in held_out_texts(validation).values():
            if is_stream(source, data.streaming):
                yield endless(source.title)


def endless(name: str) -> Problem:
    """Return the problem of a full pass over a stream."""
    message = f"-1 is a full pass, and {name} is read as a stream, which has no known end"
    return Problem("conflict", "validation.steps", message, "give a number of batches")


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
