"""Load a checkpoint: which one a run starts from, which of its tensors it takes, and what the start
report says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from titanlite.checkpoint.hf import (
    WeightsReader,
    as_manifest,
    check_model,
    holds_weights,
    open_weights,
)
from titanlite.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    find,
    hf_folder,
    is_valid,
    last_hf_step,
    refuse_older,
    root_of,
    step_folder,
    step_of,
    steps_in,
)
from titanlite.checkpoint.paths import AnyPath, StoreError, to_path
from titanlite.checkpoint.selection import GROUPS, select
from titanlite.checkpoint.storage import (
    RNG,
    CheckedReader,
    Tensors,
    dcp_errors,
    describe,
    gather,
    on_rank_0,
    rng_state,
    scatter,
    set_rng_state,
    share,
    verify_files,
)
from titanlite.config.trust import Origin
from titanlite.models.args import from_record
from titanlite.models.families import get_spec
from titanlite.models.spec import ModelSpec
from titanlite.optim.average import AVERAGE, WEIGHT
from titanlite.parallel.dist_env import DistEnv
from titanlite.runs.provenance import config_changes
from titanlite.training.nonfinite import find_nonfinite
from titanlite.utils import counted

if TYPE_CHECKING:
    from titanlite.config.sections import Checkpoint

#: Entry of the train state: the value of `exclude_from_loading` when the checkpoint was written.
LEFT_OUT = "left_out"
#: Groups that a run takes from another one's checkpoint only if it takes more than the weights.
_ALL_BUT_WEIGHTS = frozenset(GROUPS) - {"model", "ema"}
_WEIGHTS_ONLY = (
    "holds weights only (checkpoint.model_weights_only was true), without an optimizer: no run "
    "can resume from it. If the run was to end there, it is done. To start another run from it, "
    "give that another folder and name this one as checkpoint.initial_load_path. To train on in "
    "this folder, move it away: the newest full checkpoint is resumed then"
)
#: Changed keys of the config that a refusal names.
_KEYS = 8


@dataclass(frozen=True)
class LoadedState:
    """The result of a load, besides the filled model and optimizer."""

    #: Steps done; 0 after a start from another run's weights.
    step: int
    #: The saved train state; empty where only weights were taken.
    train: dict[str, Any]
    #: Lines for the start report, such as newer folders that were passed over.
    notices: list[str] = field(default_factory=list)
    #: The loaded checkpoint.
    folder: AnyPath = Path()
    #: "resume": of this run; "from": `initial_load_path`, of another one.
    origin: Literal["resume", "from"] = "resume"
    #: Names of `GROUPS` that were not taken.
    left_out: frozenset[str] = frozenset()
    #: Some of the model's tensors kept their initial values.
    partial: bool = False
    #: The configuration of the run that wrote the checkpoint.
    config: dict[str, Any] = field(default_factory=dict)
    #: Differences to this run that need `allow_changes`, and have it; a line each.
    changes: tuple[str, ...] = ()
    #: Whether every byte was compared with its hash.
    verified: bool = False
    #: The files are another program's, such as a folder of Hugging Face's.
    is_foreign: bool = False


@dataclass
class Loader:
    """Loads one run's checkpoints, or another's to start from.

    All ranks make one and call it alike.
    """

    config: Checkpoint
    world: DistEnv
    fingerprints: dict[str, str]
    #: Of this run, as manifests hold it, to name differences.
    run_config: Mapping[str, Any]
    #: Step → why; checkpoints of this run whose content is bad though manifest and sizes are right.
    bad: dict[int, str] = field(default_factory=dict)
    #: The same of `initial_load_path`.
    source_bad: dict[int, str] = field(default_factory=dict)
    #: Averages of the weights (`titanlite.optim.average`).
    averages: Tensors = field(default_factory=dict)
    #: Load them from another run's checkpoint too, though `config.initial_load_model_only` asks for
    #: the weights.
    with_averages: bool = False

    @property
    def root(self) -> AnyPath:
        return to_path(self.config.folder)

    def load(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        expected: Mapping[str, Any] | None = None,
        rollback: bool = False,
    ) -> LoadedState | None:
        """As `Checkpointer.load`, or with `rollback` as `Checkpointer.load_newest`."""
        return self._load(lambda: self._choose(expected or {}, rollback), model, optimizer)

    def load_weights(self, model: nn.Module) -> LoadedState:
        """Load the weights of `config.initial_load_path`, which is only read, whatever
        `config.folder` holds.

        Also loads `averages`; without any in the checkpoint they become the weights, and `left_out`
        has "ema".
        All ranks call it together. Raises CheckpointError, on all of them.
        """
        self.with_averages = True
        loaded = self._load(
            lambda: self._choose_source(to_path(self.config.initial_load_path or "")), model, None
        )
        assert loaded is not None
        return loaded

    def _load(
        self,
        choose: Callable[[], tuple[Manifest, LoadedState] | None],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
    ) -> LoadedState | None:
        """Load what rank 0 chooses; another one if that is bad."""
        while (choice := on_rank_0(self.world, choose)) is not None:
            if (loaded := self._try(*choice, model, optimizer)) is not None:
                return loaded
        return None

    def _try(
        self,
        manifest: Manifest,
        chosen: LoadedState,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
    ) -> LoadedState | None:
        """Load the chosen checkpoint.

        Return None, and note the reason, if its files or weights are bad.
        """
        folder, notices, is_other = chosen.folder, chosen.notices, chosen.origin == "from"
        exclude = self._exclude(manifest, chosen)
        if self.averages and not any(name.startswith(AVERAGE) for name in manifest.tensors):
            exclude.append("ema")  # the run before had none
        left_out = frozenset(entry for entry in exclude if entry in GROUPS)
        whole_optimizer = None if "optimizer" in left_out else optimizer
        tensors = gather(model, whole_optimizer) | self.averages
        if whole_optimizer is None and optimizer is not None:
            optimizer.state.clear()  # an earlier try may have given it one
        saved = {name: entry for name, entry in manifest.tensors.items() if name != RNG}
        wanted = describe(tensors, model)
        selection = select(
            saved, wanted, exclude, self.config.allow_missing, convert=is_other, source=str(folder)
        )
        bad = self.source_bad if is_other else self.bad
        reader = (
            WeightsReader(folder, manifest, *self.model())
            if chosen.is_foreign
            else CheckedReader(folder, manifest)
        )
        every_byte = self.config.verify == "hash"
        files = share(manifest.files, self.world.rank, self.world.size) if every_byte else []
        if (problem := verify_files(reader, files, self.world)) is not None:
            bad[manifest.step] = problem
            return None
        state = {name: tensor for name, tensor in tensors.items() if name in selection.load}
        rng = None if "rng" in left_out else self._generators(manifest, notices)
        with dcp_errors(f"loading {folder}"):
            dcp.load(state if rng is None else {**state, RNG: rng}, storage_reader=reader)
        for name in tensors.keys() - state.keys():
            if name.startswith("optimizer."):  # `gather` gave it a state of one step
                tensors[name].zero_()
            elif name.startswith(AVERAGE):
                tensors[name].copy_(tensors[WEIGHT + name.removeprefix(AVERAGE)])
        if where := find_nonfinite(tensors):
            bad[manifest.step] = (
                f"{folder} holds what is not finite ({where}), and no run can go on from it"
                + ("" if chosen.is_foreign else f": `titanlite checkpoint rm {folder}` deletes it")
            )
            return None
        scatter(tensors, model, whole_optimizer)
        if rng is not None:
            set_rng_state(rng, self.world.device)
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
        if is_other and left_out >= _ALL_BUT_WEIGHTS:
            chosen = replace(chosen, step=0, train={})
        return replace(
            chosen,
            left_out=left_out,
            partial=bool(kept),
            verified=every_byte and bool(manifest.hashes),
        )

    def _exclude(self, manifest: Manifest, chosen: LoadedState) -> list[str]:
        """Return the parts of this checkpoint that are not loaded.

        A run excludes parts once: its own later saves under the same setting are loaded whole. So a
        restart by the same command goes on, and does not lose the optimizer's state again.
        """
        given = list(self.config.exclude_from_loading)
        if chosen.origin == "resume":
            before = manifest.train.get(LEFT_OUT)
            before = before if isinstance(before, list) else []
            if done := [entry for entry in given if entry in before]:
                chosen.notices.append(
                    f"checkpoint.exclude_from_loading: {', '.join(done)} was left out when the "
                    "run that wrote this checkpoint began; now it is loaded"
                )
            return [entry for entry in given if entry not in before]
        if self.config.initial_load_model_only:
            return sorted(
                {
                    *given,
                    *_ALL_BUT_WEIGHTS,
                    *([] if self.averages and self.with_averages else ["ema"]),
                }
            )
        names = ("data", "data order")
        differ = [
            name for name in names if manifest.fingerprints.get(name) != self.fingerprints.get(name)
        ]
        if differ and "dataloader" not in given:
            chosen.notices.append(
                f"its {' and '.join(differ)} differ: the text here begins at its first sequence"
            )
            given.append("dataloader")
        return given

    def _generators(self, manifest: Manifest, notices: list[str]) -> Any:
        """Return a tensor to load the random generators into; None where they do not fit these
        ranks.
        """
        rng = rng_state(self.world.device, self.world.size)
        if manifest.tensors.get(RNG) == describe({RNG: rng})[RNG]:
            return rng
        notices.append(
            f"written on {counted(manifest.world_size, 'ranks')}, loaded on {self.world.size} "
            f"with {self.world.device.type} devices: the data order goes on exactly, the random "
            "generators start anew"
        )
        return None

    def _choose(
        self, expected: Mapping[str, Any], rollback: bool
    ) -> tuple[Manifest, LoadedState] | None:
        """On rank 0: return the checkpoint to load, by `config`, or with `rollback` the newest of
        this run.
        """
        config = self.config
        step = None if rollback or config.load_step == -1 else config.load_step
        start = "resume" if rollback else config.start
        try:
            manifest, passed = find(self.root, step, self.bad)
        except CheckpointError as error:
            asked = "" if step is None else f"checkpoint.load_step = {step}: "
            raise CheckpointError(f"{asked}{error}") from None
        later = [one for one in steps_in(self.root) if one > step] if step is not None else []
        if newer := [f"step-{one}" for one in later if is_valid(step_folder(self.root, one))]:
            raise CheckpointError(
                f"checkpoint.load_step = {step}, but {self.root} holds newer checkpoints, which "
                f"are never overwritten: move {', '.join(newer)} to another folder first"
            )
        if start == "fresh" and (manifest is not None or passed):
            raise CheckpointError(
                f'checkpoint.start = "fresh", but {self.root} holds checkpoints already: choose '
                "another checkpoint.folder or job.dump_folder, or move them away"
            )
        if (done := last_hf_step(self.root)) >= (
            manifest.step if manifest is not None else 0
        ) and not rollback:
            raise CheckpointError(
                f"{hf_folder(self.root, done)} holds the weights of the last save "
                "(checkpoint.last_save_in_hf): this run has ended there. To start another run "
                "from them, give that another folder and name this one as "
                "checkpoint.initial_load_path. To train on in this folder, move it away: the "
                "newest full checkpoint is resumed then"
            )
        choice = None
        if manifest is not None:
            chosen = _chosen(manifest, self.root, passed, "resume")
            if manifest.weights_only:
                raise CheckpointError(f"{chosen.folder} {_WEIGHTS_ONLY}")
            choice = manifest, self._check_run(manifest, chosen, expected)
        elif passed or start == "resume":
            demanded = 'checkpoint.start = "resume", but ' if start == "resume" else ""
            way_out = (
                "\nBring one back from a copy, or begin anew with another --checkpoint.folder or "
                "--job.dump_folder"
            )
            raise CheckpointError(
                f"{demanded}{_none_valid(self.root, passed)}{way_out if passed else ''}"
            )
        elif config.initial_load_path is not None:
            choice = self._choose_source(to_path(config.initial_load_path))
        return choice

    def _choose_source(self, path: AnyPath) -> tuple[Manifest, LoadedState]:
        """Return the checkpoint that `initial_load_path` means, which is only ever read.

        Raises CheckpointError.
        """
        step = step_of(path)
        try:
            if self.config.initial_load_in_hf or holds_weights(path):
                return self._choose_foreign(path)
            if step is None:
                refuse_older(path)
            root = path.parent if step is not None else root_of(path)
            manifest, passed = find(root, step, self.source_bad)
            if manifest is None:
                raise CheckpointError(_none_valid(root, passed))
            chosen = _chosen(manifest, root, passed, "from")
            if manifest.weights_only and not self.config.initial_load_model_only:
                way = "set checkpoint.initial_load_model_only = true"
                raise CheckpointError(f"{chosen.folder} holds weights only: {way}")
        except (CheckpointError, StoreError) as error:
            raise CheckpointError(f"checkpoint.initial_load_path: {error}") from None
        return manifest, chosen

    def model(self) -> tuple[ModelSpec, Any]:
        """Return spec and arguments of this run's model."""
        record = self.run_config.get("model")
        if not isinstance(record, dict):
            raise CheckpointError(
                "weights in Hugging Face's format need the model's description: give Checkpointer "
                'run_config={"model": titanlite.models.args.as_record(name, args)}'
            )
        family, args = from_record(record, Origin.OWN)
        return get_spec(family), args

    def _choose_foreign(self, path: AnyPath) -> tuple[Manifest, LoadedState]:
        """Return the weights of another program in `path`, whose config fits the model.

        Raises CheckpointError.
        """
        if self.source_bad:
            raise CheckpointError(*self.source_bad.values())
        if not self.config.initial_load_model_only:
            raise CheckpointError(
                f"{path} holds weights only: set checkpoint.initial_load_model_only = true"
            )
        spec, args = self.model()
        # First the small file: the tensors of another model would be missing, or have another
        # shape.
        name = str(self.run_config["model"]["family"])
        found = check_model(path, name, spec, args, "model" in self.config.allow_changes)
        weights = open_weights(path, spec, args)
        weights.check_head()
        notices = [f"another model, by checkpoint.allow_changes: {line}" for line in found]
        return as_manifest(weights), LoadedState(0, {}, notices, path, "from", is_foreign=True)

    def _check_run(
        self, manifest: Manifest, chosen: LoadedState, expected: Mapping[str, Any]
    ) -> LoadedState:
        """Add the differences to the run that wrote the checkpoint.

        Raises CheckpointError unless `config.allow_changes` has a word for each of them.
        """
        found = {
            name: f"{manifest.fingerprints.get(name)} there, {value} here"
            for name, value in self.fingerprints.items()
            if manifest.fingerprints.get(name) != value
        }
        for name, value in expected.items():
            if name in manifest.train and (saved := manifest.train[name]) != value:
                keep = (
                    f" (training.global_batch_size = {saved} keeps it)"
                    if name == "global_batch"
                    else ""
                )
                found[name.replace("_", " ")] = f"{saved} there, {value} here{keep}"
        words = dict.fromkeys(
            "data" if name == "data order" else name.replace(" ", "_") for name in found
        )
        if missing := [word for word in words if word not in self.config.allow_changes]:
            lines = "".join(f"\n  {name}: {difference}" for name, difference in found.items())
            changes = config_changes(manifest.config.get("toml"), self.run_config.get("toml"))
            keys = [f"{key}: {change}" for key, change in changes.items()]
            if keys:
                lines += (
                    "\n  in the config: " + "; ".join(keys[:_KEYS]) + "; …" * (len(keys) > _KEYS)
                )
            raise CheckpointError(
                f"{chosen.folder} is of another run:{lines}\n"
                "Start this one elsewhere with another --checkpoint.folder or --job.dump_folder, "
                "or configure it as that run was. If the change is meant, say so: "
                f"--checkpoint.allow_changes={','.join(missing)}"
            )
        for word in words:
            chosen.notices.append(f"another {word.replace('_', ' ')}, by checkpoint.allow_changes")
        return replace(
            chosen, changes=tuple(f"{name}: {difference}" for name, difference in found.items())
        )


def _none_valid(root: AnyPath, passed: Sequence[str]) -> str:
    return f"{root} has no valid checkpoint" + "".join(f"\n  {line}" for line in passed)


def _chosen(
    manifest: Manifest, root: AnyPath, passed: Sequence[str], origin: Literal["resume", "from"]
) -> LoadedState:
    """Return the result of a load before it: without the tensors. passed: reasons of newer ones."""
    folder = step_folder(root, manifest.step)
    notices = [f"passed over: {reason}" for reason in passed]
    if passed:
        notices.append(f"`titanlite checkpoint verify {root}` tells all that is wrong there")
    if not manifest.hashes:
        notices.append(
            f"{folder} was written without hashes: only the sizes of its files were checked"
        )
    return LoadedState(
        manifest.step, manifest.train, notices, folder, origin, config=manifest.config
    )
