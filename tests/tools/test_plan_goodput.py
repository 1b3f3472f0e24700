"""`titanlite plan --mtbf`: what failures of nodes cost a planned run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import python
from tests.support.run_folders import begin, end, written
from titanlite import exit_codes
from titanlite.config.load import load_file
from titanlite.start.fit import fitted
from titanlite.tools import cli
from titanlite.tools.plan.failure_options import SaveTime, duration, mtbf, save_time

H100 = ["--gpus=64", "--gpu=h100-80g", "--training.global_batch_size=512"]
SAVED = ["--checkpoint.enable_checkpoint", "--checkpoint.interval=500", "--tokens=1T"]
TOLD = ["--mtbf=1000h", "--restart-time=5m", "--save-time=40s", "--notice-time=30s"]
PLAN = ["llama3_8b.toml", *H100, *SAVED, *TOLD]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `titanlite plan`; return its exit code, output and errors."""

    def run(*words: str) -> tuple[int, str, str]:
        code = cli.main(["plan", *words])
        return (code, *capsys.readouterr())

    return run


@pytest.fixture
def goodput(plan: Any) -> Any:
    """Return the whole plan as JSON."""

    def run(*words: str) -> dict[str, Any]:
        code, out, error = plan(*words, "--json")
        assert (code, error) == (0, "")
        found: dict[str, Any] = json.loads(out)
        return found

    return run


def test_the_numbers_follow_from_dalys_formula(goodput: Any) -> None:
    found = goodput(*PLAN, "--price=100")
    said = found["goodput"]
    mean = 1000 * 3600 / 8
    assert said["job_mtbf_hours"] == pytest.approx(125), "8 machines of 8 GPUs"
    tau = 500 * found["step_seconds"]
    share = tau / (mean * math.exp(330 / mean) * math.expm1((tau + 40) / mean))
    assert said["share"] == pytest.approx(share)
    assert sum(said["parts"].values()) == pytest.approx(1)
    assert said["hours"] == pytest.approx(found["hours"] / share)
    assert said["failures"] == pytest.approx(said["hours"] / 125)
    lost = said["hours"] - found["hours"]
    assert said["lost_gpu_hours"] == pytest.approx(lost * 64)
    assert said["lost_cost"] == pytest.approx(lost * 8 * 100)
    # About half an interval for each failure.
    assert said["lost_steps"] == pytest.approx(said["failures"] * 250, rel=0.03)
    (tier,) = said["tiers"]
    first = math.sqrt(2 * 40 * mean)
    ratio = 40 / (2 * mean)
    higher = first * (1 + math.sqrt(ratio) / 3 + ratio / 9) - 40
    assert (tier["interval_steps"], tier["save_cost_seconds"]) == (pytest.approx(500), 40)
    assert tier["young_seconds"] == pytest.approx(first)
    assert tier["daly_seconds"] == pytest.approx(higher)
    assert tier["best_seconds"] == pytest.approx(higher, rel=1e-3)
    assert tier["best_steps"] == round(tier["best_seconds"] / found["step_seconds"])
    assert said["best"]["share"] >= said["share"]
    assert said["mtbf_hours_range"] is None


def test_the_other_numbers_of_the_plan_are_those_without_failures(goodput: Any) -> None:
    found = goodput(*PLAN)
    del found["goodput"]
    assert found == goodput("llama3_8b.toml", *H100, *SAVED)


def test_an_interval_in_seconds_is_that_time(goodput: Any) -> None:
    timed = ["--checkpoint.interval_type=seconds", "--checkpoint.interval=1800"]
    (tier,) = goodput(*PLAN, *timed)["goodput"]["tiers"]
    assert tier["interval_seconds"] == 1800


def test_a_rate_saves_the_bytes_of_the_plan(goodput: Any) -> None:
    found = goodput(*PLAN, "--save-time=10GB/s")
    (tier,) = found["goodput"]["tiers"]
    assert tier["save_seconds"] == pytest.approx(found["checkpoint_gib"] * 2**30 / 1e10)


def test_saves_beside_steps_cost_what_they_slow_them_down(goodput: Any) -> None:
    beside = [*PLAN, "--checkpoint.async_mode=async"]
    (tier,) = goodput(*beside, "--save-slowdown=1.25")["goodput"]["tiers"]
    assert tier["save_visible_seconds"] == pytest.approx(1)
    assert tier["save_cost_seconds"] == pytest.approx(1 + 39 * (1 - 1 / 1.25))
    said = goodput(*beside)["goodput"]
    assert said["tiers"][0]["save_cost_seconds"] == pytest.approx(1 + 39 * (1 - 1 / 1.6))
    assert any("1.6 times as long" in text for text in said["assumptions"])


def test_a_local_tier_saves_more_often_and_only_what_the_loss_of_nodes_leaves(goodput: Any) -> None:
    words = [*PLAN, "--mtbf=50h", "--local-save-time=5GB/s", "--lost-nodes=0.2"]
    found = goodput(*words)
    said = found["goodput"]
    local, shared = said["tiers"]
    assert local["save_seconds"] == pytest.approx(found["checkpoint_gib"] * 2**30 / 8 / 5e9)
    assert (local["failures"], shared["failures"]) == (0.8, 0.2)
    assert local["best_seconds"] < shared["best_seconds"] / 3
    assert said["best"]["share"] > said["best"]["share_without_local"] > said["share"]


def test_the_local_saves_of_the_config_are_the_present_tier(goodput: Any, plan: Any) -> None:
    own = ["--checkpoint.local_folder=/local/saves", "--checkpoint.local_interval=50"]
    words = [*PLAN, "--mtbf=50h", *own]
    code, _, error = plan(*words)
    assert code == exit_codes.CONFIG
    assert "--local-save-time: is needed with --mtbf: the time of a save to checkpoint.loc" in error
    told = ["--local-save-time=4s", "--lost-nodes=0.2"]
    said = goodput(*words, *told)["goodput"]
    assert [tier["interval_steps"] for tier in said["tiers"]] == pytest.approx([50, 500])
    alone = goodput(*PLAN, "--mtbf=50h", *told)["goodput"]
    assert [tier["interval_steps"] for tier in alone["tiers"]] == [None, pytest.approx(500)]
    assert said["best"] == alone["best"]
    # A failure that loses no node loses 25 steps in the mean, not 250.
    assert said["lost_steps"] < 0.35 * alone["lost_steps"]
    beside = goodput(*words, *told, "--checkpoint.async_mode=async")["goodput"]["tiers"][0]
    assert beside["save_seconds"] == 4
    assert beside["save_cost_seconds"] == pytest.approx(0.1 + 3.9 * (1 - 1 / 1.6))


def test_a_run_without_checkpoints_loses_all_at_each_failure(goodput: Any, plan: Any) -> None:
    off = [*PLAN, "--no-checkpoint.enable_checkpoint", "--tokens=10B"]
    found = goodput(*off)
    said = found["goodput"]
    mean = 125 * 3600
    length = found["hours"] * 3600
    share = length / (mean * math.exp(330 / mean) * math.expm1(length / mean))
    assert said["share"] == pytest.approx(share)
    assert said["tiers"][0]["interval_seconds"] is None
    assert "checkpoints are off, so each failure loses all steps" in plan(*off)[1]


def test_the_lines_name_the_share_and_the_best_interval(plan: Any, goodput: Any) -> None:
    code, out, error = plan(*PLAN, "--price=100")
    assert (code, error) == (0, "")
    said = goodput(*PLAN, "--price=100")["goodput"]
    assert f"  goodput      {said['share']:.1%} of the time in steps that are kept" in out
    assert "one in 5.21 days: one in 41.7 days for each of 8 nodes" in out
    assert f"    best       every {said['tiers'][0]['best_steps']:,} steps" in out
    assert f"{said['lost_gpu_hours']:,.0f} GPU hours, {said['lost_cost']:,.0f} of cost" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mtbf=1000h"], "--restart-time: is needed with --mtbf: the time from the notice"),
        (["--mtbf=1000h", "--restart-time=5m"], "--save-time: is needed with --mtbf"),
        (["--restart-time=5m"], "--restart-time: is for failures give --mtbf, too"),
        (["--lost-nodes=0.5"], "give --mtbf, too"),
        ([*TOLD, "--lost-nodes=0.5"], "give --local-save-time, too"),
        ([*TOLD, "--local-save-time=2s"], "--lost-nodes: is needed with --local-save-time"),
        ([*TOLD, "--search"], "--mtbf: is not for a search"),
    ],
)
def test_what_is_missing_is_asked_for(plan: Any, words: list[str], said: str) -> None:
    code, out, error = plan("llama3_8b.toml", *H100, *words)
    assert (code, out) == (exit_codes.CONFIG, "")
    assert said in " ".join(error.split())


def test_several_kinds_of_gpu_are_refused(plan: Any) -> None:
    code, _, error = plan("llama3_8b.toml", "--mtbf=1000h")
    assert code == exit_codes.CONFIG
    assert "is for one cluster" in error


@pytest.mark.parametrize(
    "word",
    [
        "--mtbf=1000",
        "--mtbf=0h",
        "--mtbf=nowhere",
        "--save-time=fast",
        "--save-time=0GB/s",
        "--save-slowdown=0.9",
        "--lost-nodes=1",
        "--restart-time=-5m",
    ],
)
def test_a_value_of_another_form_is_refused(
    plan: Any, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        plan("llama3_8b.toml", *H100, word)
    assert word.partition("=")[0] in capsys.readouterr().err


def test_times_and_rates_have_units() -> None:
    assert [duration(text) for text in ("40s", "1.5m", "2min", "1_000h", "2d")] == [
        40,
        90,
        120,
        3_600_000,
        172_800,
    ]
    assert mtbf("30d") == 30 * 86400
    assert save_time("1.5GiB/s") == SaveTime(rate=1.5 * 2**30)
    assert save_time("800MB/s").of(1.6e9) == 2
    assert save_time("40s").of(1.6e9) == 40


# From a run


def test_a_run_tells_how_often_it_failed_and_what_it_took(
    tmp_path: Path, goodput: Any, plan: Any
) -> None:
    """4 attempts of 10 minutes on 2 machines, 3 of them failures, with 2 minutes between them."""
    _record(tmp_path, failures=3)
    words = ["llama3_8b.toml", *H100, *SAVED]
    said = goodput(*words, f"--mtbf={tmp_path}", "--restart-time=5m", "--save-time=40s")["goodput"]
    hours = 4 * 8 / 6
    assert said["observed_failures"] == 3
    assert said["mtbf_hours"] == pytest.approx(hours / 3)
    # Garwood's limits of the mean of 3.
    assert said["mtbf_hours_range"] == pytest.approx([hours / 8.7673, hours / 0.6187], rel=1e-3)
    low, high = said["share_range"]
    assert low < said["share"] < high
    out = plan(*words, f"--mtbf={tmp_path}", "--restart-time=5m", "--save-time=40s")[1]
    assert f"95% sure, from 3 failures of {tmp_path})" in out
    error = plan(*words, f"--mtbf={tmp_path}")[2]
    assert f"{tmp_path} trained another model, or on other ranks" in error


def test_a_run_of_the_same_model_tells_its_saves_and_restarts_too(
    tmp_path: Path, goodput: Any
) -> None:
    words = ["llama3_8b.toml", *H100, *SAVED]
    run = fitted(load_file("llama3_8b.toml", [H100[2], *SAVED[:2]]), 64)
    _record(tmp_path, failures=1, toml=run.toml)
    said = goodput(*words, f"--mtbf={tmp_path}")["goodput"]
    assert said["restart_seconds"] == pytest.approx(120 + 60 + 25)
    assert said["tiers"][0]["save_seconds"] == pytest.approx(10)
    assert "the restart takes the median time of the run's own restarts" in said["assumptions"]


def test_a_run_without_a_failure_gives_a_limit_and_no_plan(tmp_path: Path, plan: Any) -> None:
    _record(tmp_path, failures=0)
    code, _, error = plan("llama3_8b.toml", *H100, *SAVED, f"--mtbf={tmp_path}")
    assert code == exit_codes.CONFIG
    assert "saw no failure in 1.33 node hours" in error
    limit = 8 / 6 / -math.log(0.05)
    assert f"is {limit:.3g} hours or more (95% sure)" in error
    assert f"give a time, as {limit:.3g}h at worst" in error
    assert error.startswith("1 problem on the command line")


def test_a_plan_without_failures_imports_none_of_this() -> None:
    code = (
        "import sys; from titanlite.tools import cli; "
        "cli.main(['plan', 'llama3_8b.toml', '--gpus=8', '--gpu=h100-80g', '--json']); "
        "print([name for name in sys.modules if 'goodput' in name or 'mtbf' in name], "
        "file=sys.stderr)"
    )
    found = python("-c", code)
    assert found.stderr.strip() == "[]"


def _record(folder: Path, failures: int, toml: str = "") -> None:
    """Record failures and an attempt that is done: 10 minutes each, 2 minutes between them."""
    times = {"first_step": 25.0, "work": 100.0, "save": 10.0}
    spent = {"trained": 5, "saves": {"count": 1, "milliseconds": 10_000}, "seconds": times}
    entries = []
    for place in range(failures + 1):
        began = 720 * place
        state = "done" if place == failures else "failed"
        entries.append(begin(place + 1, began, began + 60, 5 * place, ranks=64))
        entries.append(end(place + 1, began + 600, 5 * place + 5, state, **spent))
    written(folder, *entries)
    if toml:
        (folder / "config.toml").write_text(toml)
