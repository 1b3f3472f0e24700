"""Steps prepared by a thread: the same ones in the same order, a state of what was handed out, and
a clean end.
"""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support.processes import python, until
from titanlite.data import DataError
from titanlite.data.batch_hash import add_hashes, batch_hash
from titanlite.data.loader import Batch, TrainLoader
from titanlite.data.prefetch import THREAD, Prefetcher
from titanlite.data.sequences import PackedDataset
from titanlite.data.tokenize_files import Corpus

SEQ = 16
GLOBAL = 12


def loader(
    corpus: Corpus, rank: int = 0, ranks: int = 1, epochs: int | None = None, skip: Any = ()
) -> TrainLoader:
    dataset = PackedDataset(corpus, seq_len=SEQ, seed=4, epochs=epochs)
    return TrainLoader(dataset, GLOBAL, GLOBAL // ranks // 2, rank, ranks, skip)


def changed(inner: TrainLoader, before: Callable[[], None]) -> TrainLoader:
    """`inner`, with a call before each of its steps."""
    step = inner.next_step

    def next_step() -> list[Batch]:
        before()
        return step()

    inner.next_step = next_step  # type: ignore[method-assign]
    return inner


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(THREAD)]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    assert threads() == []
    yield
    gc.collect()
    until(lambda: not threads())


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("depth", "skip"), [(3, [(6, 12)]), (0, ())])
def test_steps_and_states_are_those_of_the_loader(corpus, depth, skip):
    plain = loader(corpus, skip=skip)
    inner = loader(corpus, skip=skip)
    makers = set[str]()
    changed(inner, lambda: makers.add(threading.current_thread().name))
    with Prefetcher(inner, depth) as batches:
        for _ in range(12):
            expected = plain.next_step()
            found = batches.next_step()
            assert [batch_hash([one]) for one in found] == [batch_hash([one]) for one in expected]
            assert batches.state_dict() == plain.state_dict()
            assert len(threads()) == (depth > 0)
        until(lambda: inner.position == plain.position + depth * GLOBAL)
        time.sleep(0.02)
        assert inner.position == plain.position + depth * GLOBAL, (
            "more than depth steps are prepared"
        )
    assert makers == {f"{THREAD}_0" if depth else "MainThread"}


def test_a_resume_throws_away_what_is_prepared_and_is_that_of_any_number_of_ranks(corpus):
    plain = loader(corpus)
    straight = [batch_hash(plain.next_step()) for _ in range(12)]
    resumed = [Prefetcher(loader(corpus, rank, 3), 2) for rank in range(3)]
    for batches in resumed:
        batches.next_step()
        batches.load_state_dict({"next_sequence": 4 * GLOBAL})
    for wanted in straight[4:]:
        assert add_hashes(batch_hash(batches.next_step()) for batches in resumed) == wanted
    for batches in resumed:
        batches.close()


FORGOTTEN = """
import threading, time
from titanlite.config.data_sections import Data
from titanlite.config.sections import Training
from titanlite.data.loader import TrainLoader
from titanlite.data.prefetch import Prefetcher
from titanlite.data.dataset_builder import TextReader
from titanlite.data.tokenizer import load_tokenizer
tokenizer = load_tokenizer()
data = Data(streaming=True, num_workers=2)
rows = TextReader(data, tokenizer, tokenizer.vocab_size).train(Training(seq_len=512))
busy, asleep = (Prefetcher(TrainLoader(rows, 64, 64)) for _ in range(2))
busy.next_step()
asleep.loader.next_step = lambda: time.sleep(600)
threading.Thread(target=asleep.next_step, daemon=True).start()
time.sleep(0.2)
print(time.time())
"""


@pytest.mark.slow
def test_a_process_does_not_wait_for_a_prefetcher_that_nobody_closes():
    done = python("-c", FORGOTTEN)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert time.time() - float(done.stdout) < 200


def test_an_error_comes_at_its_step_and_the_step_can_be_tried_again(corpus):
    inner = loader(corpus)
    plain = loader(corpus)
    broken = True

    def fail():
        if broken and inner.position == 3 * GLOBAL:
            raise DataError("text.jsonl, line 7: not valid")

    with Prefetcher(changed(inner, fail), 2) as batches:
        for _ in range(3):
            assert batch_hash(batches.next_step()) == batch_hash(plain.next_step())
        for _ in range(2):
            with pytest.raises(DataError, match=r"^text.jsonl, line 7: not valid$"):
                batches.next_step()
            assert threads() == []
            assert batches.state_dict() == {"next_sequence": 3 * GLOBAL}
        broken = False
        assert batch_hash(batches.next_step()) == batch_hash(plain.next_step())


@pytest.mark.parametrize("reserve", [0, 2])
def test_a_reserve_of_steps_is_left_when_a_source_fails(corpus, reserve):
    made = itertools.count(1)
    told = list[tuple[int, str]]()

    def fail():
        if next(made) == 6:
            raise DataError("the source is lost")

    handed = 0
    with Prefetcher(changed(loader(corpus), fail), depth=2, reserve=reserve) as batches:
        batches.on_failure = lambda error: told.append((handed, str(error)))
        with pytest.raises(DataError, match="lost"):
            while True:
                batches.next_step()
                handed += 1
        assert handed == 5  # every step that could be prepared is handed out
    if reserve:
        assert told[0][0] <= 5 - reserve
        assert told[0][1] == "the source is lost"


def test_batches_are_pinned_by_the_thread_on_this_ranks_gpu(corpus, monkeypatch):
    """Without set_device the thread would open a context on GPU 0, on every rank."""
    calls: list[tuple[Any, str]] = []

    def note(what):
        calls.append((what, threading.current_thread().name))
        return what

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", note)
    monkeypatch.setattr(torch.Tensor, "pin_memory", note)
    with Prefetcher(loader(corpus), 1, pin=True) as batches:
        batches.next_step()
    assert calls[0][0] == 3
    assert {thread for _, thread in calls} == {f"{THREAD}_0"}
    assert len(calls) >= 1 + 4  # tokens and labels of two micro-batches
