"""Text from a model, token by token: each pass takes all tokens.

    for token in generate_ids(model, [1, 5, 7], max_tokens=64, limit=2048, …):
        ...

`titanlite sample` and `titanlite.generate` use it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from titanlite.data.tokenizer import Tokenizer


class Sampling(NamedTuple):
    """How the next token is drawn."""

    #: Logits are divided by it; 0: always the most probable token.
    temperature: float = 1.0
    #: Draw from this many of the most probable tokens; 0: from all.
    top_k: int = 0
    #: Draw from the fewest tokens whose probabilities sum to this.
    top_p: float = 1.0
    seed: int = 0


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the distribution to draw from, for logits [..., vocab]; same shape, fp32.

    Temperature, not 0, then top-k, then top-p (Holtzman et al. 2020), as in `transformers`.
    """
    logits = logits.float()
    # Less the largest one, no temperature overflows.
    logits = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature
    if sampling.top_k:
        last = logits.topk(min(sampling.top_k, logits.size(-1))).values[..., -1:]
        logits = logits.masked_fill(logits < last, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.softmax(-1).sort(descending=True, stable=True)
        beyond = ordered.cumsum(-1) - ordered >= sampling.top_p
        logits = logits.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
    return logits.softmax(-1)


@torch.no_grad()
def generate_ids(  # noqa: PLR0913
    model: nn.Module,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    limit: int,
    sampling: Sampling,
    stop_ids: Collection[int],
    head: str,
    vocab: int | None,
    number: int,
) -> Iterator[int]:
    """Yield new ids after a prompt, at most `max_tokens`.

    The last is one of `stop_ids`, or the text has `limit` tokens with its prompt.

    model: in evaluation mode. prompt: at least one id and fewer than limit. head: the linear for
    logits. vocab: ids to draw from, where the vocabulary is padded. number: seeds the
    draws, too.
    """
    ids = [*prompt]
    device = next(model.parameters()).device
    draws = np.random.default_rng([sampling.seed, number])
    for _ in range(min(max_tokens, limit - len(prompt))):
        logits = _last_logits(model, head, torch.tensor([ids], device=device))[:vocab]
        ids.append(_draw(logits, sampling, draws))
        yield ids[-1]
        if ids[-1] in stop_ids:
            return


def _last_logits(model: nn.Module, head: str, tokens: Tensor) -> Tensor:
    """Return logits [vocab] of the last of tokens [1, seq]; it alone goes through the head."""

    def pick(module: nn.Module, args: tuple[Any, ...]) -> Any:
        return (args[0][:, -1:], *args[1:])

    # A model with another head gives the logits of all tokens.
    module = dict(model.named_modules()).get(head, nn.Identity())
    handle = module.register_forward_pre_hook(pick)
    try:
        # Each length would be compiled again.
        with torch.compiler.set_stance("force_eager"):
            logits: Tensor = model(tokens)
    finally:
        handle.remove()
    return logits[0, -1]


def _draw(logits: Tensor, sampling: Sampling, draws: np.random.Generator) -> int:
    """Return an id for logits [vocab]."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    sums = probabilities(logits, sampling).double().cumsum(-1)
    found = int(torch.searchsorted(sums, sums[-1:] * draws.random(), right=True))
    # The last one of logits that are no numbers, too.
    return min(found, len(sums) - 1)


def text_after(tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of ids after those before: some tokenizers begin a text with a space."""
    lead = [*before[-8:]]
    return tokenizer.decode([*lead, *ids])[len(tokenizer.decode(lead)) :]
