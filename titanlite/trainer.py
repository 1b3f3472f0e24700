"""The training loop: fetch, step, log, validate, save; and back to a checkpoint when a step
is bad.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from titanlite import exit_codes
from titanlite.callbacks import Callbacks, RunEnd
from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.loaded import LEFT_OUT
from titanlite.data import file_stamps
from titanlite.data.loader import Batch, Fetched, gather_state, to_device
from titanlite.dist.dist_env import log_once
from titanlite.dist.signals import StopRequested, StopSignal
from titanlite.optim.bad_step_errors import BadStepError
from titanlite.utils import human_time, logger
from titanlite.validation import ValidationResult

if TYPE_CHECKING:
    from titanlite.assembly.build import TrainingComponents
    from titanlite.checkpoint.loaded import LoadedState
    from titanlite.checkpoint.manager import Checkpointer


class Trainer:
    """One run, to its last step or to a stop.

    All ranks make one from their components and call `train`.

    stop: tells that the run is to stop; None: signals, while it trains.
    """

    def __init__(self, parts: TrainingComponents, stop: StopSignal | None = None) -> None:
        self.parts = parts
        self.stop = stop or StopSignal()
        self.callbacks = Callbacks(parts.callbacks)
        #: The step under way or just done. Steps that are done, and their tokens over all ranks.
        #: The run's last step.
        self.step = self.done = self.tokens_seen = 0
        self.steps = parts.steps
        #: All ranks know that one was asked to stop: the step under way is the last.
        self.stopping = False
        #: What is due and not done, "validation" or "tasks": a resumed run does it first.
        self.owed: set[str] = set()
        #: The checkpoint that the run started from, or went back to.
        self.loaded: LoadedState | None = None
        #: Data of the latest two steps: a step that is found bad is one of them.
        self.recent: dict[int, Fetched] = {}
        #: Step and losses of the latest validation; step of the newest checkpoint that is surely
        #: complete.
        self.validated: tuple[int, ValidationResult] | None = None
        self.saved_step: int | None = None
        #: Steps since the latest save that were not skipped. If there are none, its weights are not
        #: proven good.
        self.good_steps = 0
        parts.train_step.phase = self.phase

    def train(self) -> None:
        """Run to the last step.

        Raises BadStepError when the guard ends the run. Raises CheckpointError when the checkpoint
        is of another run or the last one cannot be written. Raises StopRequested when it was asked
        to stop (see `titanlite.dist.signals`) and has.
        """
        with self.stop:
            try:
                with exit_codes.no_exit("the code of the run"):
                    self.start()
                    while True:
                        try:
                            while self.step < self.steps and not self.stopping:
                                self.step += 1
                                batches = self.fetch()
                                with self.stop.shield_children():
                                    lr = self.parts.learning_rate(self.step)
                                    result = self.parts.train_step(
                                        batches, self.step, lr, self.stop.requested
                                    )
                                self.check_step()
                                self.phase("log")
                                self.callbacks("on_step_end", self, result)
                                self.poll_saves()
                                self.validate()
                                self.save()
                            self.phase("end")
                            self.sync_guard()
                            break
                        except BadStepError as bad:
                            self.roll_back(bad)
                if self.stopping and (self.step < self.steps or self.owed):
                    from titanlite.dist.stopped import stopped

                    raise stopped(self)
            except BaseException as error:
                self.end(error)
                raise
            self.end()
        logger.info(f"training done at step {self.step}")

    def start(self) -> None:
        """Load a checkpoint, if there is one, and tell the callbacks that the run begins."""
        parts = self.parts
        if self.callbacks.have("before_update"):
            parts.train_step.before_update = lambda: self.callbacks("before_update", self)
        kept = "CHECKPOINTS ARE OFF: nothing will be saved"
        if parts.checkpointer is not None:
            kept = "then a checkpoint is written"
            text = parts.datasets.train
            batch: Any = parts.run.batch.global_batch_size
            if parts.phases is not None:
                batch = parts.phases.batch_difference
            expected = {
                "global_batch": batch,
                file_stamps.TEXT_FILES: lambda saved, *_: file_stamps.difference(saved, text),
            }
            self.loaded = parts.checkpointer.load(parts.model, parts.optimizer, expected)
        self.stop.notice = f"stopping within two steps, {kept}"
        loaded = self.loaded
        if loaded is not None and (loaded.origin == "resume" or loaded.step or loaded.train):
            from titanlite.checkpoint.resume import begin_from

            begin_from(self, loaded)
        else:
            self.end_with_text()
        parts.loader.on_failure = lambda error: self.stop.request(str(error))
        if parts.validation is not None and parts.validation.first and self.step == 0:
            self.owed.add("validation")
        self.callbacks("on_start", self)
        self.stop.at_once = False  # from here on there is something to lose
        if "validation" in self.owed:
            self.validate()
        if loaded is not None:
            from titanlite.checkpoint.resume import settle

            settle(self)

    def end_with_text(self, later: bool = False) -> None:
        """End the run where its text does, of which a part may be skipped.

        later: also where that is later.
        """
        left = self.parts.loader.steps_left
        steps = self.steps if left is None else self.step + left
        if later or steps < self.steps:
            self.parts.learning_rate.change_length(self.steps, steps)
            self.steps = steps

    def fetch(self) -> list[Batch]:
        """Return this rank's micro-batches of the next step, on its device; waits for them."""
        self.phase("data")
        self.parts.resize(self.parts.course.size(self.step))
        loader = self.parts.loader
        before = loader.state_dict()
        batches = to_device(loader.next_step(), self.parts.world.device)
        self.recent[self.step] = Fetched(batches, before, loader.state_dict())
        self.recent.pop(self.step - 2, None)
        return batches

    def check_step(self) -> None:
        """Learn from the guard whether to stop, and which steps were skipped. Raises
        BadStepError.
        """
        if self.parts.checkpointer is not None:
            # A save in the background may have found weights that are not finite.
            self.parts.checkpointer.await_copy()
        # Other ranks learn of a stop with the next step's token count; a rank alone does not wait
        # for that.
        alone = self.parts.world.size == 1
        self.stopping = self.parts.train_step.guard.poll() or (alone and self.stop.requested)
        self.report_skipped()
        self.done = self.step
        self.tokens_seen += self.parts.course.size(self.step).tokens
        self.good_steps += 1

    def sync_guard(self) -> None:
        """Learn about all steps so far: on a GPU the latest is not known yet. Raises
        BadStepError.
        """
        self.parts.train_step.guard.sync()
        self.report_skipped()

    def report_skipped(self) -> None:
        """Report the steps that the guard has skipped since the last call.

        Raises WeightsError when the weights themselves are not finite: every later step would be
        skipped too.
        """
        for bad in self.parts.train_step.guard.skipped():
            self.good_steps -= 1
            if bad.kind == "not finite":
                from titanlite.metrics.anomalies import check_weights

                check_weights(bad, self.parts.model)
            self.parts.anomalies.skipped(bad, self.recent[bad.step])

    def roll_back(self, bad: BadStepError) -> None:
        """Go back to a checkpoint from before the bad step, if the guard's policy says so.

        Raises `bad` where it does not, or cannot be done.
        """
        if self.parts.train_step.guard.policy != "rollback" or self.parts.checkpointer is None:
            raise bad
        from titanlite.checkpoint.resume import roll_back

        roll_back(self, bad)

    def validate(self) -> None:
        """Measure the mean losses on the held-out texts, every `validation.freq` steps and at the
        end.
        """
        parts = self.parts
        texts = parts.validation
        if texts is None:
            return
        due = self.step % texts.freq == 0 or self.step >= self.steps or "validation" in self.owed
        if not due:
            return
        self.sync_guard()
        self.owed.add("validation")  # until it is done
        if self.stopping:
            return
        self.phase("validate")
        started = time.perf_counter()
        with self.stop.shield_children():
            runner, factors = parts.train_step.runner, parts.train_step.factors
            result = texts.measure(
                parts.model, parts.world.device, runner, factors, self.stop.interruptible
            )
        if self.stop.interrupted:
            self.stopping = True
            logger.info(f"validation at {self.step} was interrupted; the resumed run does it")
            return
        self.owed.discard("validation")
        self.validated = self.step, result
        seconds = time.perf_counter() - started
        self.callbacks("on_validation_end", self, result.all.loss, result.all.tokens, seconds)

    def save(self) -> None:
        """Write a checkpoint when it is due.

        A save that fails in mid-run is reported, and tried again at the next interval; at the end
        it raises.
        """
        saves = self.parts.saves
        if saves is None:
            return
        validation_loss = None
        if self.validated is not None and self.validated[0] == self.step:
            validation_loss = self.validated[1].all.loss
        if saves.schedule.due(self.step) or self.step == self.steps or self.stopping:
            self.phase("save")
            self.sync_guard()
            saves.schedule.begin(self.step)
            _write_checkpoint(self, saves.checkpointer, validation_loss)
            self.poll_saves()
            self.good_steps = 0
        else:
            saves.schedule.between(self)

    def poll_saves(self, wait: bool = False) -> None:
        """Report on rank 0 how saves in the background ended.

        wait: until they have; all ranks call that together.
        """
        saver = self.parts.checkpointer
        if saver is None:
            return
        if wait and saver.is_async:
            with contextlib.suppress(CheckpointError):
                saver.wait()
        while (outcome := saver.poll()) is not None:
            if outcome.problem:
                logger.error(_failed(outcome.step, outcome.problem))
            else:
                self.saved_step = outcome.step
                self.callbacks("on_save", self, outcome.step, outcome.folder, outcome.seconds)

    def train_state(self) -> dict[str, Any]:
        """Return what a checkpoint holds besides tensors. All ranks call it together."""
        parts = self.parts
        state = {
            "data": gather_state(parts.loader.state_dict(), parts.datasets.train),
            "tokens_seen": self.tokens_seen,
            "global_batch": parts.course.size(self.step).sequences,
            "schedule_began": parts.learning_rate.began,
            "schedule": parts.learning_rate.record(),
            LEFT_OUT: list(parts.run.checkpoint.exclude_from_loading),
        }
        files = file_stamps.record(parts.datasets.train)
        if files:
            state[file_stamps.TEXT_FILES] = files
        if parts.learning_rate.began_tokens:
            state["schedule_began_tokens"] = parts.learning_rate.began_tokens
        statistics = parts.train_step.guard.state_dict()
        if statistics:
            state["guard"] = statistics
        for name in self.owed:
            state[f"{name}_owed"] = True
        self.callbacks.add_state(self, state)
        return state

    def phase(self, name: str) -> None:
        """Tell the callbacks what begins. All ranks go through the same phases."""
        self.callbacks("on_phase", self, name)

    def end(self, error: BaseException | None = None) -> None:
        """Tell the callbacks how the run ended, and close its threads and files."""
        self.stop.notice = "the run is ending already"
        end = RunEnd("done", self.step)
        if error is not None:
            reason = f"{type(error).__name__}: {error}".removesuffix(": ")
            end = RunEnd("failed", self.done, error, reason)
        with contextlib.ExitStack() as stack:
            if getattr(error, "together", False):
                # The first rank that leaves would end the others before they are done.
                stack.callback(dist.barrier)
            stack.callback(self.parts.close)
            stack.callback(self.callbacks.end, self, end)
            if isinstance(error, StopRequested):
                end.state = "preempted"
                end.reason = str(error)
            elif isinstance(error, BadStepError):
                end.state = "stopped"
                end.step = error.done
                end.reason = str(error)
                self.phase("end")
                self.poll_saves(wait=True)
                if not error.applied:  # else the step cannot be computed again
                    from titanlite.metrics.anomalies import explain

                    runner = self.parts.train_step.runner
                    explain(error, self.parts.model, runner, self.recent[error.step])
                end.reason = str(error)
                self.parts.anomalies.stopped(error, self.recent[error.step])


def _write_checkpoint(trainer: Trainer, saver: Checkpointer, validation_loss: float | None) -> None:
    """Write a checkpoint now; the last one of a run is complete when this returns."""
    parts = trainer.parts
    last_step = trainer.step == trainer.steps
    last = last_step or trainer.stopping
    weights_only = None
    if last_step and not trainer.owed and parts.run.checkpoint.model_weights_only:
        weights_only = parts.run.checkpoint.export_dtype
    started = time.perf_counter()
    try:
        folder = saver.save(
            trainer.step,
            parts.model,
            parts.optimizer,
            trainer.train_state(),
            weights_only=weights_only,
            validation_loss=validation_loss,
            trackers=parts.trackers(),
            proven=trainer.good_steps > 0,
        )
        if not last:  # a stop that came while it was written needs no second save
            last = trainer.stopping = trainer.stop.requested_anywhere()
        stood = time.perf_counter() - started
        if last:
            saver.wait()
    except CheckpointError as error:
        if last_step:
            raise
        log_once(logging.ERROR, _failed(trainer.step, error))
        return
    if not saver.is_async:
        trainer.saved_step = trainer.step
        trainer.callbacks("on_save", trainer, trainer.step, folder, stood)
    elif last:
        # All ranks have waited for it; rank 0 alone gets its outcome.
        trainer.saved_step = trainer.step
    else:
        logger.info(
            f"checkpoint of step {trainer.step} is being written; no step for {human_time(stood)}"
        )


def _failed(step: int, problem: object) -> str:
    return (
        f"step {step}: NO CHECKPOINT WAS WRITTEN: {problem}. Training continues; tried again later"
    )
