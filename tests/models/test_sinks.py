"""Attention with sinks against the formula, and against gpt-oss in `transformers`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.models.test_document_attention import LENGTHS, formula, numbers, seen_by
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
            *qkv, sinks = exact
            expected = formula(*qkv, seen_by(48, 48, window, doc_ids), sinks)
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
    *qkv, sinks = exact
    wanted = results(formula(*qkv, seen, sinks), exact, upstream.double())
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
