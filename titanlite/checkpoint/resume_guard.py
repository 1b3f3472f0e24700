"""Whether a run that was resumed is the one that was left: its next batch, and the loss and norm of the next step.

What the earlier attempt found in the step after a save is not in that checkpoint: it was written before. Rank 0 appends
it to a file of its own, with an id that the checkpoint holds as well.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from titanlite.checkpoint.loading import LoadedState
from titanlite.utils import logger

#: Name of the file in a run's folder.
FILE = "resume.jsonl"
#: Entry of the train state.
STATE = "resume"


@dataclass(frozen=True)
class Verdict:
    """What a resume was found to be."""

    step: int
    #: Nothing differs that must not.
    verified: bool
    text: str


class ResumeGuard:
    """Remembers what comes after a save, and compares when a run goes on from there. All ranks make one.

        guard = ResumeGuard(folder / "resume.jsonl", rank, {"ranks": "8", "dtype": "bfloat16"})
        loaded = checkpointer.load(model, optimizer)
        if loaded:
            guard.resumed(loaded, hash_of_next_batch)
        ...
        if verdict := guard.after_step(step, result.loss, result.norm):
            print(verdict.text)
        ...
        checkpointer.save(step, model, optimizer, {**state, **guard.at_save(step, hash_of_next_batch)})

    file: where rank 0 keeps what it remembers; other ranks do not touch it, and have no verdict. setting: what rounding
    depends on, by name. Where it is the same the numbers must be equal bit for bit if `exact`, else to `tolerance`,
    relative.
    """

    def __init__(
        self, file: Path, rank: int, setting: Mapping[str, str], tolerance: float = 1e-4, exact: bool = True
    ) -> None:
        self.file = Path(file)
        self.setting = dict(setting)
        self.tolerance = tolerance
        self.exact = exact
        self._rank = rank
        #: Step after the latest save, and that save's id.
        self._next: tuple[int, str] | None = None
        #: Numbers of such a step on their way from the device.
        self._coming: tuple[int, str, torch.Tensor, torch.cuda.Event | None] | None = None
        self._loaded: LoadedState | None = None
        self._same_batch: bool | None = None
        self._earlier: dict[str, Any] | None = None

    def at_save(self, step: int, next_batch: str | None) -> dict[str, Any]:
        """What the train state of a checkpoint of `step` needs. next_batch: hash of the global batch of the next step,
        None where there is none."""
        self._next = step + 1, uuid.uuid4().hex
        return {STATE: {"id": self._next[1], "next_batch": next_batch}}

    def resumed(self, loaded: LoadedState, next_batch: str | None) -> None:
        """Note what the run goes on from, and compare the hash of the batch that is to come with what was saved."""
        self._loaded = loaded
        state = loaded.train.get(STATE)
        state = state if isinstance(state, dict) else {}
        expected = state.get("next_batch")
        self._same_batch = None if expected is None or next_batch is None else expected == next_batch
        identity = state.get("id")
        self._earlier = _last_record(self.file, identity) if self._rank == 0 and identity else None
        if identity:
            # Until the next save this attempt may do the step again that follows that checkpoint.
            self._next = (loaded.step + 1, identity) if self._earlier is None else None

    def forget(self) -> None:
        """The run went back to a checkpoint, and on with other data: what comes now says nothing of the step after it.

        All ranks call it.
        """
        self._next = None

    def before_first_step(self) -> Verdict | None:
        """The verdict where the first step has nothing to be compared with; None where it has, and after a fresh start.

        The run may have ended with that checkpoint, or have been killed before the next step was done.
        """
        if self._rank or self._loaded is None or self._earlier is not None:
            return None
        loaded, self._loaded = self._loaded, None
        problems, found = self._before(loaded)
        if not problems:
            found.append(f"no earlier attempt has left figures of step {loaded.step + 1}")
        return _verdict(loaded.step, problems, found)

    def after_step(self, step: int, loss: torch.Tensor, norm: torch.Tensor) -> Verdict | None:
        """After every step, with its loss and gradient norm (0-dim, on any device); on rank 0 the verdict after the
        first step of a run that was resumed.

        Only the first step, and on a CPU the one after a save, is waited for.
        """
        if self._rank:
            return None
        self._write_what_came()
        verdict = self.before_first_step()  # a loop that has not asked then is told now
        if self._loaded is not None and self._earlier is not None:
            loaded, self._loaded = self._loaded, None
            numbers = _numbers(loss, norm).tolist()
            if step == loaded.step + 1 and math.isfinite(numbers[0]):  # else it was no step, or it ends the run
                verdict = self._compare(loaded, self._earlier, *numbers)
        if self._next is not None and step >= self._next[0]:
            (expected, identity), self._next = self._next, None
            if step == expected:
                self._coming = step, identity, *_fetch(_numbers(loss, norm))
                self._write_what_came()
        return verdict

    def close(self) -> None:
        """Write what is still on its way."""
        if self._coming is not None and self._coming[3] is not None:
            with contextlib.suppress(RuntimeError):  # of a device that has failed
                self._coming[3].synchronize()
        self._write_what_came()

    def _before(self, loaded: LoadedState) -> tuple[list[str], list[str]]:
        """What differs, and what does not, before any step."""
        problems, found = [], []
        if loaded.verified:
            found.append("every file is as it was written")
        else:
            found.append("the files have their lengths (hashes were not compared)")
        allowed = "; as allowed: " + ", ".join(loaded.changes) if loaded.changes else ""
        if self._same_batch:
            found.append("the next batch is the one that was to come")
        elif self._same_batch is False and (loaded.changes or "dataloader" in loaded.left_out):
            found.append(f"the next batch is another one{allowed}")
        elif self._same_batch is False:
            problems.append("the next batch is not the one that was to come then")
        else:
            found.append("which batch was to come was not recorded")
        return problems, found

    def _compare(self, loaded: LoadedState, earlier: Mapping[str, Any], loss: float, norm: float) -> Verdict:
        problems, found = self._before(loaded)
        step = loaded.step + 1
        then = float(earlier["loss"]), float(earlier["norm"])
        shown = f"loss {loss:.9g} and gradient norm {norm:.9g} of step {step}"
        if self._same_batch is False or loaded.partial or loaded.changes:
            found.append(f"step {step} is another one than in the earlier attempt, its figures are not compared")
        elif (loss, norm) == then:
            found.append(f"{shown} are those of the earlier attempt, bit for bit")
        else:
            differ = ", ".join(
                f"{name} {earlier['setting'].get(name, '?')} then, {value} now"
                for name, value in self.setting.items()
                if earlier["setting"].get(name) != value
            )
            gap = max(_relative(loss, then[0]), _relative(norm, then[1]))
            words = f"{shown}, then {then[0]:.9g} and {then[1]:.9g}: a relative difference of {gap:.1e}"
            # Of the two attempts the coarser one decides.
            if gap <= max(self.tolerance, earlier.get("tolerance", 0.0)) and (differ or not self.exact):
                why = differ or "kernels here are not deterministic"
                found.append(f"{words}, which is rounding ({why})")
            else:
                of = f" ({differ})" if differ else " with the same setting"
                problems.append(words + of)
        return _verdict(loaded.step, problems, found)

    def _write_what_came(self) -> None:
        if self._coming is None:
            return
        step, identity, numbers, event = self._coming
        if event is not None and not event.query():
            return
        self._coming = None
        loss, norm = numbers.tolist()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return
        record: dict[str, Any] = {"id": identity, "step": step, "loss": loss, "norm": norm, "tolerance": self.tolerance}
        record["setting"] = self.setting
        try:
            with open(self.file, "ab") as stream:
                stream.write(b"\n" * _torn(self.file) + (json.dumps(record) + "\n").encode())
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            logger.warning(f"cannot write {self.file}: {error}. A resume from step {step - 1} will not be compared")


def _verdict(step: int, problems: list[str], found: list[str]) -> Verdict:
    if problems:
        return Verdict(step, False, f"RESUME NOT VERIFIED at step {step}: " + "; ".join([*problems, *found]))
    return Verdict(step, True, f"resume verified at step {step}: " + "; ".join(found))


def _numbers(loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    return torch.stack([loss.detach().double(), norm.detach().double()])


def _fetch(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """A copy on the host, and what tells that it is there."""
    if numbers.device.type != "cuda":
        return numbers, None
    copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    copy.copy_(numbers, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return copy, event


def _relative(a: float, b: float) -> float:
    return 0.0 if a == b else abs(a - b) / max(abs(a), abs(b))


def _torn(path: Path) -> bool:
    """Whether a crash has left a line without its end."""
    with open(path, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        return size > 0 and os.pread(stream.fileno(), 1, size - 1) != b"\n"


def _last_record(path: Path, identity: str) -> dict[str, Any] | None:
    """What was written of the save `identity`, last; None where there is nothing."""
    found = None
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return None
    for line in lines:
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and record.get("id") == identity and {"loss", "norm", "setting"} <= {*record}:
                found = record
    return found
