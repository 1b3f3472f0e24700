"""A plan that takes the rates that a run measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile, schedule

from tests.support.run_of import run_from
from titanlite.cli import main as cli
from titanlite.cli.plan.measured import anchored, trace_parts
from titanlite.config.errors import ConfigError
from titanlite.plan.hardware import GPUS, Cluster
from titanlite.plan.speed import predict
from titanlite.run.config import RunConfig

H200 = Cluster(GPUS["h200-141g"], 1, 1, 5e10)
#: The two runs of benchmarks/results/gpu.json: config, flags, tokens a second.
FULL = "--activation_checkpoint.mode=full"
EAGER = ("--training.compile=false", FULL)
MEASURED = {
    "8B": ("llama3_8b.toml", ["--training.loss_chunks=8", "--training.seq_len=8192"], 7395.0),
    "7B": ("llama2_7b.toml", ["--training.batch_size=8", "--training.seq_len=4096"], 9529.0),
}


def of(config: str, *flags: str) -> RunConfig:
    return run_from(config, 1, "--training.global_batch_size=-1", *flags)


def write_record(
    folder: Path, run: RunConfig, seconds: float, device: str = "NVIDIA H200", steps: int = 3
) -> None:
    """Write the record of a run whose first step was slow."""
    (folder / "config.toml").write_text(run.toml)
    start = {"event": "start", "attempt": 1, "time": "2026-11-26T06:00:00+00:00"}
    (folder / "attempts.jsonl").write_text(
        json.dumps({**start, "step": 0, "steps": steps, "ranks": 1, "device": device}) + "\n"
    )
    rows = [
        {"step": step, "loss": 7.0, "seconds_per_step": seconds * (9 if step == 1 else 1)}
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def write_trace(folder: Path, text: str) -> None:
    path = folder / "profile_traces/iteration_10/rank0_trace.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)


def event(
    cat: str, name: str, ts: float, dur: float, number: int = 0, tid: int = 1
) -> dict[str, Any]:
    args = {"External id": number}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


@pytest.mark.parametrize("one, other", [("8B", "7B"), ("7B", "8B")])
@pytest.mark.parametrize(
    "gpu, device, before",
    # The constants of the H200 were fitted on both runs, those of the H100 on neither: it stands
    # for a GPU that the table lacks.
    [("h200-141g", "NVIDIA H200", -0.10), ("h100-80g", "NVIDIA Z100", -0.26)],
)
def test_one_of_two_measured_runs_on_an_h200_predicts_the_other(
    tmp_path, one, other, gpu, device, before
):
    config, flags, tokens = MEASURED[one]
    run = of(config, *EAGER, *flags)
    cluster = replace(H200, gpu=GPUS[gpu])
    write_record(tmp_path, run, run.batch.tokens_per_step / tokens, device)
    found = anchored(cluster, tmp_path)
    config, flags, tokens = MEASURED[other]
    run = of(config, *EAGER, *flags)
    assert predict(run, cluster).tokens_per_second / tokens - 1 == pytest.approx(before, abs=0.02)
    assert predict(run, found).tokens_per_second == pytest.approx(tokens, rel=0.02)


def test_each_part_of_a_trace_scales_its_part_of_another_plan(tmp_path):
    """Products take 2, attention 3, other kernels 4 and the update 5 times what is planned; the
    host adds a tenth.
    """
    run = of("llama3_2_1b.toml", "--training.seq_len=4096", "--activation_checkpoint.mode=none")
    planned = predict(run, H200).parts
    slower = {"matrix products": 2, "attention": 3, "memory traffic": 4, "optimizer": 5}
    seconds = {name: factor * planned[name] for name, factor in slower.items()}
    write_record(tmp_path, run, 1.1 * sum(seconds.values()))
    operators = ("aten::mm", "aten::_flash_attention_backward", "aten::add", "aten::_fused_adamw_")
    events = [
        event("user_annotation", "ProfilerStep#9", 0, 100),
        event("user_annotation", "Optimizer.step#AdamW.step", 40, 9, 9),
        # FSDP's traffic runs beside kernels, and waits for other ranks.
        event("kernel", "ncclDevKernel_AllGather_RING_LL", 0, 9e9, 5),
    ]
    for number, (name, duration) in enumerate(zip(operators, seconds.values(), strict=True), 1):
        events.append(event("cpu_op", name, 10 * number, 5, number))
        events.append(event("kernel", "nvjet_tst_128x256", 100 * number, 1e6 * duration, number))
    write_trace(tmp_path, json.dumps({"traceEvents": [{"ph": "M"}, *events]}))
    found = anchored(H200, tmp_path)
    assert found.slower == pytest.approx(1.1)
    other = of(
        "llama3_2_3b.toml", "--training.seq_len=8192", "--activation_checkpoint.mode=selective"
    )
    before, after = predict(other, H200).parts, predict(other, found).parts
    for name, factor in slower.items():
        assert after[name] == pytest.approx(1.1 * factor * before[name])
    # Half of a block's products, and none of attention.
    assert 2 < after["recomputation"] / before["recomputation"] / 1.1 < 4


def test_a_trace_of_a_cpu_is_divided_as_the_profiler_divides_it(tmp_path):
    weight = torch.nn.Parameter(torch.randn(512, 512))
    optimizer = torch.optim.AdamW([weight], foreach=True)
    path = tmp_path / "iteration_2/rank0_trace.json"
    path.parent.mkdir()
    steps = schedule(wait=0, warmup=1, active=1, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=steps, acc_events=True) as profiler:
        for _ in range(2):
            x = torch.randn(1, 4, 512, 128) @ weight[:128, :128]
            scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    profiler.export_chrome_trace(str(path))
    taken = {each.key: each.cpu_time_total / 1e6 for each in profiler.key_averages()}
    found = trace_parts(tmp_path)
    assert found["optimizer"] == pytest.approx(taken["Optimizer.step#AdamW.step"], rel=1e-3)
    assert found["matrix products"] == pytest.approx(taken["aten::mm"], rel=1e-3)
    one, two = (
        f"aten::_scaled_dot_product_flash_attention_for_cpu{end}" for end in ("", "_backward")
    )
    assert found["attention"] == pytest.approx(taken[one] + taken[two], rel=0.02)
    step = next(taken[name] for name in taken if name.startswith("ProfilerStep"))
    assert sum(found.values()) == pytest.approx(step, rel=1e-3)


def test_a_search_and_a_plan_name_the_run_that_they_take_rates_from(tmp_path, capsys):
    run = of("llama3_8b.toml", FULL)
    seconds = 2 * predict(run, H200).step_seconds
    write_record(tmp_path, run, seconds)
    words = ["plan", "llama3_8b.toml", "--gpus", "1", "--gpu", "h200-141g", FULL]
    words += ["--training.global_batch_size=-1", "--measured", str(tmp_path)]
    assert cli.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step_seconds"] == pytest.approx(seconds)
    note = f"seconds measured by {tmp_path} (NVIDIA H200): whole step x 2"
    assert found["assumptions"][-1] == note
    assert cli.main([*words, "--search"]) == 0
    assert capsys.readouterr().out.startswith(f"# {note}\n")


@pytest.mark.parametrize(
    "steps, trace, said",
    [
        (1, "{}", "no step after its first one"),
        (3, '{"traceEvents": [{"ph": "X"', "rank0_trace.json is no whole trace"),
        (3, '{"traceEvents": []}', "rank0_trace.json is no whole trace"),
    ],
)
def test_a_run_that_measured_nothing_is_refused(tmp_path, steps, trace, said):
    write_record(tmp_path, of("llama3_2_1b.toml"), 1.0, steps=steps)
    write_trace(tmp_path, trace)
    with pytest.raises(ConfigError, match=said):
        anchored(H200, tmp_path)
