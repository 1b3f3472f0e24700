"""The pieces of benchmarks/gpu.py that are no ladders: the device itself, gradients, tests,
activation checkpointing.
"""

from __future__ import annotations

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import activation_modes
from benchmarks.gpu_bench import ROOT, Bench, Failed, Result, last_line, write_json
from benchmarks.gpu_ladder import CONFIGS, SETTINGS, TOY_FLAGS

PROBE = ROOT / "benchmarks" / "gpu_probe.py"


def probe(bench: Bench, *arguments: str) -> Any:
    """What gpu_probe.py says, which runs in a process of its own. Raises Failed, OutOfTime."""
    log = bench.folder / "logs" / f"{arguments[0]}.log"
    code = bench.call([sys.executable, str(PROBE), *arguments], log)
    if code:
        raise Failed(f"exit {code}: {last_line(log)}")
    return json.loads(log.read_text().splitlines()[-1])


def machine(bench: Bench) -> Result:
    """What this device reaches: large products, and copies within its memory."""
    return Result(probe(bench, "measure", *(["--toy"] if bench.toy else [])))


#: Blocks, and the largest distance from fp32 in percent. Eager bf16 measured 0.7 on an H200.
GRADIENT_LAYERS = 4
GRADIENT_PERCENT = {"default": 3.0, "compile": 3.0, "float8": 30.0, "float8-all-gather": 30.0}


def gradients(bench: Bench) -> Result:
    """Gradients of each level against eager fp32: what the speed of a level is worth."""
    script = ROOT / "benchmarks" / "gpu_gradients.py"
    config = CONFIGS / SETTINGS["ladder-8b"].config
    flags = ["--layers", str(GRADIENT_LAYERS), *(TOY_FLAGS if bench.toy else ())]
    log = bench.folder / "logs" / "gradients.log"
    code = bench.call([sys.executable, str(script), str(config), *flags], log)
    if code:
        raise Failed(f"exit {code}: {last_line(log)}")
    rows = json.loads(log.read_text().splitlines()[-1])
    return Result(rows, [] if bench.dry else gradient_problems(rows))


def gradient_problems(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line for each level whose gradients are lost or far from those of fp32."""
    problems = []
    for row in rows:
        if row["lost"]:
            problems.append(f"{row['what']}: no gradient of {', '.join(row['lost'][:3])}")
        elif not row["value"] <= GRADIENT_PERCENT[row["what"]]:
            problems.append(f"{row['what']}: {row['value']:.1f} % from fp32")
    return problems


#: Tests of other folders that need a GPU, and what selects them.
OTHER_TESTS = ("tests/metrics/test_throughput.py",)
SELECT = ("-k", "cuda or device")
#: Processes that share a file's tests where pytest-xdist is installed. All use one GPU.
TEST_PROCESSES = 4


def tests(bench: Bench) -> Result:
    """The GPU tests, file by file; those that need no GPU are run elsewhere."""
    files = [
        str(file.relative_to(ROOT)) for file in sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    ]
    return test_files(
        bench, [*((name, ()) for name in files), *((name, SELECT) for name in OTHER_TESTS)]
    )


def test_files(bench: Bench, files: list[tuple[str, tuple[str, ...]]]) -> Result:
    """Run each file of tests that has not passed yet.

    A test run in which every test is skipped shows nothing.
    """
    found = []
    side_by_side = ("-n", str(TEST_PROCESSES)) if find_spec("xdist") else ()
    for name, select in files:
        label = name.replace("/", ".")
        done = bench.folder / "parts" / "tests" / f"{label}.json"
        if not done.exists() or json.loads(done.read_text())["code"]:
            log = bench.folder / "logs" / f"{label}.log"
            pytest = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
            code = bench.call([*pytest, *side_by_side, name, *select], log)
            lines = log.read_text(errors="replace").splitlines()
            failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
            write_json(
                done,
                {
                    "what": name,
                    "value": lines[-1].strip("= ") if lines else "",
                    "code": code,
                    "failed": failed,
                },
            )
        found.append(json.loads(done.read_text()))
    problems = [f"{row['what']}: exit {row['code']}" for row in found if row["code"]]
    if not any(
        re.search(r"\b\d+ passed", row["value"]) for row in found if row["what"] not in OTHER_TESTS
    ):
        problems.append("no GPU test passed: they were skipped, or failed")
    return Result(found, problems)


Cell = tuple[str, bool]


def cells(gpu: bool, toy: bool) -> list[Cell]:
    """Modes of activation checkpointing, and whether they are compiled."""
    eager = [*activation_modes.EAGER, *(activation_modes.OFFLOADED if gpu else ())]
    compiled = [] if toy else list(activation_modes.COMPILED)
    return [*((mode, False) for mode in eager), *((mode, True) for mode in compiled)]


def modes_command(bench: Bench, cell: Cell, out: Path) -> list[str]:
    """One cell, measured alone."""
    return [
        *(sys.executable, "benchmarks/activation_modes.py", "--out", str(out)),
        *("--modes", cell[0], "--compile", "on" if cell[1] else "off"),
        *(("--steps", "1", "--layers", "2") if bench.short else ()),
        *(("--seq", "64", "--dim", "64") if bench.toy else ()),
    ]


def modes(bench: Bench) -> Result:
    """Activation checkpointing, eager and compiled, mode by mode; what is measured is not measured
    again.
    """
    rows, problems, shape, device = [], [], None, ""
    for mode, compiled in cells(bool(bench.about.get("gpu")), bench.toy):
        name = f"{mode.replace(', ', '-').replace(' ', '-')}-{'compiled' if compiled else 'eager'}"
        kept, log = (
            bench.folder / "parts" / "modes" / f"{name}.json",
            bench.folder / "logs" / f"modes-{name}.log",
        )
        if not kept.exists():
            aside = bench.folder / "modes-aside"
            code = bench.call(modes_command(bench, (mode, compiled), aside), log)
            if code:
                problems.append(f"{name}: exit {code}: {last_line(log)}")
                continue
            write_json(kept, json.loads(aside.with_suffix(".json").read_text()))
        report = json.loads(kept.read_text())
        shape, device = activation_modes.Shape(**report["shape"]), report["device"]
        rows += [activation_modes.Row(**row) for row in report["rows"]]
    if shape is None:
        raise Failed("; ".join(problems))
    lines = [
        f"{device}; dim {shape.dim}, {shape.layers} layers, {shape.heads} heads, vocabulary "
        f"{shape.vocab:,}, {shape.batch} x {shape.seq} tokens, {shape.dtype}; one mode after the "
        "other.",
        "",
        *activation_modes.table(rows, shape),
    ]
    eager = [row.losses for row in rows if not row.compiled]
    if len(eager) > 1 and not bench.dry:
        verdict = "equal" if all(losses == eager[0] for losses in eager) else "DIFFERENT"
        lines += ["", f"Losses of the {len(eager)} eager modes, bit for bit: {verdict}."]
    (bench.folder / "activation_modes.md").write_text("\n".join(lines) + "\n")
    return Result([{"what": "table", "value": "activation_modes.md", "lines": lines}], problems)
