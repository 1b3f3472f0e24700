"""Which checkpoint a run starts from: candidates are found, and each is judged before a tensor is
read.

Rank 0 chooses for all ranks. Weights of other programs are imported when a path holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.hf_files import holds_adapters, holds_weights, is_torchtitan
from titanlite.checkpoint.manifest import (
    Found,
    Manifest,
    fault_of,
    find,
    hf_folder,
    last_hf_step,
    refuse_older,
    root_of,
    step_folder,
    step_of,
    steps_in,
)
from titanlite.checkpoint.retention import quarantine
from titanlite.checkpoint.store_paths import AnyPath, StoreError, to_path
from titanlite.config import trust
from titanlite.models.families import get_spec
from titanlite.models.recorded_args import from_record
from titanlite.models.spec import ModelSpec
from titanlite.runs.config_changes import config_changes

if TYPE_CHECKING:
    from titanlite.config.sections import Checkpoint

_WEIGHTS_ONLY = (
    "holds weights only (checkpoint.model_weights_only was true), without an optimizer: no run "
    "can resume from it. If the run was to end there, it is done. To start another run from it, "
    "give that another folder and name this one as checkpoint.initial_load_path. To train on in "
    "this folder, move it away: the newest full checkpoint is resumed then"
)
_ENDED = (
    "holds the weights of the last save (checkpoint.last_save_in_hf): this run has ended there. "
    "To start another run from them, give that another folder and name this one as "
    "checkpoint.initial_load_path. To train on in this folder, move it away: the newest full "
    "checkpoint is resumed then"
)
_WAY_OUT = (
    "\nBring one back from a copy, or start a new run with another --checkpoint.folder or "
    "--job.dump_folder"
)
_NO_RECORD = (
    "weights in Hugging Face's format need the model's description: give Checkpointer "
    'run_config={"model": titanlite.models.args.as_record(name, args)}'
)
#: Fingerprints of adapters: their frozen weights, and the section [lora].
_OF_ADAPTERS = ("base", "lora")
_FIXED = (
    "Adapters mean nothing on other weights or with other keys of [lora], so no key allows it. "
    "Start this run elsewhere with another --checkpoint.folder or --job.dump_folder, or configure "
    "it as that run was"
)
_MEANT = (
    "Start this one elsewhere with another --checkpoint.folder or --job.dump_folder, or configure "
    "it as that run was. If the change is meant, say so: --checkpoint.allow_changes="
)
#: Name of a difference → its word in `checkpoint.allow_changes`, where it has another one.
_WORDS = {"data order": "data", "text files": "data"}
#: Changed keys of the config that a refusal names.
_KEYS = 8


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that fits the run by all that is known without its tensors."""

    folder: AnyPath
    manifest: Manifest
    #: As `LoadedState.origin`.
    origin: Literal["resume", "from"]
    #: Lines for the start report.
    notices: list[str] = field(default_factory=list)
    #: Differences to this run that need `allow_changes`, and have it; a line each.
    changes: tuple[str, ...] = ()
    #: The files are another program's.
    is_foreign: bool = False


@dataclass
class Chooser:
    """Chooses the checkpoint to load. All methods raise CheckpointError where none may be used."""

    config: Checkpoint
    #: Fingerprints of this run: a checkpoint with others is of another run.
    fingerprints: Mapping[str, str]
    #: Config of this run, as manifests hold it, to name differences.
    run_config: Mapping[str, Any]
    #: Step → why; checkpoints of this run whose content is bad though manifest and sizes are right.
    bad: dict[int, str] = field(default_factory=dict)
    #: The same of `initial_load_path`.
    source_bad: dict[int, str] = field(default_factory=dict)

    @property
    def root(self) -> AnyPath:
        return to_path(self.config.folder)

    def choose(self, expected: Mapping[str, Any]) -> Candidate | None:
        """Return the checkpoint that a start uses, by `config`; None: the run is a fresh one.

        expected: as for `Checkpointer.load`.
        """
        config, step = self.config, self.config.load_step
        found = self.newest() if step == -1 else self._find_step(step)
        newest = found.manifest
        if config.start == "fresh" and (newest is not None or found.passed):
            place = self.root if newest is None else self.folder_of(newest).parent
            raise CheckpointError(
                f'checkpoint.start = "fresh", but {place} holds checkpoints already: choose '
                "another checkpoint.folder or job.dump_folder, or move them away"
            )
        done = last_hf_step(self.root)
        if done >= (0 if newest is None else newest.step):
            raise CheckpointError(f"{hf_folder(self.root, done)} {_ENDED}")
        demanded = config.start == "resume"
        if newest is not None or found.passed or demanded:
            return self.judge_own(self._to_resume(found, demanded), found.passed, expected)
        if config.initial_load_path is not None:
            return self.choose_source()
        return None

    def choose_newest(self) -> Candidate:
        """Return the newest checkpoint, whatever `config.start` says."""
        found = self.newest()
        return self.judge_own(self._to_resume(found, True), found.passed, {})

    def choose_source(self) -> Candidate:
        """Return the checkpoint of `config.initial_load_path`."""
        path = to_path(self.config.initial_load_path or "")
        adapted = "lora" in self.run_config
        key = "lora.adapter" if adapted else "checkpoint.initial_load_path"
        try:
            if holds_adapters(path):
                return self._judge_peft(path)
            if not adapted and (self.config.initial_load_in_hf or holds_weights(path)):
                return self._judge_foreign(path)
            return self._judge_source(path, adapted)
        except (CheckpointError, StoreError) as error:
            raise CheckpointError(f"{key}: {error}") from None

    # Candidates

    def newest(self) -> Found:
        """Return the newest checkpoint that is not known to be bad."""
        return find(self.root, known_bad=self.bad)

    def reject(self, manifest: Manifest, problem: str) -> None:
        self.bad[manifest.step] = problem

    def reject_newest(self, suspect: Callable[[int], str]) -> Manifest | None:
        """Reject the newest checkpoint if it is suspect, and return it. suspect: step → why."""
        newest = self.newest().manifest
        reason = "" if newest is None else suspect(newest.step)
        if newest is None or not reason:
            return None
        self.reject(newest, reason)
        return newest

    def set_aside(self, rejected: Manifest) -> None:
        """Quarantine a suspect checkpoint, now that another one is loaded."""
        quarantine(self.folder_of(rejected), self.bad[rejected.step])

    def folder_of(self, manifest: Manifest) -> AnyPath:
        return step_folder(self.root, manifest.step)

    def _find_step(self, step: int) -> Found:
        asked = f"checkpoint.load_step = {step}"
        try:
            found = find(self.root, step, self.bad)
        except CheckpointError as error:
            raise CheckpointError(f"{asked}: {error}") from None
        later = [one for one in steps_in(self.root) if one > step]
        newer = [f"step-{one}" for one in later if not fault_of(step_folder(self.root, one))]
        if newer:
            raise CheckpointError(
                f"{asked}, but {self.root} holds newer checkpoints, which are never overwritten: "
                f"move {', '.join(newer)} to another folder first"
            )
        return found

    def _to_resume(self, found: Found, demanded: bool) -> Manifest:
        """Return the checkpoint to resume from. demanded: by `checkpoint.start`, or a rollback."""
        try:
            return found.valid(self.root)
        except CheckpointError as error:
            lead = 'checkpoint.start = "resume", but ' if demanded else ""
            way_out = _WAY_OUT if found.passed else ""
            raise CheckpointError(f"{lead}{error}{way_out}") from None

    # Judgements

    def judge_own(
        self, manifest: Manifest, passed: Sequence[str], expected: Mapping[str, Any]
    ) -> Candidate:
        """Return a checkpoint of this run's folder, if this run may resume from it."""
        folder = self.folder_of(manifest)
        if manifest.weights_only:
            raise CheckpointError(f"{folder} {_WEIGHTS_ONLY}")
        notices = _notices(self.root, manifest, passed)
        differ = self._differences(manifest, expected)
        words = dict.fromkeys(_WORDS.get(name, name.replace(" ", "_")) for name in differ)
        missing = [word for word in words if word not in self.config.allow_changes]
        if missing:
            lines = "".join(f"\n  {name}: {difference}" for name, difference in differ.items())
            changes = config_changes(manifest.config.get("toml"), self.run_config.get("toml"))
            keys = [f"{key}: {change}" for key, change in changes.items()]
            if keys:
                more = "; …" if len(keys) > _KEYS else ""
                lines += f"\n  in the config: {'; '.join(keys[:_KEYS])}{more}"
            way = _FIXED
            if not any(word in _OF_ADAPTERS for word in missing):
                way = f"{_MEANT}{','.join(missing)}"
            raise CheckpointError(f"{folder} is of another run:{lines}\n{way}")
        for word in words:
            notices.append(f"another {word.replace('_', ' ')}, by checkpoint.allow_changes")
        allowed = tuple(f"{name}: {difference}" for name, difference in differ.items())
        return Candidate(folder, manifest, "resume", notices, allowed)

    def _differences(self, manifest: Manifest, expected: Mapping[str, Any]) -> dict[str, str]:
        """Return name → "A there, B here"."""
        found = {}
        for name in dict.fromkeys([*self.fingerprints, *_OF_ADAPTERS]):
            saved = manifest.fingerprints.get(name, "none")
            value = self.fingerprints.get(name, "none")
            if saved != value:
                found[name] = f"{saved} there, {value} here"
        for name, wanted in expected.items():
            if name not in manifest.train:
                continue
            saved = manifest.train[name]
            difference = ""
            if callable(wanted):
                difference = wanted(saved, manifest.step, manifest.train)
            elif saved != wanted:
                difference = f"{saved} there, {wanted} here"
                if name == "global_batch":
                    difference += f" (training.global_batch_size = {saved} keeps it)"
            if difference:
                found[name.replace("_", " ")] = difference
        return found

    def _judge_source(self, path: AnyPath, adapted: bool) -> Candidate:
        step = step_of(path)
        if step is None:
            refuse_older(path)
        root = path.parent if step is not None else root_of(path)
        found = find(root, step, self.source_bad)
        manifest = found.valid(root)
        folder = step_folder(root, manifest.step)
        theirs = manifest.fingerprints
        if "lora" in theirs and not adapted:
            raise CheckpointError(
                f"{folder} holds adapters alone: `titanlite export` merges them into their "
                "weights. To train them on, set lora.rank, and name it as lora.adapter"
            )
        if manifest.weights_only and not self.config.initial_load_model_only:
            way = "set checkpoint.initial_load_model_only = true"
            raise CheckpointError(f"{folder} holds weights only: {way}")
        if adapted and "lora" not in theirs:
            raise CheckpointError(
                f"{folder} holds whole weights, and no adapters: name it as "
                "checkpoint.initial_load_path, to put new ones beside them"
            )
        if adapted:
            _refuse_differences(
                f"{folder} holds other adapters than this run's",
                {name: theirs.get(name) for name in _OF_ADAPTERS},
                {name: self.fingerprints.get(name) for name in _OF_ADAPTERS},
            )
        return Candidate(folder, manifest, "from", _notices(root, manifest, found.passed))

    def _judge_peft(self, path: AnyPath) -> Candidate:
        from titanlite.checkpoint.foreign_formats import as_manifest, open_weights

        record = self.run_config.get("lora")
        if not isinstance(record, dict):
            raise CheckpointError(
                f"{path} holds adapters of PEFT, and no weights: set lora.rank, name it as "
                "lora.adapter and the weights beside them as checkpoint.initial_load_path"
            )
        if self.source_bad:
            raise CheckpointError(*self.source_bad.values())
        weights = open_weights(path, *self.model())
        lead = f"{path} holds other adapters than [lora] describes"
        _refuse_differences(lead, _lora(weights.config), _lora(record))
        return Candidate(path, as_manifest(weights), "from", is_foreign=True)

    def _judge_foreign(self, path: AnyPath) -> Candidate:
        from titanlite.checkpoint.foreign_formats import as_manifest, open_weights

        if self.source_bad:
            raise CheckpointError(*self.source_bad.values())
        if not self.config.initial_load_model_only:
            raise CheckpointError(
                f"{path} is of another program, of which weights alone are taken: set "
                "checkpoint.initial_load_model_only = true"
            )
        weights = open_weights(path, *self.model())
        weights.check_head()
        notices = []
        if is_torchtitan(path):
            notices.append("torchtitan's optimizer, schedule and place in the text are left out")
        return Candidate(path, as_manifest(weights), "from", notices, is_foreign=True)

    def model(self) -> tuple[ModelSpec, Any]:
        record = self.run_config.get("model")
        if not isinstance(record, dict):
            raise CheckpointError(_NO_RECORD)
        family, args = from_record(record, trust.Origin.OWN)
        return get_spec(family), args


def _notices(root: AnyPath, manifest: Manifest, passed: Sequence[str]) -> list[str]:
    """Return lines for the start report. passed: why newer ones are not used."""
    notices = [f"passed over: {reason}" for reason in passed]
    if not manifest.hashes:
        notices.append(
            f"{step_folder(root, manifest.step)} was written without hashes: only the sizes of "
            "its files were checked"
        )
    return notices


def _lora(record: Mapping[str, Any]) -> dict[str, Any]:
    targets = sorted(record.get("targets", ()))
    return {"targets": targets, **{name: record.get(name) for name in ("rank", "alpha", "rslora")}}


def _refuse_differences(lead: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise CheckpointError with a line for each entry that differs."""
    lines = ""
    for name, value in there.items():
        if value != here[name]:
            lines += f"\n  {name}: {value!s:.80} there, {here[name]!s:.80} here"
    if lines:
        raise CheckpointError(
            f"{lead}:{lines}\nName the weights that they were trained on as "
            "checkpoint.initial_load_path, and give [lora] as they had it"
        )
