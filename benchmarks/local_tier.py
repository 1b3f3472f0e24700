"""Local saves of a run that is killed: what lies in the folders that stand for its nodes' disks.

They are read without the code of titanlite that judges them, so that a start can be compared with
what it should have found.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

#: A shared checkpoint comes after so many intervals of local saves.
SHARED_EVERY = 5
_STEP = re.compile(r"step-\d+")


@dataclass(frozen=True)
class LocalTier:
    """interval: steps between local saves. copies: of each part, on other nodes."""

    interval: int
    ranks: int
    copies: int
    chance: random.Random

    def flags(self, run: Path) -> list[str]:
        """Return keys with which each rank of this machine has its own disk."""
        return [
            f"--checkpoint.local_folder={run}/node-{{local_rank}}",
            f"--checkpoint.local_interval={self.interval}",
            f"--checkpoint.local_copies={self.copies}",
        ]

    def newest(self, run: Path) -> int:
        """Return the step of the newest save whose parts all lie on some node, unchanged; 0: there
        is none.
        """
        whole = [(0.0, 0)]
        for record in _records(run).values():
            if all(self._has_part(run, record, rank) for rank in range(self.ranks)):
                whole.append((record["created"], record["step"]))
        return max(whole)[1]

    def _has_part(self, run: Path, record: dict[str, Any], rank: int) -> bool:
        digest = record["hashes"][f"rank-{rank}"]
        for kind in ("rank", "copy"):
            for path in run.glob(f"node-*/run-*/{kind}-{rank}/{_place(record)}"):
                if digest == f"xxh3:{xxhash.xxh3_128(path.read_bytes()).hexdigest()}":
                    return True
        return False

    def has_begun(self, run: Path) -> bool:
        """Return whether a part lies there whose save was not published."""
        published = {Path(_place(record)).stem for record in _records(run).values()}
        return any(
            path.stem not in published
            for folder in _folders(run)
            for path in folder.glob("*.safetensors")
        )

    def lose_a_node(self, run: Path) -> None:
        """Delete all that one node has."""
        shutil.rmtree(run / f"node-{self.chance.randrange(self.ranks)}", ignore_errors=True)

    def damage(self, run: Path, step: int) -> Path:
        """Change one bit of a rank's own part of a save; return the file."""
        rank = self.chance.randrange(self.ranks)
        record = next(one for one in _records(run).values() if one["step"] == step)
        (path,) = run.glob(f"node-*/run-*/rank-{rank}/{_place(record)}")
        change_a_bit(path, self.chance)
        return path


def change_a_bit(file: Any, chance: random.Random) -> None:
    """Change a random bit of a file, or of an object in a store."""
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(bytes(content))


def _folders(run: Path) -> Iterator[Path]:
    """Yield the folders of parts, but for those that were set aside."""
    for folder in run.glob("node-*/run-*/*/step-*"):
        if _STEP.fullmatch(folder.name):
            yield folder


def _records(run: Path) -> dict[str, dict[str, Any]]:
    """Return the manifests of local saves, by the id of the save."""
    found = {}
    for folder in _folders(run):
        path = folder / "manifest.json"
        if path.is_file():
            record = json.loads(path.read_bytes())
            found[record["train"]["local_save"]["save"]] = record
    return found


def _place(record: dict[str, Any]) -> str:
    """Return where a part of a save lies in the folder of its rank."""
    return f"step-{record['step']}/{record['train']['local_save']['save']}.safetensors"
