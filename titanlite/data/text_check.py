"""What the check of a config can tell of its local text without reading it.

Nothing here imports numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from titanlite.config.data_sections import Data, Validation
from titanlite.config.sections import Training
from titanlite.config.urls import is_url
from titanlite.data import DataError
from titanlite.data.text_keys import held_out_texts, key_of, training_texts
from titanlite.data.token_paths import is_of_tokens

if TYPE_CHECKING:
    from titanlite.data.kinds import Format
    from titanlite.data.listing import UnclearTextError


def open_choices(
    training: Training, data: Data, validation: Validation
) -> Iterator[UnclearTextError]:
    """Yield the errors of folders that leave open which of their files are meant."""
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
