"""Load a checkpoint, on all ranks together: choose one, compare it with its hashes, read it, check
what was read.

A checkpoint that turns out to be bad is noted, and another one is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.checkpoint.choice import Candidate, Chooser
from titanlite.checkpoint.dcp_files import CheckedReader, share, verify_files
from titanlite.checkpoint.loaded import GROUPS, LEFT_OUT, LoadedState, group_of, weight_of
from titanlite.checkpoint.manifest import Manifest
from titanlite.checkpoint.selection import Selection, select
from titanlite.checkpoint.state_dict import (
    PLACES,
    RNG,
    Tensors,
    dcp_errors,
    describe,
    find_nonfinite,
    gather,
    on_rank_0,
    rng_state,
    scatter,
    set_rng_state,
)
from titanlite.dist.dist_env import DistEnv
from titanlite.models.spec import ModelSpec
from titanlite.utils import counted

if TYPE_CHECKING:
    from titanlite.checkpoint.foreign_formats import WeightsReader
    from titanlite.config.sections import Checkpoint

#: Groups that a run takes from another one's checkpoint only if it takes more than the weights.
_ALL_BUT_WEIGHTS = frozenset(GROUPS) - {"model", "ema"}


class Loader:
    """Loads one run's checkpoints, or another's to start from.

    All ranks make one and make the same calls. fingerprints, run_config: as for `Checkpointer`.
    averages: of the weights (`titanlite.features.ema`), to be filled too. frozen: of a model with
    adapters, load all but those.
    """

    chooser_class = Chooser

    def __init__(
        self,
        config: Checkpoint,
        world: DistEnv,
        fingerprints: Mapping[str, str],
        run_config: Mapping[str, Any],
        averages: Tensors | None = None,
        frozen: bool = False,
    ) -> None:
        self.config = config
        self.world = world
        self.averages = averages or {}
        self.frozen = frozen
        self.chooser = self.chooser_class(config, fingerprints, run_config)
        #: Load averages from another run's checkpoint too, though `config.initial_load_model_only`
        #: asks for the weights.
        self._with_averages = False

    def load(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        expected: Mapping[str, Any] | None = None,
    ) -> LoadedState | None:
        """As `Checkpointer.load`."""
        return self._load(lambda: self.chooser.choose(expected or {}), model, optimizer)

    def load_newest(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        suspect: Callable[[int], str],
        together: Callable[[Callable[[], Any]], Any],
    ) -> LoadedState:
        """As `Checkpointer.load_newest`. together: runs a function on rank 0, for all ranks."""
        self.look(model)
        chooser = self.chooser
        rejected: Manifest | None = together(lambda: chooser.reject_newest(suspect))
        loaded = self._load(chooser.choose_newest, model, optimizer)
        assert loaded is not None
        if rejected is not None:
            together(lambda: chooser.set_aside(rejected))
        return loaded

    def look(self, model: nn.Module) -> None:
        """Learn which checkpoints there are, where `chooser` does not see them itself."""

    def load_weights(self, model: nn.Module) -> LoadedState:
        """Load the weights of `config.initial_load_path`, whatever `config.folder` holds.

        Without averages in the checkpoint `averages` become the weights, and `left_out` has "ema".
        All ranks call it together. Raises CheckpointError, on all of them.
        """
        self._with_averages = True
        loaded = self._load(self.chooser.choose_source, model, None)
        assert loaded is not None
        return loaded

    def model(self) -> tuple[ModelSpec, Any]:
        return self.chooser.model()

    def _load(
        self,
        choose: Callable[[], Candidate | None],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
    ) -> LoadedState | None:
        self.look(model)
        while True:
            candidate = on_rank_0(self.world, choose)
            if candidate is None:
                return None
            loaded = self._try(candidate, model, optimizer)
            if loaded is not None:
                return loaded

    def _try(
        self, candidate: Candidate, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> LoadedState | None:
        """Return None, and note the reason, if files or weights are bad."""
        excluded = self._excluded(candidate)
        left_out = frozenset(excluded) & frozenset(GROUPS)
        filled_optimizer = None if "optimizer" in left_out else optimizer
        tensors = gather(model, filled_optimizer, self.frozen) | self.averages
        if optimizer is not None and filled_optimizer is None:
            # An earlier try may have given it a state.
            optimizer.state.clear()
        saved = {name: entry for name, entry in candidate.manifest.tensors.items() if name != RNG}
        selection = select(
            saved,
            describe(tensors, model),
            excluded,
            self.config.allow_missing,
            convert=candidate.origin == "from",
            source=str(candidate.folder),
        )

        reader = self._reader(candidate)
        problem = self._compare(reader)
        if problem is not None:
            self._reject(candidate, problem)
            return None

        generators = None if "rng" in left_out else self._generators(candidate)
        self._read(reader, tensors, selection, generators)
        where = find_nonfinite(tensors)
        if where:
            way = "" if candidate.is_foreign else ": delete that folder"
            self._reject(
                candidate,
                f"{candidate.folder} holds values that are not finite ({where}): no run can use "
                f"it{way}",
            )
            return None

        scatter(tensors, model, filled_optimizer)
        if generators is not None:
            set_rng_state(generators, self.world.device)
        return self._result(candidate, left_out, selection)

    # Parts that are loaded

    def _excluded(self, candidate: Candidate) -> list[str]:
        excluded = self._excluded_by_config(candidate)
        saved = {group_of(name) for name in candidate.manifest.tensors}
        if self.averages and "ema" not in saved:
            excluded.append("ema")
        return excluded

    def _excluded_by_config(self, candidate: Candidate) -> list[str]:
        """A run excludes parts once: its own later saves are loaded whole.

        So a restart by the same command keeps the optimizer's state.
        """
        given = list(self.config.exclude_from_loading)
        if candidate.origin == "resume":
            before = candidate.manifest.train.get(LEFT_OUT)
            before = before if isinstance(before, list) else []
            done = [entry for entry in given if entry in before]
            if done:
                candidate.notices.append(
                    f"checkpoint.exclude_from_loading: {', '.join(done)} was left out when the "
                    "run that wrote this checkpoint began; now it is loaded"
                )
            return [entry for entry in given if entry not in before]
        if self.config.initial_load_model_only:
            excluded = {*given, *_ALL_BUT_WEIGHTS}
            if not (self.averages and self._with_averages):
                excluded.add("ema")
            return sorted(excluded)
        there, here = candidate.manifest.fingerprints, self.chooser.fingerprints
        differ = [name for name in ("data", "data order") if there.get(name) != here.get(name)]
        if differ and "dataloader" not in given:
            candidate.notices.append(
                f"its {' and '.join(differ)} differ: the text here begins at its first sequence"
            )
            given.append("dataloader")
        return given

    def _generators(self, candidate: Candidate) -> DTensor | None:
        """Return a tensor to load the random generators into; None where they do not fit these
        ranks.
        """
        manifest, places = candidate.manifest, self.world.places
        generators = rng_state(self.world.device, self.world.size)
        fits = manifest.tensors.get(RNG) == describe({RNG: generators})[RNG]
        before = manifest.config.get(PLACES)
        # Older checkpoints do not tell, and their tensor-parallel ranks may not agree.
        if fits and (before == places or (before is None and places.get("tp", 1) == 1)):
            return generators
        how = "in another mesh" if fits else f"with {self.world.device.type} devices"
        candidate.notices.append(
            f"written on {counted(manifest.world_size, 'ranks')}, loaded on {self.world.size} "
            f"{how}: the data order continues exactly, the random generators start afresh"
        )
        return None

    # Reading

    def _reader(self, candidate: Candidate) -> CheckedReader | WeightsReader:
        if not candidate.is_foreign:
            return CheckedReader(candidate.folder, candidate.manifest)
        from titanlite.checkpoint.foreign_formats import WeightsReader

        return WeightsReader(candidate.folder, candidate.manifest, *self.model())

    def _compare(self, reader: CheckedReader | WeightsReader) -> str | None:
        files: list[str] = []
        if self.config.verify == "hash":
            files = share(reader.manifest.files, self.world.rank, self.world.size)
        return verify_files(reader, files, self.world)

    def _read(
        self,
        reader: CheckedReader | WeightsReader,
        tensors: Tensors,
        selection: Selection,
        generators: DTensor | None,
    ) -> None:
        state = {name: tensor for name, tensor in tensors.items() if name in selection.load}
        if generators is not None:
            state[RNG] = generators
        self._fill(reader, state)
        for name in tensors.keys() - state.keys():
            if group_of(name) == "optimizer":
                # `gather` gave it a state of one step.
                tensors[name].zero_()
        for name in self.averages.keys() - state.keys():
            self.averages[name].copy_(tensors[weight_of(name)])

    def _fill(self, reader: CheckedReader | WeightsReader, state: Tensors) -> None:
        with dcp_errors(f"loading {reader.folder}"):
            dcp.load(state, storage_reader=reader)

    def _reject(self, candidate: Candidate, problem: str) -> None:
        if candidate.origin == "resume":
            self.chooser.reject(candidate.manifest, problem)
        else:
            self.chooser.source_bad[candidate.manifest.step] = problem

    def _result(
        self, candidate: Candidate, left_out: frozenset[str], selection: Selection
    ) -> LoadedState:
        manifest, notices = candidate.manifest, candidate.notices
        kept = [name for name in selection.keep if name.startswith("model.")]
        if kept:
            notices.append(
                f"{len(kept)} tensors of the model keep their initial values, such as {min(kept)}"
            )
        if selection.converted:
            notices.append(
                f"{len(selection.converted)} tensors are converted from the types they were saved "
                "in"
            )
        weights_alone = candidate.origin == "from" and left_out >= _ALL_BUT_WEIGHTS
        return LoadedState(
            step=0 if weights_alone else manifest.step,
            train={} if weights_alone else manifest.train,
            notices=notices,
            folder=candidate.folder,
            origin=candidate.origin,
            left_out=left_out,
            partial=bool(kept),
            config=manifest.config,
            changes=candidate.changes,
            verified=self.config.verify == "hash" and bool(manifest.hashes),
            is_foreign=candidate.is_foreign,
        )
