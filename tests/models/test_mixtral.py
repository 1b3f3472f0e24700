"""Family mixtral: equal to `transformers`, published counts, names of weights, initial weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.test_families import pair
from tests.support.hf import check_files
from titanlite.assembly.fingerprints import weights_fingerprints
from titanlite.checkpoint.source_model import differences, from_hf
from titanlite.models import get_spec, resolve_args
from titanlite.models.counts import count_active_parameters
from titanlite.models.experts.layer import MoE, MoEDecoder
from titanlite.models.mixtral import MixtralArgs

SPEC = get_spec("mixtral")
ARGS = MixtralArgs(
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    ffn_dim=48,
    vocab_size=96,
    n_experts=4,
    rope_theta=1e6,
    aux_loss=0.0,
)


def make(args: MixtralArgs) -> MoEDecoder:
    model = MoEDecoder(args)
    for i, (name, parameter) in enumerate(model.named_parameters()):
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(i))
    return model


def test_z_loss_and_record() -> None:
    args = replace(ARGS, n_layers=1, z_loss=0.1)
    moe: Any = make(args).layers["0"].feed_forward
    x = torch.randn(2, 8, 32)
    (with_z,) = torch.autograd.grad(moe(x).sum(), moe.gate.weight)
    moe.z_weight = 0.0
    (without,) = torch.autograd.grad(moe(x).sum(), moe.gate.weight)
    z = torch.logsumexp(moe.gate(x.flatten(0, 1)), -1).square().mean()
    (expected,) = torch.autograd.grad(0.1 * z, moe.gate.weight)
    torch.testing.assert_close(with_z - without, expected, rtol=1e-3, atol=1e-5)
    moe.record = torch.zeros(7, dtype=torch.float64)
    moe(x)
    with torch.no_grad():
        moe(x)
    assert moe.record[:4].sum() == 2 * 16
    assert moe.record[4] == 16
    assert moe.record[6].item() == pytest.approx(16 * z.item(), rel=1e-5)


def test_files_of_transformers_there_and_back(tmp_path: Path) -> None:
    ours, theirs, _, args = pair("mixtral")
    check_files(theirs, ours.state_dict(), SPEC, args, tmp_path)


def test_counts_and_flops_of_the_published_models() -> None:
    args = resolve_args("mixtral", "8x7B")
    assert (SPEC.count_parameters(args), count_active_parameters(args)) == (
        46_702_792_704,
        12_879_925_248,
    )
    assert SPEC.flops_per_token(args, 4096) == 82_935_570_432
    # As the files of mistralai/Mixtral-8x22B-v0.1 hold, and Mistral's "141B, 39B active".
    large = resolve_args("mixtral", "8x22B")
    assert (SPEC.count_parameters(large), count_active_parameters(large)) == (
        140_620_634_112,
        39_152_031_744,
    )


def test_a_head_dim_of_its_own_need_not_divide_the_width() -> None:
    args = resolve_args("qwen3", "8B", {"dim": 4112})
    assert (args.n_heads, args.head_dim, args.dim % args.n_heads) == (32, 128, 16)


def test_the_losses_of_routers_make_no_other_model() -> None:
    tokenizer: Any = SimpleNamespace(fingerprint="0")
    other = replace(ARGS, aux_loss=0.5, z_loss=0.1)
    assert weights_fingerprints("mixtral", ARGS, tokenizer) == weights_fingerprints(
        "mixtral", other, tokenizer
    )
    wider = replace(ARGS, ffn_dim=56)
    assert weights_fingerprints("mixtral", ARGS, tokenizer) != weights_fingerprints(
        "mixtral", wider, tokenizer
    )
    there = from_hf(Path("config.json"), SPEC.hf_config(ARGS), SPEC)
    assert differences(there, "mixtral", other) == []
    assert differences(there, "mixtral", wider) == ["model.overrides.ffn_dim is 56 here, 48 there"]


def test_experts_are_drawn_one_by_one() -> None:
    """A rank that holds a part of the experts, or rows of each, draws the values of the whole."""
    from titanlite.parallel.init import fill

    init = SPEC.init_rule("layers.1.feed_forward.experts.w2", ARGS)
    assert init.std == pytest.approx(0.02 / 2)
    assert SPEC.init_rule("layers.1.feed_forward.experts.w1", ARGS).std == 0.02
    whole = torch.empty(4, 200, 6)
    experts = torch.empty(2, 200, 6)
    rows = torch.empty(4, 50, 6)
    for part, offset in ((whole, (0, 0, 0)), (experts, (2, 0, 0)), (rows, (0, 150, 0))):
        fill(part, offset, (4, 200, 6), "w", init, 5)
    assert torch.equal(experts, whole[2:])
    assert torch.equal(rows, whole[:, 150:])
    assert len(whole.unique()) > 4700


#: Arguments of one MoE layer by itself.
SINGLE = MixtralArgs(
    dim=16, n_layers=2, n_heads=2, ffn_dim=24, vocab_size=32, n_experts=5, top_k=2, aux_loss=0.0
)


def make_moe(args: MixtralArgs = SINGLE, dtype: torch.dtype = torch.float32) -> MoE:
    moe = MoE(args)
    for i, parameter in enumerate(moe.parameters()):
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(i))
    return moe.to(dtype)


def inputs(*shape: int, seed: int = 9) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def gradients(moe: MoE, x: Tensor, y: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(y, [x, *moe.parameters()], torch.cos(y).detach()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_repeats_to_the_last_bit(dtype: torch.dtype) -> None:
    moe = make_moe(dtype=dtype)
    x = inputs(4, 32, 16).detach().to(dtype).requires_grad_()
    first, second = (gradients(moe, x, moe(x)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
