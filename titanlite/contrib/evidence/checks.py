"""The checks of a proof, and the faults that they must find."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.manifest import find, read_manifest, step_folder
from titanlite.cli.hub.compare_checkpoints import our_logits
from titanlite.contrib.evidence import faults
from titanlite.contrib.evidence.bench import Bench, RunFailed
from titanlite.contrib.evidence.compare import Comparison, compare_runs
from titanlite.contrib.evidence.tiny import HALF, RANKS, STEPS, TinyCopy
from titanlite.runs.lines import read_lines

HOLDS, FAILS, NOT_RUN, IDLE = "holds", "fails", "not run", "does not apply"
#: A control's fault was found, or not.
FOUND, MISSED = "found", "missed"
#: Layouts round sums in another order in every product of every step. They may be so many times
#: as far from one rank as a run is from itself whose first weights differ by one rounding each.
FACTOR = 10.0

_SEED = ("--checkpoint.create_seed_checkpoint=true",)
_ALONE = (
    "--training.data_parallel_type=fsdp",
    "--training.data_parallel_replicate_degree=1",
    "--training.data_parallel_shard_degree=-1",
    "--training.tensor_parallel_degree=1",
    "--training.reshard_after_forward=default",
    "--training.batch_size=1",
    "--validation.batch_size=1",
    "--experimental.pipeline_parallel_degree=1",
    "--experimental.context_parallel_degree=1",
    "--experimental.enable_async_tensor_parallel=false",
    "--parallelism.expert_parallel_degree=1",
)


@dataclass
class Check:
    """One comparison of two figures."""

    name: str
    claim: str
    #: It compares with a fault, which must be found.
    is_control: bool = False
    state: str = NOT_RUN
    left: str = ""
    right: str = ""
    note: str = ""
    seconds: float = 0.0


class Proof:
    """The checks of one config; they share its runs."""

    def __init__(self, bench: Bench, tiny: TinyCopy) -> None:
        self._bench = bench
        self._run = tiny.run
        self.reference = bench.folder / "reference"
        #: The run on one rank without parallelism, and how far rounding takes it; None: unknown.
        self._alone: Path | None = None
        self._rounding: Comparison | None = None

    def checks(self) -> Iterator[Check]:
        """Yield each check when it is done. Raises RunFailed where the config does not train."""
        if self._run.lora.rank:
            self._bench.train("base", *_SEED, "--lora.rank=0", *_ALONE, ranks=1)
        self._bench.train("reference")
        for name, claim, do in self._table():
            check = Check(name, claim, do.__name__.startswith("_fault"))
            started = time.perf_counter()
            try:
                do(check)
            except RunFailed as error:
                check.state = NOT_RUN if error.is_refused else FAILS
                check.note = str(error)
            check.seconds = time.perf_counter() - started
            yield check

    def _table(self) -> list[tuple[str, str, Callable[[Check], None]]]:
        return [
            ("repeat", "The same command gives the same bits.", self._repeat),
            ("kill", "A run whose ranks were killed at once ends with the same bits.", self._kill),
            ("resume", "A run from a checkpoint ends with the same bits.", self._resume),
            ("moment", "A flipped bit in the optimizer's state", self._fault_moment),
            ("batch", "A batch that is skipped", self._fault_batch),
            ("generator", "A generator of another seed", self._fault_generator),
            ("weight", "A weight of the step before", self._fault_weight),
            ("rounding", "The last bit of each first weight, on one rank", self._fault_rounding),
            ("layout", "One rank without parallelism computes the same.", self._layout),
            ("ranks", "Another number of ranks continues with the same data.", self._other_ranks),
            ("evaluation", "`titanlite eval` gives the run's own loss.", self._evaluation),
            ("export", "Exported weights give the same logits.", self._export),
        ]

    def fingerprints(self) -> dict[str, str]:
        """Return what model and data of the runs are known by."""
        return read_manifest(step_folder(self.reference / "checkpoint", STEPS)).fingerprints

    # Bit for bit

    def _equal(self, check: Check, run: Path, after: int, last: int = STEPS) -> Comparison:
        found = compare_runs(self.reference, run, after, last)
        check.left, check.right = found.left, found.right
        check.note = found.text
        states = (MISSED, FOUND) if check.is_control else (HOLDS, FAILS)
        check.state = states[not found.is_equal]
        return found

    def _repeat(self, check: Check) -> None:
        killed = self._bench.train_until_killed("killed", HALF)
        newest = find(killed / "checkpoint").valid(killed).step
        self._equal(check, killed, 0, newest)

    def _kill(self, check: Check) -> None:
        self._equal(check, self._bench.train("killed"), 0)

    def _resume(self, check: Check) -> None:
        self._bench.copy(self.reference, HALF, "resumed")
        self._equal(check, self._bench.train("resumed"), HALF)

    # Faults

    def _with_fault(self, check: Check, fault: faults.Fault) -> None:
        folder = self._bench.copy(self.reference, HALF, check.name)
        where = faults.inject(folder, fault)
        if not where:
            check.state = IDLE
            check.note = "the checkpoint holds no such tensor"
            return
        self._equal(check, self._bench.train(check.name), HALF)
        check.note = f"in {where}: {check.note}"

    def _fault_moment(self, check: Check) -> None:
        self._with_fault(check, faults.flipped_bit)

    def _fault_generator(self, check: Check) -> None:
        self._with_fault(check, faults.other_generator)

    def _fault_weight(self, check: Check) -> None:
        older = step_folder(self.reference / "checkpoint", HALF - 1)
        self._with_fault(check, faults.stale_weight(older))

    def _fault_batch(self, check: Check) -> None:
        self._bench.copy(self.reference, HALF, check.name)
        run = self._bench.train(check.name, f"--data.skip_steps={HALF + 1}")
        self._skipped = self._equal(check, run, HALF)

    # To rounding

    def _fault_rounding(self, check: Check) -> None:
        alone = self.reference
        if self._bench.ranks > 1:
            alone = self._bench.train("alone", *_ALONE, ranks=1)
        flags = _ALONE
        if self._run.lora.rank:
            folder = self._bench.copy(self._bench.folder / "base", 0, "rounded")
            flags = (*_ALONE, f"--checkpoint.initial_load_path={folder}")
        else:
            seed = self._bench.train(check.name, *_ALONE, *_SEED, ranks=1)
            folder = step_folder(seed / "checkpoint", 0)
        size = 2 if self._run.training.mixed_precision_param == "bfloat16" else 4
        faults.inject(folder, faults.last_bits(size), everywhere=True)
        found = compare_runs(alone, self._bench.train(check.name, *flags, ranks=1), 0, STEPS)
        self._alone, self._rounding = alone, found
        fault = self._skipped
        check.left = f"{FACTOR:g} times {_distance(found)}"
        check.right = f"a skipped batch: {_distance(fault)}"
        is_between = 0 < FACTOR * found.loss < fault.loss and FACTOR * found.weights < fault.weights
        check.state = FOUND if is_between else MISSED
        check.note = "the tolerance of what follows, and a fault that it must not hide"

    def _close(self, check: Check, run: Path, after: int) -> None:
        rounding = self._rounding
        if rounding is None:
            check.note = "the tolerance is not known"
            return
        found = compare_runs(self.reference, run, after, STEPS)
        check.left = _distance(found)
        check.right = f"at most {FACTOR:g} times {_distance(rounding)}"
        is_close = (
            found.loss <= FACTOR * rounding.loss and found.weights <= FACTOR * rounding.weights
        )
        check.state = HOLDS if is_close and not found.batches else FAILS
        check.note = f"{len(found.batches)} of {STEPS - after} batches differ"

    def _layout(self, check: Check) -> None:
        if self._alone == self.reference:
            check.state, check.note = IDLE, "the copy has one rank"
        else:
            self._close(check, self._alone or self.reference, 0)

    def _other_ranks(self, check: Check) -> None:
        mesh = self._run.mesh
        times = 2.0 if 2 * mesh.world_size <= RANKS or mesh.dp_degree % 2 else 0.5
        key, degree = "shard", mesh.dp_shard
        if degree == 1 and mesh.dp_replicate > 1 or self._run.training.data_parallel_type == "ddp":
            key, degree = "replicate", mesh.dp_replicate
        ranks = int(mesh.world_size * times)
        self._bench.copy(self.reference, HALF, check.name)
        flag = f"--training.data_parallel_{key}_degree={int(degree * times)}"
        self._close(check, self._bench.train(check.name, flag, ranks=ranks), HALF)
        check.note = f"{mesh.world_size} ranks, then {ranks}; {check.note}"

    # The weights elsewhere

    def _evaluation(self, check: Check) -> None:
        output = self._bench.evaluate(step_folder(self.reference / "checkpoint", STEPS))
        found = re.search(r"^{.*^}", output.read_text(), re.DOTALL | re.MULTILINE)
        rows = read_lines(self.reference / "metrics.jsonl")
        inside = next(row["validation_loss"] for row in rows if "validation_loss" in row)
        outside = json.loads(found[0])["loss"] if found else None
        check.left, check.right = f"{inside!r}", f"{outside!r}"
        check.state = HOLDS if inside == outside else FAILS

    def _export(self, check: Check) -> None:
        from titanlite.cli.hub.export_weights import convert, open_source

        target = self._bench.folder / "export"
        lines: list[str] = []
        try:
            convert(
                step_folder(self.reference / "checkpoint", STEPS), target, "hf", report=lines.append
            )
        except CheckpointError as error:
            check.state, check.note = FAILS, str(error)
            return
        shown = []
        for path in (self.reference, target, step_folder(self.reference / "checkpoint", HALF)):
            source = open_source(path)
            sample = torch.arange(64)[None]
            logits = our_logits(source.family, source.args, source.read, sample)
            shown.append(hashlib.sha256(faults.as_bytes(logits)).hexdigest()[:16])
        check.left, check.right, stale = shown
        check.state = HOLDS if check.left == check.right != stale else FAILS
        check.note = f"{lines[0]}; step {HALF} has other logits"


def _distance(found: Comparison) -> str:
    return f"{found.loss:.1e} in the loss, {found.weights:.1e} in weights"
