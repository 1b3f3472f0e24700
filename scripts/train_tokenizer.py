"""Train the bundled tokenizers on the bundled training shards: tokenizer.tiktoken and
tokenizer.model.

    python scripts/train_tokenizer.py

`tokenizers` finds the merges of the first; the file is kept only if tiktoken then encodes every
training document exactly as `tokenizers` does. sentencepiece trains the second with the settings of
Llama 2's.
"""

from __future__ import annotations

import argparse
import base64
import io
from pathlib import Path

import sentencepiece
from tokenizers import Regex
from tokenizers import Tokenizer as Trainee
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer

from titanlite.data.text_files import BUNDLED, iter_records
from titanlite.data.tokenizer import BUNDLED_SENTENCEPIECE, BUNDLED_TOKENIZER, load_tokenizer
from titanlite.data.tokenizer.tiktoken_ranks import SPECIAL_TOKENS, SPLIT_PATTERN, TiktokenTokenizer

#: 2,048 ranks and Llama 3's 256 special tokens make 2,304 = 36 x 64; the sentencepiece model has as
#: many pieces.
RANKS = 2048


def byte_of_char() -> dict[str, int]:
    """The bytes behind the printable characters that stand for them in a byte-level vocabulary.

    Printable Latin-1 characters stand for themselves, the other bytes are numbered from U+0100 up.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


def train_ranks(texts: list[str]) -> bytes:
    """A tiktoken file of `RANKS` ranks."""
    trainee = Trainee(BPE())
    trainee.pre_tokenizer = Sequence(
        [
            Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = BpeTrainer(
        vocab_size=RANKS, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    trainee.train_from_iterator(texts, trainer)

    bytes_of = byte_of_char()
    vocabulary = sorted(trainee.get_vocab().items(), key=lambda item: item[1])
    ranks = {bytes(bytes_of[char] for char in token): rank for token, rank in vocabulary}
    tokenizer = TiktokenTokenizer(ranks)
    for text, expected in zip(texts, trainee.encode_batch_fast(texts), strict=True):
        if tokenizer.encode(text) != expected.ids:
            raise SystemExit(
                f"tiktoken and tokenizers disagree on the document that begins {text[:60]!r}"
            )
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items())


def train_pieces(texts: list[str]) -> bytes:
    """A sentencepiece model with as many pieces as the other tokenizer has ids."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        # Line by line, so that a line's end is no piece but falls back to its byte, as in Llama 2's
        # model.
        sentence_iterator=(line for text in texts for line in text.splitlines()),
        model_writer=model,
        vocab_size=RANKS + len(SPECIAL_TOKENS),
        model_type="bpe",
        character_coverage=0.99995,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        max_sentence_length=max(len(text.encode()) for text in texts),
        num_threads=1,
        minloglevel=1,
    )
    return model.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--out", type=Path, default=BUNDLED_TOKENIZER.parent, help="folder to write both files to"
    )
    out = parser.parse_args().out
    texts = [record.text for record in iter_records(BUNDLED["c4_test"])]
    for name, train in (
        (BUNDLED_TOKENIZER.name, train_ranks),
        (BUNDLED_SENTENCEPIECE.name, train_pieces),
    ):
        (out / name).write_bytes(train(texts))
        tokenizer = load_tokenizer(str(out / name))
        tokens = sum(len(tokenizer.encode(text, bos=True, eos=True)) for text in texts)
        characters = sum(len(text) for text in texts) / (tokens - 2 * len(texts))
        print(
            f"{out / name}: {tokenizer.vocab_size:,} ids; {tokens:,} tokens with BOS and EOS, "
            f"{characters:.2f} characters per token without them"
        )


if __name__ == "__main__":
    main()
