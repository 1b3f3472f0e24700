"""The time of a run beside its own plan, for `titanlite plan --measured`."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from titanlite.config.errors import bad_flag
from titanlite.plan.computing import computing, update
from titanlite.plan.hardware import Cluster, gpu_of_device
from titanlite.plan.memory import with_vocabulary
from titanlite.plan.rates import CONSTANTS
from titanlite.plan.speed import predict
from titanlite.plan.step_sizes import StepSizes
from titanlite.resolve.load import check_config
from titanlite.run.config import RunConfig
from titanlite.runs.read import read_run
from titanlite.runs.record import CONFIG

_PRODUCTS, _ATTENTION, _MEMORY, _OPTIMIZER = (
    "matrix products",
    "attention",
    "memory traffic",
    "optimizer",
)
#: Kind of work → operators and ranges of the host that do it. A collective's seconds contain the
#: wait for other ranks, so they are counted nowhere.
_KINDS = {
    _OPTIMIZER: re.compile(r"Optimizer\.step|aten::_foreach_norm"),
    "collectives": re.compile(r"c10d::|FSDP::all_gather |FSDP::post_backward_reduce "),
    _ATTENTION: re.compile(r"aten::_?\w*(attention|attn)"),
    _PRODUCTS: re.compile(r"aten::\w*mm(\.|$)"),
}
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def anchored(cluster: Cluster, folder: Path) -> Cluster:
    """Return the cluster with the rates that a run measured.

    Raises RunError for a folder without a run, ConfigError for a run without a whole step.
    """
    found = read_run(folder)
    attempt = found.attempts[-1] if found.attempts else {}
    ranks = attempt.get("ranks") or 1
    argv = [f"--job.config_file={folder / CONFIG}"]
    config, run = check_config(argv, ranks, training=False)
    run = with_vocabulary(run)
    last = max(found.step or 1, 1)
    first = max(start for start in run.legs if start <= last)
    # The first row of an attempt has its slow first step.
    begun = max(first, (attempt.get("first_step") or 0) + 1)
    rows = [row for row in found.training if row["step"] > begun and "seconds_per_step" in row]
    if not rows:
        raise bad_flag("--measured", f"{folder} has no step after its first one", "train longer")
    seconds = median(row["seconds_per_step"] for row in rows)
    device = str(attempt.get("device"))
    own = min(int(attempt.get("environment", {}).get("LOCAL_WORLD_SIZE", ranks)), ranks)
    gpu = gpu_of_device(device) or cluster.gpu
    here = replace(cluster, gpu=gpu, gpus_per_node=own, nodes=ranks // own)
    run = run.steady_at(last)
    expected = _expected(run, here)
    traces = folder / config.sections.profiling.save_traces_folder
    ratios: dict[str, float] = {}
    for name, measured in trace_parts(traces).items():
        if measured and expected.get(name):
            ratios[name] = measured / expected[name]
    rest = seconds / predict(run, _at(here, ratios)).step_seconds
    parts = "".join(f"{name} x {ratio:.3g}, " for name, ratio in ratios.items())
    note = f"seconds measured by {folder} ({device}): {parts}whole step x {rest:.3g}"
    return replace(_at(cluster, ratios), slower=rest, note=note)


def _expected(run: RunConfig, cluster: Cluster) -> dict[str, float]:
    step = StepSizes(run, cluster, CONSTANTS)
    work = computing(step)
    once = work.forward.plus(work.backward).plus(work.again)
    times = step.micro_batches * step.stage_share
    return {
        _PRODUCTS: times * once.products,
        _ATTENTION: times * once.attention,
        _MEMORY: times * (once.memory + once.casts),
        _OPTIMIZER: update(step),
    }


def _at(cluster: Cluster, ratios: Mapping[str, float]) -> Cluster:
    """Return the cluster with rates divided by ratios; one that is missing is 1."""
    gpu = cluster.gpu
    memory = ratios.get(_MEMORY, 1.0)
    changed = replace(
        gpu,
        sustained=gpu.sustained / ratios.get(_PRODUCTS, 1.0),
        attention=gpu.attention / ratios.get(_ATTENTION, 1.0),
        bandwidth=gpu.bandwidth / memory,
        update=gpu.update * memory / ratios.get(_OPTIMIZER, memory),
    )
    return replace(cluster, gpu=changed)


def trace_parts(folder: Path) -> dict[str, float]:
    """Return the seconds of a step by kind of work, by the newest trace of rank 0; empty: none.

    On a GPU those of its kernels, by the operators that launched them. On a CPU memory traffic is
    the rest of the step.
    """
    traces = sorted(
        folder.glob("iteration_*/rank0_trace.json"), key=lambda path: path.stat().st_mtime
    )
    if not traces:
        return {}
    try:
        events = json.loads(traces[-1].read_bytes())["traceEvents"]
        return _parts([event for event in events if event.get("ph") == "X"])
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        message = f"{traces[-1]} is no whole trace: {error!r}"
        raise bad_flag("--measured", message, "remove it") from None


def _parts(events: list[dict[str, Any]]) -> dict[str, float]:
    host = [event for event in events if event["cat"] in ("cpu_op", "user_annotation")]
    host.sort(key=lambda event: (event["ts"], -event["dur"]))
    steps = [event for event in host if event["name"].startswith("ProfilerStep")]
    kinds: dict[Any, str] = {}
    #: Thread → end and kind of the outermost operator with a kind.
    running: dict[Any, tuple[float, str]] = {}
    busy: Counter[str] = Counter()
    for event in host:
        end, kind = running.get(event["tid"], (0.0, ""))
        if event["ts"] >= end:
            kind = next((kind for kind, name in _KINDS.items() if name.match(event["name"])), "")
            if kind:
                running[event["tid"]] = event["ts"] + event["dur"], kind
                busy[kind] += event["dur"]
        kinds[event["args"].get("External id")] = kind
    busy[_MEMORY] = sum(event["dur"] for event in steps) - busy.total()
    kernels = [event for event in events if event["cat"] in _ON_DEVICE]
    if kernels:
        busy.clear()
    for event in kernels:
        kind = kinds.get(event["args"].get("External id")) or _MEMORY
        busy["collectives" if "nccl" in event["name"] else kind] += event["dur"]
    return {name: busy[name] / len(steps) / 1e6 for name in busy}
