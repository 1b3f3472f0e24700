"""Mixtures: shares by tokens, each source in its own order without gaps, any number of ranks, exact
resume.
"""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.sources import Numbers
from tests.support.texts import write_records
from titanlite.assembly.datasets import phases_of, read_datasets
from titanlite.checkpoint.resume import load_text
from titanlite.config.data_sections import DataPhase
from titanlite.data import DataError, EndOfData
from titanlite.data.loader import Fetched, TrainLoader
from titanlite.data.mixtures.mixed_rows import MixedRows
from titanlite.data.phases import Phases
from titanlite.data.skip_ranges import skip_to, take
from titanlite.data.step_sizes import Course, StepSize
from titanlite.metrics.anomalies import AnomalyLog
from titanlite.optim.bad_step_errors import BadStepError
from titanlite.optim.schedule import LearningRate, Schedule
from titanlite.resolve.load import load_config

#: Steps of 4 sequences of 2 tokens.
STEADY = Course.steady(StepSize(4, 2, 4))


def mix(
    weights: dict[str, float], limits: dict[str, int] | None = None, slots: int = 1, phases=None
) -> MixedRows:
    sources = {name: Numbers((limits or {}).get(name), slots) for name in weights}
    return MixedRows(sources, {0: weights, **(phases or {})}, seed=5, slots=slots)


def located(rows: MixedRows, count: int, start: int = 0) -> list[tuple[str, int]]:
    return [
        (rows.names[source], number) for source, number in map(rows.locate, range(start, count))
    ]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("slots", [1, 4, 6])
def test_shares_are_exact_and_each_source_is_served_without_gaps(slots) -> None:
    weights = {"a": 0.7, "b": 0.2, "c": 0.1}
    rows = mix(weights, slots=slots)
    found = located(rows, 4096 * slots)
    counts = Counter(name for name, _ in found)
    assert [round(counts[name] / len(found), 3) for name in "abc"] == [0.7, 0.2, 0.1]
    for name in "abc":
        numbers = [number for source, number in found if source == name]
        assert len(set(numbers)) == len(numbers)
        assert sorted(numbers) == list(range(len(numbers)))
    assert rows.served(len(found)) == dict(counts)
    for index in (1, 17, 1000):
        few = Counter(name for name, _ in found[:index])
        assert rows.served(index) == {name: few[name] for name in "abc"}
        assert all(
            abs(few[n] / index - share) < 2 * slots / index
            for n, share in zip("abc", (0.7, 0.2, 0.1), strict=True)
        )


def test_a_source_that_has_served_its_epochs_leaves_its_share_to_the_others() -> None:
    rows = mix({"a": 1, "b": 1, "c": 2}, {"b": 10, "c": 30})
    found = located(rows, 200)
    assert [number for name, number in found if name == "b"] == list(range(10))
    assert [number for name, number in found if name == "c"] == list(range(30))
    assert {name for name, _ in found[100:]} == {"a"}
    assert rows.total_sequences is None
    ended = mix({"b": 1, "c": 1}, {"b": 10, "c": 30})
    assert ended.total_sequences == 40
    assert Counter(n for n, _ in located(ended, 40)) == {
        "b": 10,
        "c": 30,
    }
    with pytest.raises(EndOfData):
        ended.sequence(40)


def test_a_run_that_is_longer_than_the_epochs_of_all_sources_is_refused(tmp_path) -> None:
    sources = []
    for name in "ab":
        path = write_records(tmp_path / name, 1)
        sources.append(f"{{name='{name}', path='{path}', epochs=1}}")
    flags = [
        f"--data.source=[{', '.join(sources)}]",
        "--training.seq_len=16",
        "--training.batch_size=5",
        "--training.warmup_steps=0",
        "--no-validation.enable",
    ]
    rows = read_datasets(load_config("debug_model.toml", 1, [*flags, "--training.steps=1"])).train
    last, rest = divmod(rows.total_sequences, 5)
    assert rest > 0, "the last step is not whole"
    read_datasets(load_config("debug_model.toml", 1, [*flags, f"--training.steps={last}"]))
    longer = load_config("debug_model.toml", 1, [*flags, f"--training.steps={last + 1}"])
    with pytest.raises(DataError, match=f"end after step {last} of {last + 1}. Set it to {last} "):
        read_datasets(longer)


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8])
def test_ranks_serve_the_same_steps_and_read_lanes_of_their_own(degree) -> None:
    weights = {"a": 3, "b": 1}
    alone = mix(weights, slots=4)
    loaders = [TrainLoader(mix(weights, slots=4), 24, 1, rank, degree) for rank in range(degree)]
    for step in range(3):
        wanted = sorted(alone.sequence(i).tokens[0] for i in range(step * 24, step * 24 + 24))
        assert (
            sorted(int(b.tokens[0, 0]) for loader in loaders for b in loader.next_step()) == wanted
        )
    if 4 % degree == 0:
        assert all(len(loader.dataset.rows[0].asked) == 4 // degree for loader in loaders)


def test_phases_change_the_shares_and_the_counts_go_on() -> None:
    rows = mix({"a": 1, "b": 0}, phases={100: {"a": 1, "b": 1}, 301: {"b": 1}}, slots=2)
    found = located(rows, 500)
    assert {name for name, _ in found[:100]} == {"a"}
    assert {name for name, _ in found[302:]} == {"b"}
    assert abs(sum(name == "a" for name, _ in found[100:302]) - 101) <= 2
    for name in "ab":
        numbers = [number for source, number in found if source == name]
        assert sorted(numbers) == list(range(len(numbers)))


def test_a_phase_begins_at_its_sequence_also_within_one_turn_of_the_lanes() -> None:
    """Each lane still serves its sequences of each source in order, without gaps."""
    rows = mix(
        {"a": 1, "b": 0}, phases={9: {"a": 1, "b": 1}, 13: {"b": 1}, 30: {"a": 2, "b": 1}}, slots=8
    )
    found = located(rows, 400)
    assert {name for name, _ in found[:9]} == {"a"}
    assert {name for name, _ in found[13:30]} == {"b"}
    for name in "ab":
        numbers = [
            (number, index) for index, (source, number) in enumerate(found) if source == name
        ]
        assert all(number % 8 == index % 8 for number, index in numbers), (
            "a lane of the stream for each slot"
        )
        for slot in range(8):
            lane = [number // 8 for number, index in numbers if index % 8 == slot]
            assert lane == list(range(len(lane)))
    assert abs(sum(name == "a" for name, _ in found[30:]) - 370 * 2 / 3) <= 8
    for index in (0, 9, 11, 13, 29, 30, 37, 400):
        served = Counter(name for name, _ in found[:index])
        assert rows.served(index) == {"a": served["a"], "b": served["b"]}


def test_a_run_goes_on_with_other_shares_and_a_new_source_and_repeats_nothing() -> None:
    before = mix({"a": 1, "b": 1})
    first = located(before, 50)
    state = json.loads(json.dumps(before.merge_states([before.state_dict()])))
    after = mix({"b": 1, "n": 3, "a": 1})
    after.load_state_dict(state, 50)
    found = first + located(after, 150, 50)
    assert located(after, 50) == first
    assert Counter(name for name, _ in found[50:]) == {"a": 20, "b": 20, "n": 60}
    for name in "abn":
        assert [number for source, number in found if source == name] == list(
            range(sum(s == name for s, _ in found))
        )
    again = mix({"b": 1, "n": 3, "a": 1})
    again.load_state_dict(
        json.loads(json.dumps(after.state_dict())), 120
    )  # the shares stay: so does the history
    assert located(again, 150) == [(n, i) for n, i in found]


def test_a_source_that_was_served_stays_and_a_lowered_limit_ends_it() -> None:
    before = mix({"a": 1, "b": 1}, {"a": 300, "b": 400})
    state = json.loads(json.dumps(before.merge_states([before.state_dict()])))
    with pytest.raises(DataError, match="mixture has b. Keep it"):
        mix({"a": 1, "c": 1}).load_state_dict(state, 100)
    less = mix({"a": 1, "b": 1}, {"a": 100, "b": 400})
    less.load_state_dict(state, 400)  # 200 of each are served
    assert {name for name, _ in located(less, 600, 400)} == {"b"}
    assert less.total_sequences == 600


def test_the_record_of_a_bad_step_has_the_documents_of_all_ranks(tmp_path) -> None:
    rows = mix({"a": 1, "b": 1})
    log = AnomalyLog(tmp_path, rows, STEADY, share=(0, 2))
    log.skipped(
        BadStepError(3, 9.0, 9.0, "why"), Fetched([], {"next_sequence": 8}, {"next_sequence": 12})
    )
    (event,) = map(json.loads, (tmp_path / "guard.jsonl").read_text().splitlines())
    assert event["documents"] == {
        str(n): [f"{name}: {i}"] for n, (name, i) in enumerate(located(rows, 12, 8), 8)
    }


def test_the_record_of_a_bad_last_step_has_no_documents_of_what_fills_it_up(tmp_path) -> None:
    rows = mix({"a": 1, "b": 1}, {"a": 5, "b": 5})
    AnomalyLog(tmp_path, rows, STEADY).skipped(
        BadStepError(3, 9.0, 9.0, "why"), Fetched([], {"next_sequence": 8}, {"next_sequence": 12})
    )
    (event,) = map(json.loads, (tmp_path / "guard.jsonl").read_text().splitlines())
    assert rows.total_sequences == 10
    assert sorted(event["documents"]) == ["8", "9"]


def test_a_phase_begins_at_its_step_or_with_the_first_step_after_its_tokens(tmp_path) -> None:
    """A step has 4 sequences of 32 tokens."""
    phases = "[{tokens=1024,lr_factor=0.5}, {tokens=257,weights={b=1}}, {step=7,weights={a=1}}]"
    sources = f"[{{name='a', path='{tmp_path}'}}, {{name='b', path='{tmp_path}'}}]"
    flags = [
        f"--data.source={sources}",
        f"--data.phase={phases}",
        "--training.seq_len=32",
        "--training.batch_size=4",
    ]
    run = load_config("debug_model.toml", 1, flags)
    assert phases_of(run).rates() == ((4, 1.0), (7, 1.0), (9, 0.5))
    assert phases_of(run).shares() == {0: {"a": 1.0, "b": 1.0}, 12: {"b": 1.0}, 24: {"a": 1.0}}


class Walk:
    """Steps of a run without a model: a mixture of "a", and of "b" from a phase on that halves the
    learning rate.
    """

    def __init__(
        self, phase: DataPhase, slots: int, size: int = 8, skip: tuple[tuple[int, int], ...] = ()
    ) -> None:
        first = {"a": 1.0, "b": 0.0}
        phases = Phases([phase], first, size, 2 * size, skip)
        rows = MixedRows(
            {name: Numbers(None, slots) for name in "ab"}, phases.shares(), seed=5, slots=slots
        )
        rate = LearningRate(Schedule(1000, 0, "constant", "titan", 1.0), 1.0, phases=phases.rates())
        self.loader = TrainLoader(rows, size, size, skip=skip)
        self.size = size
        parts = SimpleNamespace(
            phases=phases,
            learning_rate=rate,
            course=phases.course(),
            loader=self.loader,
            datasets=SimpleNamespace(train=rows),
        )
        self.run: Any = SimpleNamespace(parts=parts, step=0, tokens_seen=0)
        #: Step → its source, and the factor of its learning rate.
        self.served: dict[int, tuple[str, float]] = {}
        #: Numbers of each source that were served.
        self.numbers: dict[str, list[int]] = {"a": [], "b": []}

    def go_on(self, data: dict[str, Any], step: int, tokens: int) -> Walk:
        self.run.step = step
        self.run.tokens_seen = tokens
        load_text(self.run, json.loads(json.dumps(data)))
        return self

    def walk(self, until: int) -> dict[str, Any]:
        rows = self.loader.dataset
        while self.run.step < until:
            self.run.step += 1
            before = self.loader.position
            self.loader.next_step()
            self.run.tokens_seen += 2 * self.size
            sequences = take(before, self.size, self.loader.skip)
            found = [(rows.names[source], number) for source, number in map(rows.locate, sequences)]
            (name,) = {name for name, _ in found}
            self.numbers[name] += [number for _, number in found]
            self.served[self.run.step] = name, self.run.parts.learning_rate(self.run.step)
        return self.loader.state_dict()


def first_of_b(*walks: Walk) -> int:
    """Return the step at which weights and rate change; they do so together."""
    served = {step: pair for walk in walks for step, pair in walk.served.items()}
    assert set(served.values()) == {("a", 1.0), ("b", 0.5)}
    steps = [step for step, pair in sorted(served.items()) if pair == ("b", 0.5)]
    assert steps == list(range(steps[0], max(served) + 1))
    return steps[0]


BY_STEP = DataPhase(step=21, weights={"b": 1.0}, lr_factor=0.5)
#: 20 steps of 8 sequences of 2 tokens.
BY_TOKENS = DataPhase(tokens=320, weights={"b": 1.0}, lr_factor=0.5)


@pytest.mark.parametrize("slots", [1, 64])
@pytest.mark.parametrize(("phase", "wanted"), [(BY_STEP, 21), (BY_TOKENS, 31)])
def test_weights_and_rate_change_together_after_a_resume_with_another_global_batch(
    slots, phase, wanted
) -> None:
    first = Walk(phase, slots)
    data = first.walk(10)
    second = Walk(phase, slots, size=4).go_on(data, 10, 160)
    data = second.walk(15)
    third = Walk(phase, slots, size=4).go_on(data, 15, 200)  # nothing changes any more
    third.walk(40)
    assert first_of_b(first, second, third) == wanted
    assert not third.loader.dataset.changed
    numbers = [walk.numbers for walk in (first, second, third)]
    for name in "ab":
        served = sorted(number for some in numbers for number in some[name])
        assert len(set(served)) == len(served), "nothing is repeated"


@pytest.mark.parametrize("slots", [1, 64])
@pytest.mark.parametrize("phase", [BY_STEP, BY_TOKENS])
def test_weights_and_rate_change_together_with_skipped_steps(slots, phase) -> None:
    walk = Walk(phase, slots, skip=((16, 40), (150, 161)))
    walk.walk(40)
    assert first_of_b(walk) == 21


@pytest.mark.parametrize("bad_step", [19, 20, 21, 22])
@pytest.mark.parametrize("slots", [1, 64])
def test_weights_and_rate_change_together_after_a_rollback_that_skips_the_bad_text(
    slots, bad_step
) -> None:
    run = Walk(BY_STEP, slots)
    data = run.walk(15)
    before = run.walk(bad_step - 1)
    fetched = Fetched([], before, run.walk(bad_step))
    bad = [
        run.loader.dataset.locate(index)
        for index in range(before["next_sequence"], run.loader.position)
    ]
    run.served = {step: pair for step, pair in run.served.items() if step <= 15}
    run.go_on(skip_to(data, fetched.after), 15, 240)
    skipped = [
        run.loader.dataset.locate(index)
        for index in range(before["next_sequence"], run.loader.position)
    ]
    assert skipped == bad, "the text of the bad step is behind the run"
    data = run.walk(18)
    # A start from a checkpoint that was saved after the rollback.
    again = Walk(BY_STEP, slots).go_on(data, 18, 288)
    again.walk(40)
    run.walk(40)
    assert first_of_b(run) == 21
    assert not again.loader.dataset.changed
    assert {step: pair for step, pair in run.served.items() if step > 18} == again.served
    assert again.numbers["b"] == run.numbers["b"][-len(again.numbers["b"]) :]
