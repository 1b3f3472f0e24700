"""Attention with sinks against the formula, and against gpt-oss in `transformers`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.models.test_document_attention import LENGTHS, numbers
from tests.support.llamas import relative
from tests.support.watch import Watch
from titanlite.models.sinks import SinkAttention, attend_in_window, attend_masked


def inputs(queries: int = 48, keys: int = 48) -> list[Tensor]:
    """q, k, v, sinks that matter, and a gradient of the result."""
    torch.manual_seed(0)
    q = torch.randn(3, 4, queries, 16)
    k = torch.randn(3, 2, keys, 16)
    v = torch.randn(3, 2, keys, 16)
    return [q, k, v, torch.tensor([-2.0, 0.0, 1.0, 5.0]), torch.randn(3, 4, queries, 16)]


def seen_by(queries: int, keys: int, window: int | None, doc_ids: Tensor | None) -> Tensor:
    """Which keys each query sees, from the places of both."""
    place = torch.arange(keys - queries, keys).unsqueeze(1)
    back = place - torch.arange(keys)
    seen = (back >= 0) & (back < (window or keys))
    if doc_ids is None:
        return seen
    return (seen & (doc_ids[:, :, None] == doc_ids[:, None, :])).unsqueeze(1)


def formula(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, seen: Tensor) -> Tensor:
    """Every score, and the sink as one more of them."""
    groups = q.size(1) // k.size(1)
    k = k.repeat_interleave(groups, 1)
    v = v.repeat_interleave(groups, 1)
    scores = (q @ k.mT * q.size(-1) ** -0.5).masked_fill(~seen, -torch.inf)
    column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], 3).softmax(3)[..., :-1] @ v


def results(y: Tensor, leaves: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """The result, and the gradients of q, k, v and the sinks."""
    return [y.detach(), *torch.autograd.grad(y, leaves, upstream)]


def copies(tensors: list[Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [t.detach().to(dtype).requires_grad_() for t in tensors]


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_windows_and_documents_equal_the_formula(dtype: torch.dtype, within: float) -> None:
    *given, upstream = (t.to(dtype) for t in inputs())
    for window in (None, 1, 7, 47, 100):
        for doc_ids in (None, numbers(LENGTHS)):
            attention = SinkAttention(window)
            ours = copies(given, dtype)
            exact = copies(given)
            q, k, v, sinks = ours
            y = attention(q, k, v, attention.prepare(doc_ids), sinks)
            expected = formula(*exact, seen_by(48, 48, window, doc_ids))
            found = results(y, ours, upstream)
            wanted = results(expected, exact, upstream.float())
            for name, one, other in zip("yqkvs", found, wanted, strict=True):
                assert one.dtype == dtype
                assert relative(one.float(), other) < within, (name, window, doc_ids)


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("queries", [2, 47])
def test_fewer_queries_than_keys(window: int | None, queries: int) -> None:
    """As ranks that share a sequence have them: their queries are the last ones."""
    *given, upstream = inputs(queries=queries)
    seen = seen_by(queries, 48, window, None)
    exact = copies(given, torch.float64)
    wanted = results(formula(*exact, seen), exact, upstream.double())
    ways = {
        "kernel": lambda q, k, v, sinks: attend_in_window(q, k, v, sinks, window),
        "mask": lambda q, k, v, sinks: attend_masked(q, k, v, sinks, seen),
    }
    for way, function in ways.items():
        ours = copies(given)
        found = results(function(*ours), ours, upstream)
        for name, one, other in zip("yqkvs", found, wanted, strict=True):
            assert relative(one, other) < 2e-6, (way, name)


def test_no_scores_of_the_sequence_squared_are_made() -> None:
    q, k, v = (torch.randn(1, heads, 1024, 8, requires_grad=True) for heads in (4, 2, 2))
    sinks = torch.zeros(4, requires_grad=True)
    sizes: list[int] = []

    def look(_: Any, args: Any, out: Any) -> None:
        sizes.extend(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))

    with Watch(look):
        attention = SinkAttention(24)
        mask = attention.prepare(numbers([[64] * 16]))
        attention(q, k, v, mask, sinks).sum().backward()
    assert max(sizes) == 4 * 1024 * 8


def test_a_compiled_call_has_the_same_gradients() -> None:
    *given, upstream = inputs()
    attention = SinkAttention(24)
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    found = []
    for function in (attention, compiled):
        leaves = copies(given)
        q, k, v, sinks = leaves
        found.append(results(function(q, k, v, None, sinks), leaves, upstream))
    torch._dynamo.reset()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
