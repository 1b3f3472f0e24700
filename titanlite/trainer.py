"""The training loop: fetch, step, log, validate, save; and back to a checkpoint when a step
is bad.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import torch.distributed as dist

from titanlite import exit_codes
from titanlite.callbacks import Callbacks, RunEnd
from titanlite.data.loader import Batch, Fetched, to_device
from titanlite.dist.process_settings import kernel_order
from titanlite.dist.signals import StopRequested, StopSignal
from titanlite.optim.bad_step_errors import BadStepError
from titanlite.utils import logger
from titanlite.validation import ValidationResult

if TYPE_CHECKING:
    from titanlite.assembly.build import TrainingComponents
    from titanlite.checkpoint.loaded import LoadedState


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
        #: Work that is due and not done, "validation" or "tasks": a resumed run does it first.
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
        first = self.parts.run.training.attention_kernel
        with self.stop, kernel_order(self.parts.world.device.type, first):
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
                    from titanlite.dist.stopped_state import stopped

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
            from titanlite.checkpoint.resume import load

            kept = "then a checkpoint is written"
            self.loaded = load(parts)
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
        if loaded is not None and any(name.endswith("_owed") for name in loaded.train):
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
                from titanlite.metrics.bad_step_log import check_weights

                check_weights(bad, self.parts.model)
            self.phase("evaluate")
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
        if saves.schedule.due(self.step) or self.step == self.steps or self.stopping:
            from titanlite.checkpoint.trainer_save import write_checkpoint

            self.phase("save")
            self.sync_guard()
            saves.schedule.begin(self.step)
            write_checkpoint(self, saves.checkpointer)
            self.poll_saves()
            self.good_steps = 0
        else:
            saves.schedule.between(self)

    def poll_saves(self, wait: bool = False) -> None:
        """Report on rank 0 how saves in the background ended.

        wait: until they have; all ranks call that together.
        """
        saver = self.parts.checkpointer
        if saver is not None:
            from titanlite.checkpoint.trainer_save import report_saves

            report_saves(self, saver, wait)

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
                from titanlite.metrics.bad_step_log import explain

                self.phase("end")
                self.poll_saves(wait=True)
                explain(self, error)
                end.reason = str(error)
