"""Text from a model, token by token: each pass takes all tokens.

    for ids in generate(model, [[1, 5, 7], [1, 9]], max_tokens=64, limit=2048,
        sampling=Sampling(temperature=0.8)):
        ...                             # [next id of row 0, of row 1]; None: that row has ended

`titanlite sample` uses it.
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
def generate(  # noqa: PLR0913
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    limit: int,
    sampling: Sampling = Sampling(),  # noqa: B008 (immutable)
    stop_ids: Collection[int] = (),
    head: str = "output",
    vocab: int | None = None,
    first_row: int = 0,
) -> Iterator[list[int | None]]:
    """Yield the next id of every row, None for a row that has ended, until all have.

    A row ends after an id of `stop_ids`, after `max_tokens`, or when it has `limit` tokens with its
    prompt. Each row draws from its own generator, seeded by the seed and the row's number.

    prompts: ids of each row, at least one and fewer than limit. head: the linear for logits, for
    the last token of each row. vocab: ids to draw from, where the vocabulary is padded.
    """
    rows = [[*prompt] for prompt in prompts]
    numbers = range(first_row, first_row + len(rows))
    draws = [np.random.default_rng([sampling.seed, number]) for number in numbers]
    is_alive = [True] * len(rows)
    was_training = model.training
    model.eval()
    try:
        for _ in range(max_tokens):
            found = _draw(_last_logits(model, head, rows)[:, :vocab], sampling, draws)
            new: list[int | None] = [None] * len(rows)
            for index, one in enumerate(found):
                if is_alive[index]:
                    new[index] = one
                    rows[index].append(one)
                    is_alive[index] = one not in stop_ids and len(rows[index]) < limit
            yield new
            if not any(is_alive):
                return
    finally:
        model.train(was_training)


def _last_logits(model: nn.Module, head: str, rows: Sequence[Sequence[int]]) -> Tensor:
    """Return logits [rows, vocab] of each row's last token, which alone goes through the head."""
    device = next(model.parameters()).device
    lengths = [len(row) for row in rows]
    # Padding on the right is never attended to.
    tokens = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
    for padded, row in zip(tokens, rows, strict=True):
        padded[: len(row)] = torch.tensor(row)
    last = torch.arange(len(rows), device=device), torch.tensor(lengths, device=device) - 1

    def pick(module: nn.Module, args: tuple[Any, ...]) -> Any:
        return (args[0][last].unsqueeze(1), *args[1:])

    # A model with another head gives the logits of all tokens.
    module = dict(model.named_modules()).get(head)
    handle = None if module is None else module.register_forward_pre_hook(pick)
    try:
        # Each length would be compiled again.
        with torch.compiler.set_stance("force_eager"):
            logits: Tensor = model(tokens.to(device))
    finally:
        if handle is not None:
            handle.remove()
    return logits[last] if handle is None else logits[:, 0]


def _draw(logits: Tensor, sampling: Sampling, draws: Sequence[np.random.Generator]) -> list[int]:
    """Return an id for each row of logits [rows, vocab]."""
    if sampling.temperature == 0:
        found = logits.argmax(-1)
    else:
        sums = probabilities(logits, sampling).double().cumsum(-1)
        uniform = torch.tensor([[draw.random()] for draw in draws], dtype=torch.float64)
        uniform = uniform.to(sums.device) * sums[:, -1:]
        found = torch.searchsorted(sums, uniform, right=True).squeeze(1)
    # The last one of logits that are no numbers, too.
    ids: list[int] = found.clamp(max=logits.size(-1) - 1).tolist()
    return ids


def text_after(tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of ids after those before: some tokenizers begin a text with a space."""
    lead = [*before[-8:]]
    return tokenizer.decode([*lead, *ids])[len(tokenizer.decode(lead)) :]
