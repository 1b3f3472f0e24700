"""Every shipped TOML is accepted, builds its model, and says the truth about it in its comments."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from titanlite.config.load import load_file
from titanlite.config.plans import Plans
from titanlite.config.resolve import resolve
from titanlite.config.unbuilt import unbuilt_keys
from titanlite.models import SHAPES, count_parameters, get_spec
from titanlite.prepare import model_args

FOLDER = Path(__file__).parents[2] / "train_configs"
SIZES = {
    "llama2_7b": ("llama2", "7B"),
    "llama2_13b": ("llama2", "13B"),
    "llama2_70b": ("llama2", "70B"),
    "llama3_8b": ("llama3", "8B"),
    "llama3_70b": ("llama3", "70B"),
    "llama3_1_8b": ("llama3", "3.1-8B"),
    "llama3_1_70b": ("llama3", "3.1-70B"),
    "llama3_1_405b": ("llama3", "3.1-405B"),
    "llama3_2_1b": ("llama3", "3.2-1B"),
    "llama3_2_3b": ("llama3", "3.2-3B"),
}


def resolved(path: Path, ranks: int) -> Plans:
    config = load_file(path)
    assert unbuilt_keys(config) == []
    plans = resolve(config, world_size=ranks, shapes=SHAPES)
    assert plans.warnings == ()
    return plans


def test_there_is_one_file_for_each_size_and_the_debug_model() -> None:
    assert set(SIZES) | {"debug_model"} <= {path.stem for path in FOLDER.glob("*.toml")}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_the_model_builds_with_the_counted_parameters(path: Path) -> None:
    plan = resolved(path, ranks=2).model
    args = model_args(plan, tokenizer_size=2048)
    with torch.device("meta"):
        module = get_spec(plan.name).build(args)
        logits = module(torch.zeros(1, plan.max_seq_len, dtype=torch.int64))
    assert sum(p.numel() for p in module.parameters()) == count_parameters(args)
    assert logits.shape == (1, plan.max_seq_len, args.n_vocab)


@pytest.mark.parametrize("name", SIZES)
def test_a_files_name_model_and_stated_numbers_agree(name: str) -> None:
    path = FOLDER / f"{name}.toml"
    comments = " ".join(line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#"))
    gpus = re.search(r"Hardware: (\d+|one) GPUs? of", comments)
    assert gpus
    plans = resolved(path, ranks=1 if gpus[1] == "one" else int(gpus[1]))
    assert (plans.model.name, plans.model.flavor) == SIZES[name]
    assert plans.observe.dump_folder == f"./outputs/{name}"

    args = model_args(plans.model, tokenizer_size=None)
    assert f"{count_parameters(args):,} parameters" in comments
    batch = plans.batch
    assert f"{batch.global_batch_size} * {batch.seq_len:,} = {batch.tokens_per_step:,} tokens" in comments

    # Kept for the backward by each block, in bf16: six tensors of width dim (inputs and outputs of both norms, q, and
    # attention's output), k and v, and four of the feed-forward's width.
    kept = args.n_layers * (12 * args.dim + 4 * args.kv_heads * args.head_dim + 8 * args.ffn_width)
    stated = re.search(r"activations take ([\d.]+) MB", comments)
    assert stated and float(stated[1]) == pytest.approx(kept / 1e6, rel=0.02)
