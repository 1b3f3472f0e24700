"""Keys of sharding: accepted values, and values refused before the build."""

from __future__ import annotations

import pytest
import torch

from titanlite.assembly.preflight import check_model
from titanlite.config.errors import ConfigError
from titanlite.config.load import load
from titanlite.resolve.load import resolve
from titanlite.run.config import RunConfig


def run_of(*flags: str) -> RunConfig:
    return resolve(load(flags), 4)[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--training.fsdp_units=Atention"],
            "training.fsdp_units: no FSDP group can be made of Atention",
        ),
        (
            ["--training.fsdp_units=Attention", "--training.compile"],
            (
                "training.fsdp_units: makes layers.0.attention an FSDP group, but "
                "training.compile makes one graph"
            ),
        ),
        (
            ["--training.fsdp_units=Linear", "--activation_checkpoint.selective_ac_option=op"],
            (
                "makes layers.0.attention.wq an FSDP group, but "
                "activation_checkpoint.selective_ac_option"
            ),
        ),
        (
            ["--training.fsdp_units=Attention", "--activation_checkpoint.offload"],
            (
                "makes layers.0.attention an FSDP group, but activation_checkpoint.offload would "
                "send its gathered weights"
            ),
        ),
    ],
)
def test_units_that_do_not_fit_the_model_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_model(run_of(*flags), 512)
    check_model(run_of("--training.fsdp_units=Attention"), 512)
    check_model(run_of("--training.fsdp_units=Block", "--training.compile"), 512)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may have float8 products")
def test_a_loop_of_ones_own_is_told_that_a_cpu_has_no_float8_products() -> None:
    flags = ("--training.seq_len=64", "--float8.enable_float8_linear")
    with pytest.raises(ConfigError, match="a CPU has no float8 products"):
        check_model(run_of(*flags), 512)
    check_model(run_of(*flags, "--float8.emulate"), 512)
