"""Memory by formula, against peaks that `titanlite.plan.trace` found."""

import pytest

from titanlite.fit import check_config
from titanlite.plan.memory import estimate

GIB = 2**30
BLOCKS_6 = ("--model.overrides.n_layers=6", "--training.global_batch_size=8", "--training.loss_chunks=8")


def plan(config: str, ranks: int, *flags: str):
    argv = [f"--job.config_file=train_configs/{config}.toml", *flags]
    return estimate(check_config(argv, ranks, training=False)[1])


@pytest.mark.parametrize(
    ("traced", "flags"),
    [
        (15.9014, ["--activation_checkpoint.mode=none"]),
        (9.8952, ["--activation_checkpoint.mode=full"]),
        (12.4323, ["--activation_checkpoint.selective_ac_option=op"]),
        (12.8983, ["--activation_checkpoint.selective_ac_option=2"]),
    ],
)
def test_the_peak_is_that_of_the_trace(traced, flags):
    assert plan("llama3_8b", 8, *BLOCKS_6, *flags).peak.total / GIB == pytest.approx(traced, rel=0.01)
