"""The decoder's own promises: names, RoPE, norms, dtypes.

test_families.py holds it against `transformers`.
"""

from __future__ import annotations

import pytest
import torch

from tests.support.llamas import SMALL, VARIANTS, built
from titanlite.models.layers import Llama
from titanlite.models.rope import Rope, Rotation, _Rotate


def test_rope_in_a_bf16_model_differs_from_fp32_only_by_the_rounding_of_its_inputs() -> None:
    rope = Rope(16, 4096, 5e5, None).to(torch.bfloat16)
    assert (rope.cos.dtype, rope.sin.dtype) == (torch.float32, torch.float32)
    assert torch.equal(rope.cos, Rope(16, 4096, 5e5, None).cos)
    x = torch.randn(1, 4096, 2, 16).bfloat16()
    rotated = rope(4096)(x)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, rope(4096)(x.float()).bfloat16())
    coarse = Rotation(rope.cos.bfloat16().unsqueeze(1), rope.sin.bfloat16().unsqueeze(1))(x)
    assert not torch.equal(rotated, coarse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rotation_of_eager_cuda_is_the_formula(dtype: torch.dtype) -> None:
    rotation = Rope(16, 512, 5e5, None)(512)
    x = torch.randn(2, 512, 3, 16).to(dtype).requires_grad_()
    grad = torch.randn(2, 512, 3, 16).to(dtype)
    expected = rotation(x)
    actual = _Rotate.apply(x, rotation.cos, rotation.sin)
    # One rounding to the dtype of x each; before it a fused multiply-add differs in the last bits
    # of fp32.
    near = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6}
    torch.testing.assert_close(actual, expected, **near)
    torch.testing.assert_close(
        torch.autograd.grad(actual, x, grad)[0], torch.autograd.grad(expected, x, grad)[0], **near
    )


def test_a_sequence_longer_than_the_tables_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"129 tokens is longer than the model's RoPE tables \(128\)"
    ):
        built(SMALL)(torch.zeros(1, 129, dtype=torch.int64))


def test_names_are_frozen_and_no_table_is_in_a_checkpoint() -> None:
    block = [
        "attention.wq.weight",
        "attention.wk.weight",
        "attention.wv.weight",
        "attention.wo.weight",
        "feed_forward.w1.weight",
        "feed_forward.w2.weight",
        "feed_forward.w3.weight",
        "attention_norm.weight",
        "ffn_norm.weight",
    ]
    names = ["tok_embeddings.weight", *(f"layers.{i}.{name}" for i in (0, 1) for name in block)]
    names += ["norm.weight", "output.weight"]
    assert list(Llama(SMALL).state_dict()) == names
    assert list(Llama(VARIANTS["all"]).state_dict()) == names
