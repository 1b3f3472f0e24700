"""The training loop: fetch, step, log, validate, save; and back to a checkpoint when a step
is bad.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from titanlite import exit_codes
from titanlite.callbacks import Callbacks, RunEnd
from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.loaded import HELD_OUT, LEFT_OUT, RESUME, LoadedState
from titanlite.checkpoint.manifest import steps_in
from titanlite.checkpoint.storage import gather
from titanlite.data.loader import Batch, gather_state, to_device
from titanlite.data.state import StateError, check_loader
from titanlite.guard import BadStepError, WeightsError, check_statistics
from titanlite.start.signals import StopRequested, StopSignal
from titanlite.training.anomalies import Fetched, explain, skip_to
from titanlite.training.nonfinite import find_nonfinite
from titanlite.training.validation import ValidationResult
from titanlite.utils import human_time, logger

if TYPE_CHECKING:
    from titanlite.build import TrainingComponents

#: Entries of a checkpoint's train state that the loop reads, and their types; numbers count from 0.
_STATE = {"tokens_seen": int, "data": dict, "schedule_began": int, "guard": dict, RESUME: dict}
_ONLY_WEIGHTS = (
    "Only its weights can be used: name it as checkpoint.initial_load_path of another run"
)


class Trainer:
    """One run, to its last step or to a stop.

    All ranks make one from their components and call `train`.

    stop: tells that the run is to stop; None: signals, while it trains.
    """

    def __init__(self, parts: TrainingComponents, stop: StopSignal | None = None) -> None:
        self.parts = parts
        self.stop = stop or StopSignal()
        self.callbacks = Callbacks(parts.callbacks)
        #: The step under way or just done; steps that are done, and their tokens over all ranks;
        #: the run's last step.
        self.step = self.done = self.tokens_seen = 0
        self.steps = parts.steps
        #: All ranks know that one was asked to stop: the step under way is the last.
        self.stopping = False
        self.validation_owed = False
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

        Raises BadStepError when the guard ends the run, CheckpointError when the checkpoint is of
        another run or the last one cannot be written, StopRequested when it was asked to stop (see
        `titanlite.start.signals`) and has.
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
                            if self.step >= self.steps:
                                _close_at_checkpoint(self)
                if self.stopping and (self.step < self.steps or self.validation_owed):
                    raise _stopped(self)
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
            expected = {"global_batch": parts.global_batch_size}
            self.loaded = parts.checkpointer.load(parts.model, parts.optimizer, expected)
        self.stop.notice = f"stopping within two steps, {kept}"
        loaded = self.loaded
        if loaded is not None and (loaded.origin == "resume" or loaded.step or loaded.train):
            _check_state(loaded)
            self.restore(loaded)
            owed = loaded.origin == "resume" and parts.validation is not None
            self.validation_owed = owed and bool(loaded.train.get("validation_owed"))
        else:
            _end_with_text(self)
        parts.loader.on_failure = lambda error: self.stop.request(str(error))
        if parts.validation is not None and parts.validation.first and self.step == 0:
            self.validation_owed = True
        self.callbacks("on_start", self)
        self.stop.at_once = False  # from here on there is something to lose
        if self.validation_owed:
            self.validate()
            in_hf = parts.checkpointer is not None and parts.checkpointer.config.last_save_in_hf
            if in_hf and self.step == self.steps and not self.validation_owed:
                self.save()  # a stop in the last validation left a full checkpoint instead

    def restore(self, loaded: LoadedState) -> None:
        """Go on from the loop's state in a checkpoint; its tensors are loaded already."""
        parts = self.parts
        self.step = self.done = loaded.step
        self.good_steps, self.validated = 0, None
        if loaded.origin == "resume":
            self.saved_step = loaded.step
        self.tokens_seen = int(loaded.train["tokens_seen"])
        anew = "lr_scheduler" in loaded.left_out
        parts.learning_rate.began = (
            loaded.step if anew else int(loaded.train.get("schedule_began", 0))
        )
        parts.train_step.guard.load_state_dict(loaded.train.get("guard", {}))
        if "dataloader" in loaded.left_out:
            load_text(self, {"next_sequence": 0})
        else:
            _restore_text(self, loaded)
        # Earlier steps may have been of another size. A mixture has a length of its own.
        _end_with_text(self, later=parts.datasets.train.mixture is None)

    def fetch(self) -> list[Batch]:
        """Return this rank's micro-batches of the next step, on its device; waits for them."""
        self.phase("data")
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
        if (
            self.parts.checkpointer is not None
        ):  # a save in the background may have found weights that are not finite
            self.parts.checkpointer.await_copy()
        # Other ranks learn of a stop with the next step's token count; a rank alone does not wait
        # for that.
        alone = self.parts.world.size == 1
        self.stopping = self.parts.train_step.guard.poll() or (alone and self.stop.requested)
        self.report_skipped()
        self.done = self.step
        self.tokens_seen += self.parts.tokens_per_step
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
            if bad.kind == "not finite" and (where := find_nonfinite(gather(self.parts.model))):
                raise WeightsError(bad.step, bad.done, where, "Skipping steps cannot mend that")
            self.parts.anomalies.skipped(bad, self.recent[bad.step])

    def roll_back(self, bad: BadStepError) -> None:
        """Go back to the newest checkpoint that is not suspect, and on with the text behind the bad
        step.

        All ranks call it together. Raises `bad` where the policy is another one, its budget is used
        up, or there is no checkpoint.
        """
        parts, guard = self.parts, self.parts.train_step.guard
        if guard.policy != "rollback" or parts.checkpointer is None:
            raise bad
        guard.consume_budget(bad)
        self.phase("rollback")
        self.poll_saves(wait=True)
        try:
            loaded = parts.checkpointer.load_newest(
                parts.model,
                parts.optimizer,
                lambda newest: parts.anomalies.mark_suspect(bad, newest),
            )
        except CheckpointError as error:
            bad.explain(f'guard.policy = "rollback", but there is nothing to go back to: {error}')
            raise bad from error
        fetched = self.recent[bad.step]
        data = {"next_sequence": 0} if "dataloader" in loaded.left_out else loaded.train["data"]
        train = {**loaded.train, "data": skip_to(data, fetched)}
        self.loaded = replace(loaded, train=train, left_out=loaded.left_out - {"dataloader"})
        self.restore(self.loaded)
        self.recent.clear()
        self.stopping = self.validation_owed = (
            False  # a request to stop is repeated with every step
        )
        self.callbacks("on_rollback", self)
        parts.anomalies.rolled_back(bad, fetched, self.step, data)
        for notice in loaded.notices:
            logger.info(notice)

    def validate(self) -> None:
        """Measure the mean losses on the held-out texts, every `validation.freq` steps and at the
        end.
        """
        parts, texts = self.parts, self.parts.validation
        if texts is None or not (
            self.step % texts.freq == 0 or self.step >= self.steps or self.validation_owed
        ):
            return
        self.sync_guard()
        self.validation_owed = True  # until it is done: a resumed run does it first
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
            logger.info(f"validation at {self.step} was broken off; the run that goes on does it")
            return
        self.validation_owed = False
        self.validated = self.step, result
        self.callbacks(
            "on_validation_end",
            self,
            result.all.loss,
            result.all.tokens,
            time.perf_counter() - started,
        )

    def save(self) -> None:
        """Write a checkpoint when it is due.

        A save that fails in mid-run is reported, and tried again at the next interval; at the end
        it raises.
        """
        parts, saver, schedule = self.parts, self.parts.checkpointer, self.parts.save_schedule
        last_step = self.step == self.steps
        last = last_step or self.stopping
        measured, result = self.validated or (0, None)
        validation_loss = result.all.loss if result and measured == self.step else None
        if (
            saver is None
            or schedule is None
            or not (schedule.due(self.step, validation_loss) or last)
        ):
            return
        self.phase("save")
        self.sync_guard()
        started = time.perf_counter()
        schedule.begin(self.step)
        try:
            folder = saver.save(
                self.step,
                parts.model,
                parts.optimizer,
                self.train_state(),
                weights_only=parts.last_save_dtype
                if last_step and not self.validation_owed
                else None,
                validation_loss=validation_loss,
                trackers=parts.trackers(),
                proven=self.good_steps > 0,
            )
            if not last:  # a stop that came while it was written needs no second save
                last = self.stopping = self.stop.requested_anywhere()
            stood = time.perf_counter() - started
            if last:
                saver.wait()
        except CheckpointError as error:
            if last_step:
                raise
            _log_once(logging.ERROR, _failed(self.step, error))
        else:
            if not saver.is_async:
                self.saved_step = self.step
                self.callbacks("on_save", self, self.step, folder, stood)
            elif last:
                self.saved_step = (
                    self.step
                )  # all ranks have waited for it; rank 0 alone gets its outcome
            else:
                logger.info(
                    f"checkpoint of step {self.step} is being written; no step for "
                    f"{human_time(stood)}"
                )
        self.poll_saves()
        self.good_steps = 0

    def poll_saves(self, wait: bool = False) -> None:
        """Report on rank 0 how saves in the background ended.

        wait: until they have; all ranks call that together.
        """
        saver = self.parts.checkpointer
        if wait and saver is not None and saver.is_async:
            with contextlib.suppress(CheckpointError):
                saver.wait()
        while saver is not None and (outcome := saver.poll()):
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
            "global_batch": parts.global_batch_size,
            "schedule_began": parts.learning_rate.began,
            "schedule": parts.learning_rate.record(),
            LEFT_OUT: list(parts.exclude_from_loading),
        }
        if statistics := parts.train_step.guard.state_dict():
            state["guard"] = statistics
        if self.validation_owed:
            state["validation_owed"] = True
        if parts.validation is not None:
            state[HELD_OUT] = parts.validation.fingerprint
        self.callbacks.add_state(self, state)
        return state

    def phase(self, name: str) -> None:
        """Tell the callbacks what begins. All ranks go through the same phases."""
        self.callbacks("on_phase", self, name)

    def end(self, error: BaseException | None = None) -> None:
        """Tell the callbacks how the run ended, and close its threads and files."""
        self.stop.notice = "the run is ending already"
        together = isinstance(error, BadStepError) or getattr(error, "together", False)
        end = RunEnd("done", self.step)
        if error is not None:
            end = RunEnd(
                "failed", self.done, error, f"{type(error).__name__}: {error}".removesuffix(": ")
            )
        with contextlib.ExitStack() as stack:
            if together:
                stack.callback(
                    dist.barrier
                )  # the first rank that leaves would end the others before they are done
            stack.callback(self.parts.close)
            stack.callback(self.callbacks.end, self, end)
            if isinstance(error, StopRequested):
                end.state, end.reason = "preempted", str(error)
            elif isinstance(error, BadStepError):
                end.state, end.step, end.reason = "stopped", error.done, str(error)
                self.phase("end")
                self.poll_saves(wait=True)
                if not error.applied:  # else the step cannot be computed again
                    explain(
                        error,
                        self.parts.model,
                        self.parts.train_step.runner,
                        self.recent[error.step],
                    )
                end.reason = str(error)
                self.parts.anomalies.stopped(error, self.recent[error.step])


def _close_at_checkpoint(trainer: Trainer) -> None:
    """Do what belongs to the last step, where a rollback has left no text for another one.

    The checkpoint is there. Only weights for `transformers` have a folder of their own.
    """
    texts, saver = trainer.parts.validation, trainer.parts.checkpointer
    if (
        texts is not None and trainer.step % texts.freq
    ):  # else it was done before this checkpoint was written
        trainer.validate()
    if saver is not None and saver.config.last_save_in_hf and not trainer.validation_owed:
        trainer.save()
    elif trainer.parts.last_save_dtype is not None:
        _log_once(
            logging.WARNING,
            f"the text ends with the checkpoint of step {trainer.step}, which the run went back "
            "to. It is a full one: no save of the weights alone follows it "
            "(checkpoint.model_weights_only)",
        )


def _restore_text(trainer: Trainer, loaded: LoadedState) -> None:
    """Go on at the place in the text that a checkpoint has.

    Raises CheckpointError for a place that cannot be.
    """
    try:
        load_text(trainer, loaded.train["data"])
    except StateError as error:
        raise CheckpointError(f"{loaded.folder}: {error}. {_ONLY_WEIGHTS}") from None


def load_text(trainer: Trainer, data: dict[str, Any]) -> None:
    """Let the loader go on from its state in a checkpoint, and find again where phases begin from
    there.

    Raises StateError for a state that cannot be.
    """
    check_loader(data)
    parts, data = trainer.parts, {name: value for name, value in data.items() if name != "phases"}
    if parts.phases is not None:
        from titanlite.data.phases import Progress

        done = Progress(trainer.step, trainer.tokens_seen, data["next_sequence"])
        parts.learning_rate.phases = parts.phases.rates(done)
        if parts.datasets.train.mixture is not None:
            data = {**data, "phases": parts.phases.shares(done)}
    parts.loader.load_state_dict(data)


def save_seed(parts: TrainingComponents) -> None:
    """Write the checkpoint of a run that has not begun, as step 0.

    Raises CheckpointError if there are others.
    """
    saver = parts.checkpointer
    assert saver is not None, "a seed checkpoint needs checkpoint.enable_checkpoint"
    with contextlib.closing(parts):
        if there := steps_in(saver.root):
            raise CheckpointError(
                f"checkpoint.create_seed_checkpoint = true, but {saver.root} holds "
                f"step-{there[-1]} already: give another checkpoint.folder or job.dump_folder"
            )
        data = gather_state(parts.loader.state_dict(), parts.datasets.train)
        folder = saver.save(0, parts.model, parts.optimizer, {"data": data, "tokens_seen": 0})
        saver.wait()
    logger.info(
        f"seed checkpoint written to {folder}: the same config without "
        "create_seed_checkpoint starts from it, on any number of ranks"
    )


def _check_state(loaded: LoadedState) -> None:
    """Raise CheckpointError unless a checkpoint says, in its train state, where the run goes on."""
    needed = {"tokens_seen", "data"} - ({"data"} if "dataloader" in loaded.left_out else set())
    for name, kind in _STATE.items():
        value = loaded.train.get(name)
        is_wrong = type(value) is not kind or (isinstance(value, int) and value < 0)
        if is_wrong and (name in needed or name in loaded.train):
            raise CheckpointError(
                f"{loaded.folder} does not say where its run goes on: {name} in its train state "
                f"is {value!r:.60}. {_ONLY_WEIGHTS}"
            )
    try:
        check_statistics(loaded.train.get("guard", {}))
    except ValueError as error:
        raise CheckpointError(f"{loaded.folder}: {error}. {_ONLY_WEIGHTS}") from None


def _end_with_text(trainer: Trainer, later: bool = False) -> None:
    """End the run where its text does, of which a part may be skipped.

    later: also where that is later.
    """
    left = trainer.parts.loader.steps_left
    steps = trainer.steps if left is None else trainer.step + left
    if later or steps < trainer.steps:
        trainer.parts.learning_rate.change_length(trainer.steps, steps)
        trainer.steps = steps


def _log_once(level: int, text: str) -> None:
    """Log at this level on rank 0, for the console, and at level INFO in the logs of the other
    ranks.
    """
    logger.log(logging.INFO if dist.get_rank() else level, text)


def _failed(step: int, problem: object) -> str:
    return f"step {step}: NO CHECKPOINT WAS WRITTEN: {problem}. Training goes on; tried again later"


def _stopped(trainer: Trainer) -> StopRequested:
    """Return and log how a run stands that has stopped as it was asked. All ranks call it
    together.
    """
    step, newest, saver = trainer.step, trainer.saved_step, trainer.parts.checkpointer
    saved = step == 0 or newest == step
    if step == 0:
        kept = "no step was done, nothing is lost"
    elif saver is None:
        kept = "checkpoints are off, nothing is saved"
    elif saved:
        once = (
            ["checkpoint.load_step"] if saver.config.load_step >= 0 else []
        )  # both would be refused
        once += ['checkpoint.start = "fresh"'] if saver.config.start == "fresh" else []
        command = " without ".join(["the same command", *once])
        kept = f"the checkpoint of step {step} is written, {command} goes on from there"
    else:
        other = "there is no checkpoint" if newest is None else f"the newest is of step {newest}"
        kept = f"its checkpoint could not be written, {other}"
    reason = trainer.stop.describe()
    _log_once(logging.WARNING, f"stopped after step {step} by {reason}: {kept}")
    return StopRequested(f"{reason}: {kept}", step, saved, together=True)
