"""The checks of a proof, and the faults that they must find."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from titanlite import exit_codes
from titanlite.checkpoint.loaded import RESUME
from titanlite.checkpoint.manifest import digest_of, find, read_manifest, step_folder, steps_in
from titanlite.cli.hub.compare_checkpoints import Contents, our_logits
from titanlite.config.dataset_registry import BUNDLED_IDS
from titanlite.config.toml import quote
from titanlite.contrib.evidence.child_runs import Bench
from titanlite.contrib.evidence.tiny import HALF, STEPS
from titanlite.run.config import RunConfig
from titanlite.runs.metrics_jsonl import FILE
from titanlite.runs.read_jsonl import read_lines

#: Figures, hashes of batches and tensors of a run, by name.
Facts = Mapping[str, Any]
#: Figures of a step that follow from the computation alone.
_FIGURES = ("loss", "grad_norm", "lr", "tokens_seen", "validation_loss")
HOLDS, FAILS, NOT_RUN, IDLE = "holds", "fails", "not run", "does not apply"
#: States of a fault.
FOUND, MISSED = "found", "missed"
#: Layouts round sums differently. They may be so many times as far from one rank as that is from
#: itself when all first weights differ by their last bit.
FACTOR = 4.0
#: Figures are in float32.
_LAST_BIT = 2.0**-23
_SEED = "--checkpoint.create_seed_checkpoint=true"
_BASE = ("--lora.rank=0", "--checkpoint.initial_load_path=none")
#: A coarser precision turns a rounding error of 6e-8 into one of 3e-3, which would hide faults.
_FLOAT32 = (
    "--training.mixed_precision_param=float32",
    "--training.mixed_precision_reduce=float32",
    "--training.dtype=float32",
    "--float8.enable_float8_linear=false",
)
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
    *_FLOAT32,
)


@dataclass
class Check:
    """A comparison of two figures."""

    name: str
    claim: str
    #: One side has a fault, which must be found.
    is_control: bool = False
    state: str = NOT_RUN
    left: str = ""
    right: str = ""
    note: str = ""
    seconds: float = 0.0


class Skipped(Exception):
    """A check was not made; gets its state and the reason."""


def made(name: str, claim: str, do: Callable[[Check], bool], is_control: bool = False) -> Check:
    """Make a check. do: fills in its figures; returns whether they are the same."""
    check = Check(name, claim, is_control)
    began = time.perf_counter()
    try:
        states = (FOUND, MISSED) if is_control else (FAILS, HOLDS)
        check.state = states[do(check)]
    except Skipped as error:
        check.state, check.note = error.args
    except Exception as error:
        # Records of a run may hold anything.
        known = exit_codes.own_code(error) not in (None, exit_codes.CONFIG)
        check.state = FAILS if known else NOT_RUN
        check.note = f"{type(error).__name__}: {error}"
    check.seconds = time.perf_counter() - began
    return check


class Proof:
    """The checks of one config; they share its runs."""

    def __init__(self, bench: Bench, run: RunConfig) -> None:
        self._bench = bench
        self._run = run
        #: The run of all ranks in float32.
        self._divided = "reference"
        #: Tolerance of layouts; nan: not known.
        self._tolerance = math.nan

    def checks(self) -> Iterator[Check]:
        """Yield each check when it is done. Raises RunFailed for a config that does not train."""
        bench = self._bench
        if self._run.lora.rank:
            bench.train("base", _SEED, *_BASE, *_ALONE, ranks=1)
        bench.train("reference")
        again = "The same command computes the same bits."
        yield made("repeat", again, lambda it: self._same(it, bench.killed("killed", HALF), 0))
        killed = "Killed at once and started again, a run ends with the same bits."
        yield made("kill", killed, lambda it: self._same(it, bench.train("killed"), 0))
        resume = partial(self._go_on, [])
        yield made("resume", "From a checkpoint, a run ends with the same bits.", resume)
        generator = partial(self._go_on, [self._fault("Generator")])
        yield made("generator", "Generators of another seed", generator, True)
        faults = {
            "weight": ("A stale weight", self._fault("Weight")),
            "batch": ("A skipped batch", f"--data.skip_steps={HALF + 1}"),
        }
        tensors = read_manifest(bench.saved("reference", HALF)).tensors
        if any(name.startswith("optimizer.") and shape for name, (_, shape) in tensors.items()):
            faults["moment"] = ("A flipped bit in the optimizer's state", self._fault("Moment"))
        for name, (fault, flag) in faults.items():
            yield made(name, fault, partial(self._go_on, [flag]), True)
        rounding = "The tolerance of layouts is less than what any of the last faults changes."
        yield made("rounding", rounding, partial(self._rounding, faults), True)
        yield made("layout", "One rank computes the same without parallelism.", self._layout)
        yield made("ranks", "Another number of ranks goes on with the same data.", self._ranks)
        yield made("evaluation", "`titanlite eval` finds the run's own loss.", self._evaluation)
        yield made("export", "Exported weights have the same logits.", self._export)

    def _facts(self, run: str | Path, after: int = HALF, last: int = STEPS) -> Facts:
        """Return batches, figures and tensors of the steps behind `after` to `last`."""
        found: dict[str, Any] = {}
        folder = self._bench.folder / run
        root = folder / "checkpoint"
        for step in steps_in(root):
            if max(after, 1) <= step <= last:
                contents = Contents(step_folder(root, step))
                found[f"batch of step {step + 1}"] = contents.manifest.train[RESUME]["next_batch"]
        for row in read_lines(folder / FILE):
            for name in _FIGURES:
                if name in row and after < row["step"] <= last:
                    found[f"{name} of step {row['step']}"] = row[name]
        return found | contents.read_all(list(contents.manifest.tensors))

    def _fault(self, name: str) -> str:
        """Return the flag that adds a callback of `titanlite.contrib.evidence.faults`."""
        fault = f"titanlite.contrib.evidence.faults:{name}"
        return f"--job.callbacks={quote([*self._run.job.callbacks, fault])}"

    # Bit for bit

    def _same(self, check: Check, run: Path, after: int = HALF) -> bool:
        last = find(run / "checkpoint").valid(run).step
        one = hashes(self._facts("reference", after, last))
        other = hashes(self._facts(run, after, last))
        check.left, check.right = _short(one), _short(other)
        found = [key for key in {**one, **other} if one.get(key) != other.get(key)]
        count = f"{len(found)} of {len(one)} figures, batches and tensors differ"
        check.note = ", ".join([count, *found[:2]])
        return not found

    def _go_on(self, flags: Sequence[str], check: Check) -> bool:
        return self._same(check, self._bench.go_on("reference", HALF, check.name, *flags))

    # To rounding

    def _rounding(self, faults: Iterable[str], check: Check) -> bool:
        d = self._run.training
        used = {d.mixed_precision_param, d.mixed_precision_reduce, d.dtype}
        if used != {"float32"} or self._run.features.float8:
            self._divided = "float32"
            self._bench.train(self._divided, *_FLOAT32)
        self._bench.train("alone", *_ALONE, ranks=1)
        self._bench.train(check.name, *_ALONE, self._fault("Rounding"), ranks=1)
        rounding = distance(self._facts("alone", 0), self._facts(check.name, 0))
        self._tolerance = FACTOR * max(rounding, _LAST_BIT)
        reference = self._facts("reference")
        least = min(distance(reference, self._facts(fault)) for fault in faults)
        check.left, check.right = f"{self._tolerance:.1e}", f"{least:.1e}"
        return not self._tolerance < least

    def _close(self, check: Check, one: Facts, other: Facts) -> bool:
        found = distance(one, other)
        check.left, check.right = f"{found:.1e}", f"at most {self._tolerance:.1e}"
        batches = [key for key in one if key.startswith("batch") and one[key] != other.get(key)]
        check.note = f"{len(batches)} batches differ"
        return found <= self._tolerance and not batches

    def _layout(self, check: Check) -> bool:
        is_close = self._close(check, self._facts("alone", 0), self._facts(self._divided, 0))
        own = self._facts("reference")
        coarse, skipped = (distance(own, self._facts(run)) for run in (self._divided, "batch"))
        check.note += f", {coarse:.1e} from the precision of the config"
        return is_close and coarse <= skipped

    def _ranks(self, check: Check) -> bool:
        if self._bench.ranks == 1:
            raise Skipped(IDLE, "the copy has one rank")
        self._bench.go_on(self._divided, HALF, check.name, *_ALONE, ranks=1)
        return self._close(check, self._facts(self._divided), self._facts(check.name))

    # The weights elsewhere

    def _evaluation(self, check: Check) -> bool:
        words = ["eval", str(self._bench.saved("reference", STEPS)), "--json"]
        output = self._bench.finish(check.name, words)
        check.left = str(self._facts("reference")[f"validation_loss of step {STEPS}"])
        check.right = re.findall('"loss": (.*),', output)[0]
        return check.left == check.right

    def _export(self, check: Check) -> bool:
        from titanlite.checkpoint.hf_files import hf_form
        from titanlite.cli.hub.export_weights import convert, open_source

        try:
            hf_form(self._run.spec, self._run.model_args(BUNDLED_IDS))
        except ValueError as error:
            raise Skipped(IDLE, str(error)) from None
        saved = self._bench.saved("reference", STEPS)
        lines: list[str] = []
        target = convert(saved, self._bench.folder / check.name, "hf", report=lines.append)
        check.left, check.right = (
            _short({"": our_logits(one.family, one.args, one.read, torch.arange(64)[None])})
            for one in map(open_source, (saved, target))
        )
        check.note = lines[0]
        return check.left == check.right


def _short(facts: Facts) -> str:
    return digest_of(repr(hashes(facts)).encode())[7:23]


def hashes(facts: Facts) -> dict[str, Any]:
    """Return facts with the hash of each tensor in its place."""
    found = dict(facts)
    for name, value in facts.items():
        if isinstance(value, torch.Tensor):
            numbers = value.contiguous().flatten().view(torch.uint8).numpy()
            found[name] = digest_of(numbers.tobytes())
    return found


def distance(one: Facts, other: Facts) -> float:
    """Return the largest relative difference of a loss, weight or moment; infinity where one is
    missing or no number.
    """
    found = 0.0
    for name, value in one.items():
        is_number = isinstance(value, torch.Tensor) and value.is_floating_point()
        if is_number or name.startswith("loss"):
            a, b = (torch.as_tensor(side.get(name, math.nan)).double() for side in (one, other))
            gap = (a - b).norm() / a.norm().clamp(min=1e-30)
            found = max(found, gap.nan_to_num(math.inf).item())
    return found
