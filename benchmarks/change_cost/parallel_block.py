"""Check of parallel_block.md: `python benchmarks/change_cost/parallel_block.py [TREE]`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from checking import (
    PIPELINE,
    SMALL,
    TENSOR,
    command,
    is_near,
    records,
    require,
    require_keys,
    require_same_losses,
    train,
)
from torch import Tensor

KEY = "--model.overrides.parallel_blocks=true"
SHAPE = ("--model.overrides.rope_theta=10000.0", "--model.overrides.norm_eps=1e-5")
STEPS = "--training.steps=5"
LAYOUTS = {
    "FSDP 2": (2, ()),
    "TP 2": (2, (TENSOR,)),
    "FSDP 2, TP 2": (4, (TENSOR,)),
    "PP 2": (2, (PIPELINE,)),
}
HEADS, KV_HEADS = 4, 2


def rotated(x: Tensor) -> Tensor:
    """Rotate [batch, seq, heads, head_dim] by positions, pairs half a head apart."""
    half = x.size(-1) // 2
    frequencies = 10000.0 ** (-torch.arange(half) / half)
    angles = torch.outer(torch.arange(x.size(1)).double(), frequencies.double())[:, None]
    first, second = x.split(half, dim=-1)
    turned = (
        first * angles.cos() - second * angles.sin(),
        second * angles.cos() + first * angles.sin(),
    )
    return torch.cat(turned, dim=-1)


def normed(x: Tensor, gain: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gain


def reference(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Return the logits by the formula in float64."""
    w = {name: weight.double() for name, weight in weights.items()}
    x = w["tok_embeddings.weight"][tokens]
    for layer in ("layers.0.", "layers.1."):
        n = normed(x, w[f"{layer}attention_norm.weight"])
        q, k, v = (
            F.linear(n, w[f"{layer}attention.{name}.weight"]).unflatten(-1, (heads, -1))
            for name, heads in (("wq", HEADS), ("wk", KV_HEADS), ("wv", KV_HEADS))
        )
        repeats = HEADS // KV_HEADS
        q, k = rotated(q), rotated(k).repeat_interleave(repeats, dim=2)
        v = v.repeat_interleave(repeats, dim=2)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        attention = F.linear(mixed, w[f"{layer}attention.wo.weight"])
        gate, up = (F.linear(n, w[f"{layer}feed_forward.{name}.weight"]) for name in ("w1", "w3"))
        x = x + attention + F.linear(F.silu(gate) * up, w[f"{layer}feed_forward.w2.weight"])
    return F.linear(normed(x, w["norm.weight"]), w["output.weight"])


def planned(*flags: str) -> dict[str, float]:
    words = ("plan", "debug_model.toml", "--gpu", "h100-80g", "--json", *SMALL, *SHAPE, KEY)
    done = command(*words, *flags)
    require(bool(done.stdout), f"titanlite plan fails: {done.stderr[-2000:]}")
    return dict(json.loads(done.stdout)["parts"])


def main() -> None:
    require_keys(KEY)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone = train(folder / "alone", 1, KEY, *SHAPE, STEPS, recorder="Scaled")
        (record,) = records(folder / "alone")
        weights = record["weights"]
        left = [one for one in weights if "ffn_norm" in one]
        require(not left, f"{left} are still there")
        wanted = reference(weights, record["tokens"])
        error = ((record["logits"] - wanted).norm() / wanted.norm()).item()
        require(error < 1e-5, f"logits are {error} off the formula")
        for number, (layout, (ranks, flags)) in enumerate(LAYOUTS.items()):
            rows = train(folder / str(number), ranks, KEY, *SHAPE, STEPS, *flags, recorder="Scaled")
            require_same_losses(layout, rows, alone, 1e-5)
        usual = train(folder / "usual", 1, *SHAPE, STEPS, recorder="Scaled")
        differs = not is_near(usual[-1]["grad_norm"], alone[-1]["grad_norm"], 1e-3)
        require(differs, "a model without the key has the same gradients")
    # AdamW's two moments in float32; one norm has 512 bytes of them.
    moments = planned("--gpus", "1")["optimizer"] * 2**30
    wanted_moments = 8 * sum(weight.numel() for weight in weights.values())
    require(
        abs(moments - wanted_moments) < 256,
        f"plan counts {moments} bytes of moments, not {wanted_moments}",
    )
    for ranks, flags in ((1, ()), (2, (TENSOR,))):
        formula = planned("--gpus", str(ranks), *flags)["activations"]
        exact = planned("--gpus", str(ranks), *flags, "--exact")["activations"]
        require(
            is_near(formula, exact, 0.02),
            f"plan on {ranks} GPUs: {formula} GiB of activations by formulas, {exact} by --exact",
        )
    print(f"right: the formula, {', '.join(LAYOUTS)}, and the plan")


if __name__ == "__main__":
    main()
