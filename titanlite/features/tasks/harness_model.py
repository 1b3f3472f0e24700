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
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from titanlite.config.errors import unfit
from titanlite.features.tasks.scoring import Likelihood, Request, Scorer
from titanlite.models.generate import Sampling, generate

#: New tokens of a task that names no number, as in the harness's own models.
_MAX_NEW = 256


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
        """Continue texts on one device."""
        texts = [""] * len(requests)
        # Requests with the same options are continued together.
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        for group in groups.values():
            options = requests[group[0]].args[1]
            prompts = [self.tok_encode(requests[number].args[0]) for number in group]
            order = sorted(range(len(prompts)), key=lambda place: -len(prompts[place]))
            size = self.scorer.size
            batches = [order[begin : begin + size] for begin in range(0, len(order), size)]
            for batch in self.scorer.progress(batches):
                found = self._continued([prompts[place] for place in batch], options)
                for place, text in zip(batch, found, strict=True):
                    texts[group[place]] = text
        return texts

    def _continued(self, prompts: Sequence[list[int]], given: Any) -> list[str]:
        """Continue prompts; all end once every text holds a stop sequence.

        given: how a task wants its texts. Raises ConfigError if the model is too short.
        """
        subject = self.scorer.subject
        options = normalize_gen_kwargs(given, _MAX_NEW)
        until = handle_stop_sequences(options.get("until"), self.tokens.decode([self.eot_token_id]))
        most: int = options["max_gen_toks"]
        if most >= self.max_length:
            message = f"the model has {self.max_length} tokens, and a task writes {most}"
            raise unfit("", message)
        temperature = options.get("temperature", 0.0) if options.get("do_sample") else 0.0
        # The harness's own models hide special tokens, too.
        hidden = {*subject.stop_ids, *self.tokens.special_tokens.values()}
        written: list[list[int]] = [[] for _ in prompts]
        texts = [""] * len(prompts)
        done = [False] * len(prompts)
        for ids in generate(
            subject.model,
            [prompt[most - self.max_length :] for prompt in prompts],
            max_tokens=most,
            limit=self.max_length,
            sampling=Sampling(temperature, options.get("top_k", 0), options.get("top_p", 1.0)),
            stop_ids=subject.stop_ids,
            head=subject.head,
            vocab=self.tokens.vocab_size,
        ):
            for row, new in enumerate(ids):
                if new is not None and new not in hidden:
                    written[row].append(new)
                texts[row] = self.tokens.decode(written[row])
                done[row] = new is None or any(stop in texts[row] for stop in until)
            if all(done):
                break
        return [str(postprocess_generated_text(text, until, None)) for text in texts]
