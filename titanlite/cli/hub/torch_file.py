"""Writes the weights of a model as one file of torch's."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch._subclasses import FakeTensorMode

from titanlite.checkpoint.paths import sync_folder
from titanlite.models import get_spec
from titanlite.models.args import as_record
from titanlite.utils import new_file, sync

if TYPE_CHECKING:
    from titanlite.cli.hub.convert import Source

#: Entries of the dictionary in a file of torch's.
STATE = "state_dict"
MODEL = "model"
STEP = "step"


def write_torch(source: Source, final: Path) -> None:
    """Write the file's layout without content; then the tensors, one by one, each to its place."""
    final.parent.mkdir(parents=True, exist_ok=True)
    file = final.parent / f".partial-{final.name}-{uuid.uuid4().hex[:8]}"
    tied = get_spec(source.family).tied(source.args)
    # Sorted: the same weights are the same file each time.
    names = sorted(source.empty.keys() - tied.keys())
    with FakeTensorMode():
        state = {
            name: torch.empty(source.empty[name].shape, dtype=source.empty[name].dtype)
            for name in names
        }
        for name, other in tied.items():
            state[name] = state[other]  # one storage, as in the model
    content = {STATE: state, MODEL: as_record(source.family, source.args), STEP: source.step}
    try:
        # As a stream: torch refuses to open a file whose name begins with a dot.
        with (
            torch.serialization.skip_data(materialize_fake_tensors=True),
            new_file(file) as stream,
        ):
            torch.save(content, stream)
        places = _places(file)
        with open(file, "r+b") as stream:
            # Not through the file mapped to memory: a full disk would end the process by a signal
            # there.
            for name in sorted(names, key=places.__getitem__):
                stream.seek(places[name])
                stream.write(source.read(name).contiguous().view(-1).view(torch.uint8).numpy().data)
            sync(stream)
        os.link(file, final)  # unlike a rename, it fails where there is a file
        sync_folder(final.parent)
    finally:
        file.unlink(missing_ok=True)


def _places(file: Path) -> dict[str, int]:
    """Return tensor name → the byte where its values begin in a file of torch's."""
    with FakeTensorMode():
        state: dict[str, torch.Tensor] = torch.load(file, weights_only=True)[STATE]
    found: dict[str, int] = {}
    for name, tensor in state.items():
        place = tensor.untyped_storage()._checkpoint_offset
        assert place, "torch has told no places"
        found[name] = place
    return found
