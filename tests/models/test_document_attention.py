"""Documents in one row compute what each computes alone: logits, losses, gradients, in every way to
run a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests.support.llamas import VARIANTS, built, relative, tokens_of
from tests.support.processes import ROOT
from tests.support.watch import Watch
from titanlite.assembly.preflight import mask_problems
from titanlite.config.data_sections import Data
from titanlite.config.sections import ActivationCheckpoint
from titanlite.models import get_spec
from titanlite.models.attention import document_positions
from titanlite.models.layers import SdpaAttention
from titanlite.parallel.activation_checkpoint import apply_ac
from titanlite.parallel.compile import apply_compile

LENGTHS = [[20, 1, 27], [48], [5, 38, 5]]


def numbers(lengths: list[list[int]]) -> Tensor:
    """doc_ids [rows, seq] for documents of these lengths."""
    return torch.stack(
        [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
    )


def documents(lengths: list[list[int]], *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """The tensors [rows, seq, …], cut into documents [1, tokens, …]."""
    rows = zip(*(t.unsqueeze(1) for t in tensors), lengths, strict=True)
    return [
        part for *row, sizes in rows for part in zip(*(t.split(sizes, 1) for t in row), strict=True)
    ]


def nll(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def by_operation(model: nn.Module) -> None:
    names = [f"layers.{i}" for i in range(2)]
    apply_ac(
        model,
        names,
        ActivationCheckpoint(mode="selective", selective_ac_option="op"),
        torch.device("cpu"),
    )


def compiled(model: nn.Module) -> None:
    by_operation(model)
    apply_compile(
        {f"layers.{i}": model.get_submodule(f"layers.{i}") for i in range(2)}, "aot_eager"
    )


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(
    ("variant", "apply"),
    [("scaled", None), ("gqa", compiled)],
)
def test_a_packed_row_equals_its_documents_alone(
    variant: str, apply: Callable[[nn.Module], None] | None
) -> None:
    args = VARIANTS[variant]
    alone = built(args)
    packed = built(args)
    if apply is not None:
        apply(packed)
    tokens = tokens_of(args, batch=3, seq=48)
    labels = tokens.roll(-1, 1)
    logits = packed(tokens, doc_ids=numbers(LENGTHS))
    nll(logits, labels).backward()
    for part, found, target in documents(LENGTHS, tokens, logits.detach(), labels):
        expected = alone(part)
        assert relative(found, expected) < 1e-6
        nll(expected, target).backward()
    for (name, p), q in zip(packed.named_parameters(), alone.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and relative(p.grad, q.grad) < 1e-6, name
    torch._dynamo.reset()


def test_other_documents_need_no_other_graph() -> None:
    model = built(VARIANTS["gqa"])
    count = 0

    def backend(module: Any, inputs: Any) -> Any:
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


def test_no_mask_of_the_sequence_squared_is_made() -> None:
    q, k, v = (torch.randn(1, heads, 1024, 8, requires_grad=True) for heads in (4, 2, 2))
    sizes: list[int] = []
    with Watch(
        lambda _, args, out: sizes.extend(
            t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)
        )
    ):
        attention = SdpaAttention(24)
        attention(q, k, v, attention.prepare(numbers([[64] * 16]))).sum().backward()
    assert max(sizes) == 4 * 1024 * 8


def seen_by(queries: int, keys: int, window: int | None, doc_ids: Tensor | None) -> Tensor:
    """Which keys each query sees, from the places of both."""
    place = torch.arange(keys - queries, keys).unsqueeze(1)
    back = place - torch.arange(keys)
    seen = (back >= 0) & (back < (window or keys))
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


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_windows_and_documents_equal_plain_attention(
    dtype: torch.dtype, within: float, kv_heads: int
) -> None:
    torch.manual_seed(0)
    q, k, v, upstream = (
        torch.randn(3, heads, 48, 16).to(dtype) for heads in (4, kv_heads, kv_heads, 4)
    )
    for window in (None, 1, 7, 47, 100):
        for doc_ids in (None, numbers(LENGTHS)):
            attention = SdpaAttention(window)
            ours, exact = (
                [t.to(d).requires_grad_() for t in (q, k, v)] for d in (dtype, torch.float32)
            )
            y = attention(*ours, attention.prepare(doc_ids))
            expected = formula(*exact, seen_by(48, 48, window, doc_ids))
            pairs = [
                (y, expected),
                *zip(
                    grads(y, ours, upstream), grads(expected, exact, upstream.float()), strict=True
                ),
            ]
            # A token that sees only itself sends nothing to q and k.
            assert all(relative(a.float(), b) < within for a, b in pairs if b.norm() > 1e-4), (
                window,
                doc_ids,
            )


def grads(y: Tensor, leaves: list[Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, leaves, upstream)


def test_positions_begin_again_with_each_document() -> None:
    assert document_positions(torch.tensor([[7, 7, 2, 2, 7]])).tolist() == [[0, 1, 0, 1, 0]]


def test_a_model_without_documents_is_refused() -> None:
    spec = get_spec(f"{ROOT}/examples/tiny_gpt.py:SPEC")
    args = replace(next(iter(spec.flavors.values())), vocab_size=64)
    masked = Data(mask_documents=True)
    run: Any = SimpleNamespace(spec=spec, data=masked)
    (problem,) = mask_problems(run, args)
    assert problem.key == "data.mask_documents"
    assert "its forward takes no doc_ids" in problem.message
    run = SimpleNamespace(spec=spec, data=Data())
    assert not list(mask_problems(run, args))
    run = SimpleNamespace(spec=get_spec("llama3"), data=masked)
    assert not list(mask_problems(run, VARIANTS["gqa"]))
