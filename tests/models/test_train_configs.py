"""Every shipped TOML is accepted, builds its model, and says the truth about it in its comments."""

from __future__ import annotations

import re

import pytest

from tests.support.processes import ROOT
from titanlite.config.load import load_file
from titanlite.models import LlamaArgs
from titanlite.models.counts import count_parameters
from titanlite.resolve.load import resolve
from titanlite.run.config import RunConfig

FOLDER = ROOT / "train_configs"
SIZES = {
    "llama2_7b": ("llama2", "7B"),
    "llama2_13b": ("llama2", "13B"),
    "llama2_70b": ("llama2", "70B"),
    "llama3_8b": ("llama3", "8B"),
    "llama3_70b": ("llama3", "70B"),
    "llama3_1_8b": ("llama3", "3.1-8B"),
    "llama3_1_8b_lora": ("llama3", "3.1-8B"),
    "llama3_1_70b": ("llama3", "3.1-70B"),
    "llama3_1_405b": ("llama3", "3.1-405B"),
    "llama3_2_1b": ("llama3", "3.2-1B"),
    "llama3_2_3b": ("llama3", "3.2-3B"),
    "mistral_7b": ("mistral", "7B-v0.3"),
    "mathstral_7b": ("mistral", "mathstral-7B"),
    "qwen3_8b": ("qwen3", "8B"),
    "olmo2_7b": ("olmo2", "7B"),
    "olmo3_7b": ("olmo3", "7B"),
    "gemma3_4b": ("gemma3", "4B"),
    "qwen3_30b_a3b": ("qwen3_moe", "30B-A3B"),
    "mixtral_8x7b": ("mixtral", "8x7B"),
    "deepseek_v3_16b": ("deepseek_v3", "16B"),
    "gpt_oss_20b": ("gpt_oss", "20B"),
    "gpt_oss_120b": ("gpt_oss", "120B"),
    "llama4_17bx16e": ("llama4", "17Bx16E"),
}


def described(name: str) -> tuple[RunConfig, LlamaArgs, str]:
    """A file's run on the hardware it names, its model, and its comments as one line."""
    path = FOLDER / f"{name}.toml"
    comments = " ".join(
        line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#")
    )
    gpus = re.search(r"Hardware: (\d+|one) GPUs? of", comments)
    assert gpus
    run = resolve(load_file(path), 1 if gpus[1] == "one" else int(gpus[1]))[1]
    assert not [note for note in run.notes if note.warns]
    return run, run.model_args(), comments


@pytest.mark.parametrize("name", SIZES)
def test_a_files_name_model_and_stated_numbers_agree(name):
    run, args, comments = described(name)
    assert (run.model.name, run.model.flavor) == SIZES[name]
    assert run.job.dump_folder == f"./outputs/{name}"
    assert f"{count_parameters(args):,} parameters" in comments
    batch = run.batch
    assert (
        f"{batch.global_batch_size} * {batch.seq_len:,} = {batch.tokens_per_step:,} tokens"
        in comments
    )


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in FOLDER.glob("*.toml") if "debug" not in path.stem)
)
def test_a_large_model_keeps_few_checkpoints(name):
    """All saves of a 70B would take 77 TiB of disk.

    The newest stay, and about ten over the whole run.
    """
    run, _, _ = described(name)
    section, steps = run.checkpoint, run.steps
    assert steps is not None
    if not section.enable_checkpoint:
        return
    assert section.keep_latest_k == 3
    assert not section.milestones
    assert not section.keep_every or steps // section.keep_every <= 12
    assert not section.keep_every or section.keep_every % section.interval == 0
