"""Train a byte-level BPE tokenizer on text of your own, in the split pattern of Llama 3.

    python examples/own_tokenizer.py mine/train.jsonl --out mine/tokenizer --vocab-size 2048

It writes `tokenizer.json` and `tokenizer_config.json`, which titanlite and transformers read.
TEXT is what `training.dataset_path` takes: a file, a pattern or a folder.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer

from titanlite.data.text_files import iter_records
from titanlite.data.tokenizer.tiktoken_ranks import SPLIT_PATTERN

BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"


def train(texts: list[str], vocab_size: int) -> Tokenizer:
    """Return a tokenizer of at most `vocab_size` ids: 2 special tokens, 256 bytes and merges."""
    tokenizer = Tokenizer(BPE())
    words = Split(Regex(SPLIT_PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = Sequence([words, ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        # All bytes are there, so the tokenizer can encode every text.
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("text", nargs="+", help="files, patterns or folders of text")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--vocab-size", type=int, default=2048, help="ids (default: 2048)")
    given = parser.parse_args()
    texts = [record.text for text in given.text for record in iter_records(Path(text))]
    tokenizer = train(texts, given.vocab_size)
    save(tokenizer, given.out)
    tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch_fast(texts))
    characters = sum(map(len, texts))
    print(
        f"{given.out}: {tokenizer.get_vocab_size():,} ids, from {len(texts):,} documents; "
        f"{characters / tokens:.2f} characters per token"
    )


if __name__ == "__main__":
    main()
