"""Models of transformers: their folders, and training of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor

from tests.support.processes import ROOT
from tests.support.steps import train_rows
from tests.support.texts import LLAMA3
from tests.support.tiny import KEPT_TOKENS
from titanlite.data.tokenizer import BUNDLED_TOKENIZER
from titanlite.data.tokenizer.tiktoken_ranks import SPECIAL_TOKENS, SPLIT_PATTERN
from titanlite.dist.dist_env import DistEnv


def bundled_as_json() -> tokenizers.Tokenizer:
    """The bundled ranks as `transformers` converts them; no file names BOS and EOS."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    return TikTokenConverter(
        vocab_file=str(BUNDLED_TOKENIZER),
        pattern=SPLIT_PATTERN,
        extra_special_tokens=list(SPECIAL_TOKENS),
    ).converted()


def hf_folder(folder: Path) -> Path:
    """A random Llama with the bundled tokenizer and a chat template, as `transformers` saves it."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(
        **sizes,
        num_key_value_heads=2,
        vocab_size=2304,
        max_position_embeddings=96,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    made = bundled_as_json()
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    PreTrainedTokenizerFast(tokenizer_object=made, chat_template=LLAMA3, **names).save_pretrained(
        folder
    )
    return folder


TOML = str(ROOT / "train_configs" / "hf_debug.toml")
#: Sizes of all families but GPT-2. There is no dropout, so that two models can be compared.
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
SMALL: dict[str, Any] = {**SIZES, "vocab_size": 2304}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "tie_word_embeddings": False},
    "qwen2": {**SMALL, "tie_word_embeddings": True, "initializer_range": 0.05},
    "gemma": {**SMALL, "head_dim": 16},
    "opt": {**SMALL, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "phi": {**SMALL, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "gpt2": {
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        "vocab_size": 2304,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
}
FLAGS = [
    "--training.seq_len=32",
    "--training.batch_size=2",
    "--training.global_batch_size=4",
    "--metrics.log_freq=1",
    "--training.warmup_steps=1",
    "--lr_scheduler.total_steps=4",
    "--no-validation.enable",
    KEPT_TOKENS,
]


def content(family: str) -> dict[str, Any]:
    return {"model_type": family, **FAMILIES[family]}


def written(folder: Path, family: str) -> str:
    """The flag that names a family's config.json, in `folder`."""
    (folder / "config.json").write_text(json.dumps(content(family)))
    return f"--model.hf_config={folder}"


def config_flags(folder: Path, *flags: str) -> list[str]:
    return [f"--job.dump_folder={folder}/run", *FLAGS, *flags]


def train_losses(world: DistEnv, flags: list[str]) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step, also of those before a resume."""
    folder = [flag.partition("=")[2] for flag in flags if flag.startswith("--job.dump_folder=")][-1]
    return [
        (row["loss"], row["grad_norm"])
        for row in train_rows(world, folder, *flags, config=TOML)
        if "loss" in row
    ]


def check_files(
    theirs: Any, state: Mapping[str, Tensor], spec: Any, args: Any, folder: Path
) -> None:
    """Hold files that `transformers` writes of its model against an export, and read them."""
    from safetensors.torch import load_file

    from titanlite.checkpoint.foreign_formats import open_weights

    theirs.save_pretrained(folder)
    files = load_file(folder / "model.safetensors")
    exported = spec.to_hf(state, args)
    assert files.keys() == exported.keys()
    assert all(files[name].equal(exported[name]) for name in files)
    weights = open_weights(folder)
    assert (weights.family, replace(weights.args, max_seq_len=1)) == (
        spec.name,
        replace(args, max_seq_len=1, n_kv_heads=args.kv_heads),
    )
    assert weights.parts.keys() == state.keys()
    assert all(weights.read(name).equal(state[name]) for name in state)
