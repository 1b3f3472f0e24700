"""A model of titanlite as lm-evaluation-harness asks it.

The import needs the package `lm_eval`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from titanlite.features.tasks.scoring import Likelihood, Request, Scorer


class HarnessModel(TemplateLM):
    """The harness's `LM` over a scorer: of one device, or of the ranks of a run."""

    def __init__(self, scorer: Scorer) -> None:
        super().__init__()
        self.scorer = scorer
        self.tokens = scorer.subject.tokenizer
        self.max_length = scorer.subject.limit

    @property
    def tokenizer_name(self) -> str:
        return self.tokens.fingerprint

    @property
    def prefix_token_id(self) -> int:
        return self.tokens.bos_id

    @property
    def eot_token_id(self) -> int:
        return self.tokens.eos_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        return self.tokens.encode(string, bos=add_special_tokens is not False)

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> list[Likelihood]:
        found: list[Likelihood] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[Likelihood]:
        """requests: the texts, the ids before, and the ids."""
        return self.scorer.likelihoods([(before, ids) for _, before, ids in requests])

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> list[float]:
        """Return the log-likelihood of each text, in windows of the context; BOS counts as its
        first token.
        """
        parts: list[Request] = []
        owners = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            rolled = get_rolling_token_windows(ids, self.tokens.bos_id, self.max_length, 1)
            for window in rolled:
                parts.append(make_disjoint_window(window))
                owners.append(number)
        totals = [0.0] * len(requests)
        likelihoods = self.scorer.likelihoods(parts)
        for owner, (likelihood, _) in zip(owners, likelihoods, strict=True):
            totals[owner] += likelihood
        return totals

    def generate_until(self, requests: Any, disable_tqdm: bool = True) -> list[str]:
        raise NotImplementedError("`load_tasks` refuses tasks that continue texts")
