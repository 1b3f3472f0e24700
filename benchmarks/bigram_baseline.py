"""Held-out cross-entropy of unigram and bigram models of the bundled text, in nats per token.

    python benchmarks/bigram_baseline.py [--tokenizer FILE] [--train PATH] [--held-out PATH]

The bar that a trained Llama has to get under: it predicts the same tokens as a full validation pass
(every token of the held-out text but the first, BOS and EOS of each document included), from one
token
of context. The bigram model is interpolated Kneser-Ney (Kneser and Ney 1995; interpolated form and
discount
n1 / (n1 + 2 n2) of Chen and Goodman 1999), its lower order itself interpolated with the uniform
distribution
over the vocabulary; the unigram model adds one to each count.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from titanlite.data.text_files import BUNDLED, list_files
from titanlite.data.tokenize_files import tokenize
from titanlite.data.tokenizer import load_tokenizer


def unigram_nats(train: NDArray[np.int64], held_out: NDArray[np.int64], vocab_size: int) -> float:
    """Mean negative log probability of held_out[1:] under add-one token frequencies of `train`."""
    counts = np.bincount(train, minlength=vocab_size) + 1.0
    return float(-np.log(counts[held_out[1:]] / counts.sum()).mean())


def bigram_nats(train: NDArray[np.int64], held_out: NDArray[np.int64], vocab_size: int) -> float:
    """Mean negative log probability of held_out[1:], each from the token before it.

    P(w | v) = max(c(vw) - d, 0) / c(v) + d N(v.) / c(v) P'(w), N(v.) the number of kinds of tokens
    seen after v; P'(w) has the same form with the number of kinds of tokens seen before w as its
    count and the uniform below it.
    """
    pairs, counts = np.unique(train[:-1] * vocab_size + train[1:], return_counts=True)
    before, after = np.divmod(pairs, vocab_size)

    kinds_before = np.bincount(after, minlength=vocab_size)
    d = discount(kinds_before[kinds_before > 0])
    lower = (
        np.maximum(kinds_before - d, 0) + d * np.count_nonzero(kinds_before) / vocab_size
    ) / len(pairs)

    d = discount(counts)
    followed = np.bincount(before, weights=counts, minlength=vocab_size)
    kinds_after = np.bincount(before, minlength=vocab_size)

    context, target = held_out[:-1], held_out[1:]
    wanted = context * vocab_size + target
    place = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    seen = np.where(pairs[place] == wanted, counts[place] - d, 0.0)
    known = followed[context] > 0
    total = np.maximum(followed[context], 1)
    probability = np.where(
        known, (seen + d * kinds_after[context] * lower[target]) / total, lower[target]
    )
    return float(-np.log(probability).mean())


def discount(counts: NDArray[np.int64]) -> float:
    """What absolute discounting takes from each count: n1 / (n1 + 2 n2), n_k the number of counts
    of k.
    """
    ones, twos = np.count_nonzero(counts == 1), np.count_nonzero(counts == 2)
    return ones / (ones + 2 * twos) if ones else 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokenizer", default="bundled", help="file or folder")
    parser.add_argument(
        "--train", help="file or folder of C4-format records (default: the bundled training text)"
    )
    parser.add_argument("--held-out", help="the same for the held-out text")
    arguments = parser.parse_args()
    started = time.perf_counter()
    tokenizer = load_tokenizer(arguments.tokenizer)
    size = tokenizer.vocab_size

    def ids(dataset: str, path: str | None) -> NDArray[np.int64]:
        files = list_files(Path(path) if path else BUNDLED[dataset])
        return tokenize(files, tokenizer, size).tokens.astype(np.int64)

    train, held_out = ids("c4_test", arguments.train), ids("c4_validation", arguments.held_out)
    print(
        f"training tokens {len(train):,}, held-out targets {len(held_out) - 1:,}, vocabulary "
        f"{size:,}"
    )
    print(f"uniform  {np.log(size):.4f} nats per token")
    print(f"unigram  {unigram_nats(train, held_out, size):.4f} nats per token (add-one)")
    print(
        f"bigram   {bigram_nats(train, held_out, size):.4f} nats per token (interpolated "
        "Kneser-Ney)"
    )
    print(f"{time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
