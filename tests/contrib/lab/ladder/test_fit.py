"""The fit finds the law of made-up points, and its intervals hold what they say."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.contrib.lab.ladder.made_up import HORIZONS, SIZES, TRUE, made_up
from titanlite.contrib.lab.ladder.fit import CONFIDENCE, DELTA, KNOWN_TOKEN_EXPONENT, fit
from titanlite.contrib.lab.ladder.law import LadderError, Point, check_points
from titanlite.contrib.lab.ladder.predict import (
    leave_largest_out,
    notes_on_distance,
    predict,
)

#: Four times the largest of the ladder.
TARGET = (4.0 * SIZES[-1], 20 * 4.0 * SIZES[-1])


def test_exact_points_give_back_their_law():
    found = fit(made_up(), replicates=50)
    for name in ("irreducible", "size_factor", "size_exponent", "token_factor", "token_exponent"):
        assert getattr(found.law, name) == pytest.approx(getattr(TRUE, name), rel=1e-6), name
        low, high = found.interval(name)
        assert high - low < 1e-4 * high
    assert max(map(abs, found.residuals)) < 1e-9
    assert predict(found, *TARGET).loss == pytest.approx(TRUE.loss(*TARGET), rel=1e-9)
    assert predict(found, *TARGET).error < 1e-6
    assert found.notes == ()


def objective(law: torch.Tensor, points: list[Point]) -> torch.Tensor:
    """The sum that appendix D.2 of Hoffmann et al. 2022 minimises, written with torch."""
    e, a, b, alpha, beta = law
    n, d, loss = (
        torch.tensor([getattr(p, key) for p in points], dtype=torch.float64).log()
        for key in ("parameters", "tokens", "loss")
    )
    terms = torch.stack([a - alpha * n, b - beta * d, e.expand_as(n)])
    found = torch.logsumexp(terms, dim=0)
    return torch.nn.functional.huber_loss(found, loss, reduction="sum", delta=DELTA)


def test_the_law_of_noisy_points_minimises_the_objective_of_the_paper():
    points = made_up(noise=0.005, generator=np.random.default_rng(2))
    law = fit(points, replicates=0).law
    factors = [math.log(one) for one in (law.irreducible, law.size_factor, law.token_factor)]
    ours = torch.tensor([*factors, law.size_exponent, law.token_exponent], dtype=torch.float64)
    least = objective(ours, points)
    generator = torch.Generator().manual_seed(0)
    for step in torch.randn(50, 5, generator=generator, dtype=torch.float64):
        assert objective(ours + 1e-3 * step, points) > least
    assert objective(ours * torch.tensor([1, 1, 1, 1.001, 1]), points) > 1.001 * least


@pytest.mark.slow
def test_intervals_hold_the_truth_as_often_as_they_say():
    generator = np.random.default_rng(5)
    noise = 0.003
    count = 25
    names = ("size_exponent", "token_exponent")
    held = dict.fromkeys((*names, "loss"), 0)
    for _ in range(count):
        found = fit(made_up(noise=noise, generator=generator), replicates=40)
        one = predict(found, *TARGET)
        run = TRUE.loss(*TARGET) * math.exp(noise * generator.standard_normal())
        held["loss"] += one.low <= run <= one.high
        for name in names:
            low, high = found.interval(name)
            held[name] += low <= getattr(TRUE, name) <= high
    # Three standard deviations of the share that a sound interval holds.
    slack = 3 * math.sqrt(CONFIDENCE * (1 - CONFIDENCE) / count)
    for name, number in held.items():
        assert CONFIDENCE - slack <= number / count, name
    assert held["loss"] < count


def test_intervals_are_wider_where_trunks_have_luck_of_their_own():
    points = made_up(noise=0.003, generator=np.random.default_rng(1), luck=0.8)
    shared = predict(fit(points, replicates=40), *TARGET)
    alone = predict(fit([replace(one, trunk="") for one in points], replicates=40), *TARGET)
    assert alone.loss == shared.loss
    assert shared.error > 1.2 * alone.error


def test_few_points_take_the_known_exponent_of_tokens_and_say_so():
    points = made_up(SIZES[:3], HORIZONS[:2])
    found = fit(points, replicates=20)
    assert found.law.token_exponent == KNOWN_TOKEN_EXPONENT
    assert found.law.size_exponent == pytest.approx(TRUE.size_exponent, rel=0.01)
    assert "fewer than 9 points" in found.notes[0]


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (made_up([*SIZES, 1e9], (20,)), "tokens follow from parameters almost exactly"),
        (made_up(SIZES[:3], (10, 20))[:5], "5 points of 3 sizes: a law needs 6"),
    ],
)
def test_degenerate_ladders_are_refused_with_the_reason(points, message):
    with pytest.raises(LadderError, match=message):
        check_points(points)


def test_leaving_the_largest_model_out_predicts_its_points():
    left = leave_largest_out(made_up())
    assert [one.point.parameters for one in left] == [SIZES[-1]] * 3
    assert max(abs(one.error) for one in left) < 1e-6
    points = made_up()
    points[-1] = replace(points[-1], loss=points[-1].loss * 1.05)
    assert leave_largest_out(points)[-1].error == pytest.approx(1 / 1.05 - 1, abs=1e-6)


def test_what_lies_far_from_the_runs_is_told():
    points = made_up()
    n, d = SIZES[-1], SIZES[-1] * 20.0
    assert notes_on_distance(points, 10 * n, 10 * d) == []
    (note,) = notes_on_distance(points, 11 * n, 11 * d)
    assert note.startswith("121 times the compute of the ladder's largest run: too far")
    (note,) = notes_on_distance(points, 1e8, 40e8)
    assert "40 tokens for each parameter, and the runs have 5 to 20" in note
