"""A model of titanlite as lm-evaluation-harness asks it.

The import needs the package `lm_eval`, so a command imports this module only when it runs tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from tqdm import tqdm

from titanlite.config.errors import ConfigError, Problem
from titanlite.tools.commands.loading import LoadedModel
from titanlite.training.generate import Sampling, TextStream, generate

#: New tokens of a task that names no number, as in the harness's own models.
_MAX_NEW = 256

#: A text for the harness's cache, the ids before, and the ids whose likelihood is asked for.
Request = tuple[Any, list[int], list[int]]
#: Log-likelihood of the ids, and whether greedy decoding gives them.
Likelihood = tuple[float, bool]


class HarnessModel(TemplateLM):
    """The harness's `LM` over a model.

    A request that is too long loses tokens on the left, as in the harness's `HFLM`.
    """

    def __init__(self, loaded: LoadedModel, batch_size: int) -> None:
        super().__init__()
        self.loaded = loaded
        self.size = batch_size
        self.max_length = loaded.limit
        above = getattr(getattr(loaded.model, "rope", None), "varies_above", None)
        if above is not None and self.max_length > above:
            # Padded to the longest of a batch, a row would have the RoPE tables of that length.
            self.size = 1

    @property
    def tokenizer_name(self) -> str:
        return self.loaded.tokenizer.fingerprint

    @property
    def prefix_token_id(self) -> int:
        return self.loaded.tokenizer.bos_id

    @property
    def eot_token_id(self) -> int:
        return self.loaded.tokenizer.eos_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        return self.loaded.tokenizer.encode(string, bos=add_special_tokens is not False)

    # Likelihoods

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, **_: Any
    ) -> list[Likelihood]:
        found: dict[int, Likelihood] = {}
        lengths = [len(before) + len(ids) for _, before, ids in requests]
        for batch in _batches(lengths, self.size, disable_tqdm):
            likelihoods = self._likelihoods([requests[number] for number in batch])
            for number, likelihood in zip(batch, likelihoods, strict=True):
                found[number] = likelihood
                text = requests[number][0]
                self.cache_hook.add_partial("loglikelihood", text, likelihood)
        return [found[number] for number in range(len(requests))]

    def _likelihoods(self, requests: Sequence[Request]) -> Iterator[Likelihood]:
        """Yield the likelihood of each request of one batch."""
        rows = [(before + ids)[-self.max_length - 1 :] for _, before, ids in requests]
        longest = max(len(row) for row in rows) - 1
        tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
        for place, row in enumerate(rows):
            tokens[place, : len(row) - 1] = torch.tensor(row[:-1])
        logits = self.loaded.model(tokens.to(self.loaded.device))
        for place, (_, _, ids) in enumerate(requests):
            length = len(rows[place]) - 1
            asked = ids[-length:]
            yield _likelihood(logits[place, length - len(asked) : length], asked)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, in windows of the context; BOS counts as its
        first token.
        """
        windows: list[Request] = []
        owners = []
        for number, request in enumerate(requests):
            (text,) = request.args
            ids = self.tok_encode(text)
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1):
                before, part = make_disjoint_window(window)
                windows.append((None, before, part))
                owners.append(number)
        totals = [0.0] * len(requests)
        likelihoods = self._loglikelihood_tokens(windows, disable_tqdm)
        for owner, (likelihood, _) in zip(owners, likelihoods, strict=True):
            totals[owner] += likelihood
        return totals

    # Generation

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        texts: dict[int, str] = {}
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        # Requests with the same options are generated together.
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        for group in groups.values():
            options = _Options(self, requests[group[0]].args[1])
            lengths = [len(prompts[number]) for number in group]
            for places in _batches(lengths, self.size, disable_tqdm):
                batch = [group[place] for place in places]
                written = self._written([prompts[number] for number in batch], options)
                for number, text in zip(batch, written, strict=True):
                    texts[number] = postprocess_generated_text(text, options.until, None)
                    self.cache_hook.add_partial(
                        "generate_until", requests[number].args, texts[number]
                    )
        return [texts[number] for number in range(len(requests))]

    def _written(self, prompts: Sequence[list[int]], options: _Options) -> list[str]:
        """Return the continuation of each prompt; all end once every text holds a stop sequence."""
        loaded = self.loaded
        tokenizer = loaded.tokenizer
        rows = [prompt[-(self.max_length - options.max_new) :] for prompt in prompts]
        # The harness's own models hide special tokens, too.
        hidden = {*loaded.stop_ids, *tokenizer.special_tokens.values()}
        streams = [TextStream(tokenizer, row) for row in rows]
        texts = [""] * len(rows)
        done = [False] * len(rows)
        steps = generate(
            loaded.model,
            rows,
            max_tokens=options.max_new,
            limit=self.max_length,
            sampling=options.sampling,
            stop_ids=loaded.stop_ids,
            head=loaded.head,
            vocab=tokenizer.vocab_size,
        )
        for ids in steps:
            for row, new in enumerate(ids):
                ended = new is None or new in loaded.stop_ids
                seen = [] if new is None or new in hidden else [new]
                texts[row] += streams[row].add(seen, whole=ended)
                done[row] = ended or any(stop in texts[row] for stop in options.until)
            if all(done):
                steps.close()
        return [
            text + stream.add([], whole=True) for text, stream in zip(texts, streams, strict=True)
        ]


class _Options:
    """How a task wants its texts written. Raises ConfigError if the model is too short for them."""

    def __init__(self, model: HarnessModel, given: Any) -> None:
        options = normalize_gen_kwargs(given, _MAX_NEW)
        end = model.loaded.tokenizer.decode([model.eot_token_id])
        self.until: list[str] = handle_stop_sequences(options.get("until"), eos=end)
        self.max_new: int = options["max_gen_toks"]
        if self.max_new >= model.max_length:
            message = f"the model has {model.max_length} tokens, and a task writes {self.max_new}"
            raise ConfigError([Problem("command line", "--context", message)])
        temperature = options.get("temperature", 0.0) if options.get("do_sample") else 0.0
        self.sampling = Sampling(temperature, options.get("top_k", 0), options.get("top_p", 1.0))


def _likelihood(logits: Tensor, ids: Sequence[int]) -> Likelihood:
    """logits: [len(ids), vocab], each for the id at its place."""
    wanted = torch.tensor(ids, device=logits.device)
    logs = logits.float().log_softmax(-1)
    likely = logs.gather(1, wanted.unsqueeze(1)).sum().item()
    return likely, bool((logs.argmax(-1) == wanted).all())


def _batches(lengths: Sequence[int], size: int, quiet: bool) -> Iterator[list[int]]:
    """Yield the numbers of requests of like length, the longest first: what needs too much memory
    fails at once.
    """
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    for begin in tqdm(range(0, len(order), size), disable=quiet):
        yield order[begin : begin + size]
