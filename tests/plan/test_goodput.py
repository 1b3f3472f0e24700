"""The share of useful time on nodes that fail: Daly's figures, and a run followed by event."""

from __future__ import annotations

import json
import random

import pytest

from titanlite.cli.main import main
from titanlite.plan.goodput import best_interval, useful_share

MINUTE = 60.0
HOUR = 3600.0


@pytest.mark.parametrize(("mean", "said"), [(24 * HOUR, 117), (6 * HOUR, 57), (900, 9.1)])
def test_the_best_interval_is_that_of_figures_3_to_5_of_daly(mean: float, said: float) -> None:
    """Saves of 5 minutes, restarts of 10; the captions give minutes to two digits or three."""
    best = best_interval(5 * MINUTE, mean)
    assert float(f"{best / MINUTE:.{2 if said < 100 else 3}g}") == said
    shares = [useful_share(best * factor, 5 * MINUTE, mean, 600) for factor in (0.8, 1, 1.25)]
    assert shares[1] == max(shares)


def followed(interval: float, save: float, mean: float, restart: float) -> float:
    """Return the share of a run that is followed from failure to failure, without a formula."""
    draw = random.Random(1)
    kept = clock = 0.0
    next_failure = draw.expovariate(1 / mean)
    failures = 0
    while failures < 20_000:
        if clock + interval + save <= next_failure:
            clock += interval + save
            kept += interval
            continue
        clock = next_failure
        while True:
            failures += 1
            next_failure = clock + draw.expovariate(1 / mean)
            if clock + restart <= next_failure:
                clock += restart
                break
            clock = next_failure
    return kept / clock


@pytest.mark.parametrize(("interval", "mean"), [(57 * MINUTE, 6 * HOUR), (10 * MINUTE, 1800.0)])
def test_the_share_is_that_of_a_run_followed_event_by_event(interval: float, mean: float) -> None:
    share = followed(interval, 5 * MINUTE, mean, 600)
    assert useful_share(interval, 5 * MINUTE, mean, 600) == pytest.approx(share, rel=0.02)


def test_a_run_that_never_reaches_a_save_keeps_nothing() -> None:
    assert useful_share(1e9, 60, 1.0, 1.0) == 0


def test_the_plan_says_what_failures_cost_and_how_often_to_save(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["plan", "llama3_1_405b.toml", "--gpus=2048", "--gpu=h200-141g", "--json"]
    words += ["--training.global_batch_size=2048", "--mtbf=2000h"]
    assert main([*words, "--restart-time=15m", "--save-time=2m"]) == 0
    plan = json.loads(capsys.readouterr().out)
    found = plan["goodput"]
    mean = 2000 * HOUR / 256
    assert found["job_mtbf_hours"] == pytest.approx(2000 / 256)
    best = found["best_interval_steps"]
    assert best == round(best_interval(120, mean) / plan["step_seconds"])
    for name, steps in (("share", 500), ("best_share", best)):
        expected = useful_share(steps * plan["step_seconds"], 120, mean, 900)
        assert found[name] == pytest.approx(expected)
    assert main([*words, "--restart-time=15m"]) == 2
    assert "--save-time: is missing" in capsys.readouterr().err
