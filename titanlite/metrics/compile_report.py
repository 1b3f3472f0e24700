"""What `torch.compile` compiled in a run, in its log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titanlite.callbacks import Callback

if TYPE_CHECKING:
    from titanlite.data.step_sizes import StepSize
    from titanlite.parallel.compile import CompileWatch
    from titanlite.step import StepResult
    from titanlite.trainer import Trainer


class CompileReport(Callback):
    """Reports what `torch.compile` compiles, and what it compiles again."""

    def __init__(self, watch: CompileWatch) -> None:
        self._watch = watch
        self._first: StepSize | None = None

    def on_start(self, trainer: Trainer) -> None:
        self._first = trainer.parts.course.size(trainer.step + 1)
        if trainer.step < trainer.steps:
            self._watch.start()

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        size = trainer.parts.course.size(trainer.step)
        phase = "training"
        if size != self._first:
            phase = f"steps of {size.sequences} sequences of {size.seq_len} tokens"
        self._watch.after(trainer.step, phase)

    def on_validation_end(self, trainer: Trainer, loss: float, tokens: int, seconds: float) -> None:
        self._watch.after(trainer.step, "validation")
