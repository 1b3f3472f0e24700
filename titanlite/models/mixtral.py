"""Mixtral (Jiang et al. 2024): a Llama whose feed-forward is a mixture of experts. No torch here.

`titanlite.models.experts.layer` has the modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titanlite.models.experts.arguments import ExpertArgs
from titanlite.models.experts.family import expert_spec
from titanlite.models.spec import ModelSpec

if TYPE_CHECKING:
    from titanlite.models.hf_names import HFName


@dataclass(frozen=True)
class MixtralArgs(ExpertArgs):
    """A decoder's arguments; `ffn_dim` is the width of each expert."""

    @property
    def published_context(self) -> int:
        """Tokens of context of the published model of this width; 0: there is none."""
        return {4096: 32768, 6144: 65536}.get(self.dim, 0)


#: Flavor → arguments: Mixtral of Experts (2024), and of 8x22B from public descriptions.
FLAVORS: dict[str, MixtralArgs] = {
    "debugmodel": MixtralArgs(256, 6, 16, n_kv_heads=4, ffn_dim=512, rope_theta=1e6),
    "8x7B": MixtralArgs(
        4096, 32, 32, n_kv_heads=8, ffn_dim=14336, vocab_size=32000, rope_theta=1e6
    ),
    "8x22B": MixtralArgs(
        6144, 56, 48, n_kv_heads=8, ffn_dim=16384, vocab_size=32000, rope_theta=1e6, aux_loss=0.001
    ),
}


def hf_names(args: MixtralArgs) -> dict[str, Any]:
    """Return our parameter name → Hugging Face's; a stack of experts → the names of its
    matrices.
    """

    from titanlite.models import llama_hf

    def each(name: str) -> tuple[str, ...]:
        return tuple(f"block_sparse_moe.experts.{i}.{name}.weight" for i in range(args.n_experts))

    experts: dict[str, HFName] = {}
    for name in ("w1", "w2", "w3"):
        experts[f"feed_forward.experts.{name}"] = each(name)
    experts["feed_forward.gate.weight"] = "block_sparse_moe.gate.weight"
    return llama_hf.hf_names(args, lambda block: llama_hf.block_parts(block, experts))


def hf_config(args: MixtralArgs) -> dict[str, Any]:
    """Return the content of config.json, see `llama_hf.hf_config`. `transformers` has no z-loss."""
    from titanlite.models import llama_hf

    return llama_hf.hf_config(args, "mixtral") | {
        "num_local_experts": args.n_experts,
        "num_experts_per_tok": args.top_k,
        "router_aux_loss_coef": args.aux_loss,
        "sliding_window": None,
    }


def args_from_hf(config: Mapping[str, Any]) -> MixtralArgs:
    """Return the arguments that a config.json describes.

    Raises ValueError for one that this family does not do.
    """
    from titanlite.models import llama_hf
    from titanlite.models.hf_names import entry_of

    for name in ("sliding_window", "router_jitter_noise"):
        if config.get(name):
            raise ValueError(f"{name} is {config[name]!r}; the family mixtral here has none")
    experts: dict[str, Any] = {
        "n_experts": entry_of(config, "num_local_experts", int, 8),
        "top_k": entry_of(config, "num_experts_per_tok", int, 2),
        "aux_loss": entry_of(config, "router_aux_loss_coef", float, 0.001),
    }
    # Without the entry `transformers` takes its default.
    return llama_hf.args_from_hf({"rope_theta": 1e6, **config}, "mixtral", MixtralArgs, **experts)


SPEC: ModelSpec = expert_spec(
    "mixtral", FLAVORS, hf_names=hf_names, hf_config=hf_config, args_from_hf=args_from_hf
)
