"""The learning rate where the batch changes, against tables by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from titanlite.config.data_sections import DataPhase
from titanlite.data.phases import Phases
from titanlite.data.step_sizes import Progress
from titanlite.optim.schedule import LearningRate, Schedule
from titanlite.resolve.load import load_config

#: Steps of 10, 10, 20, 20, 20 and 20 tokens.
RAMP = Phases([DataPhase(step=3, global_batch_size=2)], {}, 1, 10)
#: A warm-up of 20 tokens, then 80 to the floor.
BY_TOKENS = Schedule(100, 20, "linear", "titan", 0.1, in_tokens=True)
TINY = [
    "--training.seq_len=16",
    "--training.batch_size=1",
    "--training.global_batch_size=4",
    "--data.phase=[{step=5,global_batch_size=8}]",
]


def first(rate: LearningRate, last: int = 6) -> list[float]:
    return [rate(step) for step in range(1, last + 1)]


def rates(schedule: Schedule, last: int) -> list[float]:
    return first(LearningRate(schedule, 1.0, course=RAMP.course()), last)


def test_a_schedule_in_tokens_reaches_its_floor_with_the_last_token_of_a_ramp():
    # Before step 4 the run has 40 tokens: a quarter of the decay from 20 to 100.
    wanted = [1 / 3, 2 / 3, 1.0, 0.775, 0.55, 0.325, 0.1]
    assert rates(BY_TOKENS, 7) == pytest.approx(wanted, rel=1e-12)
    wanted[:2] = [1 / 2, 1.0]
    assert rates(replace(BY_TOKENS, style="titan-0.2"), 7) == pytest.approx(wanted, rel=1e-12)
    # AWS counts the step's own tokens: 40, 60 and 80 are 0.2, 0.4 and 0.6 of the whole after the
    # warm-up; then it stops.
    wanted = [0.5, 1.0, 0.82, 0.64, 0.46, 0.46]
    assert rates(replace(BY_TOKENS, style="fsdp"), 6) == pytest.approx(wanted, rel=1e-12)
    wanted = [1 / 3, 2 / 3, 1, 1, 1, 0.55, 0.1]
    assert rates(replace(BY_TOKENS, decay_steps=40), 7) == pytest.approx(wanted, rel=1e-12)
    # A warm-up that ends within a step.
    assert max(rates(replace(BY_TOKENS, warmup_steps=25), 6)) <= 1.0


@pytest.mark.parametrize("style", ["titan", "titan-0.2", "fsdp"])
@pytest.mark.parametrize("decay", ["linear", "cosine", "sqrt", "exponential"])
def test_steps_of_one_size_have_the_rates_of_a_schedule_in_steps(style, decay):
    steady = Phases([], {}, 4, 64).course()
    in_steps = Schedule(50, 7, decay, style, 0.1)
    in_tokens = replace(in_steps, total_steps=50 * 64, warmup_steps=7 * 64, in_tokens=True)
    ours = LearningRate(in_tokens, 3e-4, course=steady)
    wanted = LearningRate(in_steps, 3e-4)
    assert first(ours, 55) == pytest.approx(first(wanted, 55), rel=1e-12)


def test_a_peak_stays_from_its_phase_on_and_a_factor_holds_in_its_phase():
    phases = Phases(
        [
            DataPhase(step=2, lr=3.0),
            DataPhase(step=3, lr_factor=0.5),
            DataPhase(step=4, global_batch_size=8),
            DataPhase(tokens=60, lr=0.25),
        ],
        {},
        1,
        10,
    )
    flat = Schedule(100, 0, "constant", "titan", 1.0, min_lr=0.4)
    rate = LearningRate(flat, 1.0, phases=phases.rates(), peaks=phases.peaks())
    # The floor min_lr holds for a peak, and not for a factor.
    assert first(rate) == [1.0, 3.0, 1.5, 3.0, 0.4, 0.4]
    record = json.loads(json.dumps(rate.record()))
    again = LearningRate(flat, 1.0).with_record(record)
    assert first(again) == first(rate)
    # After a resume at step 4, with 3 · 10 + 80 tokens.
    done = Progress(4, 110)
    later = LearningRate(flat, 1.0, phases=phases.rates(done), peaks=phases.peaks(done))
    assert later(5) == 0.4


def test_a_record_of_steps_is_that_of_earlier_versions():
    schedule = Schedule(10, 2, "linear", "titan", 0.0)
    record = LearningRate(schedule, 1e-3).record()
    assert list(record) == [
        *("total_steps", "warmup_steps", "decay_type", "style", "min_lr_factor"),
        *("decay_steps", "plateau_steps", "min_lr", "peak"),
    ]
    assert LearningRate(BY_TOKENS, 1e-3).with_record(record).schedule == schedule


def test_the_length_of_a_run_in_tokens_counts_the_ramp():
    # 4 steps of 64 tokens, then steps of 128.
    run = load_config("debug_model.toml", 1, [*TINY, "--training.tokens=1000"])
    assert (run.steps, run.tokens) == (10, 4 * 64 + 6 * 128)
    flags = [*TINY, "--training.steps=10", "--lr_scheduler.unit=tokens"]
    run = load_config("debug_model.toml", 1, [*flags, "--lr_scheduler.warmup_ratio=0.25"])
    assert (run.schedule.total_steps, run.schedule.warmup_steps) == (1024, 256)


def test_a_config_gives_the_rates_of_a_ramp():
    flags = [*TINY, "--training.steps=6", "--lr_scheduler.unit=tokens", "--optimizer.lr=1"]
    flags += ["--training.warmup_steps=64", "--lr_scheduler.decay_type=linear"]
    run = load_config("debug_model.toml", 1, flags)
    rate = LearningRate(run.schedule, run.optimizer.peak_lr, course=run.course)
    # 512 tokens; before steps 1 to 6: 0, 64, 128, 192, 256 and 384.
    wanted = [0.5, 1.0, 6 / 7, 5 / 7, 4 / 7, 2 / 7]
    assert first(rate) == pytest.approx(wanted, rel=1e-12)
