"""What a restart takes: from the SIGKILL of one rank to the end of the first step after it, by
phases.

    python benchmarks/restarts.py --out benchmarks/results/restarts

The debug model trains on two ranks (gloo, a thread each) under titanlite's torchrun with
`--max-restarts`, and saves every few steps. Its last rank and rank 0 are killed in turn. A phase
ends when the last rank has passed its end, so the phases add up to the whole. The whole is compared
with another clock: the time in the row of metrics.jsonl that rank 0 writes after its first step.
Further flags, such as --model.overrides.dim=64, go to titanlite.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from titanlite.checkpoint.manifest import steps_in  # noqa: E402
from titanlite.contrib.processes import end, last_lines, start, training_environment  # noqa: E402
from titanlite.runs.read_jsonl import read_metrics  # noqa: E402

T = TypeVar("T")

#: End of a phase, as restart_marks.py names it → what the phase is. The first begins with the kill.
PHASES = {
    "noticed": "notice: torchrun sees that a rank is gone",
    "ended": "end of the other ranks",
    "launched": "torchrun: rendezvous, new processes",
    "code": "start of Python",
    "checked": "imports without torch, check of the config",
    "imported": "imports of torch and titanlite",
    "connected": "rendezvous: the store of the run",
    "compiler": "imports of torch's compiler, which FSDP needs",
    "prepared": "data: locks, tokenizer, text",
    "grouped": "process group",
    "built": "comparison of the ranks, model, optimizer, loaders",
    "loaded": "load of the checkpoint",
    "fetched": "callbacks, first batch",
    "stepped": "first step",
}
#: Steps between saves. A kill comes when so many more are done.
INTERVAL = 5
FIRST_KIND = "first"
#: What is killed, by its name on the command line.
KINDS = {
    "last": "kill of the last rank",
    FIRST_KIND: "kill of rank 0",
}
#: Limit of one restart.
PATIENCE_SECONDS = 300.0
#: The two clocks may differ by what rank 0 does between a step and its record: seconds, or this
#: share of a restart where a busy machine makes that longer.
CLOCKS_SECONDS = 0.25
CLOCKS_SHARE = 0.02


class Job:
    """A run under torchrun, of which a rank can be killed."""

    def __init__(self, folder: Path, ranks: int, restarts: int, flags: Sequence[str]) -> None:
        self.folder = folder
        self.ranks = ranks
        self.marks = folder / "marks.jsonl"
        self.marks.touch()
        self.console = folder / "console.log"
        marks = [sys.executable, str(ROOT / "benchmarks" / "restart_marks.py")]
        torchrun = ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
        torchrun += [f"--nproc_per_node={ranks}", f"--max-restarts={restarts}"]
        run = [
            "train",
            str(ROOT / "train_configs" / "debug_model.toml"),
            *run_flags(folder),
            *flags,
        ]
        words = [*torchrun, *marks[1:], "rank", str(self.marks), *run]
        command = [*marks, "launcher", str(self.marks), *words]
        self.process = start(command, self.console, training_environment())

    def restart(self, attempt: int, rank: int) -> dict[str, Any]:
        """Kill a rank of an attempt; return the seconds of the phases until the first step
        of the next one.
        """
        victim = self.started(attempt)[rank]
        self.until("steps and a checkpoint", lambda: self.may_be_killed(attempt))
        os.kill(victim["pid"], signal.SIGKILL)
        killed = time.time()
        ranks = self.started(attempt + 1)
        ends = [killed, *phase_ends(killed, self.lines(), ranks)]
        lengths = [after - before for before, after in pairwise(ends)]
        seconds = dict(zip(PHASES, lengths, strict=True))
        recorded = self.until("a row in metrics.jsonl", lambda: self.recorded(ranks))
        return {
            "seconds": seconds,
            "whole": ends[-1] - killed,
            "recorded": recorded - killed,
        }

    def started(self, attempt: int) -> list[dict[str, Any]]:
        """Wait until all ranks of an attempt have done a step; return their lines, by rank."""

        def there() -> list[dict[str, Any]]:
            mine = [line for line in self.lines() if line.get("attempt") == attempt]
            return sorted(mine, key=lambda line: line["rank"]) if len(mine) == self.ranks else []

        return self.until(f"the first step of attempt {attempt + 1}", there)

    def may_be_killed(self, attempt: int) -> bool:
        """Return whether an attempt has done so many steps, and a checkpoint is there."""
        began = max(line["times"]["launched"] for line in self.started(attempt))
        steps = [row["step"] for row in self.rows() if row["time"] > began]
        return len(steps) > INTERVAL and bool(steps_in(self.folder / "run" / "checkpoint"))

    def recorded(self, ranks: Sequence[dict[str, Any]]) -> float | None:
        """Return the time of the first row of an attempt; None: it is not there yet."""
        began = max(line["times"]["launched"] for line in ranks)
        return next((row["time"] for row in self.rows() if row["time"] > began), None)

    def rows(self) -> list[dict[str, Any]]:
        try:
            return list(read_metrics(self.folder / "run" / "metrics.jsonl"))
        except FileNotFoundError:
            return []

    def lines(self) -> list[dict[str, Any]]:
        """Return the whole lines of restart_marks.py."""
        text = self.marks.read_text()
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def until(self, what: str, ask: Callable[[], T | None]) -> T:
        """Return the first answer that is true. Raises SystemExit when the run ends before that."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (answer := ask()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                end = "\n    ".join(last_lines(self.console))
                raise SystemExit(f"the run has come to no {what}:\n    {end}")
            time.sleep(0.02)
        return answer


def run_flags(folder: Path) -> list[str]:
    return [
        f"--job.dump_folder={folder / 'run'}",
        f"--data.token_cache={folder / 'tokens'}",
        "--training.steps=1000000",
        "--metrics.log_freq=1",
        "--checkpoint.enable_checkpoint",
        f"--checkpoint.interval={INTERVAL}",
        "--checkpoint.keep_latest_k=2",
    ]


def phase_ends(
    killed: float, lines: Sequence[dict[str, Any]], ranks: Sequence[dict[str, Any]]
) -> list[float]:
    """Return when each phase had ended: torchrun's own at its mark, the others on the last rank.

    lines: of restart_marks.py. ranks: those of the next attempt.
    """
    ends = []
    for mark in PHASES:
        own = [line["time"] for line in lines if line.get("launcher") == mark]
        if own:
            # torchrun closes the processes of an attempt more than once.
            ends.append(min(moment for moment in own if moment > killed))
        else:
            ends.append(max(line["times"][mark] for line in ranks))
    return ends


def measure(
    kinds: Sequence[str], ranks: int, repeats: int, flags: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the figures of each restart, kinds in turn in one run."""
    found = []
    order = [*kinds] * repeats
    with tempfile.TemporaryDirectory(prefix="restarts-") as folder:
        job = Job(Path(folder), ranks, len(order), flags)
        try:
            for attempt, kind in enumerate(order):
                victim = 0 if kind == FIRST_KIND else ranks - 1
                found.append({"kind": kind, **job.restart(attempt, victim)})
                print(f"{KINDS[kind]}: {found[-1]['whole']:.2f} s", file=sys.stderr)
        finally:
            end(job.process)
    return found


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    kinds = [kind for kind in KINDS if any(one["kind"] == kind for one in found)]
    names = [KINDS[kind] for kind in kinds]
    lines = [f"| phase, s | {' | '.join(names)} |", "|---" * (1 + len(kinds)) + "|"]
    for mark, name in PHASES.items():
        lines.append(_row(name, [[o["seconds"][mark] for o in _of(found, k)] for k in kinds]))
    whole = "**from the kill to the end of the first step**"
    lines.append(_row(whole, [wholes(_of(found, kind)) for kind in kinds]))
    return lines


def _of(found: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [one for one in found if one["kind"] == kind]


def _row(name: str, columns: Sequence[Sequence[float]]) -> str:
    cells = [
        f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
        for seconds in columns
    ]
    return f"| {name} | {' | '.join(cells)} |"


def wholes(found: Sequence[dict[str, Any]]) -> list[float]:
    return [one["whole"] for one in found]


def verdict(found: Sequence[dict[str, Any]]) -> tuple[str, bool]:
    """Return whether the phases add up to what the run recorded, in words and as a fact."""
    gaps = [abs(one["recorded"] - sum(one["seconds"].values())) for one in found]
    limit = max(CLOCKS_SECONDS, CLOCKS_SHARE * min(wholes(found)))
    negative = [mark for one in found for mark, value in one["seconds"].items() if value < 0]
    good = max(gaps) <= limit and not negative
    words = (
        "The phases of each restart add up to the time until its first row in metrics.jsonl, to "
        f"{1000 * max(gaps):.0f} ms."
    )
    if not good:
        shown = ", ".join(negative) or "none"
        words = f"**WRONG:** {words} At most {limit:.2f} s are right. Below zero: {shown}."
    return words, good


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="restarts of each kind")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--kinds",
        default=",".join(KINDS),
        help="what is killed, of last and first",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write FILE.md and FILE.json")
    arguments, flags = parser.parse_known_args()
    if arguments.repeats < 1:
        parser.error("--repeats must be at least 1")
    kinds = arguments.kinds.split(",")
    if not set(kinds) <= set(KINDS):
        parser.error(f"--kinds must be of {', '.join(KINDS)}")
    load = os.getloadavg()[0]
    found = measure(kinds, arguments.ranks, arguments.repeats, flags)
    import torch

    from titanlite.metrics.throughput import device_name
    from titanlite.runs import provenance

    command = shlex.join(["python", "benchmarks/restarts.py", *sys.argv[1:]])
    head = (
        f"{device_name(torch.device('cpu'))}, {os.cpu_count()} cores, load {load:.1f} before, "
        f"{os.getloadavg()[0]:.1f} after; Python {platform.python_version()}, torch "
        f"{torch.__version__}; {arguments.ranks} ranks under torchrun --max-restarts, "
        f"{arguments.repeats} kills of each kind; medians, and ranges in parentheses; `{command}`."
    )
    words, good = verdict(found)
    lines = ["# Restarts", "", head, "", *table(found), "", words]
    print("\n".join(lines))
    if arguments.out:
        record = {
            "head": head,
            "command": command,
            "versions": provenance.versions(),
            "phases": PHASES,
            "found": found,
        }
        arguments.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
        arguments.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
