"""The frozen weights of a run: loaded at its start, and known again by their hashes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from torch import nn

from titanlite.checkpoint.load import Loader
from titanlite.checkpoint.loaded import WEIGHT
from titanlite.checkpoint.state_dict import describe, gather
from titanlite.checkpoint.store_paths import AnyPath, StorePath
from titanlite.dist.dist_env import DistEnv
from titanlite.features.lora.digests import digests_of, together
from titanlite.features.lora.settings import BASE, RECORD, Adapters
from titanlite.utils import logger, public

if TYPE_CHECKING:
    from titanlite.config.sections import Checkpoint


class FrozenBase:
    """Loads the weights under the adapters, and tells checkpoints which they are.

    section: its `initial_load_path` names them. A load adds their hash to `fingerprints` of the
    run's checkpoints, and their place to the record of adapters in `about`.
    """

    def __init__(
        self,
        section: Checkpoint,
        world: DistEnv,
        adapters: Adapters,
        fingerprints: dict[str, str],
        about: dict[str, Any],
    ) -> None:
        # Entries that the keys leave out belong to the adapters.
        self._section = replace(section, exclude_from_loading=[], allow_missing=[])
        self._world = world
        self._fingerprints = fingerprints
        self._about = about
        self._model = {"model": about["model"]}
        fingerprints[RECORD] = adapters.fingerprint
        about[RECORD] = adapters.as_record()

    def load(self, model: nn.Module) -> None:
        """Fill all parameters but the adapters'. All ranks call it together.

        Raises CheckpointError, on all of them.
        """
        loader = Loader(self._section, self._world, {}, self._model, frozen=True)
        loaded = loader.load_weights(model)
        tensors = gather(model, frozen=True)
        names = sorted(describe(tensors, model))
        found = digests_of(tensors, names)
        digests = {name.removeprefix(WEIGHT): digest for name, digest in found.items()}
        whole = together(digests)
        self._fingerprints[BASE] = whole
        self._about[RECORD][BASE] = {"path": place_of(loaded.folder), "tensors": digests}
        if self._world.rank == 0:
            for notice in loaded.notices:
                logger.info(f"base: {notice}")
            logger.info(f"frozen weights of {loaded.folder}, by hash {whole}")


def place_of(folder: AnyPath) -> str:
    """Return the path of a folder as it is found from anywhere, without a login."""
    if isinstance(folder, StorePath):
        return public(str(folder))
    return os.path.abspath(folder)
