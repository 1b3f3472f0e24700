"""Text from a model, token by token; the keys and values of earlier tokens are kept.

    for ids in generate(model, [[1, 5, 7], [1, 9]], max_tokens=64, limit=2048,
        sampling=Sampling(temperature=0.8)):
        ...                             # [next id of row 0, of row 1]; None: that row has ended

`titanlite sample` uses it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from titanlite.data.tokenizer import Tokenizer

#: Name of the module in each block that a model lets be replaced.
_REPLACED = "inner_attention"


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


class KVCache:
    """Keys and values of the tokens so far; while entered, replaces the blocks' `inner_attention`.

    A token's slot is its position, so rows need no padding on the left. Padding on the right is
    never attended to, and later tokens overwrite it. size: slots of each row.
    """

    def __init__(self, model: nn.Module, rows: int, size: int) -> None:
        self.rows = rows
        self.size = size
        #: Owner of each attention, that attention, and what takes its place.
        self._modules: list[tuple[nn.Module, nn.Module, CachedAttention]] = []
        for owner in model.modules():
            inner = dict(owner.named_children()).get(_REPLACED)
            if inner is not None:
                new = CachedAttention(self, inner)
                self._modules.append((owner, inner, new))
        #: Slots of the tokens of this forward pass: [rows, seq].
        self.slots = torch.empty(0)
        #: One more than the highest of them.
        self.end = 0
        #: These are the first tokens, from slot 0 on.
        self.first = True

    def __enter__(self) -> None:
        for owner, _, new in self._modules:
            setattr(owner, _REPLACED, new)

    def __exit__(self, *_: object) -> None:
        for owner, inner, _new in self._modules:
            setattr(owner, _REPLACED, inner)

    def __bool__(self) -> bool:
        """Whether the model has attention that can be replaced."""
        return bool(self._modules)


class CachedAttention(nn.Module):
    """Causal attention to a cache. replaced: the attention whose `window` or `chunk` it keeps."""

    def __init__(self, cache: KVCache, replaced: nn.Module) -> None:
        super().__init__()
        self.cache = cache
        self.window: int | None = getattr(replaced, "window", None)
        self.chunk: int | None = getattr(replaced, "chunk", None)
        #: [rows, slots, kv_heads, head_dim]; made for the first token.
        self._keys = self._values = torch.empty(0)

    def prepare(self, doc_ids: Tensor | None) -> Tensor | None:
        """Return the slots a query sees: [rows, 1, seq, slots] bool; None: all up to its own."""
        cache = self.cache
        slots = cache.slots.unsqueeze(2)
        everywhere = self.window is None or cache.end <= self.window
        if everywhere and (cache.first or cache.slots.numel() == 1):
            return None
        places = torch.arange(cache.end, device=slots.device)
        seen = places <= slots
        if self.window is not None:
            seen &= places > slots - self.window
        if self.chunk is not None:
            seen &= places // self.chunk == slots // self.chunk
        return seen.unsqueeze(1)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None = None
    ) -> Tensor:
        """q: [rows, heads, seq, head_dim], k and v: [rows, kv_heads, seq, head_dim], rotated;
        sinks: [heads].

        Return q's shape.
        """
        cache = self.cache
        if not self._keys.numel():
            shape = cache.rows, cache.size, k.size(1), k.size(3)
            self._keys = k.new_zeros(shape)
            self._values = v.new_zeros(shape)
        row = torch.arange(cache.rows, device=k.device).unsqueeze(1)
        self._keys[row, cache.slots] = k.transpose(1, 2)
        self._values[row, cache.slots] = v.transpose(1, 2)
        k = self._keys[:, : cache.end].transpose(1, 2)
        v = self._values[:, : cache.end].transpose(1, 2)
        if sinks is not None:
            from titanlite.models.sinks import attend_masked

            return attend_masked(q, k, v, sinks, mask)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=cache.first and mask is None,
            enable_gqa=q.size(1) != k.size(1),
        )


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
    cached: bool = True,
) -> Generator[list[int | None], None, None]:
    """Yield the next id of every row, None for a row that has ended, until all have.

    A row ends after an id of `stop_ids`, after `max_tokens`, or when it has `limit` tokens with its
    prompt. Each row draws from its own generator, seeded by the seed and the row's number.

    prompts: ids of each row, at least one and fewer than limit. head: the linear for logits, for
    the last token of each row. vocab: ids to draw from, where the vocabulary is padded. cached:
    False computes every token again.
    """
    device = next(model.parameters()).device
    rows = _Rows(prompts, max_tokens, limit, device)
    numbers = range(first_row, first_row + len(prompts))
    draws = [np.random.default_rng([sampling.seed, number]) for number in numbers]
    cache = KVCache(model, len(prompts), rows.ids.size(1))
    rows.cache = cache if cached and cache else None
    was_training = model.training
    model.eval()
    try:
        for _ in range(max_tokens):
            logits = rows.newest(_forward(model, rows, head))
            found = _draw(logits[:, :vocab], sampling, draws)
            yield rows.add(found, stop_ids)
            if not any(rows.alive):
                return
            rows.advance(found)
    finally:
        model.train(was_training)


class _Rows:
    """The texts of one call of `generate`, and the tokens that the next pass takes."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        limit: int,
        device: torch.device,
    ) -> None:
        self.lengths = [len(prompt) for prompt in prompts]
        self.alive = [True] * len(prompts)
        #: Keys and values of earlier passes; None: each pass takes all tokens.
        self.cache: KVCache | None = None
        self._limit = limit
        longest = min(max(self.lengths) + max_tokens, limit)
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        self.ids = ids.to(device)
        #: For the next pass: first place [rows, 1], tokens of each row, place of the newest in it.
        self.start = torch.zeros(len(prompts), 1, dtype=torch.int64, device=device)
        self.width = max(self.lengths)
        self.last = torch.tensor(self.lengths, device=device) - 1

    def positions(self) -> Tensor:
        """Return the positions of the next pass's tokens: [rows, width] int64."""
        return self.start + torch.arange(self.width, device=self.start.device)

    def newest(self, logits: Tensor) -> Tensor:
        """Return the logits of each row's newest token: [rows, vocab]."""
        if logits.size(1) == 1:
            return logits[:, 0]
        return logits[torch.arange(len(self.lengths), device=logits.device), self.last]

    def add(self, found: Tensor, stop_ids: Collection[int]) -> list[int | None]:
        """Count the next ids [rows], and return them; None for ended rows."""
        new: list[int | None] = []
        for row, one in enumerate(found.tolist()):
            if not self.alive[row]:
                new.append(None)
                continue
            new.append(one)
            self.lengths[row] += 1
            self.alive[row] = one not in stop_ids and self.lengths[row] < self._limit
        return new

    def advance(self, found: Tensor) -> None:
        device = self.ids.device
        places = torch.tensor(self.lengths, device=device).sub_(1).unsqueeze(1)
        kept = torch.where(torch.tensor(self.alive, device=device), found, 0)
        self.ids.scatter_(1, places, kept.unsqueeze(1))
        if self.cache is None:
            self.last = places.squeeze(1)
            self.width = max(self.lengths)
        else:
            self.start = places
            self.last = torch.zeros_like(self.last)
            self.width = 1
            self.cache.first = False


def _forward(model: nn.Module, rows: _Rows, head: str) -> Tensor:
    """Return logits of the next pass: [rows, 1 or width, vocab]."""
    positions = rows.positions()
    cache = rows.cache
    given = {}
    if cache is not None:
        cache.slots = positions
        cache.end = rows.width if cache.first else max(rows.lengths) + rows.width - 1
        given["positions"] = positions
    with (
        contextlib.nullcontext() if cache is None else cache,
        _only(model, head, rows.last, rows.width > 1),
        # Other shapes than in training would be compiled again.
        torch.compiler.set_stance("force_eager"),
    ):
        logits: Tensor = model(rows.ids.gather(1, positions), **given)
    return logits


@contextlib.contextmanager
def _only(model: nn.Module, head: str, last: Tensor, wanted: bool) -> Iterator[None]:
    """Let only each row's token at `last` [rows] go through the head."""
    module = dict(model.named_modules()).get(head)
    if not wanted or module is None:
        yield
        return

    def pick(module: nn.Module, args: tuple[Any, ...]) -> Any:
        x = args[0]
        return (x[torch.arange(len(last), device=x.device), last].unsqueeze(1), *args[1:])

    handle = module.register_forward_pre_hook(pick)
    try:
        yield
    finally:
        handle.remove()


def _draw(logits: Tensor, sampling: Sampling, draws: Sequence[np.random.Generator]) -> Tensor:
    """Return an id for each row of logits [rows, vocab]: [rows] int64."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    sums = probabilities(logits, sampling).double().cumsum(-1)
    uniform = torch.tensor(
        [[draw.random()] for draw in draws], dtype=torch.float64, device=sums.device
    )
    drawn = torch.searchsorted(sums, uniform * sums[:, -1:], right=True).squeeze(1)
    return drawn.clamp(max=logits.size(-1) - 1)  # of logits that are no numbers, too


def text_after(tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of ids after those before: some tokenizers begin a text with a space."""
    lead = [*before[-8:]]
    return tokenizer.decode([*lead, *ids])[len(tokenizer.decode(lead)) :]
