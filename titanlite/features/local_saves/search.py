"""Which local saves there are, seen from all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from titanlite.checkpoint.manifest import Manifest
from titanlite.checkpoint.paths import AnyPath
from titanlite.checkpoint.storage import on_each_rank, on_rank_0
from titanlite.dist.dist_env import DistEnv, gather_objects
from titanlite.features.local_saves.abandoned import Past
from titanlite.features.local_saves.folder import ABOUT, GENERATORS, LocalFolder, part_name
from titanlite.utils import counted


@dataclass(frozen=True)
class Offer:
    """A local save of which at least one rank has the manifest."""

    save: str
    manifest: Manifest
    #: Rank → the ranks whose parts it finds on its node with the right length.
    parts: tuple[tuple[int, ...], ...]


def find_saves(
    folder: LocalFolder,
    layout: str,
    past: Past,
    shared: AnyPath,
    world: DistEnv,
    group: dist.ProcessGroup,
) -> tuple[list[Offer], list[str]]:
    """Return the local saves of all nodes, newest first, and why others cannot be taken.

    All ranks call it together, and get the same. layout: hash of where all ranks' tensors lie now.
    shared: folder of the shared checkpoints.
    """
    seen, problems = on_each_rank(folder.seen, group)
    mine = {one.save: one.manifest for one in seen}
    manifests, notes = _manifests(mine, problems, world, group)
    gone = on_rank_0(world, lambda: past.gone(manifests.values(), shared), group)
    offers = []
    ordered = sorted(manifests.items(), key=lambda pair: (pair[1].created, pair[0]), reverse=True)
    for save, manifest in ordered:
        reason = past.abandoned(manifest) or gone or _of_another_layout(manifest, layout, world)
        if reason:
            notes.append(f"the local save of step {manifest.step}: {reason}")
            continue
        parts = gather_objects(tuple(folder.parts_of(manifest)), group)
        offers.append(Offer(save, manifest, tuple(parts)))
    return offers, notes


def _manifests(
    mine: Mapping[str, Manifest],
    problems: list[str],
    world: DistEnv,
    group: dist.ProcessGroup | None,
) -> tuple[dict[str, Manifest], list[str]]:
    """Return the manifests that any rank has, by the id of the save, and what is wrong with others.

    Each is sent once, by the first rank that has it.
    """
    known = gather_objects((sorted(mine), problems), group)
    manifests: dict[str, Manifest] = {}
    for rank, (saves, _) in enumerate(known):
        sent: list[Any] = [None]
        if rank == world.rank:
            sent = [{save: mine[save] for save in saves if save not in manifests}]
        if any(save not in manifests for save in saves):
            dist.broadcast_object_list(sent, src=rank, group=group)
            manifests.update(sent[0])
    told = {problem for _, faults in known for problem in faults}
    return manifests, sorted(told)


def _of_another_layout(manifest: Manifest, layout: str, world: DistEnv) -> str:
    if manifest.world_size != world.size:
        ranks = counted(manifest.world_size, "ranks")
        return f"it has the parts of {ranks}, and this run has {world.size}"
    names = {GENERATORS, *map(part_name, range(world.size))}
    if names != manifest.hashes.keys():
        return "its manifest does not list the parts of all ranks"
    about = manifest.train[ABOUT]
    if about.get("layout") != layout:
        return "other degrees divided its tensors: the shared checkpoints fit any"
    return ""
