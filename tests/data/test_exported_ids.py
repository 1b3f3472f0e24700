"""Files beside exported weights: `AutoTokenizer` reads the ids that a run trains on, BOS before
each text.
"""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
import transformers

from tests.support.hf import bundled_as_json
from titanlite.checkpoint.manifest import CheckpointError
from titanlite.cli.hub.compare_checkpoints import compare_ids
from titanlite.data.text_files import BUNDLED, iter_records
from titanlite.data.tokenizer import BUNDLED_SENTENCEPIECE, BUNDLED_TOKENIZER, load_tokenizer
from titanlite.data.tokenizer.export_files import hf_files
from titanlite.data.tokenizer.hf_export import SAMPLES

TEXTS = (
    *SAMPLES,
    "In 1811 a cafe\u0301  for 12345 ",
    "x\n\n\ty",
    "   \n ",
    "[ins] is text [/ins]",
    "a[ins]b [/ins][ins]  c",
)


def documents() -> list[str]:
    records = iter_records(BUNDLED["c4_test"])
    return [record.text for record, _ in zip(records, range(40), strict=False)]


def sentencepiece_model(file: Path, kind: str = "bpe", **options: Any) -> Path:
    """Train a small model with the settings of a published one."""
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(documents()),
        model_writer=content,
        vocab_size=700,
        model_type=kind,
        num_threads=1,
        minloglevel=2,
        **options,
    )
    file.write_bytes(content.getvalue())
    return file


#: Llama 2, Mistral and Mixtral: no normalisation, every space kept, bytes for unknown characters.
PLAIN: dict[str, Any] = {
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "split_digits": True,
}


def llama_2(folder: Path) -> Path:
    return shutil.copy(BUNDLED_SENTENCEPIECE, folder / "tokenizer.model")


def llama_3(folder: Path) -> Path:
    return shutil.copy(BUNDLED_TOKENIZER, folder / "tokenizer.model")


def mistral_3(folder: Path) -> Path:
    """Its instructions are control pieces, which no text becomes; its config says nothing of
    BOS.
    """
    config = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "chat_template": "{{ 1 }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    control = ["[INST]", "[/INST]", "[TOOL_CALLS]"]
    return sentencepiece_model(folder / "tokenizer.model", **PLAIN, control_symbols=control)


def qwen(folder: Path) -> Path:
    """Byte-level BPE after NFC, and no BOS by its config: titanlite takes <|endoftext|>."""
    parsed = json.loads(bundled_as_json().to_str())
    parsed |= {"normalizer": {"type": "NFC"}, "added_tokens": [], "post_processor": None}
    made = tokenizers.Tokenizer.from_str(json.dumps(parsed))
    made.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    made.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "add_bos_token": False,
        "pad_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


def plain_ids(file: Path) -> Callable[[str], list[int]]:
    """The ids of the library of this kind of file, without BOS."""
    if file.name == "tokenizer.json":
        made = tokenizers.Tokenizer.from_file(str(file))
        return lambda text: list(made.encode(text, add_special_tokens=False).ids)
    if file.read_bytes() == BUNDLED_TOKENIZER.read_bytes():
        return load_tokenizer().encode
    processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
    return lambda text: list(processor.encode(text))


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("kind", "families", "bos"),
    [
        (llama_2, ["llama", "mixtral"], "<s>"),
        (llama_3, ["llama", "mistral", "mixtral", "qwen3"], "<|begin_of_text|>"),
        (mistral_3, ["mistral"], "<s>"),
        (qwen, ["qwen3", "llama"], "<|endoftext|>"),
    ],
)
def test_auto_tokenizer_reads_the_ids_of_the_run(tmp_path, kind, families, bos):
    """families: of models that are exported with tokenizers of this kind."""
    source = tmp_path / "source"
    source.mkdir()
    file = kind(source)
    expected = plain_ids(file)
    for family in families:
        folder = tmp_path / family
        folder.mkdir()
        for name, content in hf_files(str(file)).items():
            (folder / name).write_bytes(content)
        (folder / "config.json").write_text(json.dumps({"model_type": family}))
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        assert theirs.bos_token == bos
        assert theirs.eos_token_id == load_tokenizer(str(file)).eos_id
        for text in [*TEXTS, *documents()[:5]]:
            assert theirs(text)["input_ids"] == [theirs.bos_token_id, *expected(text)], (
                family,
                text,
            )
        assert compare_ids(str(file), folder).endswith("they are equal")
        text = "Some text, 12 times."
        assert theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True) == text
        if kind is mistral_3:
            assert theirs.chat_template == "{{ 1 }}"
            assert len(theirs("[INST]", add_special_tokens=False)["input_ids"]) == 1


def test_files_that_give_the_ids_are_copied_as_they_are(tmp_path):
    llama_2(tmp_path)
    first = hf_files(str(tmp_path))
    for name, content in first.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<s>"}')
    again = hf_files(str(tmp_path))
    assert again == {**first, "special_tokens_map.json": b'{"bos_token": "<s>"}'}


def test_the_check_of_an_export_names_the_text_whose_ids_differ(tmp_path):
    file = llama_2(tmp_path)
    folder = tmp_path / "export"
    folder.mkdir()
    made = json.loads(hf_files(str(file))["tokenizer.json"])
    (folder / "tokenizer.json").write_text(json.dumps({**made, "post_processor": None}))
    with pytest.raises(
        CheckpointError, match=r"differ, and nothing is published:\n  '': \[\] there, \[1\] here"
    ):
        compare_ids(str(file), folder)
    assert "not compared" in compare_ids(str(tmp_path / "gone.model"), folder)


def test_without_transformers_an_export_has_no_tokenizer_of_a_neighbour(tmp_path, monkeypatch):
    """Beside the bundled tokenizer of Llama 3 lies that of Llama 2, as tokenizer.model."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, content in hf_files(str(BUNDLED_TOKENIZER)).items():
        (tmp_path / name).write_bytes(content)
    there, here = load_tokenizer(str(tmp_path)), load_tokenizer(str(BUNDLED_TOKENIZER))
    assert there.vocab_size == here.vocab_size
    assert [there.encode(text) for text in TEXTS] == [here.encode(text) for text in TEXTS]


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "unigram", "byte_fallback": True},
        {**PLAIN, "user_defined_symbols": ["[ins]"]},
    ],
)
def test_of_other_sentencepiece_models_the_file_alone_is_copied(tmp_path, options, caplog):
    file = sentencepiece_model(tmp_path / "tokenizer.model", **options)
    with caplog.at_level(logging.WARNING, logger="titanlite"):
        found = hf_files(str(file))
    assert found["tokenizer.model"] == file.read_bytes()
    assert "tokenizer.json" not in found
    assert "no tokenizer.json is made of a sentencepiece model of this kind" in caplog.text


@pytest.mark.parametrize(
    ("name", "beside"),
    [("<|im_end|>", None), ("<|eot|>", {"eos_token_id": 1, "top_p": 0.9})],
)
def test_texts_end_where_turns_end(tmp_path, name, beside):
    """`generate` of transformers, and vLLM, stop at the ids of generation_config.json."""
    made = bundled_as_json()
    made.add_special_tokens([name])
    made.save(str(tmp_path / "tokenizer.json"))
    if beside:
        (tmp_path / "generation_config.json").write_text(json.dumps(beside))
    ours = load_tokenizer(str(tmp_path))
    (tmp_path / "generation_config.json").write_bytes(
        hf_files(str(tmp_path))["generation_config.json"]
    )
    given = transformers.GenerationConfig.from_pretrained(tmp_path)
    ends = [ours.eos_id, ours.special_tokens["<|eot_id|>"], ours.special_tokens[name]]
    assert given.eos_token_id == ([1, *ends] if beside else ends)
    assert (given.top_p == 0.9) == bool(beside)
