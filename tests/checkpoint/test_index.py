"""The index of a checkpoint is a pickle from another program: it is read as data, with any
manifest.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
)

from tests.checkpoint.golden import HERE, PRINTS, make
from tests.cli.poison import Pickled
from tests.support.checkpoints import options, sign
from titanlite import exit_codes
from titanlite.checkpoint.manager import Checkpointer
from titanlite.checkpoint.manifest import CheckpointError, digest_of
from titanlite.cli.hub.compare_checkpoints import Contents
from titanlite.cli.main import main
from titanlite.dist.dist_env import DistEnv

GOOD = HERE / "format-4" / "step-3"


def _changed(root: Path, content: bytes | Callable[[Any], object]) -> Path:
    """A copy with another index, and a manifest that is right about it.

    content: bytes, or a change of the index.
    """
    folder = shutil.copytree(GOOD, root / "step-3")
    file = folder / ".metadata"
    if callable(content):
        index = pickle.loads(file.read_bytes())
        content(index)
        content = pickle.dumps(index)
    file.write_bytes(content)
    raw = json.loads((folder / "manifest.json").read_text())
    sign(
        folder,
        files={**raw["files"], file.name: len(content)},
        hashes={**raw["hashes"], file.name: digest_of(content)},
    )
    return folder


def _refusal(world: DistEnv, folder: Path, **fields: Any) -> str:
    model, optimizer = make()
    with pytest.raises(CheckpointError) as refused:
        Checkpointer(options(folder, **fields), world, PRINTS).load(model, optimizer)
    return str(refused.value)


def test_an_index_of_an_early_python_3_11_is_read(tmp_path, monkeypatch):
    """It pickles members of an enum as `getattr(class, name)`."""
    index = pickle.loads((GOOD / ".metadata").read_bytes())

    def by_name(member, protocol):
        return getattr, (type(member), member.name)

    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    data = pickle.dumps(index)
    assert b"getattr" in data
    assert Contents(_changed(tmp_path, data)).read("model.output.weight").shape == (6, 4)


def test_code_in_an_index_never_runs(pool, tmp_path, capsys):
    marker = tmp_path / "ran"
    payload = pickle.dumps(Pickled(marker))
    folder = _changed(tmp_path / "bad", payload)
    said = pool(1).run(_refusal, folder.parent)
    said += pool(1).run(_refusal, tmp_path / "new", start="from", initial_load_path=str(folder))
    for command in (["checkpoint", "diff", GOOD, folder], ["export", folder, tmp_path / "out"]):
        assert main([*map(str, command)]) == exit_codes.CHECKPOINT
        said.append("".join(capsys.readouterr()))
    for text in said:
        assert f"{folder}/.metadata cannot be used: it names io.open" in text
    assert not marker.exists()
    pickle.loads(payload).close()
    assert marker.exists(), "the payload would work"


def _first(index: Any) -> Any:
    return next(iter(index.storage_data.values()))


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda i: setattr(_first(i), "relative_path", "../../x"), "'../../x', which"),
        (
            lambda i: setattr(_first(i), "length", 1 << 40),
            "lies outside of __0_0.distcp",
        ),
        (
            lambda i: setattr(_first(i), "transform_descriptors", ["zstd"]),
            "is transformed",
        ),
        # DCP would unpickle the bytes of such an entry without any check.
        (
            lambda i: i.state_dict_metadata.update(more=BytesStorageMetadata()),
            "names torch.distributed.checkpoint.met",
        ),
        (lambda i: i.state_dict_metadata.popitem(), "its tensors are not those of the manifest"),
        (lambda i: setattr(i, "planner_data", torch.hub.load), "it names torch.hub.load"),
        (
            lambda i: setattr(i, "storage_data", None),
            "it is no index of torch.distributed.checkpoint",
        ),
    ],
)
def test_an_index_that_does_not_fit_is_refused_with_the_reason(tmp_path, edit, reason):
    folder = _changed(tmp_path, edit)
    with pytest.raises(CheckpointError) as refused:
        Contents(folder)
    assert str(refused.value).startswith(f"{folder}/.metadata cannot be used: ")
    assert reason in str(refused.value)


def test_an_index_cannot_change_classes_of_torch(tmp_path):
    """A pickle may set attributes of what it names: of a class, for the rest of the process."""
    payload = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N(X\x04\x00\x00\x00evilI1\ndtb."
    with pytest.raises(CheckpointError, match="cannot be used"):
        Contents(_changed(tmp_path, payload))
    assert not hasattr(Metadata, "evil")
    pickle.loads(payload)
    assert hasattr(Metadata, "evil"), "the payload would work"
    del Metadata.evil  # type: ignore[attr-defined]


def test_an_index_that_the_manifest_does_not_list_is_not_read(tmp_path):
    folder = shutil.copytree(GOOD, tmp_path / "step-3")
    raw = json.loads((folder / "manifest.json").read_text())
    for key in ("files", "hashes"):
        del raw[key][".metadata"]
    sign(folder, files=raw["files"], hashes=raw["hashes"])
    with pytest.raises(CheckpointError, match=r"\.metadata is not in the manifest"):
        Contents(folder)
