"""Fit the constants of `titanlite.plan.rates` on published runs, and print the errors as a table of
titanlite/plan/FORMULAS.md.

    # with the library's constants, and with one step of a fit without the run's source
    python benchmarks/plan_speed.py
    python benchmarks/plan_speed.py --fit         # the same from fitted values, which it prints
    python benchmarks/plan_speed.py --fit h200    # only those whose names match are fitted

A source is held out as a whole: its runs share machine and software. The two of titanlite are those
of benchmarks/results/gpu.json.

The sources give numbers only. The rest is assumed: runs on A100 are eager, on machines of 8 with
200 Gbit/s for each GPU; FSDP alone gathers float8 weights in float8; pipelines have 8
micro-batches. "H100 500 W" has memory of 2.4 TB/s, as its source says.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from statistics import median

import numpy as np

from titanlite.plan.hardware import DEFAULT_NETWORK, GPUS, Cluster, Gpu
from titanlite.plan.rates import CONSTANTS, Constants
from titanlite.plan.speed import ERROR, predict
from titanlite.resolve.load import check_config
from titanlite.run.config import RunConfig

TITAN_2024 = "torchtitan, benchmarks/llama3_h100_202412"
TITAN_2025 = "torchtitan, benchmarks/asyncTP_llama3_h100_2025-06"
TITAN_A100 = "torchtitan, docs/performance.md of 2024"
TRAINY = "torchtitan, benchmarks/llama3_8b_h200_2025-06"
AWS = "AWS, torchtitan on SageMaker, 2024"
OURS = "titanlite, benchmarks/results/gpu.json"


@dataclass(frozen=True)
class Point:
    """One published run."""

    source: str
    gpu: str
    gpus: int
    config: str
    #: Keys and values of a command line.
    flags: str
    #: Per second and GPU.
    tokens: float

    def run(self) -> RunConfig:
        argv = [
            f"--job.config_file={self.config}.toml",
            "--training.global_batch_size=-1",
            "--training.gradient_sync=last",
        ]
        for flag in self.flags.split():
            name, _, value = flag.partition("=")
            argv += [SHORT[name].format(value)] if name in SHORT else [f"--{flag}"]
        return check_config(" ".join(argv).split(), self.gpus, training=False)[1]


#: Short names of keys.
SHORT = {
    "batch": "--training.batch_size={}",
    "seq": "--training.seq_len={}",
    "compile": "--training.compile=true",
    "eager": "--training.compile=false",
    "chunks": "--training.loss_chunks={}",
    "float8": "--float8.enable_float8_linear=true",
    "gather8": (
        "--float8.enable_fsdp_float8_all_gather=true "
        "--float8.precompute_float8_dynamic_scale_for_fsdp=true"
    ),
    "none": "--activation_checkpoint.mode=none",
    "full": "--activation_checkpoint.mode=full",
    "op": "--activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option=op",
    "layer": "--activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option=2",
    "tp": "--training.tensor_parallel_degree={}",
    "cp": "--experimental.context_parallel_degree={}",
    "pp": (
        "--experimental.pipeline_parallel_degree={} --experimental.pipeline_parallel_microbatches=8"
    ),
    "interleaved": "--experimental.pipeline_parallel_schedule=Interleaved1F1B",
    "async": "--experimental.enable_async_tensor_parallel=true",
}

_G, _P = "H100 500 W", "h100-80g"
_8B, _70B, _405B = "llama3_1_8b", "llama3_1_70b", "llama3_1_405b"
_F8 = "compile float8 gather8"
_T8, _4D = (
    "compile full batch=16 seq=8192 tp=8",
    "compile float8 async full seq={} batch={} tp=8 pp=8",
)
POINTS = (
    Point(TITAN_2024, _G, 8, _8B, "eager op batch=2 seq=8192", 5762),
    Point(TITAN_2024, _G, 8, _8B, "compile op batch=2 seq=8192", 6667),
    Point(TITAN_2024, _G, 8, _8B, f"{_F8} op batch=2 seq=8192", 8532),
    Point(TITAN_2024, _G, 128, _8B, "eager op batch=2 seq=8192", 5605),
    Point(TITAN_2024, _G, 128, _8B, "compile op batch=2 seq=8192", 6514),
    Point(TITAN_2024, _G, 128, _8B, f"{_F8} op batch=2 seq=8192", 8380),
    Point(TITAN_2024, _G, 8, _8B, f"{_F8} full batch=1 seq=32768", 3890),
    Point(TITAN_2024, _G, 8, _8B, f"{_F8} full batch=1 seq=65536 cp=2", 2540),
    Point(TITAN_2024, _G, 8, _8B, f"{_F8} full batch=1 seq=131072 cp=4", 1071),
    Point(TITAN_2024, _G, 8, _8B, f"{_F8} full batch=1 seq=262144 cp=8", 548),
    Point(TITAN_2024, _G, 256, _70B, f"{_T8} float8", 829),
    Point(TITAN_2024, _G, 256, _70B, f"{_T8} float8 async", 876),
    Point(TITAN_2024, _G, 512, _405B, _4D.format(8192, 32), 100),
    Point(TITAN_2024, _G, 512, _405B, f"{_4D.format(8192, 32)} interleaved", 128),
    Point(TITAN_2024, _G, 512, _405B, _4D.format(32768, 8), 76),
    Point(TITAN_2024, _G, 512, _405B, f"{_4D.format(65536, 8)} cp=2", 47),
    Point(TITAN_2024, _G, 512, _405B, f"{_4D.format(131072, 8)} cp=4", 31),
    Point(TITAN_2024, _G, 512, _405B, f"{_4D.format(262144, 8)} cp=8", 16),
    Point(TITAN_2025, _G, 256, _70B, _T8, 597.3),
    Point(TITAN_2025, _G, 256, _70B, f"{_T8} async", 652.4),
    Point(TITAN_2025, _G, 256, _70B, f"{_T8} float8", 809.8),
    Point(TITAN_2025, _G, 256, _70B, f"{_T8} float8 async", 942.4),
    Point(TITAN_2025, _G, 64, _8B, "compile op batch=12 seq=8192 tp=8", 4378),
    Point(TITAN_2025, _G, 64, _8B, "compile op batch=12 seq=8192 tp=8 async", 4809.4),
    Point(TITAN_2025, _G, 64, _8B, "compile op batch=12 seq=8192 tp=8 float8", 5078.1),
    Point(TITAN_2025, _G, 64, _8B, "compile op batch=12 seq=8192 tp=8 float8 async", 5570.1),
    Point(TITAN_A100, _G, 128, _405B, "eager full batch=2 seq=8192 tp=8", 109),
    Point(TITAN_A100, _G, 128, _405B, "compile float8 full batch=2 seq=8192 tp=8", 177),
    Point(TITAN_A100, _G, 128, _405B, "compile float8 full batch=2 seq=8192 tp=8 async", 185),
    Point(AWS, _P, 32, _8B, "eager op batch=1 seq=8192", 6475),
    Point(AWS, _P, 32, _8B, "compile op batch=1 seq=8192", 7166),
    Point(AWS, _P, 32, _8B, "compile op batch=1 seq=8192 float8", 8624),
    Point(AWS, _P, 32, _8B, f"{_F8} op batch=1 seq=8192", 8950),
    Point(TRAINY, "h200-141g", 32, _8B, f"{_F8} op batch=2 seq=8192", 10938),
    Point(TRAINY, "h200-141g", 64, _8B, f"{_F8} op batch=2 seq=8192", 10753),
    Point(OURS, "h200-141g", 1, _8B, "eager full batch=1 seq=8192 chunks=8", 7395),
    Point(OURS, "h200-141g", 1, "llama2_7b", "eager full batch=8 seq=4096", 9529),
    Point(TITAN_A100, "a100-80g", 64, _8B, "eager layer batch=1 seq=8192", 2904),
    Point(TITAN_A100, "a100-80g", 64, _8B, "eager op batch=1 seq=8192", 2973),
    Point(TITAN_A100, "a100-80g", 64, _70B, "eager full batch=1 seq=8192", 331),
    Point(TITAN_A100, "a100-80g", 64, "llama2_13b", "eager none batch=2 seq=4096", 2162),
    Point(TITAN_A100, "a100-80g", 64, "llama2_13b", "eager layer batch=2 seq=4096", 1914),
    Point(TITAN_A100, "a100-80g", 64, "llama2_13b", "eager op batch=2 seq=4096", 1904),
    Point(TITAN_A100, "a100-80g", 64, "llama2_70b", "eager op batch=1 seq=4096", 355),
    Point(TITAN_A100, "a100-80g", 64, "llama2_70b", "eager full batch=2 seq=4096", 353),
)
#: Fitted beside `Constants`: shares of the peak by kind of GPU. Under 500 W attention is slower as
#: products are; on H200 both are faster.
_H100, _H200, _A100 = GPUS["h100-80g"], GPUS["h200-141g"], GPUS["a100-80g"]
SHARES = {
    "h100 sustained": _H100.sustained,
    "h100 attention": _H100.attention,
    "h100 at 500 W": 0.972,
    "h200": _H200.sustained / _H100.sustained,
    "a100 sustained": _A100.sustained,
    "a100 attention": _A100.attention,
}
#: No share of a bandwidth or of power is above these.
MOST = {"link": 0.95, "memory": 0.95, "network": 0.95, "contention": 0.5, "h100 at 500 W": 1.0}


def gpu_of(point: Point, shares: Mapping[str, float]) -> Gpu:
    kind = "a100" if point.gpu.startswith("a100") else "h100"
    gpu = replace(_H100, bandwidth=2.4e12) if point.gpu == _G else GPUS[point.gpu]
    factor = {_G: shares["h100 at 500 W"], _H200.key: shares["h200"]}.get(point.gpu, 1.0)
    sustained, attention = (
        factor * shares[f"{kind} {name}"] for name in ("sustained", "attention")
    )
    return replace(gpu, sustained=sustained, attention=attention)


def rate(point: Point, run: RunConfig, values: Mapping[str, float]) -> float:
    """Return the predicted tokens per second and GPU."""
    gpu = gpu_of(point, values)
    network = 8 * (25e9 if point.gpu.startswith("a100") else DEFAULT_NETWORK)
    constants = Constants(**{name: value for name, value in values.items() if name not in SHARES})
    machine = min(point.gpus, 8)
    cluster = Cluster(gpu, machine, point.gpus // machine, network)
    return predict(run, cluster, constants).tokens_per_second


class Fit:
    """Least squares of logarithms, with each value kept near its start."""

    #: Standard deviations of logarithms: of a prediction, and of a value around its start.
    error, prior = 0.07, 0.2

    def __init__(self, names: str = "") -> None:
        self.runs = [point.run() for point in POINTS]
        self.start = {**asdict(CONSTANTS), **SHARES}
        self.names = [name for name in self.start if re.search(names, name)]

    def values(self, x: np.ndarray) -> dict[str, float]:
        found = dict(self.start)
        for name, move in zip(self.names, x, strict=True):
            found[name] *= math.exp(move)
        return {name: min(value, MOST.get(name, value)) for name, value in found.items()}

    def errors(self, x: np.ndarray) -> np.ndarray:
        values = self.values(x)
        return np.array(
            [
                math.log(rate(p, run, values) / p.tokens)
                for p, run in zip(POINTS, self.runs, strict=True)
            ]
        )

    def slopes(self, x: np.ndarray, found: np.ndarray) -> np.ndarray:
        step = 0.02
        moved = [self.errors(x + step * axis) - found for axis in np.eye(len(x))]
        return np.stack(moved, axis=1) / step

    def solve(self, x: np.ndarray, found: np.ndarray, slopes: np.ndarray) -> np.ndarray:
        """Return the next values: one step of Gauss and Newton."""
        a = slopes.T @ slopes / self.error**2 + np.eye(len(x)) / self.prior**2
        b = slopes.T @ found / self.error**2 + x / self.prior**2
        return x - np.clip(np.linalg.solve(a, b), -0.3, 0.3)

    def fit(self, turns: int = 6) -> np.ndarray:
        x = np.zeros(len(self.names))
        for _ in range(turns):
            found = self.errors(x)
            x = self.solve(x, found, self.slopes(x, found))
        return x

    def left_out(self, x: np.ndarray) -> list[float]:
        """Return each point's relative error after a step of the fit without its source, from the
        fit with all.
        """
        found, result = self.errors(x), []
        slopes = self.slopes(x, found)
        for point, run in zip(POINTS, self.runs, strict=True):
            rest = [j for j, other in enumerate(POINTS) if other.source != point.source]
            values = self.values(self.solve(x, found[rest], slopes[rest]))
            result.append(rate(point, run, values) / point.tokens - 1)
        return result


def print_anchored(ratios: Mapping[str, Sequence[float]]) -> None:
    """Print the errors where one run's step scales the plan of another of its source, as
    `titanlite plan --measured` does without a trace. ratios: predicted over published.
    """
    print("\n| source | pairs | median error | by one step | worse in |\n|---|---|---|---|---|")
    for source, found in ratios.items():
        pairs = list(permutations(found, 2))
        before = [abs(other - 1) for _, other in pairs]
        after = [abs(other / one - 1) for one, other in pairs]
        worse = sum(two > one for one, two in zip(before, after, strict=True))
        cells = f"{len(pairs)} | {median(before):.1%} | {median(after):.1%} | {worse}"
        print(f"| {source} | {cells} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fit", nargs="?", const="", metavar="NAMES", help="values to fit (all)")
    fitting = parser.parse_args().fit
    fit = Fit(fitting or "")
    x = np.zeros(len(fit.names)) if fitting is None else fit.fit()
    values = fit.values(x)
    left = fit.left_out(x)
    if fitting is not None:
        print(
            "\n".join(
                f"{name}: {fit.start[name]:.3g} -> {value:.3g}"
                for name, value in values.items()
                if name in fit.names
            ),
            "\n",
        )
    print("| run | GPUs | published | predicted | error | left out |\n|---|---|---|---|---|---|")
    errors = []
    ratios: dict[str, list[float]] = defaultdict(list)
    for point, run, loo in zip(POINTS, fit.runs, left, strict=True):
        found = rate(point, run, values)
        errors.append(found / point.tokens - 1)
        ratios[f"{point.source}, {point.gpu}"].append(found / point.tokens)
        numbers = f"{point.tokens:,.0f} | {found:,.0f} | {errors[-1]:+.1%} | {loo:+.1%}"
        print(f"| {point.config} {point.flags} | {point.gpus} x {point.gpu} | {numbers} |")
    for name, some in (("all", errors), ("left out", left)):
        sizes = sorted(map(abs, some))
        near = sum(size <= ERROR for size in sizes)
        middle, largest = sizes[len(sizes) // 2], sizes[-1]
        print(
            f"\n{name}: median {middle:.1%}, largest {largest:.1%}, within {ERROR:.0%}: {near} of "
            f"{len(sizes)}"
        )
    print_anchored(ratios)


if __name__ == "__main__":
    main()
