"""Callbacks accompany a training run: they observe it, log it, or add something to a step.

    class StopAtLoss(Callback):
        def on_log(self, trainer, figures):
            if figures["loss"] < 2.5:
                trainer.stop.request("the loss is low enough")

    Trainer(build(config, world, callbacks=[StopAtLoss()])).train()

or `job.callbacks = ["./my_callbacks.py:StopAtLoss"]` in a TOML file. The list of all
that run is in `titanlite.assembly.callbacks`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from titanlite.exit_codes import is_of_collectives, no_exit, own_code
from titanlite.utils import logger

if TYPE_CHECKING:
    import torch

    from titanlite.checkpoint.store_paths import AnyPath
    from titanlite.dist.signals import StopSignal
    from titanlite.step import StepResult
    from titanlite.trainer import Trainer

#: Phases that are no part of a step: they may take as long as the first step.
SLOW_PHASES = frozenset({"validate", "evaluate", "save", "rollback", "profile", "end"})


@dataclass
class RunEnd:
    """How a run ended."""

    #: done: the last step. stopped: by the guard. preempted: a signal. failed: any other exception.
    state: Literal["done", "stopped", "preempted", "failed"]
    #: Steps done.
    step: int
    error: BaseException | None = None
    #: For people; "" where the run is done.
    reason: str = ""


class CallbackError(RuntimeError):
    """A callback raised. The message names it; the cause has the traceback."""


class Callback:
    """Base of all callbacks; each method is called at one point of the run, on every rank.

    All ranks have the same callbacks in the same order, so a callback may use collectives at every
    point. Only `on_save` is different: with saves in the background rank 0 alone calls it. A
    callback that raises ends the run. Read what you need from `trainer`: `step`, `steps`,
    `tokens_seen`, `parts` (model, optimizer, loader, …).
    """

    #: Name that it may add to `trainer.owed`: a resumed run begins with it, in `on_start`.
    owes = ""

    def on_start(self, trainer: Trainer) -> None:
        """The checkpoint is loaded (`trainer.loaded`), the first step comes next."""

    def on_phase(self, trainer: Trainer, phase: str) -> None:
        """The trainer begins something: "data", "forward", "backward", "optimizer", "log",
        "validate", "evaluate", "save", …
        """

    def before_update(self, trainer: Trainer) -> None:
        """The gradients are complete and clipped; the weights are those that the step started from.

        The only point where a callback may change gradients.
        """

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        """A step is done.

        To read a number of `result` waits for the device: on logged steps use `on_log` instead.
        """

    def on_log(self, trainer: Trainer, figures: Mapping[str, float]) -> None:
        """The figures of a logged step, as in metrics.jsonl: the same on all ranks, times apart."""

    def on_validation_end(self, trainer: Trainer, loss: float, tokens: int, seconds: float) -> None:
        """A validation is done. loss: mean over `tokens` tokens, in nats.

        `trainer.validated` has the step and a `ValidationResult`, with the loss on each source.
        """

    def on_save(self, trainer: Trainer, step: int, folder: AnyPath, seconds: float) -> None:
        """The checkpoint of `step` is complete; it took `seconds`."""

    def state_dict(self, trainer: Trainer) -> dict[str, Any]:
        """Return entries for the train state of a checkpoint, JSON-able; all ranks call it
        together.

        After a resume `trainer.loaded.train` has them. Callbacks and trainer share the names:
        choose one of your own.
        """
        return {}

    def on_rollback(self, trainer: Trainer) -> None:
        """The guard took the run back to the checkpoint of `trainer.step`; other text follows."""

    def on_end(self, trainer: Trainer, end: RunEnd) -> None:
        """The run is over, however it ended: release what you hold.

        Other ranks may be gone: use no collective.
        """

    def on_exit(self, stop: StopSignal) -> None:
        """The run is done and its ranks leave: finish here what may take long on one of them, until
        `stop.requested`.

        `titanlite.main` calls it. Other loops need not.
        """


class Figures(Callback):
    """Adds entries to the row of a logged step, in metrics.jsonl and on boards.

    `sums`, then `figures`, are called on every rank, at logged steps alone, after the update and
    `on_step_end`. What counts between logs starts anew in `on_start` and `on_rollback`; what
    outlasts a resume needs `state_dict`.
    """

    def sums(self, trainer: Trainer) -> torch.Tensor:
        """Return this rank's part of numbers that the log adds up over ranks: a tensor on the
        device, of one size on all. Of a number that all have, ranks other than 0 return zero.
        """
        raise NotImplementedError

    def figures(self, trainer: Trainer, sums: list[float]) -> dict[str, float]:
        """Return key, which is the tag too, → number, from the sums over all ranks."""
        raise NotImplementedError


class Callbacks:
    """Calls one point of all callbacks, in their order."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.all = list(callbacks)
        #: Callbacks that implement a point: the others cost nothing.
        self._at: dict[str, list[Callback]] = {}
        for point, default in vars(Callback).items():
            if callable(default) and not point.startswith("__"):
                own = [one for one in self.all if getattr(type(one), point) is not default]
                self._at[point] = own

    def __call__(self, point: str, *args: Any) -> list[Any]:
        """Call `point` with these arguments; return the results. Raises CallbackError.

        Errors with their own exit code, and failed collectives, pass as they are.
        """
        return [self.call(callback, point, *args) for callback in self._at[point]]

    def have(self, point: str) -> bool:
        """Return whether a callback implements `point`."""
        return bool(self._at[point])

    def add_state(self, trainer: Trainer, state: dict[str, Any]) -> None:
        """Add all `state_dict` entries to a checkpoint's train state.

        Raises CallbackError for what it cannot hold.
        """
        for callback in self._at["state_dict"]:
            entries = self.call(callback, "state_dict", trainer)
            try:
                # Keys that are numbers become text, as after a resume.
                entries = dict(json.loads(json.dumps(entries)))
            except (TypeError, ValueError) as error:
                raise CallbackError(
                    f"{_name(callback)}: its state_dict is no JSON object: {error}"
                ) from error
            self.refuse_taken(callback, entries, state, "the train state")
            state |= entries

    def end(self, trainer: Trainer, end: RunEnd) -> None:
        """Call `on_end` of all, even if one of them raises.

        The run's own error takes precedence over theirs.
        """
        failed: Exception | None = None
        for callback in self._at["on_end"]:
            try:
                self.call(callback, "on_end", trainer, end)
            except Exception as error:
                failed = failed or error
                logger.error(str(error))
        if failed is not None and end.error is None:
            raise failed

    @staticmethod
    def refuse_taken(
        callback: Callback, entries: Iterable[str], taken: Collection[str], holder: str
    ) -> None:
        """Raise CallbackError for an entry that `holder` has of somebody else."""
        for name in entries:
            if name in taken:
                raise CallbackError(
                    f"{_name(callback)}: {holder} has {name!r} already: choose another name"
                )

    @staticmethod
    def call(callback: Callback, point: str, *args: Any) -> Any:
        """Call one point of one callback. Raises CallbackError, as calls of all do."""
        try:
            with no_exit(_name(callback)):
                return getattr(callback, point)(*args)
        except Exception as error:
            # A callback may lead to a point of others, as the metrics do to `on_log`.
            if (
                isinstance(error, CallbackError)
                or own_code(error) is not None
                or is_of_collectives(error)
            ):
                raise
            raise CallbackError(
                f"{_name(callback)} failed in {point}: {type(error).__name__}: {error}"
            ) from error


def _name(callback: Callback) -> str:
    from titanlite.config.import_objects import module_name

    kind = type(callback)
    return f"callback {module_name(kind.__module__)}:{kind.__qualname__}"
