"""A tokenizer for `transformers`: files that give the ids of ours, with BOS before each text, and
their comparison.

Every document that a run trains on begins with BOS, and so does every text that `titanlite sample`
continues. Other programs read an export by `AutoTokenizer`, so its files must do the same.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlite.data import DataError
from titanlite.data.tokenizer.base import Tokenizer
from titanlite.data.tokenizer.hf_json import JsonTokenizer
from titanlite.data.tokenizer.load_local import Kind
from titanlite.data.tokenizer.tiktoken_ranks import SPLIT_PATTERN, TiktokenTokenizer

CONFIG, TOKENIZER = "tokenizer_config.json", "tokenizer.json"
#: Texts whose ids are compared: spaces at each place, digits, contractions, code, scripts, accents
#: in both forms of Unicode, emoji, control characters.
SAMPLES = (
    "",
    " ",
    "   ",
    "Hello world",
    " one space first",
    "  two spaces first",
    "two  spaces within",
    "a space last ",
    "0 12 123 1234 12345 3.14159 1,000,000 2024-02-29",
    "don't I'LL we've THEY'RE",
    "line one\nline two\n\n\n  line three\r\n\tend\n",
    "def f(x):\n    return {x: [1, 2]}  # why?\n",
    "caf\u00e9 cafe\u0301 na\u00efve \u00c5ngstr\u00f6m \ufb01nal",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u041f\u0440\u0438\u0432\u0435\u0442",
    "\u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f642 \U0001f469\u200d\U0001f469\u200d\U0001f467 \u00a0\u2003\u200b",
    "<b>bold</b> [x] {y} <|z|> @#$%^&*~`\\|",
    "tab\tand\x0bothers\x1b[0m",
    "\u2581 a sign of its own",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
)
#: Entries of a tokenizer_config.json that say nothing of ids, and come along into one that is made
#: here.
_KEPT = (
    "additional_special_tokens",
    "chat_template",
    "clean_up_tokenization_spaces",
    "extra_special_tokens",
    "model_input_names",
    "model_max_length",
    "pad_token",
    "padding_side",
    "truncation_side",
    "unk_token",
)
#: Files that say nothing of ids.
_BESIDE = ("chat_template.jinja", "chat_template.json", "generation_config.json")
#: Kinds of pieces in a sentencepiece model, by its protocol.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_BPE = 2
_SPACE = "\u2581"


def differing_ids(folder: Path, tokenizer: Tokenizer) -> list[str]:
    """Return a line for each difference of `AutoTokenizer`'s ids of `SAMPLES` from ours.

    Names of special tokens are left out: for `transformers` they are tokens, for titanlite text.
    """
    from transformers import AutoTokenizer

    try:
        theirs = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # of any of its parts
        return [f"transformers cannot read it: {type(error).__name__}: {error}"]
    found = []
    for text in SAMPLES:
        if any(name in text for name in tokenizer.special_tokens):
            continue
        ours, there = tokenizer.encode(text, bos=True), list(theirs(text)["input_ids"])
        if ours != there:
            found.append(f"{text!r}: {there} there, {ours} here")
    return found


def other_class(folder: Path) -> str:
    """Return the class that `AutoTokenizer` takes in place of the configured one, or "".

    For some kinds of models `transformers` 5 ignores tokenizer_config.json.
    """
    from transformers import AutoTokenizer

    asked = _json((folder / CONFIG).read_bytes()).get("tokenizer_class")
    taken = type(
        AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    ).__name__
    is_plain = (
        asked == "PreTrainedTokenizerFast" and taken == "TokenizersBackend"
    )  # two names of one class
    return "" if taken == asked or is_plain else taken


def equal_files(
    found: Mapping[str, bytes], content: bytes, kind: Kind, tokenizer: Tokenizer
) -> dict[str, bytes]:
    """Return files from which `AutoTokenizer` reads the tokenizer's ids: `found`, or new ones.

    `found` lies beside the tokenizer's own file of this content and kind.
    """
    named = with_class(found, tokenizer)
    if TOKENIZER in found or CONFIG in found:
        with tempfile.TemporaryDirectory(prefix="titanlite-tokenizer-") as folder:
            for name, one in named.items():
                Path(folder, name).write_bytes(one)
            if not differing_ids(Path(folder), tokenizer):
                return named
    made = {name: found[name] for name in _BESIDE if name in found}
    made[TOKENIZER] = as_tokenizer_json(content, kind, tokenizer)
    kept = {name: value for name, value in _json(found.get(CONFIG, b"{}")).items() if name in _KEPT}
    made[CONFIG] = _config(kept, tokenizer)
    # For programs that read it alone.
    if kind == "sentencepiece":
        made["tokenizer.model"] = content
    return made


def with_class(found: Mapping[str, bytes], tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the files with a class for a tokenizer.json.

    Else `transformers` takes that of the model's family, with its own rules of splitting.
    """
    config = _json(found.get(CONFIG, b"{}"))
    if TOKENIZER not in found or "tokenizer_class" in config:
        return dict(found)
    return {**found, CONFIG: _config(config, tokenizer)}


def _json(content: bytes) -> dict[str, Any]:
    parsed = json.loads(content)
    if not isinstance(parsed, dict):
        raise ValueError(f"{CONFIG} holds no JSON object")
    return parsed


def _config(kept: Mapping[str, Any], tokenizer: Tokenizer) -> bytes:
    """Return a tokenizer_config.json whose class takes tokenizer.json as it is in `transformers` 4
    and 5.
    """
    names = {number: name for name, number in tokenizer.special_tokens.items()}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": names[tokenizer.bos_id],
        "eos_token": names[tokenizer.eos_id],
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        **kept,
    }
    return (json.dumps(config, indent=2) + "\n").encode()


def as_tokenizer_json(content: bytes, kind: Kind, tokenizer: Tokenizer) -> bytes:
    """Return a tokenizer.json with the ids of this file, with BOS before each text.

    Raises DataError.
    """
    if kind == "sentencepiece":
        parsed = _of_sentencepiece(content)
    elif isinstance(tokenizer, TiktokenTokenizer):
        parsed = _of_ranks(content, list(tokenizer.special_tokens))
    else:
        assert isinstance(tokenizer, JsonTokenizer)
        parsed = json.loads(content)
        parsed["added_tokens"] = [*parsed.get("added_tokens", []), *tokenizer.beyond_file]
    names = {number: name for name, number in tokenizer.special_tokens.items()}
    bos = _begin_with(names[tokenizer.bos_id], tokenizer.bos_id)
    before = _processors(parsed.get("post_processor"))
    others = [part for part in before if part.get("type") == "ByteLevel"]
    parsed["post_processor"] = bos
    if others:
        parsed["post_processor"] = {"type": "Sequence", "processors": [*others, bos]}
    parsed["truncation"] = parsed["padding"] = None
    return json.dumps(parsed, ensure_ascii=False).encode()


def _processors(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    if part is None:
        return []
    if part.get("type") == "Sequence":
        return [inner for one in part.get("processors", []) for inner in _processors(one)]
    return [part]


def _begin_with(name: str, number: int) -> dict[str, Any]:
    def text(letter: str, kind: int) -> list[dict[str, Any]]:
        return [
            {"SpecialToken": {"id": name, "type_id": kind}},
            {"Sequence": {"id": letter, "type_id": kind}},
        ]

    return {
        "type": "TemplateProcessing",
        "single": text("A", 0),
        "pair": [*text("A", 0), *text("B", 1)],
        "special_tokens": {name: {"id": name, "ids": [number], "tokens": [name]}},
    }


def _of_ranks(content: bytes, special: list[str]) -> dict[str, Any]:
    from transformers.convert_slow_tokenizer import TikTokenConverter

    with tempfile.NamedTemporaryFile(prefix="titanlite-ranks-") as file:
        file.write(content)
        file.flush()
        converter = TikTokenConverter(
            vocab_file=file.name, pattern=SPLIT_PATTERN, extra_special_tokens=special
        )
        parsed: dict[str, Any] = json.loads(converter.converted().to_str())
    return parsed


def _of_sentencepiece(content: bytes) -> dict[str, Any]:
    """Return the tokenizer.json of a BPE model as of Llama 2, with a space before a text.

    That of `transformers` adds none to a text that begins with one, so ids differ. Raises DataError
    for other models.
    """
    import tokenizers
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]
    from tokenizers import decoders, normalizers
    from transformers.convert_slow_tokenizer import generate_merges

    proto = ModelProto.FromString(content)
    trainer, spaces = proto.trainer_spec, proto.normalizer_spec
    kinds = {piece.type for piece in proto.pieces}
    if (
        trainer.model_type != _BPE
        or trainer.treat_whitespace_as_suffix
        or spaces.precompiled_charsmap
        or spaces.remove_extra_whitespaces
        or _USER_DEFINED in kinds
    ):
        raise DataError(
            "no tokenizer.json is made of a sentencepiece model of this kind, only of BPE without "
            "normalisation and pieces of its own: train with the tokenizer.json of the model"
        )
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == _NORMAL}
    places = {name: place for place, name in enumerate(scores)}
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {piece.piece: number for number, piece in enumerate(proto.pieces)},
            generate_merges(places, scores),
            unk_token=next(one.piece for one in proto.pieces if one.type == _UNKNOWN),
            fuse_unk=True,
            byte_fallback=trainer.byte_fallback,
        )
    )
    prefix = [normalizers.Prepend(_SPACE)] if spaces.add_dummy_prefix else []
    made.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    made.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = [piece.piece for piece in proto.pieces if piece.type in (_UNKNOWN, _CONTROL)]
    made.add_special_tokens(
        [tokenizers.AddedToken(name, normalized=False, special=True) for name in special]
    )
    parsed: dict[str, Any] = json.loads(made.to_str())
    return parsed
