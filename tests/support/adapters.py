"""Low-rank adapters beside a small Llama: of PEFT, and of titanlite's own runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.support.harness import full, weights_of
from tests.support.whole_runs import make_trainer, outcome_of
from titanlite.callbacks import Callback
from titanlite.checkpoint.state_dict import adapter_names
from titanlite.dist.dist_env import DistEnv
from titanlite.models import get_spec
from titanlite.trainer import Trainer

#: Ids of the bundled tokenizer.
VOCABULARY = 2304
RANK = 4
ALPHA = 6.0
#: Linears in each of two blocks.
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
#: Over the flags of `make_trainer`: the shape of the base, one batch for all divisions.
FLAGS = (
    "--model.overrides.n_kv_heads=2",
    "--training.global_batch_size=4",
    "--training.batch_size=2",
    "--training.max_norm=1e9",
    "--no-validation.enable",
    "--checkpoint.enable_checkpoint",
    f"--lora.rank={RANK}",
    f"--lora.alpha={ALPHA}",
)


def base_folder(folder: Path) -> Path:
    """The model of `make_trainer` with random weights, as `transformers` saves it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    spec = get_spec("llama3")
    sizes = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": VOCABULARY}
    content = spec.hf_config(replace(spec.flavors["debugmodel"], **sizes))
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**content, initializer_range=0.1)).save_pretrained(folder)
    return folder


def peft_model(base: Path, targets: tuple[str, ...] = LINEARS, **more: Any) -> Any:
    """The base with random adapters of PEFT, B not zero."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    config = LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=list(targets),
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        **more,
    )
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return get_peft_model(model, config)


def peft_folder(folder: Path, base: Path, targets: tuple[str, ...] = LINEARS, **more: Any) -> Path:
    """Such adapters as PEFT saves them."""
    peft_model(base, targets, **more).save_pretrained(folder)
    return folder


def run_flags(base: Path, *more: str) -> list[str]:
    return [*FLAGS, f"--checkpoint.initial_load_path={base}", *more]


class Seen(Callback):
    """Keeps what a run begins with, and batch and gradients of its first step."""

    def __init__(self) -> None:
        self.start: dict[str, torch.Tensor] = {}
        self.gradients: dict[str, torch.Tensor] = {}
        self.batches: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.without: list[str] = []

    def on_start(self, trainer: Any) -> None:
        self.start = weights_of(trainer.parts.model)

    def before_update(self, trainer: Any) -> None:
        if self.gradients:
            return
        for name, parameter in trainer.parts.model.named_parameters():
            if parameter.grad is None:
                self.without.append(name)
            else:
                self.gradients[name] = full(parameter.grad)
        batches = trainer.recent[trainer.step].batches
        self.batches += [(batch.tokens, batch.labels) for batch in batches]


def train_seen(world: DistEnv, folder: str, *flags: str) -> dict[str, Any]:
    return outcome_seen(make_trainer(world, folder, *flags), folder)


def outcome_seen(trainer: Trainer, folder: str) -> dict[str, Any]:
    """Train, and return what `Seen` kept with the outcome and the last weights."""
    seen = Seen()
    trainer.callbacks = type(trainer.callbacks)([*trainer.callbacks.all, seen])
    model = trainer.parts.model
    found = outcome_of(trainer, folder)
    return {
        **found,
        **vars(seen),
        "end": weights_of(model),
        "adapters": adapter_names(model),
        "held": sum(len(group["params"]) for group in trainer.parts.optimizer.param_groups),
    }


def our_name(theirs: str) -> str:
    """Our name of a parameter of PEFT's adapters."""
    for their_word, our_word in _WORDS.items():
        theirs = theirs.replace(their_word, our_word)
    return theirs


_WORDS = {
    "base_model.model.model.": "",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "lora_A.default.weight": "lora_a",
    "lora_B.default.weight": "lora_b",
}


def peft_gradients(
    base: Path,
    batches: list[Any],
    targets: tuple[str, ...] = LINEARS,
    name_of: Callable[[str], str] = our_name,
) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients of all parameters that PEFT trains, by our names, and the loss."""
    model = peft_model(base, targets).train()
    tokens = torch.cat([batch[0] for batch in batches])
    labels = torch.cat([batch[1] for batch in batches])
    logits = model(input_ids=tokens).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100
    )
    loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found[name_of(name)] = parameter.grad.clone()
    return found, loss.item()


@functools.cache
def merged_weights(base: Path) -> dict[str, torch.Tensor]:
    """The weights of the base with PEFT's adapters merged, by Hugging Face's names."""
    whole = peft_model(base).merge_and_unload()
    return {name: tensor.detach().clone() for name, tensor in whole.state_dict().items()}
