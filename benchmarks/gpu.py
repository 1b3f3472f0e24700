"""Measures one GPU, a row at a time: gradients, ceilings, speed.

    benchmarks/gpu.sh quick 1     # within 5 minutes: machine, gradients, bf16
    benchmarks/gpu.sh quick 2     # within 5 minutes: float8, rival, kahan
    benchmarks/gpu.sh ROW ...     # others by name; --list tells them

Each row is a process of its own, and is written to FOLDER/rows/ROW.json when it ends. After each,
all rows so far are written as a page to FOLDER/gpu.md. A measurement goes to
benchmarks/results/gpu.md and gpu.json too (--results names others), and the card of its config
(benchmarks/card.py) to docs/cards. So a cut loses nothing, and a run that it cuts off keeps the
steps that it made. Rows share the compile cache in FOLDER/inductor.

Speed is worth nothing where gradients are wrong: rows of a form that failed `gradients` are not
run. The tests of the GPU are the row `tests`.
Exit status: 0 when all rows are there, else 1. Without a GPU it refuses to start. --toy takes tiny
shapes, on a CPU too, and --dry-run two blocks of the real ones on a null GPU, which
benchmarks/gpu.sh makes in .nullgpu or $NULLGPU_DIR: both show that the rows work, and measure
nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import card  # noqa: E402
from benchmarks.gpu_gradients import COMPILED, EAGER, FLOAT8, GATHERED, LIMITS  # noqa: E402
from benchmarks.gpu_targets import TARGETS, shown  # noqa: E402
from titanlite.contrib import processes  # noqa: E402
from titanlite.utils import atomic_write  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "gpu"
H200 = ROOT / "train_configs" / "llama3_8b_h200.toml"
RIVAL = ROOT / "benchmarks" / "gpu" / "rival_8b.toml"
KAHAN = ROOT / "benchmarks" / "gpu" / "llama3_8b_kahan.toml"
#: AWS's four levels: each adds to the one before, as train_configs/llama3_8b_level*.toml.
LEVELS = {"default": EAGER, "compile": COMPILED, "float8": FLOAT8, "float8-all-gather": GATHERED}


@dataclass(frozen=True)
class Run:
    """A row that trains."""

    config: Path
    level: str
    steps: int = 12
    flags: tuple[str, ...] = ()


EIGHT_BLOCKS = ("--model.overrides.n_layers=8",)
RUNS = {
    "bf16": Run(H200, "compile"),
    "float8": Run(H200, "float8-all-gather"),
    # Steps of three seconds.
    "rival": Run(RIVAL, "compile", 8),
    "kahan": Run(KAHAN, "compile", 8),
    "kahan-float8": Run(KAHAN, "float8-all-gather"),
    # Planned with 137.0 of 139.7 GiB.
    "eager": Run(H200, "default"),
    "loss-bf16": Run(H200, "compile", 500, EIGHT_BLOCKS),
    "loss-float8": Run(H200, "float8-all-gather", 500, EIGHT_BLOCKS),
}
QUICK = {"1": ("machine", "gradients", "bf16"), "2": ("float8", "rival", "kahan")}
ROWS = ("machine", "gradients", *RUNS, "tests")
#: Seconds of a quick call, with `GRACE` of them for the end of a row that is cut off. A row is not
#: begun with less than `LEAST` left.
QUICK_SECONDS, GRACE, LEAST = 290, 10, 20
UNMEASURED = "`--toy` or `--dry-run`: that the rows work; nothing here is a measurement."
TRAINING = (
    "--model.tokenizer_path=bundled",
    "--training.dataset=c4_test",
    "--lr_scheduler.total_steps=1000",
    "--metrics.log_freq=1",
    "--no-metrics.enable_tensorboard",
    "--no-validation.enable",
    "--no-checkpoint.enable_checkpoint",
)
SHORT = ("--training.steps=6", "--model.overrides.n_layers=2")
TOY = (
    *SHORT,
    *("--training.seq_len=32", "--compile.backend=aot_eager", "--model.vocab_size=4096"),
    *("--model.overrides.dim=64", "--model.overrides.n_heads=4", "--model.overrides.n_kv_heads=4"),
)


def main() -> int:
    """Make the rows that are asked for; 0 when all are there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help="or quick 1, quick 2")
    parser.add_argument("--list", action="store_true", help="name the rows and end")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="(default: outputs/gpu)")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write FILE.md and FILE.json")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help=f"(quick: {QUICK_SECONDS})")
    short = parser.add_mutually_exclusive_group()
    short.add_argument("--toy", action="store_true", help="tiny shapes, on a CPU too")
    short.add_argument("--dry-run", action="store_true", help="two blocks, on a null GPU")
    arguments = parser.parse_args()
    if arguments.list:
        for name in ROWS:
            run = RUNS.get(name)
            print(f"{name:<13}{run.config.name}, {run.level}, {run.steps} steps" if run else name)
        return 0
    quick = arguments.rows[:1] == ["quick"]
    names = QUICK.get(" ".join(arguments.rows[1:]), ()) if quick else arguments.rows
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"no row {', '.join(unknown)}; there are {', '.join(ROWS)}")
    if not names:
        parser.error("name rows, or quick 1 or quick 2")
    mode = "toy" if arguments.toy else "dry" if arguments.dry_run else ""
    results = arguments.results or (None if mode else RESULTS)
    folder = arguments.out or ROOT / "outputs" / f"gpu-{mode}".rstrip("-")
    budget = arguments.budget or (QUICK_SECONDS if quick else float("inf"))
    bench = Bench(folder.absolute(), mode, time.monotonic() + budget, results)
    (bench.folder / "facts.json").unlink(missing_ok=True)
    with processes.stoppable():
        if not bench.facts()["gpu"] and mode != "toy":
            print("error: torch sees no CUDA device; --toy takes tiny shapes", file=sys.stderr)
            return 1
        return bench.make(names)


@dataclass
class Bench:
    """One call, and the folder in which it works."""

    folder: Path
    #: "toy", "dry", or "" for a measurement.
    mode: str
    #: By time.monotonic.
    deadline: float
    results: Path | None = None

    def make(self, names: Sequence[str]) -> int:
        """Make rows in turn; 0 when all are there."""
        missing = []
        for name in names:
            wrong = self.wrong_gradients()
            run = RUNS.get(name)
            row: dict[str, Any]
            if run and run.level in wrong:
                row = {"failed": f"not run, since gradients are wrong: {wrong[run.level]}"}
            elif self.deadline - time.monotonic() < LEAST:
                print(f"{name}: the budget is spent", flush=True)
                missing.append(name)
                continue
            else:
                print(f"{name}: running", flush=True)
                began = time.monotonic()
                row = {**self.measure(name), "seconds": round(time.monotonic() - began, 1)}
            if "failed" in row:
                missing.append(name)
                print(f"{name}: FAILED: {row['failed']}", flush=True)
            row |= {"date": time.strftime("%Y-%m-%d"), "facts": self.facts()}
            self.write(f"rows/{name}", row)
            self.report()
        print((self.folder / "gpu.md").read_text() if len(missing) < len(names) else "")
        return int(bool(missing))

    def measure(self, name: str) -> dict[str, Any]:
        """Run the process of a row; return its figures, with `failed` where something is wrong."""
        code = self.call(name, command_of(self, name))
        log = (self.folder / "logs" / f"{name}.log").read_text(errors="replace").splitlines()
        cut = "cut off by the budget" if code is None else f"exit {code}: {reason(log)}"
        if name in RUNS:
            folder = newest(self.folder / "runs", name)
            row = card.figures(folder) if folder else {"steps": 0}
            return row if code == 0 else {**row, "failed": cut}
        if name == "tests":
            failed = [line for line in log if line.startswith(("FAILED", "ERROR"))]
            row = {"lines": [reason(log[-1:]).strip("= "), *failed]}
            return row if code == 0 else {**row, "failed": cut}
        if code != 0:
            return {"failed": cut}
        rows = json.loads(log[-1])
        wrong = problems(rows) if name == "gradients" and self.mode != "dry" else {}
        lines = [card.line_of(row) for row in rows]
        failures = {"failed": "; ".join(wrong.values()), "wrong": wrong} if wrong else {}
        return {"lines": lines, **failures}

    def call(self, name: str, command: Sequence[str]) -> int | None:
        """Run a command with its output in a log; its exit code, None where the budget ended it."""
        log = self.folder / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        left = self.deadline - time.monotonic() - GRACE
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor")}
        process = processes.start(command, log, {**cache, **os.environ}, ROOT)
        try:
            return process.wait(None if left == float("inf") else max(left, 1))
        except BaseException as error:
            processes.end(process, signal.SIGINT, GRACE)
            if isinstance(error, subprocess.TimeoutExpired):
                return None
            raise

    def facts(self) -> dict[str, Any]:
        """Return what the device is, asked once a call by a process of its own."""
        path = self.folder / "facts.json"
        if not path.exists():
            probe = [sys.executable, "benchmarks/gpu_probe.py", "facts"]
            said = subprocess.run(probe, cwd=ROOT, capture_output=True, text=True, check=True)
            self.write("facts", json.loads(said.stdout.splitlines()[-1]))
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def rows(self) -> dict[str, Any]:
        """Return the rows that exist, in order, but those of another device or other versions."""
        paths = {name: self.folder / "rows" / f"{name}.json" for name in ROWS}
        found = {n: json.loads(path.read_text()) for n, path in paths.items() if path.exists()}
        return {name: row for name, row in found.items() if row.get("facts") == self.facts()}

    def wrong_gradients(self) -> dict[str, str]:
        """Return the levels whose gradients are wrong, each with what is wrong."""
        found: dict[str, str] = self.rows().get("gradients", {}).get("wrong", {})
        return found

    def write(self, name: str, value: Any) -> None:
        path = self.folder / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(value, indent=1) + "\n")

    def report(self) -> None:
        """Write the page of all rows."""
        text = page(self.facts(), self.rows(), self.mode)
        atomic_write(self.folder / "gpu.md", text)
        if self.results:
            self.results.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(self.results.with_suffix(".md"), text)
            found = {"facts": self.facts(), "rows": self.rows()}
            atomic_write(self.results.with_suffix(".json"), json.dumps(found, indent=1) + "\n")
        self.write_cards(ROOT / "docs" / "cards" if self.results == RESULTS else self.folder)

    def write_cards(self, folder: Path) -> None:
        """Write the card of each config of which a row is there."""
        rows = self.rows()
        device = re.sub(r"\W+", "-", self.facts()["device"].lower())
        for config in {run.config for run in RUNS.values()}:
            names = [name for name, run in RUNS.items() if run.config == config]
            if any("device" in rows.get(name, {}) for name in names):
                facts = {
                    "title": config.name,
                    "note": UNMEASURED if self.mode else "",
                    "gradients": rows.get("gradients", {}).get("lines"),
                }
                cells = {name: rows.get(name, {}) for name in names}
                card.write(folder / f"{config.stem}_{device}.md", cells, facts)


def command_of(bench: Bench, name: str) -> list[str]:
    """Return the command of a row."""
    short = {"toy": TOY, "dry": SHORT}.get(bench.mode, ())
    if name == "machine":
        toy = ["--toy"] * (bench.mode == "toy")
        return [sys.executable, "benchmarks/gpu_probe.py", "measure", *toy]
    if name == "tests":
        side_by_side = ("-n", "4") if find_spec("xdist") else ()
        return [sys.executable, "-m", "pytest", "-q", *side_by_side, "tests/gpu"]
    if name == "gradients":
        script = "benchmarks/gpu_gradients.py"
        return [sys.executable, script, str(H200), *TRAINING, *EIGHT_BLOCKS, *short]
    run = RUNS[name]
    emulated = ["--float8.emulate"] * (bench.mode == "toy" and run.level.startswith("float8"))
    return [
        *(sys.executable, "train.py", f"--job.config_file={run.config}", *LEVELS[run.level]),
        *(f"--job.dump_folder={bench.folder / 'runs' / name}-{time.time_ns()}", *TRAINING),
        *(f"--training.steps={run.steps}", *run.flags, *emulated, *short),
    ]


def newest(runs: Path, name: str) -> Path | None:
    """Return the newest folder of a row's runs."""
    made = sorted(runs.glob(f"{name}-[0-9]*"))
    return made[-1] if made else None


def problems(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return what is wrong with gradients, by level: lost ones, or far from those of fp32."""
    found = {}
    for row in rows:
        level = row["what"]
        if row["lost"]:
            found[level] = f"{level}: no gradient of {', '.join(row['lost'][:3])}"
        elif not row["value"] <= LIMITS[level]:
            found[level] = f"{level}: {row['value']:.1f} % from fp32"
    return found


def reason(log: Sequence[str]) -> str:
    """Return what a command said why it failed."""
    lines = [line.strip() for line in log if line.strip()]
    wrong = [line for line in lines if "Error" in line or line.startswith("error:")]
    return (wrong or lines or ["no output"])[-1][:400]


def page(facts: Mapping[str, Any], rows: Mapping[str, Any], mode: str) -> str:
    """Return gpu.md."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    device = f"{facts['device']}, driver and power limit {facts['driver and power limit'] or '–'}"
    lines = ["# On one GPU", "", f"{device}; CUDA {facts['cuda']}; {versions}.", ""]
    if mode:
        lines += [UNMEASURED, ""]
    lines += [target.line({} if mode else rows) for target in TARGETS]
    columns = ("tokens/s", "slowest", "fastest", "MFU %", "memory GiB", "reserved GiB", "loss")
    lines += ["", f"| row | {' | '.join(columns)} | steps | date |", f"|{' --- |' * 10}"]
    for name in RUNS:
        row = rows.get(name, {})
        values = [row.get(column) for column in columns]
        cells = ["–" if value is None else shown(value) for value in values]
        steps = f"{row.get('steps', '–')} of {RUNS[name].steps}"
        lines.append(f"| {name} | {' | '.join(cells)} | {steps} | {row.get('date', 'not run')} |")
    failed = [f"- {name} failed: {row['failed']}" for name, row in rows.items() if "failed" in row]
    lines += ["", *failed]
    for name, row in rows.items():
        if "lines" in row:
            lines += ["", f"## {name}", "", *(f"- {line}" for line in row["lines"])]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
