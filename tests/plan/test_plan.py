"""The needs of a run besides the memory of a step: checkpoints, disk, host memory, time."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import pytest
import torch

from tests.support.run_of import run_from
from titanlite.cli import main as cli
from titanlite.config.model_sections import Optimizer
from titanlite.plan.hardware import cluster_of
from titanlite.plan.memory import estimate, with_vocabulary
from titanlite.plan.optimizer import update_bytes
from titanlite.plan.parts import GIB
from titanlite.plan.plan import checkpoint_bytes, make_plan
from titanlite.plan.text import plan_text, verdict
from titanlite.runs.text_tables import Style


@pytest.mark.skipif(version("torch") < "2.12", reason="no step of AdamW on the meta device")
@pytest.mark.parametrize(
    ("flags", "dtype", "each"),
    [
        (["name=AdamW"], "float32", 12),
        (["name=AdamW"], "bfloat16", 6),
        (["name=AnyPrecisionAdamW"], "float32", 10),
        (["name=AnyPrecisionAdamW", "kahan=true", "momentum_dtype=bfloat16"], "bfloat16", 8),
        (["name=Muon"], "float32", 0),
    ],
    ids=str,
)
def test_the_size_of_a_checkpoint_is_that_of_its_tensors(flags, dtype, each):
    """each: bytes of a parameter and its state; a gradient is as wide as its weight."""
    from titanlite.checkpoint.state_dict import gather
    from titanlite.optim.optimizer import build_optimizer

    dim = 2048 if each else 512  # blocks of 256 are of such widths; Muon's step is cubic
    wide = [f"--model.overrides.dim={dim}", "--model.overrides.n_layers=1"]
    optimizer = [f"--optimizer.{flag}" for flag in flags]
    flags = [*optimizer, f"--training.dtype={dtype}", *wide]
    run = with_vocabulary(run_from("debug_model.toml", 1, *flags))
    args = run.model_args()
    with torch.device("meta") as device:  # sizes alone: Muon takes minutes for such matrices
        model = run.spec.build(args).to(getattr(torch, dtype))
        names = run.spec.block_names(args)
        tensors = gather(
            model, build_optimizer(dict(model.named_parameters()), run.optimizer, device, names)
        ).values()
    size = sum(t.nbytes for t in tensors)
    assert checkpoint_bytes(run) == pytest.approx(size, rel=0.01)
    if each:
        assert size == pytest.approx(each * run.spec.count_parameters(args), rel=0.01)


KAHAN = (
    "--optimizer.name=AnyPrecisionAdamW",
    "--optimizer.kahan",
    "--optimizer.momentum_dtype=bfloat16",
    "--training.dtype=bfloat16",
)


class Silent(torch.optim.SGD):
    """Cannot be asked: it reads a gradient before it has a state."""

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["params"][0].grad[0, 0].item()


@pytest.mark.parametrize(
    ("flags", "state", "moved"),
    [
        # Weight and state read and written, the gradient read by the norm and by the update.
        ([], 8, 4 + 4 + 4 + 4 + 8 + 8),
        (["--training.dtype=bfloat16"], 4, 16),
        (KAHAN, 6, 206),
        # Embedding and head have AdamW's state: 1.05 of 8.03 billion.
        (["--optimizer.name=Muon"], 4 + 4 * 1.0507 / 8.0303, 98),
        (["--optimizer.name=torch.optim.SGD"], 0, 16),
        (["--optimizer.name=torch.optim.SGD", "--optimizer.args={momentum=0.9}"], 4, 24),
        # A row and a column of a matrix; its step reads a number, after its state is made.
        (["--optimizer.name=torch.optim.Adafactor"], 0, 16),
        ([f"--optimizer.name={__name__}.Silent"], 8, 32),
    ],
)
def test_state_and_traffic_of_an_update_are_those_of_its_tensors(flags, state, moved):
    run = run_from("llama3_8b.toml", 8, *flags)
    master = 4 if run.training.dtype == "float32" else 2
    parameters = 8_030_261_248
    assert checkpoint_bytes(run) == pytest.approx(parameters * (master + state), rel=0.003)
    assert update_bytes(run.optimizer, master) == pytest.approx(moved, rel=0.001)


def test_an_optimizer_without_a_formula_tells_its_state_itself(monkeypatch):
    def build(parameters, *_):
        return torch.optim.SGD(parameters.values(), momentum=0.9)

    monkeypatch.setattr("titanlite.optim.optimizer.build_optimizer", build)
    assert update_bytes(Optimizer(name="New"), 4) == pytest.approx(2 * (2 * 4 + 4))


def test_an_asynchronous_save_of_adapters_copies_no_frozen_weights(tmp_path):
    flags = ["--lora.rank=8", f"--checkpoint.initial_load_path={tmp_path}", "--training.seq_len=64"]
    saves = ["--checkpoint.enable_checkpoint", "--checkpoint.async_mode=async"]
    run = run_from("debug_model.toml", 2, *flags, *saves)
    whole = run_from("debug_model.toml", 2, *saves, "--training.seq_len=64")
    for one in (run, whole):
        plan = make_plan(one, cluster_of(one, gpu="l4-24g"))
        copied = plan.host["copy of an asynchronous save"]
        assert copied == pytest.approx(plan.checkpoint, rel=0.02)


def test_numbers_of_a_plan_agree():
    run = run_from("llama3_1_8b.toml", 16, "--checkpoint.async_mode=async", "--training.steps=1000")
    cluster = cluster_of(run, instance="p5.48xlarge")
    plan = make_plan(run, cluster)
    found = plan.as_json()
    assert found["fits"]
    assert sum(found["parts"].values()) == pytest.approx(found["peak_gib"])
    assert found["peak_gib"] + found["overhead_gib"] + found["margin_gib"] == pytest.approx(
        found["usable_gib"]
    )
    assert found["hours"] * 3600 == pytest.approx(1000 * found["step_seconds"])
    # Eight ranks of a machine copy their part of a checkpoint: half of it.
    copy = found["host_parts"]["copy of an asynchronous save"]
    assert copy == pytest.approx(found["checkpoint_gib"] / 2, rel=0.01)

    for less in (0, 1):
        gpu = replace(cluster.gpu, memory=plan.needed - less)
        full = replace(plan, cluster=replace(cluster, gpu=gpu))
        assert (full.fits, full.margin) == (not less, -less)
    assert found["host_usable_gib"] == 2048
    assert found["host_gib"] == pytest.approx(sum(found["host_parts"].values()))


def test_a_run_fits_only_where_the_host_has_the_memory():
    run = run_from("llama3_1_405b.toml", 8, "--training.enable_cpu_offload")
    plan = make_plan(run, cluster_of(run, instance="p5e.48xlarge"))
    assert plan.margin > 0
    assert not plan.fits
    assert verdict(plan).endswith("does not fit: a machine needs more host memory than it has")
    assert " of 2,048 GiB on each machine: " in plan_text(plan, Style(False))
    plan = make_plan(run, cluster_of(run, gpu="h200-141g"))
    assert plan.fits
    barely = replace(plan.cluster, gpu=replace(plan.cluster.gpu, memory=round(plan.needed * 1.04)))
    assert "fits barely, with " in verdict(replace(plan, cluster=barely))


def test_an_exact_plan_has_the_memory_of_the_trace():
    from titanlite.cli.plan.memory_trace import trace

    run = run_from("debug_model.toml", 2, "--model.overrides.n_layers=1", "--training.seq_len=64")
    cluster = cluster_of(run, gpu="l4")
    plan = make_plan(run, cluster, trace=trace)
    assert plan.exact
    assert plan.memory.peak.total == trace(with_vocabulary(run), plan.memory.rank).peak.total
    assert plan.memory.peak.total < GIB


H100 = ["--gpus", "8", "--gpu", "h100-80g"]
SMALL = ["--training.batch_size=1", "--training.global_batch_size=8"]
STEPS = "--training.steps=1000"
RAMP = "--data.phase=[{step=101,global_batch_size=16},{step=401,global_batch_size=64}]"


def test_the_memory_of_a_run_is_that_of_its_largest_phase():
    """As the start report and the report of a lack of memory have it."""
    sizes = (SMALL[1],), ("--training.global_batch_size=64",), (SMALL[1], RAMP, STEPS)
    base = SMALL[0], "--model.tokenizer_path=bundled"
    first, last, ramp = (
        estimate(run_from("llama3_8b.toml", 8, *base, *flags)).peak.total for flags in sizes
    )
    assert first < last == ramp


def test_a_phase_of_longer_sequences_is_planned_as_a_run_of_that_length(capsys):
    def plan(*words):
        cli.main(["plan", "llama3_8b.toml", *H100, *SMALL, *words, "--json"])
        return json.loads(capsys.readouterr().out)

    begin = ["--training.seq_len=2048", "--training.global_batch_size=32"]
    longer = "--data.phase=[{step=101,seq_len=8192,global_batch_size=8}]"
    whole = plan(*begin, longer, "--training.steps=300")
    # The tables of RoPE cover the longest sequence from the start.
    part = ["--model.overrides.max_seq_len=8192", "--training.steps=100"]
    short = plan(*begin, *part)
    long = plan("--training.seq_len=8192", "--training.global_batch_size=8", *part)
    assert whole["hours"] == pytest.approx(short["hours"] + 2 * long["hours"], rel=1e-9)
    assert whole["needed_gib"] == long["needed_gib"] > short["needed_gib"]
