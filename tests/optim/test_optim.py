"""The learning rate by step, against published sequences and hand-computed values, and gated
updates.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from titanlite.assembly.report_rows import schedule_text
from titanlite.config.decays import DECAYS, KEYS_OF_END, Decay
from titanlite.config.errors import ConfigError
from titanlite.config.keys import keys
from titanlite.config.load import read_text
from titanlite.config.model_sections import Optimizer
from titanlite.optim.gradients import clip_divisor, clip_gradients
from titanlite.optim.optimizer import build_optimizer, divides_gradients, gated_step
from titanlite.optim.schedule import LearningRate, Schedule, learning_rate, lr_factor
from titanlite.resolve.load import load_config
from titanlite.run.derive import derive


def schedule_of(**numbers: Any) -> Schedule:
    return Schedule(**{"decay_type": "linear", "style": "titan", "min_lr_factor": 0.0, **numbers})


def test_autumn_2024_warmup_and_linear_decay():
    schedule = schedule_of(total_steps=10, warmup_steps=3)
    factors = [lr_factor(schedule, step) for step in range(1, 11)]
    assert factors[:3] == [1 / 4, 2 / 4, 3 / 4]
    assert factors[3:] == pytest.approx([1 - n / 7 for n in range(7)])


def test_stable_phase_then_decay_to_the_floor():
    schedule = schedule_of(
        total_steps=100, warmup_steps=10, decay_steps=20, decay_type="cosine", min_lr_factor=0.1
    )
    assert lr_factor(schedule, 11) == lr_factor(schedule, 80) == 1.0
    assert lr_factor(schedule, 81) == 1.0
    assert lr_factor(schedule, 91) == pytest.approx(0.1 + 0.9 * 0.5)
    assert lr_factor(schedule, 101) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("kind", "halfway"),
    [
        ("linear", 0.5),
        ("sqrt", 1 - math.sqrt(0.5)),
        ("cosine", 0.5),
        ("exponential", 0.5**0.5),
        ("constant", 1.0),
    ],
)
def test_decay_shapes_halfway(kind, halfway):
    schedule = schedule_of(total_steps=20, warmup_steps=0, decay_type=kind)
    assert lr_factor(schedule, 11) == pytest.approx(halfway)
    assert lr_factor(schedule, 1) == 1.0
    assert f'"{kind}" ({DECAYS[kind].about})' in keys()["lr_scheduler.decay_type"].expected
    if kind == "exponential":
        floored = replace(schedule, min_lr_factor=0.01)
        assert [lr_factor(floored, step) for step in (11, 21)] == pytest.approx([0.1, 0.01])


@pytest.mark.parametrize("kind", DECAYS)
def test_one_entry_makes_a_kind_known_to_the_checks_to_ladders_and_to_reports(kind):
    decay = DECAYS[kind]
    flags = [f"--lr_scheduler.decay_type={kind}"]
    needed = dict.fromkeys(decay.needs, 0.5)
    flags += [f"--lr_scheduler.{key}={value}" for key, value in needed.items()]
    schedule = load_config("debug_model.toml", 1, flags).schedule
    factors = [lr_factor(schedule, step) for step in range(1, (schedule.total_steps or 0) + 2)]
    warm = int(schedule.warmup_steps)
    shown = f"{decay.formula or kind} decay to 0" if decay.has_end else f"then {kind}"
    assert shown in schedule_text(schedule, 0.0)
    assert factors[warm] == 1.0 and all(a >= b for a, b in itertools.pairwise(factors[warm:]))
    assert decay.reaches_floor == (factors[-1] == 0 and not needed)
    for key in () if decay.has_end else KEYS_OF_END:
        with pytest.raises(ConfigError, match=f"(?s){key}.*it has no end to shape"):
            load_config("debug_model.toml", 1, [*flags, f"--lr_scheduler.{key}=1"])


def test_a_kind_may_go_by_steps_and_has_its_rates_of_any_length(monkeypatch):
    """By steps and by tokens, in the styles that count a step before and after it."""
    halving = Decay("", lambda at: 0.5 ** ((at.done - at.warmup) / at.size), has_end=False)
    monkeypatch.setitem(DECAYS, "halving", halving)
    for length in (6, 60):
        steps = schedule_of(total_steps=length, warmup_steps=2, decay_type="halving")
        assert [lr_factor(steps, n) for n in (3, 4, 6)] == [1.0, 0.5, 0.125]
        # lr_scheduler.decay_ratio = 0 in a file.
        endless = replace(steps, decay_steps=0)
        assert [lr_factor(endless, n) for n in (3, 4, 6)] == [1.0, 0.5, 0.125]
        fsdp = replace(steps, style="fsdp")
        assert [lr_factor(fsdp, n) for n in (2, 3, 6)] == [1.0, 0.5, 0.0625]
        tokens = replace(steps, total_steps=10 * length, warmup_steps=20, in_tokens=True)
        assert [lr_factor(tokens, 10 * n, 10) for n in (3, 4, 6)] == [1.0, 0.5, 0.125]


def test_a_run_asks_for_its_steps_counted_from_where_the_schedule_began():
    schedule = schedule_of(total_steps=100, warmup_steps=9)
    rate = LearningRate(schedule, peak=2.0)
    assert [rate(step) for step in (1, 9, 10)] == pytest.approx([0.2, 1.8, 2.0])
    rate.began = 50
    assert rate(51) == pytest.approx(0.2)
    rate.change_length(99, 200)
    assert rate.schedule is schedule
    rate.change_length(100, 200)
    assert rate.schedule == replace(schedule, total_steps=200)


def _aws(
    style: str, step: int, total: int, warmup: float, plateau: float, peak: float, floor: float
) -> float:
    """The formulas of the AWS FSDP samples.

    warmup, plateau: shares of the run, as their arguments are.
    """
    w = warmup * total
    p = plateau * total
    if step <= w:
        return peak * step / w
    k = min(step, total - w) - w
    rate = {
        "linear": peak * (total - k) / total,
        "cosine": peak / 2 * (math.cos(math.pi * k / total) + 1),
        "exponential": peak * math.exp(-0.693 * k / total),
        "plateau": peak if step <= w + p else peak * (total - step) / (total - w - p),
        "constant": peak,
    }[style]
    return max(rate, floor)


@pytest.mark.parametrize(("warmup", "floor"), [(0.0032, 1e-5), (0.4, 0.0)])
@pytest.mark.parametrize(
    ("style", "plateau"),
    [
        ("linear", 0),
        ("cosine", 0),
        ("exponential", 0),
        ("constant", 0),
        ("plateau", 0.4),
        ("plateau", 0.0),
    ],
)
def test_every_step_of_a_run_of_the_aws_samples(style, plateau, warmup, floor):
    lines = [f"decay_type = '{style}'", f"warmup_ratio = {warmup}", f"min_lr = {floor}"]
    if style == "plateau":
        lines.append(f"plateau_ratio = {plateau}")
    text = "training.steps = 1003\noptimizer.lr = 1e-4\n[lr_scheduler]\nstyle = 'fsdp'\n"
    config, problems = read_text(text + "\n".join(lines), Path("run.toml"))
    assert not problems
    run = derive(config, 1)
    here = [learning_rate(run.schedule, run.optimizer.lr, step) for step in range(1, 1004)]
    there = [_aws(style, step, 1003, warmup, plateau, 1e-4, floor) for step in range(1, 1004)]
    assert here == pytest.approx(there, rel=1e-12, abs=1e-18)


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
@pytest.mark.parametrize("implementation", ["foreach", "for-loop", "fused"])
def test_a_gated_step_is_torchs_or_none(name, implementation):
    settings = Optimizer(
        name=name, implementation=implementation, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.2
    )
    plain = getattr(torch.optim, name)
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 6)) for _ in range(2))
    optimizer = build_optimizer({"w": ours}, settings, torch.device("cpu"))
    reference = plain([theirs], lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2, foreach=True)
    for step in range(4):
        ours.grad, theirs.grad = (torch.linspace(1, 2, 6) * (step + 1) for _ in range(2))
        before = ours.detach().clone()
        gated_step(optimizer, torch.tensor(False), 0.01)
        assert torch.equal(ours, before)
        gated_step(optimizer, torch.tensor(True), 0.01)
        reference.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_a_fused_step_that_clips_is_the_step_of_clipped_gradients(name):
    settings = Optimizer(name=name, implementation="fused", weight_decay=0.2)
    apart, inside = (torch.nn.Parameter(torch.linspace(-1, 1, 64)) for _ in range(2))
    optimizers = [build_optimizer({"w": p}, settings, torch.device("cpu")) for p in (apart, inside)]
    assert all(map(divides_gradients, optimizers))
    for norm, good in [(4.0, True), (0.5, True), (torch.nan, False), (torch.inf, False)]:
        at = torch.tensor(norm)
        gradient = torch.linspace(1, 2, 64) * norm
        apart.grad = gradient.clone()
        inside.grad = gradient
        before = inside.detach().clone()
        clip_gradients(
            [apart], at, 1.0
        )  # 4 + 1e-6 is 4 in float32, and a product with 1 / 4 rounds nothing
        gated_step(optimizers[0], torch.tensor(good), 0.01)
        gated_step(optimizers[1], torch.tensor(good), 0.01, clip_divisor(at, 1.0))
        assert torch.equal(apart, inside)
        assert torch.equal(inside, before) is not good
    states = [optimizer.state_dict()["state"][0] for optimizer in optimizers]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert states[0]["step"] == 2
