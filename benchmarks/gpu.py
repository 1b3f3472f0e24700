"""What one GPU shows: its tests, the ladder on Llama's published shapes, and the modes of
activation checkpointing.

    benchmarks/gpu.sh                                  # all pieces, one after the other
    benchmarks/gpu.sh --list                           # the pieces
    # some, for nine minutes and the minute an end may take
    benchmarks/gpu.sh tests ladder-8b --budget 540

Each piece writes FOLDER/NAME.json when it is done and is not run again then, so the same command
goes on where it was broken off: a ladder with the runs it lacks, the modes with the modes they
lack. What is done is printed as tables and written to FOLDER/gpu.md, and, if it measured, to
benchmarks/results/gpu.md and gpu.json (--results names others). Pieces are started anew with
--again, and all when the sources have changed; one that failed is tried again in any case.

A piece takes the largest number of blocks of its model that fits: by the bytes of weights,
gradients and optimizer state, then two fewer as long as a step of any level runs out of memory.
loss-8b takes 8. A level that does not run is named with its reason, the others stay.
Exit status: 0 when all that was asked for is done or not built yet, else 1; 128 and the signal's
number after a signal. Without a GPU it refuses to start. --toy runs every piece on tiny shapes, on
a CPU too: that shows that the pieces work, and measures nothing (the piece `tests` fails where it
finds no GPU). --dry-run runs every piece on two blocks of the real shapes for a few steps, by
CUDA's and Triton's real code, on a machine without a GPU: benchmarks/gpu.sh makes a null GPU for
it, in .nullgpu or $NULLGPU_DIR (3 GB of packages). It measures and judges nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_bench import ROOT, Bench, Failed, OutOfTime, Result, write_json
from benchmarks.gpu_ladder import SETTINGS, climb, kept_layers
from benchmarks.gpu_page import COMMAND, page, targets
from benchmarks.gpu_pieces import gradients, machine, modes, probe, tests
from titanlite.contrib.processes import Stopped, stoppable

RESULTS = ROOT / "benchmarks" / "results" / "gpu"


def _ladder(name: str) -> Callable[[Bench], Result]:
    return lambda bench: climb(bench, name)


PIECES: dict[str, Callable[[Bench], Result]] = {
    "machine": machine,
    "gradients": gradients,
    "tests": tests,
    **{name: _ladder(name) for name in SETTINGS},
    "modes": modes,
}


def sources() -> str:
    """A hash of what is measured and tested; pieces of other sources are run again."""
    digest = hashlib.sha256()
    for folder in ("titanlite", "tests", "train_configs", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".toml", ".sh"):
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def main() -> int:
    """Run the pieces that are missing; 0 when all that were asked for are done."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help="all when none is named")
    parser.add_argument("--list", action="store_true", help="name the pieces and end")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where it works (default: outputs/gpu)"
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help=(
            "write FILE.md and FILE.json too (default: benchmarks/results/gpu; with --toy or "
            "--dry-run none)"
        ),
    )
    parser.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="stop then, within a minute; the same command goes on",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        metavar="N",
        help="runs of each level of a ladder (default: what --list tells, 2 for most)",
    )
    parser.add_argument(
        "--again", action="store_true", help="run the named pieces anew, with all they have kept"
    )
    short = parser.add_mutually_exclusive_group()
    short.add_argument(
        "--toy", action="store_true", help="tiny shapes, on a CPU too; measures nothing"
    )
    short.add_argument(
        "--dry-run",
        action="store_true",
        help="few blocks and steps, on a null GPU; measures nothing",
    )
    arguments = parser.parse_args()
    if arguments.list:
        for name, piece in PIECES.items():
            setting = SETTINGS.get(name)
            about = piece.__doc__ or ""
            if setting:
                blocks = f"{setting.layers} blocks" if setting.layers else "as many blocks as fit"
                about = f"{setting.config}, {blocks}, {setting.steps} steps, {setting.repeats} of a level {' '.join(setting.flags)}".rstrip()  # noqa: E501
            print(f"{name:<10}  {about}")
        return 0
    if unknown := [name for name in arguments.pieces if name not in PIECES]:
        parser.error(f"no piece {', '.join(unknown)}; there are {', '.join(PIECES)}")
    toy, dry = arguments.toy, arguments.dry_run
    folder = (
        arguments.out or ROOT / "outputs" / ("gpu-toy" if toy else "gpu-dry" if dry else "gpu")
    ).absolute()
    results = arguments.results or (None if toy or dry else RESULTS)
    deadline = float("inf") if arguments.budget is None else time.monotonic() + arguments.budget
    try:
        with stoppable():
            bench = Bench(folder, toy, deadline, dry=dry, repeats=arguments.repeats)
            bench.about = {**probe(bench, "facts"), "sources": sources()}
            if not (bench.about["gpu"] or toy):
                print(
                    "error: torch sees no CUDA device, and this measures one: run it where there "
                    "is a GPU (--toy tries the pieces on tiny shapes without one)",
                    file=sys.stderr,
                )
                return 1
            return run(bench, arguments.pieces or list(PIECES), arguments.again, results)
    except OutOfTime:
        print("error: the budget is spent before anything began", file=sys.stderr)
        return 1
    except Failed as error:
        print(f"error: torch cannot be asked for this machine's devices: {error}", file=sys.stderr)
        return 1
    except Stopped as stop:
        return 128 + stop.number


def run(
    bench: Bench, names: Sequence[str], again: bool = False, results: Path | None = None
) -> int:
    """The pieces in turn, then the page. Raises Stopped after it when a signal came."""
    about = dict(bench.about)
    _begin(bench.folder, about)
    stopped: Stopped | None = None
    left = list(names)
    for name in names:
        result = bench.folder / f"{name}.json"
        if again:
            forget(bench, name)
        if result.exists() and not json.loads(result.read_text())["failed"]:
            print(f"{name}: done before", flush=True)
            left.remove(name)
            continue
        print(f"{name}: running", flush=True)
        began = time.monotonic()
        try:
            found = _measure(bench, name)
        except OutOfTime:
            print(f"{name}: the budget is spent; the same command goes on from here", flush=True)
            break
        except Stopped as stop:
            print(f"{name}: stopped by {stop}; the same command goes on from here", flush=True)
            stopped = stop
            break
        write_json(
            result, {"piece": name, "seconds": round(time.monotonic() - began, 1), **about, **found}
        )
        left.remove(name)
    done = {
        name: json.loads(path.read_text())
        for name in PIECES
        if (path := bench.folder / f"{name}.json").exists()
    }
    command = " ".join([COMMAND, *sys.argv[1:]])
    text = page(done, about, command, bench.short)
    (bench.folder / "gpu.md").write_text(text)
    print(f"\n{text}\nwritten: {bench.folder / 'gpu.md'} and a .json for each piece", flush=True)
    if results is not None:
        verdicts = targets(done, bench.short)
        report = {**about, "command": command, "targets": verdicts, "pieces": done}
        write_json(results.with_suffix(".json"), report)
        results.with_suffix(".md").write_text(text)
        print(f"and {results.with_suffix('.md')}, {results.with_suffix('.json')}", flush=True)
    if stopped is not None:
        raise stopped
    return 1 if left or any(done[name]["failed"] for name in names) else 0


def _begin(folder: Path, about: dict[str, Any]) -> None:
    """Make the folder; one of other sources or another device is put aside."""
    stamp = folder / "facts.json"
    if stamp.exists() and json.loads(stamp.read_text()) != about:
        old = folder.with_name(f"{folder.name}-{time.strftime('%Y%m%d-%H%M%S')}")
        folder.rename(old)
        print(
            f"sources, device or versions are others than in {old.name}, which is kept: starting "
            "anew",
            flush=True,
        )
    write_json(stamp, about)


def _measure(bench: Bench, name: str) -> dict[str, Any]:
    """A piece's rows, and the reason why some or all are missing. Raises OutOfTime, Stopped."""
    try:
        found = PIECES[name](bench)
    except Failed as error:
        return {"reason": str(error), "failed": True}
    if not found.problems:
        return {"rows": found.rows, "failed": False}
    return {"rows": found.rows, "reason": "; ".join(found.problems), "failed": True}


def forget(bench: Bench, name: str) -> None:
    """All that a piece has kept: its figures, runs and parts, and how many blocks fit."""
    (bench.folder / f"{name}.json").unlink(missing_ok=True)
    kept_layers(bench, name).unlink(missing_ok=True)
    for kept in (bench.folder / "ladders" / name, bench.folder / "parts" / name):
        shutil.rmtree(kept, ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(main())
