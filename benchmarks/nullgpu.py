"""Count the CUDA calls of a step without a GPU: the runs of `tests/nullgpu/cases.py`, beside their plans.

    python benchmarks/nullgpu.py [--folder .nullgpu] [--only REGEX] [--again] [--torchtitan WHERE]

It writes tests/nullgpu/expected.json after each run, and benchmarks/results/nullgpu.md. Runs that the file has are not
made again without --again. With torchtitan in WHERE (see torchtitan_null.py) that is counted too, into another file.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.nullgpu.cases import CASES, HERE, PLAIN, STORED, Case, figures, play, run  # noqa: E402
from titanlite.fit import check_config  # noqa: E402
from titanlite.plan.hardware import cluster_of  # noqa: E402
from titanlite.plan.parts import GIB  # noqa: E402
from titanlite.plan.plan import make_plan  # noqa: E402
from titanlite.plan.speed import CONSTANTS, ERROR, _Step  # noqa: E402

PAGE = ROOT / "benchmarks/results/nullgpu.md"
#: torchtitan's figures, and the flags of its runs: its own 8B on 8 ranks.
THEIRS = ROOT / "benchmarks/results/nullgpu_torchtitan.json"
_8B = "--model.name=llama3 --model.flavor=8B --training.seq_len=8192 --training.local_batch_size=1"
_PLAIN = f"{_8B} --activation_checkpoint.mode=none"
_OP = "--activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option=op"
TORCHTITAN = {
    "torchtitan 0.2.2, 8B": _PLAIN,
    "torchtitan 0.2.2, 8B, AC op": f"{_8B} {_OP}",
    "torchtitan 0.2.2, 8B, compiled": f"{_PLAIN} --compile.enable",
}
HEAD = """# Counted on the null GPU

Made by `python benchmarks/nullgpu.py`; [null-gpu.md](../../docs/null-gpu.md) describes it and its
limits. Torch 2.13.0 (CUDA 13), rank 0, at full depth unless a row says layers. Each row is one step that is not logged.
Settings are below the table.

- **kernels**, **NCCL**: launches and collectives of the step. **exposed**: collectives beside which no matrix product
  can run. **waits**: of the host for the compute stream or the device. **pageable**: copies that stop the loop.
- **malloc**: cudaMalloc and cudaFree. **host**: processor seconds of one step on a busy machine without a GPU:
  an upper bound of the cost of launches.
- **peak**: GiB of the caching allocator, allocated and reserved; **plan**: the tensors that `titanlite plan` expects.
- **products**: FLOPs of the matrix products in the log over those of the model's formula, without attention: 1 without
  recomputation; in brackets the plan's figure.
- **MFU**: expected by `titanlite/plan/speed.py` from products, bytes and links, not measured. Its constants are fitted
  on published runs, whose errors are within {error:.0%} (docs/plan.md). Model FLOPs over the peak in bf16.

| run | ranks | kernels | NCCL | exposed | waits | pageable | malloc | host | peak | reserved | plan | products | MFU |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|
"""
SETTINGS = f"""
Each run of titanlite has one sequence of 8,192 tokens a GPU unless its flags change it, and these flags before its own:
{PLAIN}

"""


def plan(case: Case) -> dict[str, float]:
    """Return the plan of a case: GiB of tensors on rank 0, MFU, FLOPs of products."""
    run = check_config(case.argv(), case.ranks, training=False)[1]
    found = make_plan(run, cluster_of(run, gpu=case.gpu), rank=0)
    args = run.model_args(128256)
    flops = run.spec.flops_per_token(args, 0) * run.batch.tokens_per_step / run.mesh.world_size
    step = _Step(run, cluster_of(run, gpu=case.gpu), CONSTANTS)
    sizes = [size for _, size in step.linears]
    again = sum(sizes[1::2]) / sum(sizes) if step.by_op else step.recomputed
    again *= 1 - 2 * 3 * step.width * args.vocab_size / run.spec.flops_per_token(args, 0)  # the head's
    figures = {"peak": found.memory.peak.total / GIB, "mfu": found.speed.mfu}
    return {**figures, "tflop": flops / 1e12, "products": 1 + again / 3}


def stored(file: Path = STORED) -> dict[str, Any]:
    """Return the runs that the file has."""
    return dict(json.loads(file.read_text())) if file.exists() else {}


def count_all(asked: argparse.Namespace, file: Path, runs: Mapping[str, Callable[[], dict[str, Any]]]) -> None:
    """Make the runs that are asked for, and write the file after each. One that fails loses its figures there."""
    for name, make in runs.items():
        if re.search(asked.only, name) and (asked.again or name not in stored(file)):
            began = time.monotonic()
            kept = stored(file)
            try:
                kept[name] = make()
                print(f"{name}: {kept[name]['kernels']:,} kernels, {time.monotonic() - began:.0f} s", flush=True)
            except RuntimeError as error:
                kept.pop(name, None)
                print(f"{name}: FAILED\n{error}", flush=True)
            kept = {name: kept[name] for name in runs if name in kept}
            file.write_text(json.dumps(kept, indent=1) + "\n")


def row(name: str, case: Case, found: dict[str, Any]) -> str:
    counts, depth = figures(found), f", {case.layers} layers" if case.layers else ""
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


def write_page() -> None:
    """Write the page of all runs that the file has."""
    own, theirs = stored(), stored(THEIRS)
    rows = [row(name, case, {**own[name], "plan": plan(case)}) for name, case in CASES.items() if name in own]
    rows += [row(name, Case(), found) for name, found in theirs.items()]
    flags = {name: f"{case.config}.toml, {case.gpu}: {case.flags}" for name, case in CASES.items() if name in own}
    flags |= {name: TORCHTITAN[name] for name in theirs}
    settings = [f"- {name}: {' '.join(text.split())}\n" for name, text in flags.items()]
    PAGE.write_text(HEAD.format(error=ERROR) + "".join(rows) + SETTINGS + "".join(settings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / ".nullgpu")
    parser.add_argument("--only", default="", help="regular expression of names")
    parser.add_argument("--again", action="store_true", help="also runs that the file has")
    parser.add_argument("--torchtitan", type=Path, metavar="WHERE", help="count torchtitan, which is in this folder")
    asked = parser.parse_args()
    subprocess.run([HERE / "setup.sh", asked.folder], check=True)
    count_all(asked, STORED, {name: partial(play, asked.folder, case) for name, case in CASES.items()})
    if asked.torchtitan:
        script = ROOT / "benchmarks/torchtitan_null.py"
        # The allocator's setting is that of its run_train.sh, and titanlite's own.
        own = {"PYTHONPATH": str(asked.torchtitan), "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        runs = {
            name: partial(run, asked.folder, script, "8", *text.split(), **own) for name, text in TORCHTITAN.items()
        }
        count_all(asked, THEIRS, runs)
    write_page()


if __name__ == "__main__":
    main()
