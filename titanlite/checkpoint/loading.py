"""The loading half of `Checkpointer`: which checkpoint a run starts from, what is taken of it, and what is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from titanlite.checkpoint.comparing import compare_to_load
from titanlite.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    check_resumable,
    find,
    is_valid,
    step_folder,
    step_of,
    steps_in,
)
from titanlite.checkpoint.place import Place, StoreError, place
from titanlite.checkpoint.retention import Deleter, leftovers
from titanlite.checkpoint.selection import GROUPS, groups_of, select
from titanlite.checkpoint.shelf import root_of
from titanlite.checkpoint.state import describe, describe_all, gather, rng_state, scatter, set_rng_state
from titanlite.checkpoint.storage import CheckedReader
from titanlite.checkpoint.together import named, on_rank_0, quiet
from titanlite.guard import find_nonfinite
from titanlite.parallel.dist_env import DistEnv
from titanlite.runs.provenance import config_changes
from titanlite.utils import counted

#: The tensor with all ranks' random generators.
RNG = "rng.torch"
#: Entry of the train state: what `exclude_from_loading` was when a checkpoint was written.
LEFT_OUT = "left_out"
#: What a run takes from another one's checkpoint besides the weights, if it takes more.
_ALL_BUT_WEIGHTS = frozenset(GROUPS) - {"model"}
#: Word of `checkpoint.allow_changes` → what a run does that was resumed all the same.
_THEN = {
    "data": "the place in the order is kept as a number: its sequence of the text here comes next "
    '(checkpoint.exclude_from_loading = ["dataloader"] begins with the first)',
    "tokenizer": "the ids mean what the tokenizer here says",
    "global_batch": "the text goes on where it was, the learning rate goes on by steps",
    "model": "the tensors fit, the rest is as configured here",
}
#: Changes of the config that a refusal names.
_KEYS = 8
#: Entry of the train state → how it is kept as it was.
_KEEP = {"global_batch": " (training.global_batch_size = {} keeps it)"}


@dataclass(frozen=True)
class LoadedState:
    """What a load found out, besides filling model and optimizer."""

    #: Steps done; 0 after a start from another run's weights.
    step: int
    #: The train state that was saved; empty where only weights were taken.
    train: dict[str, Any]
    #: Newer folders that were passed over, and other things to tell, a line each.
    notices: list[str] = field(default_factory=list)
    #: What was loaded.
    folder: Place = Path()
    #: "resume": of this run; "from": `initial_load_path`, of another one.
    origin: Literal["resume", "from"] = "resume"
    #: Names of `titanlite.checkpoint.selection.GROUPS` that were not taken.
    left_out: frozenset[str] = frozenset()
    #: Some of the model's tensors kept their initial values.
    partial: bool = False
    #: The configuration that the checkpoint was written under.
    config: dict[str, Any] = field(default_factory=dict)
    #: What differs from this run though it must not, allowed by `allow_changes`; a line each.
    changes: tuple[str, ...] = ()
    #: Whether every byte was compared with what was written.
    verified: bool = False


@dataclass
class _Choice:
    """Of rank 0: what to load."""

    manifest: Manifest
    folder: Place
    origin: Literal["resume", "from"]
    notices: list[str]
    changes: list[str] = field(default_factory=list)


class Loading:
    """Loads one run's checkpoints, or another's to start from. All ranks make one and call it alike.

    bad: step → why; where it notes steps of `plan.folder` whose contents are of no use though manifest and sizes are
    right. deleter: for what crashes have left. config: of this run, as manifests hold it, to name what differs.
    """

    def __init__(
        self,
        plan: CheckpointPlan,
        world: DistEnv,
        fingerprints: dict[str, str],
        bad: dict[int, str] | None = None,
        deleter: Deleter | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.plan = plan
        self.root = place(plan.folder)
        self._world = world
        self._fingerprints = fingerprints
        self._config = config or {}
        self._bad = {} if bad is None else bad
        self._source_bad: dict[int, str] = {}
        self._deleter = deleter or Deleter()

    def load(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, expected: Mapping[str, Any] | None = None
    ) -> LoadedState | None:
        """As `Checkpointer.load`."""
        while True:
            choice = on_rank_0(self._world, lambda: self._choose(expected or {}))
            if choice is None:
                return None
            loaded = self._try(choice, model, optimizer)
            if loaded is not None:
                return loaded

    def _try(self, choice: _Choice, model: nn.Module, optimizer: torch.optim.Optimizer) -> LoadedState | None:
        """Load the chosen checkpoint. Return None, and note the reason, if its files or weights are bad."""
        manifest, folder, notices = choice.manifest, choice.folder, choice.notices
        exclude = self._exclude(choice)
        left_out = groups_of(exclude)
        whole_optimizer = None if "optimizer" in left_out else optimizer
        tensors: dict[str, torch.Tensor] = gather(model, whole_optimizer)
        if whole_optimizer is None:
            optimizer.state.clear()  # a checkpoint that was tried before may have given it one
        saved = {name: entry for name, entry in manifest.tensors.items() if name != RNG}
        wanted = describe_all(tensors, model)
        convert = choice.origin == "from"
        selection = select(saved, wanted, exclude, self.plan.allow_missing, convert, str(folder))
        bad = self._bad if choice.origin == "resume" else self._source_bad
        if (problem := compare_to_load(folder, manifest, self._world, self.plan.verify == "hash")) is not None:
            bad[manifest.step] = problem
            return None
        chosen = {name: tensor for name, tensor in tensors.items() if name in selection.load}
        rng = None if "rng" in left_out else self._generators(manifest, notices)
        with quiet(), named(f"loading {folder}"):
            dcp.load(chosen if rng is None else {**chosen, RNG: rng}, storage_reader=CheckedReader(folder, manifest))
        for name in tensors.keys() - chosen.keys():
            if name.startswith("optimizer."):  # to have something to load into, it was given a step
                tensors[name].zero_()
        if where := find_nonfinite(tensors):
            bad[manifest.step] = (
                f"{folder} holds what is not finite ({where}), and no run can go on from it: "
                f"`titanlite checkpoint rm {folder}` deletes it"
            )
            return None
        scatter(tensors, model, whole_optimizer)
        if rng is not None:
            set_rng_state(rng, self._world.device)
        kept = [name for name in selection.keep if name.startswith("model.")]
        if kept:
            notices.append(f"{len(kept)} tensors of the model keep their initial values, such as {min(kept)}")
        if selection.converted:
            notices.append(f"{len(selection.converted)} tensors are converted from the types they were saved in")
        only_weights = left_out >= _ALL_BUT_WEIGHTS and choice.origin == "from"
        return LoadedState(
            step=0 if only_weights else manifest.step,
            train={} if only_weights else manifest.train,
            notices=notices,
            folder=folder,
            origin=choice.origin,
            left_out=left_out,
            partial=bool(kept),
            config=manifest.config,
            changes=tuple(choice.changes),
            verified=self.plan.verify == "hash" and bool(manifest.hashes),
        )

    def _exclude(self, choice: _Choice) -> list[str]:
        """What is left out of this checkpoint.

        A run leaves things out once: what it has saved since under the same setting is loaded whole, so that a restart
        by the same command goes on and does not lose the optimizer's state again.
        """
        given = list(self.plan.exclude_from_loading)
        if choice.origin == "resume":
            before = choice.manifest.train.get(LEFT_OUT)
            before = before if isinstance(before, list) else []
            now = [entry for entry in given if entry not in before]
            if done := [entry for entry in given if entry in before]:
                choice.notices.append(
                    f"checkpoint.exclude_from_loading: {', '.join(done)} was left out when the run that wrote this "
                    "checkpoint began; now it is loaded"
                )
            return now
        if self.plan.initial_load_model_only:
            return sorted({*given, *_ALL_BUT_WEIGHTS})
        prints = choice.manifest.fingerprints
        differ = [n for n in ("data", "data order") if prints.get(n) != self._fingerprints.get(n)]
        if differ and "dataloader" not in given:
            choice.notices.append(f"its {' and '.join(differ)} differ: the text here begins at its first sequence")
            given.append("dataloader")
        return given

    def _generators(self, manifest: Manifest, notices: list[str]) -> Any:
        """What to load the random generators into; None where they do not fit these ranks."""
        rng = rng_state(self._world.device, self._world.size)
        if manifest.tensors.get(RNG) == describe({RNG: rng})[RNG]:
            return rng
        notices.append(
            f"written on {counted(manifest.world_size, 'ranks')}, loaded on {self._world.size} with "
            f"{self._world.device.type} devices: the data order goes on exactly, the random generators start anew"
        )
        return None

    def _choose(self, expected: Mapping[str, Any]) -> _Choice | None:
        """On rank 0: which checkpoint to load, by `plan.start`, `plan.load_step` and `plan.initial_load_path`."""
        plan = self.plan
        manifest, passed = find(self.root, plan.load_step, self._bad)
        if plan.load_step is not None:
            self._check_newest(plan.load_step)
        if plan.start == "fresh" and (manifest is not None or passed):
            raise CheckpointError(
                f'checkpoint.start = "fresh", but {self.root} holds checkpoints already: choose another '
                "checkpoint.folder or job.dump_folder, or move them away"
            )
        choice = None
        if manifest is not None:
            folder = step_folder(self.root, manifest.step)
            check_resumable(manifest, folder)
            choice = _Choice(manifest, folder, "resume", _notices(passed, self.root, folder, manifest))
            choice.changes = self._check_run(choice, expected)
        else:
            self._no_checkpoint(passed)
            if plan.initial_load_path is not None:
                choice = self._choose_source(place(plan.initial_load_path))
        self._deleter.delete(leftovers(self.root))
        return choice

    def _check_newest(self, step: int) -> None:
        """Raises CheckpointError when a later save would meet a checkpoint of a path that was left."""
        newer = [later for later in steps_in(self.root) if later > step and is_valid(step_folder(self.root, later))]
        if newer:
            raise CheckpointError(
                f"checkpoint.load_step = {step}, but {self.root} holds newer checkpoints, which are "
                f"never overwritten: move step-{', step-'.join(map(str, newer))} to another folder first"
            )

    def _choose_source(self, path: Place) -> _Choice:
        """The checkpoint that `initial_load_path` means. Raises CheckpointError; it is only ever read."""
        key = "checkpoint.initial_load_path"
        step = step_of(path)
        try:
            root = path.parent if step is not None else root_of(path)
            if step is not None and not path.is_dir():
                raise CheckpointError(f"there is no folder {path}")
        except (CheckpointError, StoreError) as error:
            raise CheckpointError(f"{key}: {error}") from None
        if step is not None and step in self._source_bad:
            raise CheckpointError(f"{key}: {self._source_bad[step]}")
        try:
            manifest, passed = find(root, step, self._source_bad)
        except (CheckpointError, StoreError) as error:
            raise CheckpointError(f"{key}: {error}") from None
        if manifest is None:
            raise CheckpointError(f"{key}: {root} has no valid checkpoint" + "".join(f"\n  {line}" for line in passed))
        folder = step_folder(root, manifest.step)
        if manifest.weights_only and not self.plan.initial_load_model_only:
            raise CheckpointError(f"{key}: {folder} holds weights only: set checkpoint.initial_load_model_only = true")
        return _Choice(manifest, folder, "from", _notices(passed, root, folder, manifest))

    def _no_checkpoint(self, passed: list[str]) -> None:
        """Raises CheckpointError unless a run may begin without one of its own."""
        if not passed and self.plan.start != "resume":
            return
        reasons = "".join(f"\n  {line}" for line in passed)
        start = 'checkpoint.start = "resume", but ' if self.plan.start == "resume" else ""
        way_out = (
            "\nBring one back from a copy, or begin anew with another --checkpoint.folder or --job.dump_folder"
            if passed
            else ""
        )
        raise CheckpointError(f"{start}{self.root} has no valid checkpoint{reasons}{way_out}")

    def _check_run(self, choice: _Choice, expected: Mapping[str, Any]) -> list[str]:
        """What differs from the run that wrote a checkpoint, though it must not, a line each.

        Raises CheckpointError unless `plan.allow_changes` has a word for each of them.
        """
        manifest = choice.manifest
        found = {
            name: f"{manifest.fingerprints.get(name)} there, {value} here"
            for name, value in self._fingerprints.items()
            if manifest.fingerprints.get(name) != value
        }
        for name, value in expected.items():
            if name in manifest.train and manifest.train[name] != value:
                way = _KEEP.get(name, "").format(manifest.train[name])
                found[name.replace("_", " ")] = f"{manifest.train[name]} there, {value} here{way}"
        words = {name: _word(name) for name in found}
        if missing := dict.fromkeys(word for word in words.values() if word not in self.plan.allow_changes):
            lines = "".join(f"\n  {name}: {difference}" for name, difference in found.items())
            changes = config_changes(manifest.config.get("toml"), self._config.get("toml"))
            keys = [f"{key}: {change}" for key, change in changes.items()]
            if keys:
                lines += "\n  in the config: " + "; ".join(keys[:_KEYS]) + "; …" * (len(keys) > _KEYS)
            raise CheckpointError(
                f"{choice.folder} is of another run:{lines}\n"
                "Start this one elsewhere with another --checkpoint.folder or --job.dump_folder, or configure it as "
                f"that run was. If the change is meant, say so: --checkpoint.allow_changes={','.join(missing)}"
            )
        for word in dict.fromkeys(words.values()):
            then = f": {_THEN[word]}" if word in _THEN else ""
            choice.notices.append(f"another {word.replace('_', ' ')}, by checkpoint.allow_changes{then}")
        return [f"{name}: {difference}" for name, difference in found.items()]


def _word(name: str) -> str:
    """The word of `allow_changes` for a fingerprint."""
    return "data" if name == "data order" else name.replace(" ", "_")


def _notices(passed: list[str], root: Place, folder: Place, manifest: Manifest) -> list[str]:
    notices = [f"passed over: {reason}" for reason in passed]
    if passed:
        notices.append(f"`titanlite checkpoint verify {root}` tells all that is wrong there")
    if not manifest.hashes:
        notices.append(f"{folder} is of a time without hashes: only the sizes of its files were checked")
    return notices
