"""The table of titanlite/plan/FORMULAS.md: peak memory of a step that was measured, traced, and
computed by formulas.

    python benchmarks/plan_memory.py [WORDS] [--parts]      # the rows whose name has these words

Measured: bytes of all storages of the last rank in step 2 of a real run, on gloo ranks of this
machine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.plan.measured import CASES, measure, planned  # noqa: E402
from tests.support.pool import Pools  # noqa: E402
from titanlite.cli.plan.memory_trace import trace  # noqa: E402
from titanlite.plan.memory import estimate  # noqa: E402
from titanlite.plan.parts import PARTS, Moment, RankMemory  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--parts", action="store_true", help="also print the parts of both peaks")
    options = parser.parse_args()
    pools = Pools()
    print("| run | measured MiB | trace | formula | at the peak |\n|---|---:|---:|---:|---|")
    for case, (ranks, _) in CASES.items():
        if not all(word in case for word in options.words):
            continue
        rank = ranks - 1
        real: RankMemory = pools(ranks).run(measure, case)[rank]
        traced, computed = trace(planned(case), rank, "cpu"), estimate(planned(case), rank, "cpu")
        peak = real.peak
        ratios = [f"{memory.peak.total / peak.total:.3f}" for memory in (traced, computed)]
        print(
            f"| {case} | {peak.total / 2**20:.1f} | {' | '.join(ratios)} | {peak.phase} "
            f"{peak.module} |",
            flush=True,
        )
        if options.parts:
            for name in ("measured", "trace"):
                print(name, _line(real.peak if name == "measured" else traced.peak))
    pools.close()


def _line(moment: Moment) -> str:
    parts = ", ".join(
        f"{name} {moment.parts[name] / 2**20:.2f}" for name in PARTS if moment.parts[name]
    )
    return f"{moment.phase} {moment.module}: {parts}"


if __name__ == "__main__":
    main()
