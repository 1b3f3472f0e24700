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
from titanlite.checkpoint.manifest import Found, Manifest, digest_of, step_folder
from titanlite.checkpoint.paths import AnyPath
from titanlite.checkpoint.selection import Selection
from titanlite.checkpoint.storage import Tensors, gather, on_each_rank, on_rank_0
from titanlite.dist.dist_env import gather_objects
from titanlite.features.local_saves.abandoned import Past, read_past
from titanlite.features.local_saves.folder import ABOUT, LocalFolder
from titanlite.features.local_saves.part import layout
from titanlite.features.local_saves.reader import LocalReader
from titanlite.features.local_saves.search import Offer, find_saves
from titanlite.utils import logger


@dataclass
class TieredChooser(Chooser):
    """Chooses the newer one of both tiers, by the time of the save."""

    #: Local saves that may be complete, newest first.
    offers: list[Offer] = field(default_factory=list)
    #: Why others are none.
    notes: list[str] = field(default_factory=list)
    #: Why local saves have been rejected, by their id.
    rejected: dict[str, str] = field(default_factory=dict)
    local_root: Path = Path()

    def newest(self) -> Found:
        """Return the newest checkpoint of both tiers that is not known to be bad."""
        shared = super().newest()
        passed = [*self._told(), *shared.passed]
        local = self._newest_offer()
        newest = shared.manifest
        if local is None and newest is None:
            return self._nothing(shared, passed)
        # No rollback leaves a later step in an older save: such a time is wrong.
        if local is not None and (
            newest is None
            or (local.manifest.created > newest.created and local.manifest.step > newest.step)
        ):
            newest = local.manifest
        return Found(newest, passed)

    def _told(self) -> list[str]:
        """Return why local saves are passed over."""
        return [*self.notes, *self.rejected.values()]

    def _nothing(self, shared: Found, passed: list[str]) -> Found:
        """Return that there is no checkpoint.

        Local saves alone that cannot be used do not keep a run from its beginning: no shared one
        was due yet.
        """
        if shared.passed or self.config.start == "resume":
            return Found(None, passed)
        for line in passed:
            logger.warning(line)
        return shared

    def folder_of(self, manifest: Manifest) -> AnyPath:
        if ABOUT not in manifest.train:
            return super().folder_of(manifest)
        return step_folder(self.local_root, manifest.step)

    def reject(self, manifest: Manifest, problem: str) -> None:
        if ABOUT in manifest.train:
            self.rejected[manifest.train[ABOUT]["save"]] = problem
        else:
            super().reject(manifest, problem)

    def settle(self, rejected: Manifest, replaced: bool) -> None:
        if ABOUT not in rejected.train:
            super().settle(rejected, replaced)
        elif not replaced:
            # Otherwise all ranks set it aside, as they do with all later saves.
            del self.rejected[rejected.train[ABOUT]["save"]]

    def place_of(self, found: Found) -> AnyPath:
        if found.manifest is None:
            return super().place_of(found)
        return self.folder_of(found.manifest).parent

    def offer_of(self, manifest: Manifest) -> Offer | None:
        """Return the local save of a manifest; None for a shared one."""
        if ABOUT not in manifest.train:
            return None
        save = manifest.train[ABOUT]["save"]
        return next((offer for offer in self.offers if offer.save == save), None)

    def _newest_offer(self) -> Offer | None:
        return next((one for one in self.offers if one.save not in self.rejected), None)

    def judge_own(
        self, manifest: Manifest, passed: Sequence[str], expected: Mapping[str, Any]
    ) -> Candidate:
        told = self._told()
        others = [line for line in passed if line not in told]
        candidate = super().judge_own(manifest, others, expected)
        candidate.notices.extend(f"passed over: {line}" for line in told)
        shared = super().newest().manifest
        if ABOUT in manifest.train:
            other = "there is no shared checkpoint"
            if shared is not None:
                other = f"the newest shared checkpoint is of step {shared.step}"
            candidate.notices.append(f"the local save of step {manifest.step} is taken: {other}")
        elif self.config.load_step == -1:
            local = self._newest_offer()
            other = "no whole local save is newer"
            if local is not None:
                other = f"the newest local save is of step {local.manifest.step}"
            candidate.notices.append(
                f"the shared checkpoint of step {manifest.step} is taken: {other}"
            )
        return candidate


class TieredLoader(Loader):
    """Loads from both tiers. `folder` and `group` are those of `TieredCheckpointer`."""

    chooser: TieredChooser
    chooser_class = TieredChooser
    folder: LocalFolder
    group: dist.ProcessGroup
    #: Hash of where the tensors of all ranks lie.
    layout = ""
    #: Local saves that the run has abandoned.
    past = Past()
    #: The checkpoint that was loaded last, and what read it.
    taken: Any = None
    reader: Any = None

    def look(self, model: nn.Module) -> None:
        """Learn which local saves there are. All ranks call it together."""
        mine = digest_of(layout(gather(model)).encode())
        places = gather_objects(mine, self.group)
        self.layout = digest_of("\n".join(places).encode())
        chooser = self.chooser
        chooser.local_root = self.folder.mine
        self.past = on_rank_0(self.world, lambda: read_past(chooser.root), self.group)
        chooser.offers, chooser.notes = find_saves(
            self.folder, self.layout, self.past, chooser.root, self.world, self.group
        )

    def _reader(self, candidate: Candidate) -> Any:
        offer = self.chooser.offer_of(candidate.manifest)
        if offer is None or candidate.origin == "from":
            self.reader = super()._reader(candidate)
        else:
            by_hash = self.config.verify == "hash"
            self.reader = LocalReader(
                offer, self.folder, self.world, self.group, by_hash, candidate.notices
            )
        return self.reader

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
        self.taken = candidate
        loaded = super()._result(candidate, left_out, selection)
        # A save of what was loaded is another one.
        train = {name: value for name, value in loaded.train.items() if name != ABOUT}
        return replace(loaded, train=train)
