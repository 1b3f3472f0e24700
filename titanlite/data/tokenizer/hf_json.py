"""Hugging Face's tokenizer.json."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titanlite.data import DataError
from titanlite.data.tokenizer.base import Tokenizer
from titanlite.utils import parse_json, pip_install

#: Files beside tokenizer.json that name special tokens; the first that names one decides.
NAMING_FILES = ("tokenizer_config.json", "special_tokens_map.json")

#: BOS and EOS if no file names them: the first pair that the vocabulary has.
WELL_KNOWN = (
    ("<|begin_of_text|>", "<|end_of_text|>"),
    ("<s>", "</s>"),
    ("<bos>", "<eos>"),
    ("<|startoftext|>", "<|endoftext|>"),
    ("<|endoftext|>", "<|endoftext|>"),
    ("<|endoftext|>", "<|im_end|>"),
)

_KEYS = ("bos_token", "eos_token")
#: In the order in which transformers gives ids to those that tokenizer.json lacks.
_SPECIAL_KEYS = (*_KEYS, "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Parts without effect on the ids.
_NOT_IN_THE_IDS = ("post_processor", "decoder", "padding", "truncation")


class JsonTokenizer(Tokenizer):
    """The ids of the `tokenizers` library, without its post-processor, truncation and padding.

    So BOS is never added twice and no document is cut. Tokens of a tokenizer_config.json have the
    ids of transformers. Text never matches special added tokens, but does match others. A
    vocabulary that itself spells a special token (word lists, Unigram) still gives its id.
    """

    def __init__(self, content: bytes, path: Path) -> None:
        """Raises DataError if it is no whole tokenizer.json or has no BOS and EOS."""
        where = f"model.tokenizer_path: {path}"
        parsed = _parse(content, where)
        self._tokenizer = _opened(content, where)
        beside = _naming_files(path.parent)
        of_file = _added_tokens(self._tokenizer)
        _add_tokens(self._tokenizer, beside, path)
        added = _added_tokens(self._tokenizer)
        names_of_file = {token["content"] for token in of_file}
        #: Entries of `added_tokens` that the file lacks.
        self.beyond_file = [token for token in added if token["content"] not in names_of_file]
        deciding: list[Any] = [
            {part: value for part, value in parsed.items() if part not in _NOT_IN_THE_IDS}
        ]
        if added != of_file:
            deciding.append(added)
        names, self.named_by = _bos_and_eos(self._tokenizer, beside, path)
        _mark_special(self._tokenizer, names)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.bos_id, self.eos_id = (vocabulary[name] for name in names)
        self._tokenizer.encode_special_tokens = True

        added = _added_tokens(self._tokenizer)
        self.special_tokens = {token["content"]: token["id"] for token in added if token["special"]}
        self.special_tokens |= dict(zip(names, (self.bos_id, self.eos_id), strict=True))
        self.vocab_size = 1 + max(vocabulary.values())
        canonical = json.dumps([*deciding, self.bos_id, self.eos_id], sort_keys=True)
        self.fingerprint = hashlib.sha256(b"tokenizer.json " + canonical.encode()).hexdigest()

    def _encode(self, text: str) -> list[int]:
        # Unlike `encode`, it releases Python's lock, and it skips offsets, which have no reader.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def encode_rendered(self, text: str) -> tuple[list[int], NDArray[np.int64]]:
        found = self._with_names.encode(text, add_special_tokens=False)
        return found.ids, np.array(found.offsets, dtype=np.int64).reshape(-1, 2)

    @cached_property
    def _with_names(self) -> Any:
        """The library's tokenizer that finds special tokens with the spaces that some take.

        Its offsets are of whole tokens.
        """
        from tokenizers import Tokenizer, processors

        made = Tokenizer.from_str(self._tokenizer.to_str())
        made.post_processor = processors.Sequence([])
        return made

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _opened(content: bytes, where: str) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise DataError(
            f"{where}: reading a tokenizer.json needs the package tokenizers: "
            f"{pip_install('tokenizers')}"
        ) from None
    # Our threads give it a text each. Its own threads would only add a warning at each fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises nothing narrower
        raise DataError(
            f"{where} is not a tokenizer.json that tokenizers {tokenizers.__version__} reads "
            f"({error}); copy the file again, or install the version of tokenizers that wrote "
            "it"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _parse(content: bytes, where: str) -> dict[str, Any]:
    try:
        parsed = parse_json(content)
    except ValueError as error:
        raise DataError(
            f"{where} is JSON that is damaged or cut short ({error}); copy the file again"
        ) from None
    if not isinstance(parsed, dict) or not isinstance(parsed.get("model"), dict):
        raise DataError(
            f'{where} is JSON without a "model" part; give a tokenizer.json of Hugging Face, which '
            "transformers.integrations.mistral.convert_tekken_tokenizer makes of a tekken.json"
        )
    return parsed


def _naming_files(folder: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for file in (folder / name for name in NAMING_FILES):
        try:
            parsed = parse_json(file.read_bytes())
            if not isinstance(parsed, dict):
                raise ValueError("it holds no JSON object")
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise DataError(
                f"model.tokenizer_path: {file} cannot be read ({error}); copy the file again"
            ) from None
        found[file.name] = parsed
    return found


def _add_tokens(tokenizer: Any, beside: dict[str, dict[str, Any]], path: Path) -> None:
    """Add the tokens named beside a tokenizer.json, in the order of transformers."""
    from tokenizers import AddedToken

    entries: dict[str, Any] = {}
    for content in beside.values():
        entries = entries | content | entries
    named = {key: entries.get(key) for key in _SPECIAL_KEYS}
    # Such as "image_token". Switches have such names, too: "add_bos_token".
    named |= {key: e for key, e in entries.items() if key.endswith("_token") and type(e) is str}
    extra = entries.get("extra_special_tokens") or entries.get("additional_special_tokens") or []
    special = [*named.values(), *(extra.values() if isinstance(extra, dict) else extra)]
    try:
        by_id = entries.get("added_tokens_decoder", {}).items()
        tokens = [AddedToken(**token) for _, token in sorted(by_id, key=lambda item: int(item[0]))]
        for token in special:
            if token is not None:
                flags = dict(token) if isinstance(token, dict) else {"content": token}
                flags.pop("__type", None)
                tokens.append(AddedToken(**flags | {"special": True}))
    except (AttributeError, TypeError, ValueError) as error:
        raise DataError(
            f"model.tokenizer_path: special tokens of {' and '.join(beside)} beside {path} cannot "
            f"be read ({error}); copy the files again"
        ) from None
    tokenizer.add_tokens(tokens)


def _mark_special(tokenizer: Any, names: Iterable[str]) -> None:
    from tokenizers import AddedToken

    known = tokenizer.get_added_tokens_decoder().values()
    for name in names:
        new = AddedToken(name, normalized=False)
        token = next((token for token in known if token.content == name), new)
        token.special = True
        tokenizer.add_special_tokens([token])


def _added_tokens(tokenizer: Any) -> list[dict[str, Any]]:
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    return [{"id": number, **token.__getstate__()} for number, token in added]


def _bos_and_eos(
    tokenizer: Any, beside: dict[str, dict[str, Any]], path: Path
) -> tuple[tuple[str, str], str]:
    named: dict[str, tuple[str, str]] = {}
    for file, content in beside.items():
        for key in _KEYS:
            token = content.get(key)
            name = token["content"] if isinstance(token, dict) else token
            if key not in named and name:  # Qwen's files have no BOS
                named[key] = name, file
    if len(named) == len(_KEYS):
        (bos, first), (eos, second) = (named[key] for key in _KEYS)
        return (bos, eos), " and ".join(dict.fromkeys([first, second]))
    for pair in WELL_KNOWN:
        agrees = all(
            named[key][0] == token for key, token in zip(_KEYS, pair, strict=True) if key in named
        )
        if agrees and None not in map(tokenizer.token_to_id, pair):
            return pair, "their usual names"
    missing = " and ".join(key for key in _KEYS if key not in named)
    usual = ", ".join(" ".join(dict.fromkeys(pair)) for pair in WELL_KNOWN)
    raise DataError(
        f"model.tokenizer_path: {path}: no file names its {missing}, and it has none of the usual "
        f"ones ({usual}). "
        f'Put a {NAMING_FILES[0]} beside it, such as {{"bos_token": "<s>", "eos_token": "</s>"}}'
    )
