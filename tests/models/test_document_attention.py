"""Attention with windows, documents and sinks against the formula, its memory, and its graphs.

test_families.py and the grid hold whole models with documents against `transformers`.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.support.llamas import VARIANTS, built, relative, tokens_of
from tests.support.processes import ROOT
from tests.support.watch import Watch
from titanlite.assembly.preflight import mask_problems
from titanlite.config.data_sections import Data
from titanlite.models import get_spec
from titanlite.models.layers import SdpaAttention
from titanlite.models.sinks import SinkAttention
from titanlite.parallel.compile import apply_compile

LENGTHS = [[20, 1, 27], [48], [5, 38, 5]]


def numbers(lengths: list[list[int]]) -> Tensor:
    """doc_ids [rows, seq] for documents of these lengths."""
    return torch.stack(
        [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
    )


def test_other_documents_need_no_other_graph():
    model = built(VARIANTS["gqa"])
    count = 0

    def backend(module, inputs):
        nonlocal count
        count += 1
        return module.forward

    torch._dynamo.reset()
    apply_compile({"layers.0": model.get_submodule("layers.0")}, backend)
    tokens = tokens_of(VARIANTS["gqa"], batch=3, seq=48)
    for lengths in (LENGTHS, [[48]] * 3, [[1] * 48] * 3, [[47, 1], [2, 46], [24, 24]]):
        model(tokens, doc_ids=numbers(lengths)).sum().backward()
    torch._dynamo.reset()
    assert count == 1


def apply(attention: SdpaAttention, leaves: list[Tensor], mask: Any) -> Tensor:
    """Attention of q, k, v, and of sinks where it has them."""
    q, k, v, *sinks = leaves
    return attention(q, k, v, mask, *sinks)


@pytest.mark.parametrize("kind", [SdpaAttention, SinkAttention])
def test_nothing_of_the_sequence_squared_is_made(kind):
    leaves = [torch.randn(1, heads, 1024, 8, requires_grad=True) for heads in (4, 2, 2)]
    leaves += [torch.zeros(4, requires_grad=True)] * (kind is SinkAttention)
    sizes: list[int] = []
    with Watch(
        lambda _, args, out: sizes.extend(
            t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)
        )
    ):
        attention = kind(24)
        apply(attention, leaves, attention.prepare(numbers([[64] * 16]))).sum().backward()
    assert max(sizes) == 4 * 1024 * 8


def seen_by(length: int, window: int | None, doc_ids: Tensor | None) -> Tensor:
    """Which tokens each one sees, from the places of both."""
    place = torch.arange(length)
    back = place.unsqueeze(1) - place
    seen = (back >= 0) & (back < (window or length))
    if doc_ids is None:
        return seen
    return (seen & (doc_ids[:, :, None] == doc_ids[:, None, :])).unsqueeze(1)


def formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Every score, those of other tokens taken out, and a sink as one more of them."""
    groups = q.size(1) // k.size(1)
    k = k.repeat_interleave(groups, 1)
    v = v.repeat_interleave(groups, 1)
    scores = (q @ k.mT * q.size(-1) ** -0.5).masked_fill(~seen, -torch.inf)
    if sinks is None:
        return scores.softmax(-1) @ v
    column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], 3).softmax(3)[..., :-1] @ v


def results(y: Tensor, leaves: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """The result, and the gradients of q, k, v and the sinks."""
    return [y.detach(), *torch.autograd.grad(y, leaves, upstream)]


def copies(tensors: list[Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [t.detach().to(dtype).requires_grad_() for t in tensors]


def inputs(kv_heads: int, sinks: bool) -> tuple[list[Tensor], Tensor]:
    """Return q, k, v, perhaps sinks that matter, and a gradient of the result."""
    torch.manual_seed(0)
    shapes = [(3, 4, 48, 16), *[(3, kv_heads, 48, 16)] * 2, (3, 4, 48, 16)]
    *given, upstream = (torch.randn(shape) for shape in shapes)
    return [*given, *[torch.tensor([-2.0, 0.0, 1.0, 5.0])] * sinks], upstream


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(
    ("kind", "kv_heads"), [(SdpaAttention, 4), (SdpaAttention, 2), (SinkAttention, 2)]
)
def test_windows_and_documents_equal_the_formula(kind, kv_heads, dtype, within):
    given, upstream = inputs(kv_heads, kind is SinkAttention)
    given, upstream = [t.to(dtype) for t in given], upstream.to(dtype)
    for window in (None, 1, 7, 47, 100):
        for doc_ids in (None, numbers(LENGTHS)):
            attention = kind(window)
            ours, exact = copies(given, dtype), copies(given)
            y = apply(attention, ours, attention.prepare(doc_ids))
            q, k, v, *sinks = exact
            expected = formula(q, k, v, seen_by(48, window, doc_ids), *sinks)
            found = results(y, ours, upstream)
            wanted = results(expected, exact, upstream.float())
            for name, one, other in zip("yqkvs", found, wanted, strict=False):
                # A token that sees only itself sends nothing to q and k.
                if other.norm() > 1e-4:
                    assert relative(one.float(), other) < within, (name, window, doc_ids)


def test_a_model_without_documents_is_refused():
    spec = get_spec(f"{ROOT}/examples/tiny_gpt.py:SPEC")
    args = replace(next(iter(spec.flavors.values())), vocab_size=64)
    run: Any = SimpleNamespace(spec=spec, data=Data(mask_documents=True))
    (problem,) = mask_problems(run, args)
    assert problem.key == "data.mask_documents"
    assert "its forward takes no doc_ids" in problem.message
