"""How well one run's measurement predicts another's step: every ordered pair of run folders.

    python benchmarks/plan_measured.py RUN RUN ...

Each error is that of the planned seconds: as they are, with the first run's step alone, and with
the parts of its trace (`profiling.enable_profiling`). Folders NAME-1, NAME-2 … are rounds of one
config on a busy machine, where other work only adds time: of all their steps and traces the fastest
count.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

from titanlite.cli.plan.measured import anchored, trace_parts
from titanlite.plan.hardware import Cluster, find_gpu
from titanlite.plan.memory import with_vocabulary
from titanlite.plan.speed import predict
from titanlite.resolve.load import check_config
from titanlite.runs.read import read_run

TRACES = "profile_traces"


def fastest(rounds: list[Path], where: Path) -> float:
    """Write one run with the fastest step and trace of all rounds; return that step's seconds."""
    rows = [row for folder in rounds for row in read_run(folder).training[1:]]
    row = min(rows, key=lambda row: row["seconds_per_step"])
    traced = min(rounds, key=lambda folder: sum(trace_parts(folder / TRACES).values()))
    shutil.copytree(traced, where)
    (where / "metrics.jsonl").write_text(json.dumps({**row, "step": 20}) + "\n")
    return row["seconds_per_step"]


def main() -> None:
    rounds: dict[str, list[Path]] = defaultdict(list)
    for folder in map(Path, sys.argv[1:]):
        rounds[folder.name.partition("-")[0]].append(folder)
    cluster = Cluster(find_gpu("h100-80g"), 1, 1, 5e10)
    errors: dict[str, list[float]] = {"step": [], "parts": []}
    print("| from | to | step s | by the step | by the parts |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        folders = {name: Path(scratch) / name for name in rounds}
        seconds = {name: fastest(rounds[name], folder) for name, folder in folders.items()}
        runs = {}
        by = {"parts": {}, "step": {}}
        for name, folder in folders.items():
            argv = [f"--job.config_file={folder / 'config.toml'}"]
            runs[name] = with_vocabulary(check_config(argv, 1, training=False)[1])
            by["parts"][name] = anchored(cluster, folder)
            shutil.rmtree(folder / TRACES)
            by["step"][name] = anchored(cluster, folder)
        for one in folders:
            for other in folders:
                if one == other:
                    continue
                cells = []
                for way, found in errors.items():
                    planned = predict(runs[other], by[way][one]).step_seconds
                    found.append(planned / seconds[other] - 1)
                    cells.append(f"{found[-1]:+.0%}")
                print(f"| {one} | {other} | {seconds[other]:.3f} | {' | '.join(cells)} |")
    for way, found in errors.items():
        sizes = sorted(map(abs, found))
        print(f"\nby the {way}: median {median(sizes):.0%}, largest {sizes[-1]:.0%}")
    pairs = list(zip(*errors.values(), strict=True))
    worse = sum(abs(parts) > abs(step) for step, parts in pairs)
    print(f"\nworse by the parts: {worse} of {len(pairs)} pairs")


if __name__ == "__main__":
    main()
