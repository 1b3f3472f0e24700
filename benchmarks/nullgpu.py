"""Count the CUDA calls of a step without a GPU: the runs of `tests/nullgpu/cases.py`, beside their
plans.

    python benchmarks/nullgpu.py [--folder .nullgpu] [--only REGEX] [--again] [--torchtitan WHERE]

It writes tests/nullgpu/expected.json after each run, and benchmarks/results/nullgpu.md. Runs that
the file has are not made again without --again. With torchtitan in WHERE (see torchtitan_null.py)
that is counted too, into another file.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.plan_speed import POINTS, SHARES, Point, gpu_of, rate  # noqa: E402
from tests.nullgpu.cases import CASES, HERE, PLAIN, STORED, Case, figures, play, run  # noqa: E402
from titanlite.plan.hardware import DEFAULT_NETWORK, Gpu, cluster_of, find_gpu  # noqa: E402
from titanlite.plan.memory import estimate  # noqa: E402
from titanlite.plan.parts import GIB  # noqa: E402
from titanlite.plan.plan import make_plan  # noqa: E402
from titanlite.plan.rates import CONSTANTS  # noqa: E402
from titanlite.plan.speed import ERROR  # noqa: E402
from titanlite.plan.step_sizes import StepSizes  # noqa: E402
from titanlite.resolve.load import check_config  # noqa: E402

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
#: Published runs of torchtitan's 8B with op AC, and its flags for the words of `Point.flags`.
PUBLISHED = {
    f"published: {point.flags}, {point.gpus} {point.gpu}": point
    for point in POINTS
    if point.config == "llama3_1_8b"
    and point.gpus <= 32
    and point.gpu in ("H100 500 W", "h100-80g")
    if " op " in point.flags and " tp=" not in point.flags
}
_FLOAT8 = "--quantize.linear.float8"
_WORDS = {
    "compile": "--compile.enable",
    "float8": "--model.converters=quantize.linear.float8",
    "gather8": (
        f"{_FLOAT8}.enable_fsdp_float8_all_gather "
        f"{_FLOAT8}.precompute_float8_dynamic_scale_for_fsdp"
    ),
}
HEAD = """# Counted on the null GPU

Made by `python benchmarks/nullgpu.py`; [tests/nullgpu](../../tests/nullgpu/README.md) describes it and its
limits. Torch 2.13.0 (CUDA 13), rank 0, at full depth unless a row says layers. Each row is one step that is not logged.
Settings are below the table.

- **kernels**, **NCCL**: launches and collectives of the step. **exposed**: collectives beside which no matrix product
  can run. **waits**: of the host for the compute stream or the device. **pageable**: copies that stop the loop.
- **malloc**: cudaMalloc and cudaFree. **host**: processor seconds of one step on a busy machine without a GPU:
  an upper bound of the cost of launches.
- **peak**: GiB of the caching allocator, allocated and reserved; **plan**: the tensors that `titanlite plan` expects, and
  its error against **peak**. Formulas know eager code: of a compiled run they give an upper bound.
- **products**: FLOPs of the matrix products in the log over those of the model's formula, without attention: 1 without
  recomputation; in brackets the plan's figure.
- **MFU**: expected by `titanlite/plan/speed.py` from products, bytes and links, not measured. Its constants are fitted
  on published runs, whose errors are within {error:.0%} (docs/plan.md). Model FLOPs over the peak in bf16.
- **log**: the same from the log of kernels (see the end). "–": not counted, or a pipeline's bubbles, updates on the
  host or places of groups are not in rank 0's log, which has no sizes of experts' products either.
- Rows of one H200 are those of `benchmarks/gpu.sh quick`: bf16, the reference of the gradients, float8, the rival, Kahan.
- An all-to-all of 8 ranks counts as 8 sends and 8 receives. Experts' rows are even.

| run | ranks | kernels | NCCL | exposed | waits | pageable | malloc | host | peak | reserved | plan | products | MFU | log |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|
"""  # noqa: E501
SETTINGS = f"""
Each run of titanlite has one sequence of 8,192 tokens a GPU unless its flags change it
(DeepSeek two of 4,096, Qwen3 one of 4,096), and these flags before its own:
{PLAIN}

"""

PUBLISHED_HEAD = f"""
## Roofline from the log

Seconds of a step are the sum of:

- each product in the log, at the rate that `titanlite plan` takes for its sizes; attention's FLOPs;
- bytes of all other kernels at {CONSTANTS.memory:.0%} of the memory's bandwidth;
- collectives beside which no product runs, at {CONSTANTS.link:.0%} of the links;
- {CONSTANTS.contention:.0%} of the other collectives' time.

Each kernel reads its inputs and writes its outputs once (`tests/nullgpu/traffic.py`):
torch's operators in eager code, inductor's kernels in compiled code. FLOPs, bytes and collectives
are counted. Shares of the peaks are the plan's, fitted on published runs: the peaks of single
kernels are higher. Launches are taken to be hidden.

Llama 3 8B of 8,192 tokens, played by torchtitan 0.2.2 itself; tokens/s per GPU:

| flags | GPUs | published | by log | error | `titanlite plan` | error | GB moved |
|---|---|---|---|---|---|---|---|
"""


def plan(case: Case) -> dict[str, float]:
    """Return the plan of a case: GiB of tensors on rank 0, MFU, FLOPs of products."""
    run = check_config(case.argv(), case.ranks, training=False)[1]
    found = make_plan(run, cluster_of(run, gpu=case.gpu), lambda run, _: estimate(run, 0))
    args = run.model_args(case.vocabulary)
    flops = run.spec.flops_per_token(args, 0) * run.batch.tokens_per_step / run.mesh.world_size
    step = StepSizes(run, cluster_of(run, gpu=case.gpu), CONSTANTS)
    sizes = [linear.weights for linear in step.linears]
    again = sum(sizes[1::2]) / sum(sizes) if step.by_op else step.recomputed * (1 - step.left_out)
    again *= 1 - 2 * 3 * step.width * args.vocab_size / run.spec.flops_per_token(
        args, 0
    )  # the head's
    figures = {
        "peak": found.memory.peak.total / GIB,
        "mfu": found.speed.mfu,
        "seconds": found.speed.step_seconds,
    }
    figures["grouped"] = run.spec.experts is not None
    return {**figures, "tflop": flops / 1e12, "products": 1 + again / 3}


def roofline(found: Mapping[str, Any], gpu: Gpu) -> float:
    """Return the seconds of a step on `gpu`, by the log: products, attention, bytes, and
    collectives that are bare.

    Rates are the shares of the peaks that `titanlite plan` takes; what it guesses from the model is
    counted here.
    """
    k, rate = CONSTANTS, gpu.bf16 * gpu.sustained
    # By cudaDataType: float32, bfloat16, two of float8.
    rates = {
        0: rate / 8,
        14: rate,
        **dict.fromkeys((28, 29), (gpu.float8 or 0) * k.float8 * gpu.sustained),
    }
    busy = found["attention_tflop"] * 1e12 / (gpu.bf16 * gpu.attention)
    busy += found["moved_gb"] * 1e9 / (gpu.bandwidth * k.memory)
    for shape, count in found["shapes"].items():
        *sizes, kind = map(int, shape.split())
        busy += count * 2 * prod(size + k.edge for size in sizes) / rates[kind]
    bare = hidden = 0.0
    for kind, (count, exposed) in found["sent"].items():
        ranks, size = map(int, kind.split())
        nodes = -(-ranks // 8)
        seconds = size / (gpu.link * k.link)
        if nodes > 1:  # bytes of other machines reach a machine once, by its network
            seconds = max(
                seconds, size * (ranks - 8) / (ranks - 1) / (8 * DEFAULT_NETWORK * k.network)
            )
        bare, hidden = bare + exposed * seconds, hidden + (count - exposed) * seconds
    return busy + bare + max(0.0, hidden - busy) + k.contention * min(hidden, busy)


def stored(file: Path = STORED) -> dict[str, Any]:
    """Return the runs that the file has."""
    return dict(json.loads(file.read_text())) if file.exists() else {}


def lines(runs: Mapping[str, Any]) -> str:
    """Return JSON with a line for each run."""
    return (
        "{\n"
        + ",\n".join(f"{json.dumps(name)}: {json.dumps(found)}" for name, found in runs.items())
        + "\n}\n"
    )


def count_all(
    asked: argparse.Namespace, file: Path, runs: Mapping[str, Callable[[], dict[str, Any]]]
) -> None:
    """Make the runs that are asked for, and write the file after each.

    One that fails loses its figures there.
    """
    for name, make in runs.items():
        if re.search(asked.only, name) and (asked.again or name not in stored(file)):
            began = time.monotonic()
            kept = stored(file)
            try:
                kept[name] = make()
                print(
                    f"{name}: {kept[name]['kernels']:,} kernels, {time.monotonic() - began:.0f} s",
                    flush=True,
                )
            except RuntimeError as error:
                kept.pop(name, None)
                print(f"{name}: FAILED\n{error}", flush=True)
            kept = {name: kept[name] for name in runs if name in kept}
            file.write_text(lines(kept))


def row(name: str, case: Case, found: dict[str, Any]) -> str:
    counts, depth = figures(found), f", {case.layers} layers" if case.layers else ""
    cells: list[Any] = [
        name + depth,
        case.ranks,
        f"{found['kernels']:,}",
        sum(found["nccl"].values()),
    ]
    cells += [found["exposed"], counts["syncs"] + counts["devsync"], counts["pageable"]]
    cells += [counts["malloc"] + counts["free"], f"{found['processor_seconds']:.2f}"]
    cells += [f"{found[f'peak_{kind}_gib']:.1f}" for kind in ("allocated", "reserved")]
    expected = found.get("plan")
    if expected:
        products = f"{found['gemm_tflop'] / expected['tflop']:.2f} ({expected['products']:.2f})"
        cells += [
            f"{expected['peak']:.1f} ({expected['peak'] / found['peak_allocated_gib'] - 1:+.1%})",
            "–" if expected["grouped"] else products,
            f"{expected['mfu']:.1%}",
        ]
        is_whole = not expected["grouped"] and logged_whole(case, found)
        if "moved_gb" in found and is_whole:
            # Both figures have the same model FLOPs.
            cells.append(
                f"{expected['mfu'] * expected['seconds'] / roofline(found, find_gpu(case.gpu)):.1%}"
            )
    return "| " + " | ".join(map(str, [*cells, *["–"] * (15 - len(cells))])) + " |\n"


def logged_whole(case: Case, found: Mapping[str, Any]) -> bool:
    """Return whether a step's time follows from rank 0's log: no pipeline or update on the host,
    and known groups.
    """
    groups = {kind.split()[0] for kind in found["sent"]} - {"1"}
    return not re.search("pipeline|cpu_offload", case.flags) and (
        case.ranks <= 8 or len(groups) == 1
    )


def batch_of(point: Point) -> int:
    return int(point.flags.partition("batch=")[2][0])


def point_row(point: Point, found: Mapping[str, Any]) -> str:
    """Return the line of a published run: tokens/s per GPU by the log and by the plan, with
    errors.
    """
    tokens, values = 8192 * batch_of(point), {**asdict(CONSTANTS), **SHARES}
    by = tokens / roofline(found, gpu_of(point, values)), rate(point, point.run(), values)
    shown = " | ".join(f"{one:,.0f} | {one / point.tokens - 1:+.1%}" for one in by)
    return (
        f"| {point.flags} | {point.gpus} {point.gpu} | {point.tokens:,.0f} | {shown} | "
        f"{found['moved_gb']:,.0f} |\n"
    )


def write_page() -> None:
    """Write the page of all runs that the file has."""
    own, theirs = stored(), stored(THEIRS)
    rows = [
        row(name, case, {**own[name], "plan": plan(case)})
        for name, case in CASES.items()
        if name in own
    ]
    rows += [row(name, Case(), found) for name, found in theirs.items() if name in TORCHTITAN]
    points = [point_row(point, theirs[name]) for name, point in PUBLISHED.items() if name in theirs]
    flags = {
        name: f"{Path(case.config).name}.toml, {case.gpu}: {case.flags}"
        for name, case in CASES.items()
        if name in own
    }
    flags |= {name: text for name, text in TORCHTITAN.items() if name in theirs}
    settings = [f"- {name}: {' '.join(text.split())}\n" for name, text in flags.items()]
    PAGE.write_text(
        "".join([HEAD.format(error=ERROR), *rows, SETTINGS, *settings, PUBLISHED_HEAD, *points])
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=ROOT / ".nullgpu")
    parser.add_argument("--only", default="", help="regular expression of names")
    parser.add_argument("--again", action="store_true", help="also runs that the file has")
    parser.add_argument(
        "--torchtitan", type=Path, metavar="WHERE", help="count torchtitan, which is in this folder"
    )
    asked = parser.parse_args()
    subprocess.run([HERE / "setup.sh", asked.folder], check=True)
    options = ("--traffic",)
    count_all(
        asked,
        STORED,
        {name: partial(play, asked.folder, case, options=options) for name, case in CASES.items()},
    )
    if asked.torchtitan:
        script = ROOT / "benchmarks/torchtitan_null.py"
        # The allocator's setting is that of its run_train.sh, and titanlite's own.
        own = {
            "PYTHONPATH": str(asked.torchtitan),
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        }
        runs = {
            name: partial(run, asked.folder, script, "8", *text.split(), **own)
            for name, text in TORCHTITAN.items()
        }
        # Its published runs had 96 GB. A loop that draws weights reads the device until it finds
        # zeros.
        own |= {"NULLGPU_GIB": "94", "NULLGPU_ZERO": "1"}
        for name, point in PUBLISHED.items():
            words = " ".join(_WORDS.get(word, "") for word in point.flags.split())
            text = f"{_8B[:-1]}{batch_of(point)} {_OP} {words}"
            runs[name] = partial(run, asked.folder, script, str(point.gpus), *text.split(), **own)
        count_all(asked, THEIRS, runs)
    write_page()


if __name__ == "__main__":
    main()
