"""What nvidia-smi shows of a run beside what it needs, and how a plan says so."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from statistics import median

import pytest

from tests.nullgpu.cases import CASES, STORED
from titanlite.plan.hardware import cluster_of
from titanlite.plan.parts import CONTEXT, RESERVED_SHARDED, RESERVED_WHOLE, Reserved
from titanlite.plan.plan import Plan, make_plan
from titanlite.plan.text import plan_text
from titanlite.resolve.load import check_config
from titanlite.utils import Style


def _ratios(sharded: bool) -> list[float]:
    """Return reserved over allocated bytes of the runs on the null GPU whose weights are gathered,
    or are not.
    """
    ratios = []
    for name, found in json.loads(STORED.read_text()).items():
        mesh = check_config(CASES[name].argv(), CASES[name].ranks, training=False)[1].mesh
        if (mesh.weight_shards * mesh.dp_replicate > 1) is sharded:
            ratios.append(found["peak_reserved_gib"] / found["peak_allocated_gib"])
    return ratios


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("sharded", "stated"), [(True, RESERVED_SHARDED), (False, RESERVED_WHOLE)])
def test_shares_are_those_of_the_runs_on_the_null_gpu(sharded: bool, stated: Reserved) -> None:
    ratios = _ratios(sharded)
    assert stated.typical == round(median(ratios), 2)
    assert stated.low == math.floor(100 * min(ratios)) / 100
    assert stated.high == math.ceil(100 * max(ratios)) / 100


def _plan(*flags: str, ranks: int = 8) -> Plan:
    run = check_config(["--job.config_file=llama3_8b.toml", *flags], ranks, training=False)[1]
    return make_plan(run, cluster_of(run, gpu="h100-80g"))


def _with_memory(plan: Plan, size: float) -> Plan:
    return replace(
        plan, cluster=replace(plan.cluster, gpu=replace(plan.cluster.gpu, memory=round(size)))
    )


def test_reserved_memory_is_a_share_of_the_tensors_and_cuda_beside_them() -> None:
    plan = _plan()
    alone = _plan("--training.tensor_parallel_degree=8")
    assert plan.reserved.typical == pytest.approx(
        RESERVED_SHARDED.typical * plan.memory.peak.total + CONTEXT
    )
    assert alone.reserved.high == pytest.approx(
        RESERVED_WHOLE.high * alone.memory.peak.total + CONTEXT
    )
    found = plan.as_json()
    assert found["reserved_range_gib"][0] < found["reserved_gib"] < found["reserved_range_gib"][1]


def test_the_fit_is_judged_by_needed_memory_and_a_tight_one_says_what_it_costs() -> None:
    plan = _plan()
    roomy = _with_memory(plan, plan.reserved.typical + 1)
    tight = _with_memory(plan, plan.needed)
    short = _with_memory(plan, plan.needed - 1)
    assert [one.fits for one in (roomy, tight, short)] == [True, True, False]
    assert [one.tight for one in (roomy, tight, short)] == [False, True, False]
    texts = [" ".join(plan_text(one, Style(False)).split()) for one in (roomy, tight, short)]
    about = "in nvidia-smi ("
    assert all(about in text for text in texts)
    assert "the fit is judged by what is needed" in texts[0]
    assert "blocks back" not in texts[0]
    assert "may give blocks back and ask again, 2 to 13 times" in texts[1]
    assert "if the GPU had the room" in texts[2]
