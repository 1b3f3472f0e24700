"""Checks that a resumed run continues as before: its next batch, and loss and gradient norm.

A checkpoint cannot hold the numbers of the step after it. Rank 0 appends them to a file of the
run's folder, with an id that the checkpoint holds as well.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from titanlite.checkpoint.loaded import RESUME, LoadedState
from titanlite.utils import append_line, logger, read_lines

#: Name of the file in a run's folder.
FILE = "resume.jsonl"


class ResumeResult(NamedTuple):
    """What the comparison of a resumed step with the first run found."""

    #: No unexpected difference was found.
    verified: bool
    text: str


class _Late(NamedTuple):
    """Loss and norm of the step after a save, on their way from a GPU."""

    step: int
    #: Of the save.
    identity: str
    numbers: torch.Tensor
    event: torch.cuda.Event


class ResumeCheck:
    """Records the step after each save, and compares it when a run resumes from that save.

    All ranks make one.

    file: of rank 0; other ranks neither use it nor have a result. setting: values that rounding
    depends on, by name. Where they are equal the numbers must be equal bit for bit if `exact`, else
    to `tolerance`, relative.
    """

    def __init__(
        self,
        file: Path,
        rank: int,
        setting: Mapping[str, str],
        tolerance: float = 1e-4,
        exact: bool = True,
    ) -> None:
        self.file = Path(file)
        self.setting = dict(setting)
        self.tolerance = tolerance
        self.exact = exact
        self._rank = rank
        #: Step after the latest save, and that save's id.
        self._next: tuple[int, str] | None = None
        self._loaded: LoadedState | None = None
        self._same_batch: bool | None = None
        self._earlier: dict[str, Any] | None = None
        #: Step and id of a save, and the numbers of that step on their way from a GPU.
        self._late: _Late | None = None

    def at_save(self, step: int, next_batch: str | None) -> dict[str, Any]:
        """Return an entry for the train state.

        next_batch: hash of the next step's global batch, None for none.
        """
        self._next = step + 1, uuid.uuid4().hex
        return {RESUME: {"id": self._next[1], "next_batch": next_batch}}

    def resumed(self, loaded: LoadedState, next_batch: str | None) -> None:
        """Note the checkpoint that the run resumes from, and compare the hash of the next batch
        with the saved one.
        """
        self._loaded = loaded
        state = loaded.train.get(RESUME) or {}
        identity = state.get("id")
        before = state.get("next_batch")
        self._same_batch = None
        if before is not None and next_batch is not None:
            self._same_batch = before == next_batch
        records = []
        if self._rank == 0 and identity:
            records = read_lines(self.file)
        self._earlier = None
        for record in records:
            if record.get("id") == identity and _is_whole(record):
                self._earlier = record
        # Without numbers yet, this attempt records them.
        if identity:
            self._next = None
            if self._earlier is None:
                self._next = loaded.step + 1, identity

    def forget(self) -> None:
        """Neither record nor compare the next step: it trains on other data. All ranks call it."""
        self._next = self._loaded = None

    def after_step(self, step: int, loss: torch.Tensor, norm: torch.Tensor) -> ResumeResult | None:
        """Call it after every step, with its loss and gradient norm (0-dim, on any device).

        Returns, on rank 0, the result after the first step of a resumed run. Only that step waits
        for a GPU: the numbers of one after a save are written a step later.
        """
        self.flush()
        loaded = self._loaded
        self._loaded = None
        save = None
        if self._next is not None and step >= self._next[0]:
            save = self._next
            self._next = None
        if self._rank or not (save or loaded):
            return None
        follows_save = save is not None and step == save[0]
        if save is not None and follows_save and loaded is None and loss.is_cuda:
            self._late = _on_its_way(step, save[1], loss, norm)
            return None
        numbers = loss.item(), norm.item()
        finite = all(map(math.isfinite, numbers))
        if save is not None and follows_save:
            self._record(step, save[1], *numbers)
        if loaded is None or (not finite and self._earlier is not None):
            return None
        return self._compare(loaded, numbers)

    def flush(self) -> None:
        """Write the numbers that are on their way from a GPU."""
        late = self._late
        self._late = None
        if late is not None:
            late.event.synchronize()
            self._record(late.step, late.identity, *late.numbers.tolist())

    def _compare(self, loaded: LoadedState, numbers: tuple[float, float]) -> ResumeResult:
        """numbers: loss and gradient norm of the first step, to compare with those of the earlier
        attempt.
        """
        problems: list[str] = []
        found = ["the files have their lengths (hashes were not compared)"]
        if loaded.verified:
            found = ["every file is as it was written"]
        is_same, text = self._next_batch(loaded)
        if is_same:
            found.append(text)
        else:
            problems.append(text)
        step = loaded.step + 1
        if self._earlier is None:
            found.append(f"no earlier attempt has left figures of step {step}")
        elif self._same_batch is False or loaded.partial or loaded.changes:
            found.append(f"the figures of step {step} are not compared with the earlier attempt's")
        else:
            same, text = self._compare_numbers(numbers, self._earlier)
            text = f"loss {numbers[0]:.9g} and gradient norm {numbers[1]:.9g} of step {step}{text}"
            if same:
                found.append(text)
            else:
                problems.append(text)
        lead = "RESUME NOT VERIFIED at step" if problems else "resume verified at step"
        return ResumeResult(not problems, f"{lead} {loaded.step}: {'; '.join(problems + found)}")

    def _next_batch(self, loaded: LoadedState) -> ResumeResult:
        """Return whether the next batch is the one that was to come, as far as is known."""
        if self._same_batch is None:
            return ResumeResult(True, "which batch was to come was not recorded")
        if self._same_batch:
            return ResumeResult(True, "the next batch is the one that was to come")
        if loaded.changes or "dataloader" in loaded.left_out:
            allowed = ", ".join(loaded.changes or ["dataloader"])
            return ResumeResult(True, f"the next batch is another one, as allowed: {allowed}")
        return ResumeResult(False, "the next batch is not the one that was to come then")

    def _compare_numbers(
        self, now: tuple[float, float], earlier: Mapping[str, Any]
    ) -> ResumeResult:
        then = float(earlier["loss"]), float(earlier["norm"])
        if now == then:
            return ResumeResult(True, " are those of the earlier attempt, bit for bit")
        changed = []
        for name, value in self.setting.items():
            before = earlier["setting"].get(name)
            if before is None:
                before = "?"
            if before != value:
                changed.append(f"{name} {before} then, {value} now")
        differ = ", ".join(changed)
        gap = max(_relative_difference(a, b) for a, b in zip(now, then, strict=True))
        text = f", then {then[0]:.9g} and {then[1]:.9g}: a relative difference of {gap:.1e}"
        # Of the two attempts the coarser one decides.
        tolerance = max(self.tolerance, earlier.get("tolerance", 0.0))
        if gap <= tolerance and (differ or not self.exact):
            reason = differ or "kernels here are not deterministic"
            return ResumeResult(True, f"{text}, which is rounding ({reason})")
        if differ:
            return ResumeResult(False, f"{text} ({differ})")
        return ResumeResult(False, f"{text} with the same setting")

    def _record(self, step: int, identity: str, loss: float, norm: float) -> None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            # The step was skipped, or it ends the run.
            return
        record = {
            "id": identity,
            "step": step,
            "loss": loss,
            "norm": norm,
            "tolerance": self.tolerance,
            "setting": self.setting,
        }
        try:
            append_line(self.file, record)
        except OSError as error:
            logger.warning(
                f"cannot write {self.file}: {error}. A resume from step {step - 1} will not be "
                "compared"
            )


def _is_whole(record: Mapping[str, Any]) -> bool:
    """Return whether an entry of the file has what a comparison reads."""
    numbers = (record.get("loss"), record.get("norm"), record.get("tolerance", 0.0))
    has_numbers = all(type(number) in (int, float) for number in numbers)
    return has_numbers and isinstance(record.get("setting"), dict)


def _on_its_way(step: int, identity: str, loss: torch.Tensor, norm: torch.Tensor) -> _Late:
    """Start the copy of a step's numbers from a GPU, and wait for nothing."""
    numbers = torch.empty(2, dtype=torch.float64, pin_memory=True)
    event = torch.cuda.Event()
    numbers.copy_(torch.stack([loss.double(), norm.double()]), non_blocking=True)
    event.record()
    return _Late(step, identity, numbers, event)


def _relative_difference(a: float, b: float) -> float:
    return abs(a - b) / (max(abs(a), abs(b)) or 1.0)
