"""The choice between local and shared saves, and the load of either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from titanlite.checkpoint.choice import Candidate, Chooser
from titanlite.checkpoint.load import Loader
from titanlite.checkpoint.loaded import LoadedState
from titanlite.checkpoint.manifest import NAMES, Found, Manifest, digest_of, step_folder
from titanlite.checkpoint.selection import Selection
from titanlite.checkpoint.state_dict import Tensors, gather, on_each_rank, on_rank_0
from titanlite.checkpoint.store_paths import AnyPath, entries
from titanlite.contrib.resilience.folder import (
    ABOUT,
    GENERATORS,
    LocalFolder,
    id_of,
    part_name,
    read_past,
)
from titanlite.contrib.resilience.part import layout
from titanlite.contrib.resilience.reader import LocalReader, Offer
from titanlite.dist.dist_env import DistEnv, gather_objects
from titanlite.utils import counted, logger


@dataclass
class TieredChooser(Chooser):
    """Chooses the newer one of both tiers, by its step: no offer is of an abandoned past."""

    #: Local saves that may be complete, newest first.
    offers: list[Offer] = field(default_factory=list)
    #: Why others are none.
    notes: list[str] = field(default_factory=list)
    #: Why local saves have been rejected, by their id.
    rejected: dict[str, str] = field(default_factory=dict)
    local_root: Path = Path()

    def newest(self) -> Found:
        shared = super().newest()
        passed = [*self.notes, *self.rejected.values(), *shared.passed]
        newest = shared.manifest
        local = self._newest_local()
        if local is not None and (newest is None or local.step > newest.step):
            newest = local
        if newest is None and not shared.passed and self.config.start != "resume":
            # Local saves that cannot be used do not keep a run from its beginning: no shared
            # checkpoint was due yet.
            for line in passed:
                logger.warning(line)
            return shared
        return Found(newest, passed)

    def folder_of(self, manifest: Manifest) -> AnyPath:
        if ABOUT not in manifest.train:
            return super().folder_of(manifest)
        return step_folder(self.local_root, manifest.step)

    def reject(self, manifest: Manifest, problem: str) -> None:
        if ABOUT in manifest.train:
            self.rejected[id_of(manifest)] = problem
        else:
            super().reject(manifest, problem)

    def set_aside(self, rejected: Manifest) -> None:
        # All ranks delete a local one, as they do with all later saves.
        if ABOUT not in rejected.train:
            super().set_aside(rejected)

    def offer_of(self, manifest: Manifest) -> Offer | None:
        """None: the manifest is of a shared checkpoint."""
        # Not by the whole: a copy of a NaN in a callback's state is unequal.
        about = manifest.train.get(ABOUT)
        return next((one for one in self.offers if one.manifest.train[ABOUT] == about), None)

    def _newest_local(self) -> Manifest | None:
        usable = (one.manifest for one in self.offers if one.save not in self.rejected)
        return next(usable, None)

    def judge_own(
        self, manifest: Manifest, passed: Sequence[str], expected: Mapping[str, Any]
    ) -> Candidate:
        candidate = super().judge_own(manifest, passed, expected)
        kind, other_kind, other = "shared checkpoint", "local save", self._newest_local()
        if ABOUT in manifest.train:
            kind, other_kind, other = other_kind, kind, super().newest().manifest
        rest = f"there is no {other_kind}"
        if other is not None:
            rest = f"the newest {other_kind} is of step {other.step}"
        candidate.notices.append(f"the {kind} of step {manifest.step} is taken: {rest}")
        return candidate


class TieredLoader(Loader):
    """Loads from both tiers."""

    chooser: TieredChooser
    chooser_class = TieredChooser
    folder: LocalFolder
    group: dist.ProcessGroup
    #: Hash of where the tensors of all ranks lie.
    layout = ""

    def look(self, model: nn.Module) -> None:
        """Learn which local saves there are. All ranks call it together."""
        mine = digest_of(layout(gather(model)).encode())
        self.layout = digest_of("\n".join(gather_objects(mine, self.group)).encode())
        chooser = self.chooser
        chooser.local_root = self.folder.step(0).parent
        past, names = on_rank_0(
            self.world, lambda: (read_past(chooser.root), list(entries(chooser.root))), self.group
        )
        # Damaged checkpoints count too.
        matches = map(NAMES.fullmatch, names)
        steps = [int(match[1]) for match in matches if match is not None and match[1]]
        newest = max(steps, default=-1)
        chooser.offers = []
        manifests, problems = _gather_manifests(self.folder, self.group)
        for manifest in sorted(manifests, key=lambda one: (-one.step, id_of(one))):
            reason = past.abandoned(manifest, newest) or _unfit(manifest, self.layout, self.world)
            if reason:
                problems.append(f"the local save of step {manifest.step}: {reason}")
            else:
                parts = gather_objects(tuple(self.folder.parts_of(manifest)), self.group)
                chooser.offers.append(Offer(manifest, tuple(parts)))
        chooser.notes = problems

    def _reader(self, candidate: Candidate) -> Any:
        offer = self.chooser.offer_of(candidate.manifest)
        if offer is None or candidate.origin == "from":
            return super()._reader(candidate)
        by_hash = self.config.verify == "hash"
        return LocalReader(offer, self.folder, self.world, self.group, by_hash, candidate.notices)

    def _compare(self, reader: Any) -> str | None:
        if not isinstance(reader, LocalReader):
            return super()._compare(reader)
        return reader.collect()

    def _fill(self, reader: Any, state: Tensors) -> None:
        if isinstance(reader, LocalReader):
            on_each_rank(lambda: reader.read(state), self.group)
        else:
            super()._fill(reader, state)

    def _result(
        self, candidate: Candidate, left_out: frozenset[str], selection: Selection
    ) -> LoadedState:
        loaded = super()._result(candidate, left_out, selection)
        # A save of what was loaded is another one.
        train = {name: value for name, value in loaded.train.items() if name != ABOUT}
        return replace(loaded, train=train)


def _gather_manifests(
    folder: LocalFolder, group: dist.ProcessGroup
) -> tuple[list[Manifest], list[str]]:
    """Return the manifests of any rank, each sent once, and what is wrong with others."""
    mine, problems = on_each_rank(folder.manifests, group)
    known = gather_objects((sorted(mine), problems), group)
    first: dict[str, int] = {}
    for rank, (saves, _) in enumerate(known):
        for save in saves:
            first.setdefault(save, rank)
    manifests = []
    for save, rank in first.items():
        sent = [mine.get(save)]
        dist.broadcast_object_list(sent, src=rank, group=group)
        assert sent[0] is not None
        manifests.append(sent[0])
    return manifests, sorted({problem for _, faults in known for problem in faults})


def _unfit(manifest: Manifest, layout: str, world: DistEnv) -> str:
    if manifest.world_size != world.size:
        ranks = counted(manifest.world_size, "ranks")
        return f"it has the parts of {ranks}, and this run has {world.size}"
    names = {GENERATORS, *map(part_name, range(world.size))}
    if manifest.train[ABOUT].get("layout") != layout or names != manifest.hashes.keys():
        return "other degrees divided its tensors: the shared checkpoints fit any"
    return ""
