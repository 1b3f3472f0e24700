"""Train the bundled byte-pair tokenizer on the bundled training shards; write it in tiktoken's format.

    pip install tokenizers && python scripts/train_tokenizer.py

`tokenizers` finds the merges; the file is kept only if tiktoken then encodes every training document
exactly as `tokenizers` does.
"""

from __future__ import annotations

import argparse
import base64
from pathlib import Path

from tokenizers import Regex
from tokenizers import Tokenizer as Trainee
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer

from titanlite.data.sources import BUNDLED, iter_records
from titanlite.data.tokenizer import BUNDLED_TOKENIZER, SPLIT_PATTERN, Tokenizer

#: 2,048 ranks and Llama 3's 256 special tokens make 2,304 = 36 x 64.
RANKS = 2048


def byte_of_char() -> dict[str, int]:
    """The bytes behind the printable characters that stand for them in a byte-level vocabulary.

    Printable Latin-1 characters stand for themselves, the other bytes are numbered from U+0100 up.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=BUNDLED_TOKENIZER)
    arguments = parser.parse_args()
    texts = [record.text for record in iter_records(BUNDLED["c4_test"])]

    trainee = Trainee(BPE())
    trainee.pre_tokenizer = Sequence(
        [Split(Regex(SPLIT_PATTERN), behavior="isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = BpeTrainer(vocab_size=RANKS, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    trainee.train_from_iterator(texts, trainer)

    bytes_of = byte_of_char()
    vocabulary = sorted(trainee.get_vocab().items(), key=lambda item: item[1])
    ranks = {bytes(bytes_of[char] for char in token): rank for token, rank in vocabulary}
    tokenizer = Tokenizer(ranks)
    for text, expected in zip(texts, trainee.encode_batch_fast(texts), strict=True):
        if tokenizer.encode(text) != expected.ids:
            raise SystemExit(f"tiktoken and tokenizers disagree on the document that begins {text[:60]!r}")

    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items()]
    arguments.out.write_bytes(b"".join(lines))
    tokens = sum(len(tokenizer.encode(text)) for text in texts)
    characters = sum(len(text) for text in texts)
    print(f"{arguments.out}: {len(ranks)} ranks; {tokens:,} tokens, {characters / tokens:.2f} characters per token")


if __name__ == "__main__":
    main()
