"""Text in, batches out: files, tokenizers, the global order of sequences, loaders.

tokenizer = load_tokenizer()                                          # tokenizer/
dataset = build_dataset(training, data, tokenizer, vocab_size)        # text_files, corpus,
token_cache, packing
loader = Prefetcher(TrainLoader(dataset, global_batch_size=16, micro_batch_size=8))  # loader,
prefetch
batches = loader.next_step()
"""

from __future__ import annotations

from titanlite import exit_codes


class DataError(ValueError):
    """Bad text, tokenizer or settings. The message names the place and the remedy."""

    exit_code = exit_codes.CONFIG


class EndOfData(Exception):  # noqa: N818 - an end, not an error, like StopIteration
    """All epochs of a finite data set are served."""
