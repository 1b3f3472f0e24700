"""Prompts: their tokens are read and are no targets, in rows, caches and the loss of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titanlite.config.data_sections import Data, DataSource
from titanlite.config.errors import ConfigError
from titanlite.config.load import load_file
from titanlite.config.sections import Training
from titanlite.data import DataError
from titanlite.data.dataset_builder import build_dataset
from titanlite.data.records import Columns
from titanlite.data.rows import IGNORE
from titanlite.data.text_files import BUNDLED, columns_of, list_files
from titanlite.data.text_function import own_records
from titanlite.data.token_cache import load_corpus
from titanlite.data.tokenizer import load_tokenizer
from titanlite.resolve.load import load_config

TOKENIZER = load_tokenizer()
SFT = list_files(BUNDLED["sft_test"])
PAIRS = [json.loads(line) for line in SFT[0].read_text().splitlines()]
SEQ_LEN = 64


def by_hand() -> tuple[list[int], list[bool]]:
    """All tokens of the bundled pairs, and whether each is a target."""
    tokens: list[int] = []
    targets: list[bool] = []
    for pair in PAIRS:
        prompt = TOKENIZER.encode(pair["prompt"], bos=True)
        completion = TOKENIZER.encode(pair["completion"], eos=True)
        tokens += prompt + completion
        targets += [False] * len(prompt) + [True] * len(completion)
    return tokens, targets


def test_labels_are_those_of_completions_and_their_eos() -> None:
    tokens, targets = by_hand()
    training = Training(dataset="sft_test", seq_len=SEQ_LEN, epochs=2)
    dataset: Any = build_dataset(training, Data(shuffle=False), TOKENIZER, TOKENIZER.vocab_size)
    labels = [row.labels for row in map(dataset.sequence, range(dataset.total_sequences))]
    expected = [
        token if target else IGNORE for token, target in zip(tokens, targets, strict=True)
    ] * 2
    found = np.concatenate(labels)[: len(expected) - 1].tolist()
    assert found == expected[1:]  # the label at p is token p + 1
    assert 0 < sum(label != IGNORE for label in found) < len(found) / 2
    assert dataset.sequence(0).tokens.tolist() == tokens[:SEQ_LEN]


def test_threads_chunks_and_caches_keep_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records without a prompt among the others have targets only."""
    path = tmp_path / "mixed.jsonl"
    rows = [{"q": "" if i % 3 else f"ask {i}", "a": f"say {i}"} for i in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = Columns("a", "q")

    def read(cache: str = "off", workers: int = 0) -> Any:
        size = TOKENIZER.vocab_size
        return load_corpus([path], TOKENIZER, size, workers=workers, cache=cache, columns=columns)

    whole = read()
    firsts = whole.targets[whole.offsets[:-1]]
    assert firsts.tolist() == [bool(i % 3) for i in range(60)]
    monkeypatch.setattr(
        "titanlite.data.tokenize_files._CHUNK", 5
    )  # some chunks have no prompt at all
    cache = str(tmp_path / "cache")
    for found in (read(workers=2), read(cache), read(cache)):
        assert np.array_equal(found.targets, whole.targets)
        assert np.array_equal(found.tokens, whole.tokens)
        assert found.fingerprint == whole.fingerprint


def test_fields_of_sources_go_before_those_of_data() -> None:
    data = Data(prompt_key="q", completion_key="a")
    own = "data.source"
    assert columns_of(data, "x", "p", DataSource()) == Columns("a", "q")
    assert columns_of(data, "x", "p", DataSource(completion_key="b")) == Columns("b", "q", own)
    assert columns_of(data, "x", "p", DataSource(text_key="t")) == Columns("t", None, own)
    assert columns_of(data, "sft_test", None)[:2] == ("completion", "prompt")


def chats() -> list[dict[str, str]]:
    return [{"q": "one", "a": "two"}, {"q": "three"}]


def one_text() -> str:
    return "its characters are no documents"


def test_own_functions_may_return_prompts() -> None:
    records = own_records(f"{__name__}:chats", "training.dataset", Columns("a", "q"))
    assert next(records)[2:4] == ("two", "one")
    with pytest.raises(ValueError, match="document 2 of .*: the key 'a' is missing"):
        next(records)
    with pytest.raises(DataError, match="one_text returned 'its characters.*, expected documents"):
        next(own_records(f"{__name__}:one_text", "training.dataset"))


def test_one_key_needs_the_other_also_in_a_source(tmp_path: Path) -> None:
    for key in ("prompt_key", "completion_key"):
        with pytest.raises(ValueError, match=f"data: has {key} and needs "):
            load_config("sft_debug.toml", 1, [f"--data.{key}=x"])
    path = tmp_path / "run.toml"
    sources = (
        'name = "sft_test"\nprompt_key = "a"\ncompletion_key = "b"',
        'name = "c4_test"\nprompt_key = "a"',
    )
    path.write_text("".join(f"[[data.source]]\n{source}\n" for source in sources))
    with pytest.raises(ConfigError) as caught:
        load_file(str(path))
    (problem,) = caught.value.problems
    assert (problem.code, problem.key) == ("needs", "data.source[1]")
