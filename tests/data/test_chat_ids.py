"""Ids and masks of conversations by kinds of tokenizers as they are published, beside those of
`apply_chat_template`.

The vocabularies are small; added tokens, normalizers and pre-tokenizers are those of the models.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.support.hf import bundled_as_json
from titanlite.data.chat import encode_chat, load_template
from titanlite.data.tokenizer import BUNDLED_SENTENCEPIECE, BUNDLED_TOKENIZER, load_tokenizer
from titanlite.data.tokenizer.hf_export import as_tokenizer_json

CHATS = [
    [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Good day, sir."}],
    [
        {"role": "system", "content": "  Be brief — cafe\u0301, 日本語.\n"},
        {"role": "user", "content": " 1 + 1?   "},
        {"role": "assistant", "content": "\n  2 🙂\n"},
        {"role": "user", "content": "<tool_call> a<mask> </s> b<mask>c"},
        {"role": "assistant", "content": " the  user"},
    ],
]
#: The turns of most families: a head, the content, an end.
TURNS = (
    "{{ bos_token }}{% for m in messages %}HEAD{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}END{% endgeneration %}{% else %}{{ m.content }}END{% endif %}{% endfor %}"
)
CHATML = ("<|im_start|>{{ m.role }}\n", "<|im_end|>\n")
PHI = ("<|{{ m.role }}|>\n", "<|end|>\n")
LLAMA3 = ("<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n", "<|eot_id|>")
MISTRAL = ("{{ '' if m.role == 'assistant' else '[INST]' }}", "</s>")
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREPEND = {"type": "Prepend", "prepend": "▁"}
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def of_bytes(**changed: Any) -> dict[str, Any]:
    return {**json.loads(bundled_as_json().to_str()), "added_tokens": [], **changed}


def of_pieces(**changed: Any) -> dict[str, Any]:
    tokenizer = load_tokenizer(str(BUNDLED_SENTENCEPIECE))
    content = as_tokenizer_json(BUNDLED_SENTENCEPIECE.read_bytes(), "sentencepiece", tokenizer)
    # </s> in a user's text is the token, and those of Phi-3 take the spaces behind it.
    return {**json.loads(content), "added_tokens": [], "post_processor": None, **changed}


def with_tokens(parsed: dict[str, Any], *names: str, **flags: Any) -> dict[str, Any]:
    """Add tokens, which strip spaces or not."""
    fixed = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    vocabulary = parsed["model"]["vocab"]
    for name in names:
        number = vocabulary.get(name, len(vocabulary) + len(parsed["added_tokens"]))
        entry = {"id": number, "content": name, **fixed, "special": True, **flags}
        parsed["added_tokens"].append(entry)
    return parsed


def phi3() -> dict[str, Any]:
    parsed = of_pieces(normalizer={"type": "Sequence", "normalizers": [PREPEND, REPLACE]})
    with_tokens(parsed, "<unk>", "<s>", "<|end|>")
    with_tokens(parsed, "</s>", rstrip=True, special=False)
    return with_tokens(parsed, "<|system|>", "<|user|>", "<|assistant|>", rstrip=True)


def mistral_v3() -> dict[str, Any]:
    first = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    parsed = of_pieces(normalizer=None, pre_tokenizer=first)
    return with_tokens(parsed, "<unk>", "<s>", "</s>", "[INST]", "[/INST]")


def qwen() -> dict[str, Any]:
    plain = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    cut = {"pattern": {"Regex": QWEN}, "behavior": "Isolated", "invert": False}
    steps = [{"type": "Split", **cut}, {"type": "ByteLevel", **plain}]
    parsed = of_bytes(
        normalizer={"type": "NFC"}, pre_tokenizer={"type": "Sequence", "pretokenizers": steps}
    )
    with_tokens(parsed, "<s>", "</s>", "<|im_start|>", "<|im_end|>")
    return with_tokens(parsed, "<tool_call>", special=False)


KINDS: dict[str, tuple[Callable[[], dict[str, Any]], tuple[str, str]]] = {
    "phi3": (phi3, PHI),
    "mistral-v3": (mistral_v3, MISTRAL),
    "qwen": (qwen, CHATML),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_json_gives_ids_and_masks_of_transformers(kind: str, tmp_path: Path) -> None:
    make, (head, end) = KINDS[kind]
    (tmp_path / "tokenizer.json").write_text(json.dumps(make()))
    compare(tmp_path, tmp_path / "tokenizer.json", TURNS.replace("HEAD", head).replace("END", end))


@pytest.mark.parametrize("kind", ["tiktoken", "sentencepiece"])
def test_files_of_other_kinds_give_those_of_their_tokenizer_json(kind: str, tmp_path: Path) -> None:
    file = {"tiktoken": BUNDLED_TOKENIZER, "sentencepiece": BUNDLED_SENTENCEPIECE}[kind]
    ours = load_tokenizer(str(file))
    made = as_tokenizer_json(file.read_bytes(), kind, ours)
    (tmp_path / "tokenizer.json").write_bytes(made)
    head, end = LLAMA3 if kind == "tiktoken" else MISTRAL
    compare(tmp_path, file, TURNS.replace("HEAD", head).replace("END", end))


def compare(folder: Path, file: Path, source: str) -> None:
    """Compare conversations by the tokenizer of a file, and by transformers from a folder."""
    template = folder / "own.jinja"
    template.write_text(source)
    ours = load_tokenizer(str(file))
    names = {number: name for name, number in ours.special_tokens.items()}
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token=names[ours.bos_id],
        eos_token=names[ours.eos_id],
        chat_template=source,
    )
    for chat in CHATS:
        text = load_template(str(template), ours).render(chat, "here")
        ids, mask = encode_chat(text, ours)
        assert ids.tolist() == theirs.apply_chat_template(chat)["input_ids"]
        assert mask.tolist() == tokens_within(text, theirs)
        assert 0 < mask.sum() < len(mask)


def tokens_within(text: str, theirs: PreTrainedTokenizerFast) -> list[bool]:
    """Tell of each token whether a character of it is between marks.

    `return_assistant_tokens_mask` is the same but for a space that no token has, and for the last
    character of a turn where that is several tokens.
    """
    inside: list[bool] = []
    plain = ""
    is_inside = False
    for character in text:
        if character in "\ufdd0\ufdd1":
            is_inside = character == "\ufdd0"
        else:
            plain += character
            inside.append(is_inside)
    found = theirs(plain, add_special_tokens=False, return_offsets_mapping=True)
    return [any(inside[begin:end]) for begin, end in found["offset_mapping"]]
