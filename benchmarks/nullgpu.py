"""Count what cannot be timed: runs of `tests/nullgpu/cases.py` at their full depth on the null GPU, beside their plans.

    python benchmarks/nullgpu.py [--folder .nullgpu] [--only REGEX] [--again]

It writes benchmarks/results/nullgpu.json after each run, and nullgpu.md. Runs that the file has are not made again
without --again. torchtitan's row is made when its package is in the null GPU's environment (`nullgpu_titan.py`).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.nullgpu.cases import CASES, HERE, Case, figures, play  # noqa: E402
from titanlite.fit import check_config  # noqa: E402
from titanlite.plan.hardware import cluster_of  # noqa: E402
from titanlite.plan.parts import GIB  # noqa: E402
from titanlite.plan.plan import make_plan  # noqa: E402
from titanlite.plan.speed import CONSTANTS, ERROR, _Step  # noqa: E402

RESULTS = ROOT / "benchmarks/results/nullgpu.json"
HEAD = """# Counted on the null GPU

Made by `python benchmarks/nullgpu.py` from `nullgpu.json`; [development.md](../../docs/development.md#the-null-gpu) has
what it is and what it cannot show. Torch 2.13.0 (CUDA 13), rank 0, one micro-batch of 8,192 tokens a GPU unless named.
No activation checkpointing unless named. Each row is one step that is not logged, at full depth unless it says layers.

- **kernels**, **NCCL**: launches and collectives of the step. **exposed**: collectives beside which no matrix product
  can run. **waits**: of the host for the compute stream or the device. **pageable**: copies that stop the host.
- **malloc**: cudaMalloc and cudaFree. **host**: processor seconds of one step on a busy machine without a GPU:
  an upper bound of what launching costs.
- **peak**: GiB of the caching allocator, allocated and reserved; **plan**: the tensors that `titanlite plan` expects.
- **products**: FLOPs of the matrix products in the log over those of the model's formula, without attention: 1 without
  recomputation; in brackets what the plan expects.
- **MFU**: expected by `titanlite/plan/speed.py` from products, bytes and links, not measured. Its constants are fitted
  on published runs, whose errors are within {error:.0%} (docs/plan.md). Model FLOPs over the peak in bf16.

| run | ranks | kernels | NCCL | exposed | waits | pageable | malloc | host | peak | reserved | plan | products | MFU |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|
"""


def plan(case: Case) -> dict[str, float]:
    """Return what the plan expects of a case: GiB of tensors on rank 0, MFU, FLOPs of products."""
    run = check_config(case.argv(case.deep), case.ranks, training=False)[1]
    found = make_plan(run, cluster_of(run, gpu=case.gpu), rank=0)
    args = run.model_args(128256)
    flops = run.spec.flops_per_token(args, 0) * run.batch.tokens_per_step / run.mesh.world_size
    step = _Step(run, cluster_of(run, gpu=case.gpu), CONSTANTS)
    sizes = [size for _, size in step.linears]
    again = sum(sizes[1::2]) / sum(sizes) if step.by_op else step.recomputed
    again *= 1 - 2 * 3 * step.width * args.vocab_size / run.spec.flops_per_token(args, 0)  # the head's
    figures = {"peak": found.memory.peak.total / GIB, "mfu": found.speed.mfu}
    return {**figures, "tflop": flops / 1e12, "products": 1 + again / 3}


def stored() -> dict[str, Any]:
    """Return the runs that the file has."""
    return dict(json.loads(RESULTS.read_text())) if RESULTS.exists() else {}


def row(name: str, case: Case, found: dict[str, Any]) -> str:
    counts, depth = figures(found), f", {case.deep} layers" if case.deep else ""
    cells: list[Any] = [name + depth, case.ranks, f"{found['kernels']:,}", sum(found["nccl"].values())]
    cells += [found["exposed"], counts["syncs"] + counts["devsync"], counts["pageable"]]
    cells += [counts["malloc"] + counts["free"], f"{found['processor_seconds']:.2f}"]
    cells += [f"{found[f'peak_{kind}_gib']:.1f}" for kind in ("allocated", "reserved")]
    expected = found.get("plan")
    if expected:
        cells += [
            f"{expected['peak']:.1f}",
            f"{found['gemm_tflop'] / expected['tflop']:.2f} ({expected['products']:.2f})",
            f"{expected['mfu']:.1%}",
        ]
    return "| " + " | ".join(map(str, [*cells, *["–"] * (14 - len(cells))])) + " |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / ".nullgpu")
    parser.add_argument("--only", default="", help="regular expression of names")
    parser.add_argument("--again", action="store_true", help="also runs that the file has")
    asked = parser.parse_args()
    subprocess.run([HERE / "setup.sh", asked.folder], check=True)
    for name, case in CASES.items():
        if re.search(asked.only, name) and (asked.again or name not in stored()):
            began = time.monotonic()
            try:
                found = play(asked.folder, case, case.deep)
            except RuntimeError as error:
                print(f"{name}: FAILED\n{error}", flush=True)
                continue
            RESULTS.write_text(json.dumps({**stored(), name: found}, indent=1) + "\n")
            print(f"{name}: {found['kernels']:,} kernels, {time.monotonic() - began:.0f} s", flush=True)
    results = stored()
    page = HEAD.format(error=ERROR)
    for name in [*CASES, *(name for name in results if name not in CASES)]:
        if name in results:
            case = CASES.get(name)
            page += row(name, case or Case(), {**results[name], **({"plan": plan(case)} if case else {})})
    RESULTS.with_suffix(".md").write_text(page)


if __name__ == "__main__":
    main()
