"""A model of titanlite as lm-evaluation-harness asks it.

The import needs the package `lm_eval`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)

from titanlite.config.errors import unfit
from titanlite.features.tasks.scoring import Likelihood, Request, Scorer, Writing
from titanlite.models.generate import Sampling

#: New tokens of a task that names no number, as in the harness's own models.
_MAX_NEW = 256


class HarnessModel(TemplateLM):
    """The harness's `LM` over a scorer: of one device, or of the ranks of a run."""

    def __init__(self, scorer: Scorer) -> None:
        super().__init__()
        self.scorer = scorer
        self.max_length = scorer.subject.limit

    @property
    def tokenizer_name(self) -> str:
        return self.scorer.subject.tokenizer.fingerprint

    @property
    def prefix_token_id(self) -> int:
        return self.scorer.subject.tokenizer.bos_id

    @property
    def eot_token_id(self) -> int:
        return self.scorer.subject.tokenizer.eos_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        return self.scorer.subject.tokenizer.encode(string, bos=add_special_tokens is not False)

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> list[Likelihood]:
        found: list[Likelihood] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[Likelihood]:
        """requests: the texts for the harness's cache, the ids before, and the ids."""
        found = self.scorer.likelihoods([(before, ids) for _, before, ids in requests])
        for request, likelihood in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", request[0], likelihood)
        return found

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> list[float]:
        """Return the log-likelihood of each text, in windows of the context; BOS counts as its
        first token.
        """
        parts: list[Request] = []
        owners = []
        for number, request in enumerate(requests):
            (text,) = request.args
            rolled = self.scorer.rolling(self.tok_encode(text))
            parts += rolled
            owners += [number] * len(rolled)
        totals = [0.0] * len(requests)
        likelihoods = self.scorer.likelihoods(parts)
        for owner, (likelihood, _) in zip(owners, likelihoods, strict=True):
            totals[owner] += likelihood
        return totals

    def generate_until(self, requests: Any, disable_tqdm: bool = True) -> list[str]:
        texts = [""] * len(requests)
        # Requests with the same options are written together.
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        for group in groups.values():
            writing = self._writing(requests[group[0]].args[1])
            prompts = [self.tok_encode(requests[number].args[0]) for number in group]
            written = self.scorer.write(prompts, writing)
            for number, text in zip(group, written, strict=True):
                texts[number] = postprocess_generated_text(text, list(writing.until), None)
                self.cache_hook.add_partial("generate_until", requests[number].args, texts[number])
        return texts

    def _writing(self, given: Any) -> Writing:
        """Return how a task wants its texts. Raises ConfigError if the model is too short."""
        options = normalize_gen_kwargs(given, _MAX_NEW)
        end = self.scorer.subject.tokenizer.decode([self.eot_token_id])
        until = handle_stop_sequences(options.get("until"), eos=end)
        most: int = options["max_gen_toks"]
        if most >= self.scorer.longest_text:
            message = f"the model has {self.max_length} tokens, and a task writes {most}"
            raise unfit("", message)
        temperature = options.get("temperature", 0.0) if options.get("do_sample") else 0.0
        sampling = Sampling(temperature, options.get("top_k", 0), options.get("top_p", 1.0))
        return Writing(tuple(until), most, sampling)
