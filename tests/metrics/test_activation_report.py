"""The start-up report's line about activations: what is recomputed, how much is kept, and where."""

from __future__ import annotations

import pytest
import torch
from titanlite.config.resolve import resolve
from titanlite.observe.report import start_report

from tests.training.harness import TINY
from titanlite.config.load import load
from titanlite.config.sections import ActivationCheckpoint
from titanlite.models import SHAPES, get_spec
from titanlite.parallel.activation_checkpoint import trace_block
from titanlite.utils import human_bytes

SPEC = get_spec("llama3")


def line(device: str, mode: str, offload: bool = False) -> tuple[str, str, str]:
    """The line, and the bytes that all blocks keep under these settings and without recomputation."""
    flags = [f"--activation_checkpoint.{flag}" for flag in mode.split()]
    flags += ["--activation_checkpoint.offload"] * offload
    plans = resolve(load(["--training.compile", *flags]), world_size=1, shapes=SHAPES)
    settings: ActivationCheckpoint = plans.config.activation_checkpoint
    args = [SPEC.block_names(TINY), settings, (4, 32), torch.device("cpu"), torch.float32]
    stats = trace_block(SPEC.build_on_meta(TINY), *args)
    lines = start_report(
        plans,
        parameters={"layers": 1},
        flops_per_token=1,
        device=device,
        world_size=1,
        versions={},
        tokenizer="",
        documents=1,
        tokens_per_epoch=1,
        memory_bytes=0,
        peak_flops=None,
        folders={},
        kept=stats,
    )
    (found,) = [line for line in lines if line.startswith("activations ")]
    return found, human_bytes(stats.total_bytes), human_bytes(2 * stats.plain_bytes)


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("mode=none", "all kept; "),
        ("mode=full", "2 of 2 blocks keep only their input and recompute 6 of 7 matmuls and attention; 64.0 KiB of "),
        ("selective_ac_option=2", "1 of 2 blocks keep only their input and recompute 6 of 7 matmuls and attention; "),
        (
            "mode=selective selective_ac_option=op",
            "by operation: each block saves 4 of 7 matmuls and attention and recomputes 3 of 7 matmuls; ",
        ),
        ("mode=budget memory_budget=0.3", "the compiler keeps 30% of what it would by itself; "),
    ],
)
def test_it_tells_what_is_kept_and_recomputed(mode: str, said: str) -> None:
    assert said in line("CPU (some model)", mode)[0]


@pytest.mark.parametrize("mode", ["mode=none", "mode=full", "mode=budget memory_budget=0.3"])
def test_it_tells_how_much_may_wait_in_host_memory(mode: str) -> None:
    found, kept, every = line("NVIDIA H100", mode, offload=True)
    assert f"; {kept} of {every} kept " in found or f"; {every} in 2 blocks " in found
    assert found.endswith(f"; up to {kept} of that wait in host memory")
    assert line("CPU (some model)", mode, offload=True)[0].endswith("; offload has no effect on a CPU")
