"""Command lines of the AWS FSDP samples as TOML files."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from titanlite.cli.aws_fsdp import to_toml
from titanlite.config.errors import ConfigError
from titanlite.config.load import load_file, read_text
from titanlite.resolve.load import resolve

AWS_LLAMA2 = """
    --max_context_width=4096 --num_key_value_heads=8 # 70b: 8
    --intermediate_size=28672 --hidden_width=8192 \\
    --num_layers=80 --num_heads=64 --model_type=llama_v2 --vocab_size 32000
    --tokenizer="hf-internal-testing/llama-tokenizer" --checkpoint_freq=50 --validation_freq=500
    --max_steps=5000 --checkpoint_dir=./checkpoints --dataset='c4' --dataset_config_name='en'
    --resume_from_checkpoint=./checkpoints --train_batch_size=1 --val_batch_size=3
    --sharding_strategy="hybrid" --offload_activations=1 --limit_all_gathers=1 --resid_pdrop 0.1
    --lr_decay_style plateau --plateau 0.4 --min_lr 1e-6 --bogus 3
"""


def test_arguments_of_the_aws_samples_become_a_file_with_their_defaults(tmp_path):
    toml = to_toml(AWS_LLAMA2)
    path = tmp_path / "aws.toml"
    path.write_text(toml)
    config = load_file(path)
    d = config.sections
    assert (d.model.name, d.model.vocab_size) == ("llama2", 32000)
    assert d.model.overrides == {
        "dim": 8192,
        "n_layers": 80,
        "n_heads": 64,
        "n_kv_heads": 8,
        "ffn_dim": 28672,
    }
    assert (d.training.seq_len, d.training.batch_size, d.training.steps, d.training.seed) == (
        4096,
        1,
        5000,
        12345,
    )
    assert (d.training.mixed_precision_param, d.training.mixed_precision_reduce) == (
        "bfloat16",
        "bfloat16",
    )
    assert (d.optimizer.lr, d.optimizer.weight_decay, d.optimizer.beta2) == (1e-4, 0.2, 0.95)
    s = d.lr_scheduler
    assert (s.style, s.decay_type, s.plateau_ratio, s.min_lr, s.warmup_ratio) == (
        "fsdp",
        "plateau",
        0.4,
        1e-6,
        0.0032,
    )
    v = d.validation
    assert (v.enable, v.freq, v.steps, v.batch_size) == (True, 500, 10, 3)
    assert (d.checkpoint.enable_checkpoint, d.checkpoint.folder, d.checkpoint.interval) == (
        True,
        "./checkpoints",
        50,
    )
    assert (d.activation_checkpoint.mode, d.activation_checkpoint.offload) == ("full", True)
    assert (d.metrics.log_freq, d.metrics.log_style) == (1, "aws_fsdp")
    schedule = resolve(config, 8)[1].schedule
    assert (schedule.total_steps, schedule.warmup_steps, schedule.plateau_steps) == (5000, 16, 2000)
    lines = [line for line in toml.splitlines() if line.startswith("# left out: ")]
    left = [line.removeprefix("# left out: ").split("=")[0] for line in lines]
    names = (
        "tokenizer dataset_config_name resume_from_checkpoint sharding_strategy limit_all_gathers "
        "resid_pdrop bogus"
    )
    assert set(left) == {f"--{name}" for name in names.split()}
    assert "# left out: --bogus=3 (no key here)" in lines


def test_arguments_of_the_aws_samples_without_a_model_keep_titanlites():
    config, _ = read_text(to_toml("--max_steps=30 --lr=1e-3 --bf16 0"), Path("x.toml"))
    assert (config.value("model.flavor"), config.value("training.steps")) == ("debugmodel", 30)
    assert config.value("training.mixed_precision_param") == "float32"
    assert config.value("checkpoint.enable_checkpoint") is False
    assert math.isclose(config.value("optimizer.lr"), 1e-3)
    epochs, _ = read_text(to_toml("--epochs 2"), Path("x.toml"))
    assert epochs.value("training.epochs") == 2


@pytest.mark.parametrize(
    ("words", "key", "code"),
    [
        ("max_steps=3", "--aws-fsdp", "bad-flag"),
        ("--max_steps=many", "--max_steps", "bad-flag"),
        ("--lr 0.1x --warmup 0.5", "--lr", "bad-flag"),
        ("--tokenizer='x", "--aws-fsdp", "bad-flag"),
        ("--train_batch_size=0", "training.batch_size", "out-of-range"),
        ("--lr=1e-6 --min_lr=1e-5", "lr_scheduler.min_lr", None),
    ],
)
def test_wrong_arguments_are_errors(words, key, code):
    with pytest.raises(ConfigError) as caught:
        to_toml(words)
    (problem,) = caught.value.problems
    assert problem.key == key
    assert code in (None, problem.code)


def test_c4_is_the_dataset_of_that_name_also_beside_a_folder_of_that_name(tmp_path, monkeypatch):
    (tmp_path / "c4").mkdir()
    monkeypatch.chdir(tmp_path)
    toml = to_toml("--dataset=c4 --model_type=mixtral --num_layers=3")
    config, _ = read_text(toml, Path("x.toml"))
    assert config.value("training.dataset") == "c4"
    assert config.value("training.dataset_path") is None
    assert "# left out: --model_type=mixtral (only llama_v2 and llama_v3 are Llama models)" in toml
    assert "# left out: --num_layers=3 (model.overrides.n_layers)" in toml
