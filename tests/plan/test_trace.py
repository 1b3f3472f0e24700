"""A trace runs the real step at real sizes, without data."""

from __future__ import annotations

from titanlite.fit import check_config
from titanlite.plan.trace import trace


def test_parameters_and_optimizer_of_a_rank_are_its_shards():
    run = check_config(["--job.config_file=debug_model.toml"], 4, training=False)[1]
    memory = trace(run, device="cpu")
    weights = memory.peak.parts["parameters"]
    assert abs(memory.peak.parts["optimizer"] / weights - 2) < 0.02
    assert memory.moments[-1].phase == "optimizer"
