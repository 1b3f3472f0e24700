"""What is published is on the disk to its last byte: a crash of the machine must find it there."""

from __future__ import annotations

import os

from tests.support.checkpoints import RUN, train
from titanlite.dist.dist_env import DistEnv


def _synced(world: DistEnv, folder: str) -> dict[str, int]:
    """Name of a file -> its bytes when it was last synced on this rank, and the order of what must
    come in turn.
    """
    found: dict[str, int] = {}
    fsync, rename = os.fsync, os.replace

    def watched(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if os.path.isfile(path):
            found[os.path.basename(path)] = os.fstat(descriptor).st_size
        else:
            name = f"folder {os.path.basename(path)}"
            found.pop(name, None)
            found[name] = len(found)
        fsync(descriptor)

    def renamed(source: os.PathLike[str], target: os.PathLike[str], **kwargs: int) -> None:
        found[f"rename to {os.path.basename(target)}"] = len(found)
        rename(source, target, **kwargs)

    os.fsync, os.replace = watched, renamed  # type: ignore[assignment]
    try:
        train(world, RUN, folder, 1, 1)
    finally:
        os.fsync = fsync
        os.replace = rename
    return found


def test_every_file_is_synced_whole_and_before_the_manifest_gets_its_name(pool, tmp_path):
    first, second = pool(2).run(_synced, str(tmp_path / "saves"))
    folder = tmp_path / "saves" / "step-1"
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert sizes.keys() == {"__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.json"}
    synced = {name: size for one in (first, second) for name, size in one.items()}
    assert synced["__0_0.distcp"] == sizes["__0_0.distcp"]
    assert synced["__1_0.distcp"] == sizes["__1_0.distcp"]
    assert synced[".metadata"] == sizes[".metadata"], "it has no other name before"
    assert synced["manifest.json.part"] == sizes["manifest.json"]
    order = [name for name in first if name.startswith(("folder step", "rename to manifest"))]
    assert order == ["rename to manifest.json", "folder step-1"]
    assert list(first)[-1] == "folder saves"
