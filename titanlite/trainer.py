"""The training loop: named steps, in the order they happen."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from titanlite import exit_codes, starting
from titanlite.bad_steps import BadSteps, behind, explain, late_notices
from titanlite.build import Parts, Text, build, fingerprints
from titanlite.checkpoint import Checkpointer, CheckpointError, LoadedState
from titanlite.checkpoint.load import LEFT_OUT
from titanlite.checkpoint.paths import AnyPath
from titanlite.checkpoint.resume_check import ResumeResult
from titanlite.checkpoint.schedule import SaveSchedule
from titanlite.checkpoint.storage import gather
from titanlite.config.plans import Plans
from titanlite.data.loader import Batch
from titanlite.determinism import deterministic, environment
from titanlite.feed import Feed
from titanlite.guard import BadStepError, FiniteGuard, NonFiniteError, WeightsError, find_nonfinite
from titanlite.metrics.float8_error import Float8ErrorCheck
from titanlite.metrics.observer import Observer
from titanlite.metrics.profiler import Profiler
from titanlite.metrics.watchdog import HangWatchdog
from titanlite.models.shapes import as_record
from titanlite.optim.schedule import learning_rate
from titanlite.parallel.compile import CACHE_VARIABLE
from titanlite.parallel.fsdp import DTYPES
from titanlite.parallel.init import seed_generators
from titanlite.parallel.world import World, patience, set_timeouts
from titanlite.preempt import STOPPING, GracefulStop, Preempted, any_rank
from titanlite.runs.provenance import config_text
from titanlite.runs.record import AttemptRecord, FinalState
from titanlite.saving import Saves, preempted
from titanlite.step import Duplicates, StepResult, train_step, unwatched, validate
from titanlite.utils import logger


class Trainer:
    """One run, from its plans to its last checkpoint. All ranks make one and call `train`.

    stop: what tells that the run is to stop, installed by the caller; None: one of its own while it trains.
    stalls: what is told where this rank is, entered by the caller; None: one of its own while it trains, which ends no
        process.
    """

    def __init__(
        self,
        plans: Plans,
        world: World,
        text: Text,
        stop: GracefulStop | None = None,
        stalls: HangWatchdog | None = None,
    ) -> None:
        assert plans.train.steps is not None, "plans are resolved without the text's length"
        self.plans, self.world, self.text = plans, world, text
        self.steps = plans.train.steps
        self.step = 0
        self._trained = 0
        #: Steps left out since a save, and the step of that.
        self._skipped = self._saved_at = 0
        self.tokens_seen = 0
        self._timeouts_lowered = False
        self._closed = False
        self.stop = stop or GracefulStop()
        self._owns_stop = stop is None
        self.stalls = stalls or HangWatchdog(plans.config.stall, plans.config.comm, end=None)
        self._owns_stalls = stalls is None
        #: All ranks know that one was asked to stop: the step under way is the last.
        self._stopping = False
        self._validation_owed = False
        #: Steps done when the learning rate's schedule began.
        self._schedule_began = 0
        self._record: AttemptRecord | None = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(environment(CACHE_VARIABLE))
            self.parts: Parts = build(plans, world, text)
            self._environment = stack.pop_all()  # until `close`; where the build fails, until here
        self.feed = Feed(self.parts.loader, self.parts.validation, self.stop, self._asked, plans, world.device)
        if plans.train.seed is not None:  # of torch's own generators; the weights and the data order have their own
            seed_generators(plans.train.seed, self.parts.mesh)
        self.guard = FiniteGuard(world.device, plans.guard)
        dtype = DTYPES[plans.config.training.mixed_precision_param]
        self.drift = Float8ErrorCheck(plans.config.float8, dtype, self.parts, world.device, self.duplicates)
        folder = Path(plans.observe.dump_folder) if world.rank == 0 else None
        self._bad_steps = BadSteps(folder, text.train, plans.batch.global_batch_size)
        self.checkpointer: Checkpointer | None = None
        self.saves: Saves | None = None
        if plans.checkpoint.enable:
            prints = fingerprints(self.parts.args, text)
            about = {"toml": config_text(plans.config_toml), "model": as_record(plans.model.name, self.parts.args)}
            config = plans.config.checkpoint
            self.checkpointer = Checkpointer(config, world, prints, about)
            self.saves = Saves(self.checkpointer, SaveSchedule(config, world, prints), world, self._saved)
        self.resume_check = starting.resume_check(plans, world)
        self.observer = Observer(plans, world, self.parts.args)

    def train(self) -> None:
        """Run to the last step.

        Raises BadStepError when the guard stops it, CheckpointError when the checkpoint is of another run or the
        last one cannot be written, Preempted when it was asked to stop (see `titanlite.preempt`) and has.
        """
        self.stalls.on_peer = lambda error: self._finish("failed", self._trained, error, str(error))
        nothing = contextlib.nullcontext()
        stop, stalls = self.stop if self._owns_stop else nothing, self.stalls if self._owns_stalls else nothing
        with stop, stalls, deterministic(self.plans.train):
            self._train()

    def _train(self) -> None:
        was_collecting = gc.isenabled()
        try:
            if self.saves is not None and self.plans.checkpoint.seed_only:
                state = {"data": self.parts.loader.state_dict(), "tokens_seen": 0}
                self.saves.seed(self.parts.model, self.parts.optimizer, state)
                return
            self.resume()
            self.stop.at_once = False  # from here on there is something to lose
            if self._validation_owed:
                self.validate()
            if self.step >= self.steps and not self._stopping:
                logger.info(starting.nothing_to_do(self.plans, self.step))
                self._finish("done", self.step)
                return
            gc.disable()  # collected on all ranks together instead: one rank's pause makes every other wait
            with Profiler(self.plans.config.profiling, self.world.rank, self.world.device) as profiles:
                while True:
                    try:
                        self._take_steps(profiles)
                        break
                    except BadStepError as bad:
                        self.roll_back(bad)
            if self._stopping and (self.step < self.steps or self._validation_owed):
                raise preempted(self.saves, self.stop, self.step)
            self._finish("done", self.step)
        except Preempted as end:
            self._finish("preempted", self._trained, end, str(end))
            self.close()
            if end.together:
                dist.barrier()  # who leaves first has the others ended
            raise
        except BadStepError as error:
            try:
                if self.saves is not None:
                    with self.patience():
                        self.saves.wait()
                if (fetched := self.feed.recent.get(error.step)) is not None:  # None: a seed, which no step made
                    with self.patience():
                        explain(error, self.parts, fetched, self.plans.shard)
                    self._bad_steps.stopped(error, fetched)
            finally:
                self._finish("stopped", error.done, error, str(error))
                self.close()
                dist.barrier()  # all ranks are here; who leaves first has the others ended before they have said why
            raise
        except BaseException as error:
            culprit = self.stalls.failed(error)  # first of all: the others wait for this rank
            reason = culprit or ": ".join(filter(None, (type(error).__name__, str(error))))
            self._finish("failed", self._trained, error, reason)
            raise
        finally:
            if was_collecting:
                gc.enable()
            self.close()
        logger.info(f"training done at step {self.step}")

    def _take_steps(self, profiles: Profiler) -> None:
        """Train to the last step, or to the one after which all ranks stop. Raises BadStepError."""
        while self.step < self.steps and not self._stopping:
            self.step += 1
            result = self.train_one()
            self.watch_compilation("training")
            # Other ranks learn of a wish with the next step's counts; a rank alone need not wait for that.
            self._stopping = self.guard.watch() or (self.world.size == 1 and self.stop.wanted)
            self.tell_skipped()
            if self.take_back():
                break
            self.stalls.phase("log")
            self._trained = self.step
            self.after_first_step()
            self.collect_garbage()
            self.observer.step(self.step, result, self.lr(), self.tokens_seen)
            self._tell(self.resume_check.after_step(self.step, result.loss, result.norm))
            if self.saves is not None:
                self.saves.tell()
            if profiles.on:
                with self.observer.pausing():  # writing a trace takes a while
                    profiles.step(self.step)
            self.validate()
            self.save()
        self.stalls.phase("end")
        self.settle()
        if self.guard.void_step is not None:
            self.save()

    def settle(self) -> bool:
        """Learn what became of all steps so far; on a GPU the latest is not known yet. As `take_back` otherwise."""
        self.guard.check()
        self.tell_skipped()
        return self.take_back()

    def tell_skipped(self) -> None:
        """Report the steps that the guard has left out since the last call.

        Raises WeightsError when the weights themselves are not finite: every later step would be left out too.
        """
        for bad in self.guard.skipped():
            self._skipped += 1
            if isinstance(bad, NonFiniteError) and (where := find_nonfinite(gather(self.parts.model))):
                raise WeightsError(bad.step, bad.done, where, "Skipping steps cannot mend that")
            self._bad_steps.skipped(bad, self.feed.recent[bad.step])

    def take_back(self) -> bool:
        """Stand before the step for which a rank had no data (see `titanlite.feed`), which changed nothing, and stop.

        Whether there was one to take back, alike on all ranks.
        """
        void = self.guard.void_step
        if void is None or self.step < void:
            return False
        told = self._trained >= void  # on a GPU, where it is known a step later
        self.tokens_seen -= (self.step - void + 1) * self.plans.batch.tokens_per_step
        self.step = self._trained = void - 1
        self._stopping = True
        self.feed.take_back(void)
        self.resume_check.forget()
        if told:
            self.observer.roll_back(self.step, self.plans)
        return True

    def roll_back(self, bad: BadStepError) -> None:
        """Go back to the newest checkpoint, and on with the data behind the bad step. All ranks call it together.

        To the one before, where the newest has proved to be no better (`BadSteps.distrust`). Raises `bad` where the
        policy is another one, its budget is used up, or there is no checkpoint.
        """
        if self.plans.guard.policy != "rollback" or self.checkpointer is None or self.saves is None:
            raise bad
        if any_rank(self.feed.void):
            bad.explain("There is no going back: a rank that was asked to stop waits for its text in vain")
            raise bad
        self.guard.spend(bad)
        self.stalls.phase("rollback")
        with self.observer.pausing(), self.patience():
            self.saves.wait()
            try:
                loaded = self.checkpointer.load_newest(
                    self.parts.model, self.parts.optimizer, lambda newest: self._bad_steps.distrust(bad, newest)
                )
            except CheckpointError as error:
                bad.explain(f'guard.policy = "rollback", but there is nothing to go back to: {error}')
                raise bad from error
        fetched = self.feed.recent[bad.step]
        data = {"next_sequence": 0} if "dataloader" in loaded.left_out else loaded.train["data"]
        train = {**loaded.train, "data": behind(data, fetched)}
        self._stand_at(replace(loaded, train=train, left_out=loaded.left_out - {"dataloader"}))
        self.guard.rewind(loaded.train.get("guard"))
        self.resume_check.forget()
        self.feed.recent.clear()
        self._stopping = self._validation_owed = False  # a wish to stop is renewed with every step
        self.observer.roll_back(self.step, self.plans)
        if self._record is not None:
            self._record.saved(self.step, self.tokens_seen)  # what is kept, should the run end now
        self._bad_steps.rolled_back(bad, fetched, self.step, data)
        for notice in loaded.notices:
            logger.info(notice)

    def _finish(self, state: FinalState, step: int, error: BaseException | None = None, reason: str = "") -> None:
        """Record how the run ended after `step` steps. The first call counts."""
        self.stop.when, self.stop.notice = "the run is ending already", ""
        self.observer.finish(state)
        if self._record is not None:
            tokens = self.tokens_seen - (self.step - step) * self.plans.batch.tokens_per_step
            code = exit_codes.DONE if error is None else exit_codes.code_of(error)
            self._record.end(state, step, tokens, code, reason)

    def close(self) -> None:
        """End the threads and files of the run; what cannot be closed does not keep the rest open."""
        if self._closed:
            return
        self._closed = True
        with self._environment as stack:
            if self.checkpointer is not None:
                stack.callback(self.checkpointer.close)
            if self.parts.validation is not None:
                stack.callback(self.parts.validation.close)
            stack.callback(self.parts.loader.close)
            stack.callback(self.observer.close)
            stack.callback(self._bad_steps.close)

    def resume(self) -> None:
        """Continue from a checkpoint, if there is one, and say what will run."""
        loaded = None
        if self.checkpointer is not None:
            expected = {"global_batch": self.plans.batch.global_batch_size}
            loaded = self.checkpointer.load(self.parts.model, self.parts.optimizer, expected)
        if loaded is not None and (loaded.origin == "resume" or loaded.step or loaded.train):
            starting.check_state(loaded)
            self._go_on(loaded)
        gc.collect()  # before any time is measured
        warnings = self.saves.warnings(self.steps) if self.saves else []
        report = starting.report(self.plans, self.parts, self.text, self.world, self.observer)
        report += starting.words(loaded, self.plans, [*warnings, *self._begin_record(loaded)])
        self.observer.start(self.step, report, self.parts.model)
        changed = starting.schedule_change(loaded, self.plans, self._schedule_began) if loaded else None
        if changed and not self.world.rank:
            logger.warning(changed)
        if self.parts.compile_watch is not None and self.step < self.steps:
            self.parts.compile_watch.start()

    def _go_on(self, loaded: LoadedState) -> None:
        """Take over the state of the loop that a checkpoint holds, at the start."""
        self._stand_at(loaded)
        self.guard.load_state_dict(loaded.train.get("guard", {}))
        if "dataloader" not in loaded.left_out:
            batch = self.plans.batch.global_batch_size
            loaded.notices.extend(late_notices(self.plans.data, batch, loaded.train["data"]))
        if loaded.origin == "resume":
            self._validation_owed = bool(loaded.train.get("validation_owed"))
            self.resume_check.resumed(starting.with_other_skips(loaded, self.plans), self._next_batch())
        if self.observer.plans is not self.plans:
            self.observer = Observer(self.plans, self.world, self.parts.args)

    def _stand_at(self, loaded: LoadedState) -> None:
        """Stand where a checkpoint was written; its tensors are loaded already."""
        self.step = self._trained = self._saved_at = loaded.step
        self._skipped = 0
        if loaded.origin == "resume" and self.saves is not None:
            self.saves.stand_at(loaded.step)
        self._schedule_began = int(loaded.train.get("schedule_began", 0))
        if "lr_scheduler" in loaded.left_out:
            self._schedule_began = loaded.step
        self.tokens_seen = int(loaded.train["tokens_seen"])
        if "dataloader" not in loaded.left_out:
            self.parts.loader.load_state_dict(loaded.train["data"])
        if self.parts.loader.steps_left is not None:
            # Earlier steps may have been of another size: a run in epochs ends where the text does.
            self._set_length(self.step + self.parts.loader.steps_left)

    def _next_batch(self) -> str | None:
        """Hash of the global batch of the next step; all ranks compute it together."""
        return starting.next_batch(self.text.train, self.plans, self.feed.state_dict(), self.world, self._asked)

    def _asked(self) -> bool:
        """Whether a rank was asked to stop, as far as this one knows: what hangs is not waited for then."""
        return self.stop.wanted or self._stopping

    def _tell(self, result: ResumeResult | None) -> None:
        """Whether a run that was resumed goes on as the attempt before did."""
        if result is not None:
            logger.log(logging.INFO if result.verified else logging.WARNING, result.text)

    def _begin_record(self, loaded: LoadedState | None) -> list[str]:
        """Note on rank 0 that an attempt starts; what to tell of the one before."""
        off = ". CHECKPOINTS ARE OFF: nothing will be saved"
        self.stop.notice = ", then a checkpoint is written" if self.checkpointer else off
        # On a GPU the answer is read a step later.
        within = "within two steps" if self.world.device.type == "cuda" else "after this step or the next"
        self.stop.when = f"all ranks stop {within}" if self.world.size > 1 else STOPPING
        if self.world.rank:
            return []
        self._record, lines = starting.begin_record(self.plans, self.world, loaded, self.step, self.tokens_seen)
        return lines

    def _set_length(self, steps: int) -> None:
        """Another number of steps than was planned; a schedule of the run's length follows it."""
        schedule = self.plans.schedule
        if schedule.total_steps == self.steps:
            schedule = replace(schedule, total_steps=steps)
        self.steps = steps
        self.plans = replace(self.plans, schedule=schedule, train=replace(self.plans.train, steps=steps))

    @property
    def duplicates(self) -> Duplicates:
        """How many ranks read the same text, and how many have the same loss."""
        mesh = self.plans.mesh
        return Duplicates(mesh.tensor * mesh.pipeline, mesh.tensor)

    def lr(self) -> float:
        """Learning rate of the current step."""
        return learning_rate(self.plans.schedule, self.plans.optimizer.lr, self.step - self._schedule_began)

    def train_one(self) -> StepResult:
        """Fetch this rank's micro-batches and take one optimizer step."""
        self.stalls.phase("data", self.step)
        with self.observer.waiting_for_data():
            batches = self.feed.step(self.step)
        self.tokens_seen += self.plans.batch.tokens_per_step
        self.measure_drift(batches[0])
        watch = self.parts.compile_watch
        compiles = watch is not None and not watch.is_warm("training")
        if compiles:
            self.stalls.phase("compile")
        with self._shield():
            return train_step(
                self.parts.model,
                self.parts.optimizer,
                batches,
                step=self.step,
                lr=self.lr(),
                max_norm=self.plans.optimizer.max_norm,
                guard=self.guard,
                duplicates=self.duplicates,
                sync_every=self.plans.shard.gradient_sync == "every",
                loss_function=self.parts.loss,
                layer_norms=self.observer.wants_layer_norms(self.step),
                pipeline=self.parts.pipeline,
                stop=self.stop.wanted,
                void=self.feed.void,
                before_update=self.checkpointer.await_copy if self.checkpointer else None,
                after_update=self.parts.after_update,
                phase=unwatched if compiles else self.stalls.phase,
            )

    def measure_drift(self, batch: Batch) -> None:
        """What float8 changes in the loss of this rank's micro-batch, every `float8.drift_check` steps."""
        if self.drift.due(self.step):
            self.stalls.phase("validate")
            self.guard.check()  # on a GPU the step before is still under way, and would be paid for in the pause
            with self.observer.pausing():
                drift = self.drift.measure([batch])
            self.observer.drift(self.step, drift)

    def _shield(self) -> contextlib.AbstractContextManager[None]:
        """Around what may compile: compilers must outlive the SIGTERM that torchrun sends to a worker's group."""
        return contextlib.nullcontext() if self.parts.compile_watch is None else self.stop.shielding_children()

    def watch_compilation(self, phase: Literal["training", "validation"]) -> None:
        """Report what was compiled since the last call."""
        if self.parts.compile_watch is not None:
            self.parts.compile_watch.after(self.step, phase)

    def after_first_step(self) -> None:
        """The slow first step is over: from now on a stuck peer should be found soon."""
        if not self._timeouts_lowered and self.world.timeout is not None:  # a joined group's timeouts are not ours
            self._timeouts_lowered = True
            set_timeouts(self.plans.comm.train_timeout_seconds)

    def collect_garbage(self) -> None:
        """Collect on all ranks in the same step."""
        if self.step % self.plans.train.gc_freq == 0:
            gc.collect(1)

    def validate(self) -> None:
        """Mean loss on the held-out text, every `validation.freq` steps and at the end."""
        plan = self.plans.validation
        due = self.step % plan.freq == 0 or self.step >= self.steps or self._validation_owed
        if self.parts.validation is None or not due or self.settle():
            return
        self._validation_owed = True  # until it is done; the run that goes on catches up on it
        if self._stopping:
            return
        self.stalls.phase("validate")
        started = time.perf_counter()
        watch = self.parts.compile_watch
        compiles = watch is not None and not watch.is_warm("validation")
        batches = self.stop.until_agreed(self.feed.validation(), lambda: self.feed.void)
        with self.observer.pausing(), self._shield(), self.patience() if compiles else contextlib.nullcontext():
            loss, tokens = validate(
                self.parts.model,
                batches,
                self.world.device,
                self.parts.loss,
                self.duplicates,
                self.parts.pipeline,
            )
            figures = loss.item(), int(tokens.item())
        self.watch_compilation("validation")
        if batches.broken_off:
            self._stopping = True
            logger.info(f"validation at {self.step} was broken off; the run that goes on does it")
            return
        self._validation_owed = False
        if self.saves is not None:
            self.saves.validated(self.step, figures[0])
        self.observer.validation(self.step, *figures, time.perf_counter() - started)

    def save(self) -> None:
        """Write a checkpoint when it is due.

        A save that fails in mid-run is reported and tried again at the next interval; at the end it raises.
        """
        is_last = self.step == self.steps or self._stopping
        if self.saves is None or self.step == 0 or not (self.saves.due(self.step) or is_last):
            return
        self.stalls.phase("save")
        if self.settle() or self.saves.has(self.step):
            return  # a step was taken back: the loop ends and saves what is left, if it is not there
        with self.observer.pausing(), self.patience():
            asked = self.saves.save(
                self.step,
                self.parts.model,
                self.parts.optimizer,
                self._loop_state(),
                trackers=self.observer.run_ids(),
                stop=self.stop,
                final=is_last,
                must=self.step == self.steps,
                # Weights that make every step bad must not push out the last that did not.
                proven=self.step - self._saved_at > self._skipped,
            )
        self._saved_at, self._skipped = self.step, 0
        self._stopping = self._stopping or asked

    def _loop_state(self) -> dict[str, Any]:
        """What a checkpoint holds besides tensors. All ranks call it together."""
        state = {
            "data": self.feed.state_dict(),
            "tokens_seen": self.tokens_seen,
            "global_batch": self.plans.batch.global_batch_size,
            "schedule_began": self._schedule_began,
            starting.SCHEDULE: starting.schedule_record(self.plans),
            LEFT_OUT: list(self.plans.checkpoint.exclude_from_loading),
            **self.resume_check.at_save(self.step, self._next_batch()),
        }
        if statistics := self.guard.state_dict():
            state["guard"] = statistics
        if self._validation_owed:
            state["validation_owed"] = True
        return state

    def _saved(self, step: int, tokens: int, folder: AnyPath, seconds: float) -> None:
        """The checkpoint of `step` is there."""
        self.observer.saved(step, folder, seconds)
        if self._record is not None:
            self._record.saved(step, tokens)

    def patience(self) -> contextlib.AbstractContextManager[None]:
        """For what may take as long as the first step: its timeouts, where they were lowered since."""
        comm = self.plans.comm
        if not self._timeouts_lowered:
            return contextlib.nullcontext()
        return patience(comm.init_timeout_seconds, comm.train_timeout_seconds)
