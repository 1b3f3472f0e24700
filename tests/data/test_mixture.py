"""Mixtures: shares by tokens, each source in its own order without gaps, any number of ranks, exact
resume.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest

from tests.support.sources import Numbers
from tests.support.texts import write_records
from titanlite.assembly.datasets import phases_of, read_datasets
from titanlite.data import DataError, EndOfData
from titanlite.data.loader import TrainLoader
from titanlite.data.mixtures.mixed_rows import MixedRows
from titanlite.resolve.load import load_config


def mix(
    weights: dict[str, float], limits: dict[str, int] | None = None, slots: int = 1, phases=None
) -> MixedRows:
    sources = {name: Numbers((limits or {}).get(name), slots) for name in weights}
    return MixedRows(sources, {0: weights, **(phases or {})}, seed=5, slots=slots)


def located(rows: MixedRows, count: int, start: int = 0) -> list[tuple[str, int]]:
    return [
        (rows.names[source], number) for source, number in map(rows.locate, range(start, count))
    ]


@pytest.mark.parametrize("slots", [1, 6])
def test_shares_are_exact_and_each_source_is_served_without_gaps(slots):
    weights = {"a": 0.7, "b": 0.2, "c": 0.1}
    rows = mix(weights, slots=slots)
    found = located(rows, 4096 * slots)
    for name in weights:
        numbers = [number for source, number in found if source == name]
        assert sorted(numbers) == list(range(len(numbers)))
        assert round(len(numbers) / len(found), 3) == weights[name]
    for index in (1, 17, 1000, len(found)):
        few = Counter(name for name, _ in found[:index])
        assert rows.served(index) == {name: few[name] for name in weights}
        assert all(abs(few[n] / index - weights[n]) < 2 * slots / index for n in weights)


def test_a_source_that_has_served_its_epochs_leaves_its_share_to_the_others():
    rows = mix({"a": 1, "b": 1, "c": 2}, {"b": 10, "c": 30})
    found = located(rows, 200)
    assert [number for name, number in found if name == "b"] == list(range(10))
    assert [number for name, number in found if name == "c"] == list(range(30))
    assert {name for name, _ in found[100:]} == {"a"}
    ended = mix({"b": 1, "c": 1}, {"b": 10, "c": 30})
    assert ended.total_sequences == 40
    assert Counter(n for n, _ in located(ended, 40)) == {"b": 10, "c": 30}
    with pytest.raises(EndOfData):
        ended.sequence(40)


def test_a_run_that_is_longer_than_the_epochs_of_all_sources_is_refused(tmp_path):
    sources = []
    for name in "ab":
        path = write_records(tmp_path / name, 1)
        sources.append(f"{{name='{name}', path='{path}', epochs=1}}")
    flags = [f"--data.source=[{', '.join(sources)}]", "--training.seq_len=16"]
    flags += ["--training.batch_size=5", "--training.warmup_steps=0", "--no-validation.enable"]

    def read(steps):
        words = [*flags, f"--training.steps={steps}"]
        return read_datasets(load_config("debug_model.toml", 1, words)).train

    last, rest = divmod(read(1).total_sequences, 5)
    assert rest > 0, "the last step is not whole"
    read(last)
    with pytest.raises(DataError, match=f"end after step {last} of {last + 1}. Set it to {last} "):
        read(last + 1)


@pytest.mark.parametrize("degree", [2, 3, 8])
def test_ranks_serve_the_same_steps_and_read_lanes_of_their_own(degree):
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


def test_a_phase_begins_at_its_sequence_also_within_one_turn_of_the_lanes():
    """Each lane still serves its sequences of each source in order, without gaps."""
    rows = mix(
        {"a": 1, "b": 0}, phases={9: {"a": 1, "b": 1}, 13: {"b": 1}, 30: {"a": 2, "b": 1}}, slots=8
    )
    found = located(rows, 400)
    assert {name for name, _ in found[:9]} == {"a"}
    assert {name for name, _ in found[13:30]} == {"b"}
    for name, slot in itertools.product("ab", range(8)):
        # A lane of the stream for each slot.
        lane = [number for source, number in found[slot::8] if source == name]
        assert lane == list(range(slot, 8 * len(lane) + slot, 8))
    assert abs(sum(name == "a" for name, _ in found[30:]) - 370 * 2 / 3) <= 8
    for index in (0, 9, 11, 13, 29, 37):
        served = Counter(name for name, _ in found[:index])
        assert rows.served(index) == {"a": served["a"], "b": served["b"]}


def test_a_run_goes_on_with_other_shares_and_a_new_source_and_repeats_nothing():
    before = mix({"a": 1, "b": 1})
    first = located(before, 50)
    state = json.loads(json.dumps(before.merge_states([before.state_dict()])))
    after = mix({"b": 1, "n": 3, "a": 1})
    after.load_state_dict(state, 50)
    found = first + located(after, 150, 50)
    assert located(after, 50) == first
    assert Counter(name for name, _ in found[50:]) == {"a": 20, "b": 20, "n": 60}
    for name in "abn":
        numbers = [number for source, number in found if source == name]
        assert numbers == list(range(len(numbers)))
    again = mix({"b": 1, "n": 3, "a": 1})
    # The shares stay, and so does the history.
    again.load_state_dict(json.loads(json.dumps(after.state_dict())), 120)
    assert located(again, 150) == found


def test_a_source_that_was_served_stays_and_a_lowered_limit_ends_it():
    before = mix({"a": 1, "b": 1}, {"a": 300, "b": 400})
    state = json.loads(json.dumps(before.merge_states([before.state_dict()])))
    with pytest.raises(DataError, match="mixture has b. Keep it"):
        mix({"a": 1, "c": 1}).load_state_dict(state, 100)
    less = mix({"a": 1, "b": 1}, {"a": 100, "b": 400})
    less.load_state_dict(state, 400)  # 200 of each are served
    assert {name for name, _ in located(less, 600, 400)} == {"b"}
    assert less.total_sequences == 600


def test_a_phase_begins_at_its_step_or_with_the_first_step_after_its_tokens(tmp_path):
    """A step has 4 sequences of 32 tokens."""
    phases = "[{tokens=1024,lr_factor=0.5}, {tokens=257,weights={b=1}}, {step=7,weights={a=1}}]"
    sources = f"[{{name='a', path='{tmp_path}'}}, {{name='b', path='{tmp_path}'}}]"
    flags = [
        f"--data.source={sources}",
        f"--data.phase={phases}",
        "--training.seq_len=32",
        "--training.batch_size=4",
    ]
    found = phases_of(load_config("debug_model.toml", 1, flags))
    assert found.rates() == ((4, 1.0), (7, 1.0), (9, 0.5))
    assert found.shares() == {0: {"a": 1.0, "b": 1.0}, 12: {"b": 1.0}, 24: {"a": 1.0}}
