"""Configs of parallelism and recomputation that cannot work are one error, with the key, the numbers and a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pool import free_port
from tests.refusals import refusal
from titanlite import exit_codes, main
from titanlite.config.load import load
from titanlite.fit import check_config, fitted, load_config

AC, TP, CP = "activation_checkpoint.", "training.tensor_parallel_degree", "experimental.context_parallel_degree"
PP = "experimental.pipeline_parallel_"
ASYNC = "experimental.enable_async_tensor_parallel"
ZBV, INTERLEAVED = f"{PP}schedule=ZBVZeroBubble", f"{PP}schedule=Interleaved1F1B"
BY_OP = [f"{AC}mode=selective", f"{AC}selective_ac_option=op"]
#: flags, ranks, the key to blame, and texts of the message and hint
REFUSED: list[tuple[list[str], int, str, list[str]]] = [
    # Recomputation
    ([f"{AC}mode=budget"], 1, f"{AC}mode", ["needs training.compile = true"]),
    (
        [f"{AC}mode=budget", "training.compile", "compile.components=loss"],
        1,
        f"{AC}mode",
        ["needs model in compile.components"],
    ),
    (
        [f"{AC}mode=selective", f"{AC}selective_ac_option=9"],
        1,
        f"{AC}selective_ac_option",
        ["one block of each 9", "model has 6"],
    ),
    ([*BY_OP, f"{AC}offload"], 1, f"{AC}offload", ["held elsewhere"]),
    ([f"{AC}selective_ac_option=0"], 1, f"{AC}selective_ac_option", ['"op" or a number']),
    ([f"{AC}mode=some"], 1, f"{AC}mode", ['one of "none"']),
    ([f"{AC}memory_budget=1.5"], 1, f"{AC}memory_budget", ["<= 1"]),
    (["training.compile", "compile.components="], 1, "compile.components", ["is empty"]),
    # Tensor parallelism
    ([f"{TP}=3", "training.seq_len=2049"], 6, TP, ["is 3", "n_heads = 16 nor n_kv_heads = 16", "1, 2, 4, 8, 16"]),
    ([f"{TP}=2", "training.seq_len=2047"], 6, "training.seq_len", ["2047", "= 2 ranks", "2046 or 2048"]),
    ([f"{TP}=2", "validation.enable", "validation.seq_len=2047"], 6, "validation.seq_len", ["2047"]),
    ([f"{TP}=16", "model.flavor=8B"], 16, TP, ["does not divide n_kv_heads = 8", "these work: 1, 2, 4, 8"]),
    ([f"{TP}=2", "model.vocab_size=2305"], 6, TP, ["2,305", "model.vocab_size = 2306 leaves 1"]),
    ([f"{TP}=2", ASYNC], 6, ASYNC, ["needs training.compile = true"]),
    ([f"{TP}=2", ASYNC, "training.compile", "compile.components=loss"], 6, ASYNC, ["model in compile.components"]),
    ([f"{TP}=2", ASYNC, "training.compile", "compile.backend=aot_eager"], 6, ASYNC, ['"inductor"', '"aot_eager"']),
    # Context parallelism
    (
        [f"{CP}=4", "training.seq_len=2052"],
        4,
        CP,
        ["is 4", "2052", "8 equal chunks", "2048 or 2056", "context_parallel_degree = 1, 2, 3, 6"],
    ),
    ([f"{CP}=2", "validation.enable", "validation.seq_len=34"], 4, CP, ["validation.seq_len = 34", "4 equal chunks"]),
    ([f"{CP}=2", "training.reshard_after_forward=3"], 4, "training.reshard_after_forward", ["3", "the 4 ranks"]),
    # Pipelines
    ([f"{PP}degree=2", f"{PP}schedule=F1B"], 2, f"{PP}schedule", ['"F1B"', "there are GPipe, 1F1B, Lo"]),
    ([f"{PP}schedule=F1B"], 2, f"{PP}schedule", ['"F1B"', "nearest: 1F1B"]),
    ([f"{PP}degree=4", INTERLEAVED], 4, f"{PP}degree", ["6 blocks", "8 stages", "one stage per rank"]),
    ([f"{PP}degree=8", "training.batch_size=8"], 8, f"{PP}degree", ["6 blocks", "smaller degree"]),
    (
        [f"{PP}degree=2", f'{PP}split_points=["layers.9"]'],
        2,
        f"{PP}split_points",
        ["'layers.9'", "layers.0 to "],
    ),
    (
        [f"{PP}degree=4", f'{PP}split_points=["layers.3","layers.2","norm"]'],
        4,
        f"{PP}split_points",
        ["layers.2 comes after layers.3", "sort them"],
    ),
    ([f"{PP}degree=2", f'{PP}split_points=["tok_embeddings"]'], 2, f"{PP}split_points", ["first stage", "the others"]),
    (
        [f"{PP}degree=2", f'{PP}split_points=["layers.1","layers.2"]'],
        2,
        f"{PP}split_points",
        ["2 split points make 3 stages", "2 stages, 1 split points"],
    ),
    (
        [f"{PP}degree=2", f'{PP}split_points=["layers.1"]', ZBV],
        2,
        f"{PP}split_points",
        ["two stages per rank: 4 stages"],
    ),
    ([f"{PP}degree=2", f"{PP}microbatches=3"], 2, f"{PP}microbatches", ["is 3", "batch_size = 4", "1, 2, 4"]),
    ([f"{PP}degree=3"], 3, f"{PP}microbatches", ["is 3, the pipeline degree", "multiple of 3"]),
    ([f"{PP}degree=2", f"{PP}microbatches=1"], 2, f"{PP}microbatches", ["each of the 2", '"GPipe"']),
    (
        [f"{PP}degree=2", f"{PP}microbatches=5", "training.batch_size=5", INTERLEAVED],
        2,
        f"{PP}microbatches",
        ["in 2 rounds of equal size", "multiple of 2"],
    ),
    ([f"{PP}degree=2", "model.overrides.tied=true"], 2, f"{PP}degree", ["share one weight", "tied = false"]),
    ([f"{PP}degree=2", ZBV, "training.compile"], 2, f"{PP}schedule", ["run twice or fail", "training.compile = false"]),
    ([f"{PP}degree=2", ZBV, *BY_OP], 2, f"{PP}schedule", ["run again only once", '"full"']),
    (
        [f"{PP}degree=2", ZBV, "training.reshard_after_forward=always"],
        2,
        f"{PP}schedule",
        ["get no gradient", '"default"'],
    ),
    (
        [f"{PP}degree=2", "training.gradient_sync=every"],
        2,
        "training.gradient_sync",
        ["reduces gradients once", '"last"'],
    ),
]


@pytest.mark.parametrize(("flags", "ranks", "key", "texts"), REFUSED, ids=[" ".join(row[0]) for row in REFUSED])
def test_it_is_refused(flags: list[str], ranks: int, key: str, texts: list[str]) -> None:
    files = ["--job.config_file=debug_model.toml"] if any(flag.startswith(PP) for flag in flags) else []
    layers = [] if files or "model.flavor=8B" in flags else ["--model.overrides.n_layers=6"]
    problem = refusal([*files, *layers, *(f"--{flag}" for flag in flags)], ranks)
    assert problem.key == key
    assert all(text in f"{problem.message} {problem.hint}" for text in texts), str(problem)


def test_what_fits_is_accepted() -> None:
    check_config([f"--{AC}mode=budget", "--training.compile"], 1, training=False)
    for length in (2048, 2056):
        assert fitted(load([f"--{CP}=2", f"--training.seq_len={length}"]), 4).mesh.context == 2
    fitted(load([f"--{CP}=2", "--validation.seq_len=34"]), 4)  # nothing is validated
    plans = fitted(
        load([f"--{CP}=2", "--training.reshard_after_forward=4", "--training.prefetch=1"]), 4
    )  # all ranks that share weights count
    assert (plans.mesh.weight_shards, plans.warnings) == (4, ())


def test_the_default_of_recomputation_passes_over_a_model_of_one_block() -> None:
    one = "--model.overrides.n_layers=1"
    notes = fitted(load([one]), 1).notes
    assert any(note.endswith("but the model has 1: all activations are kept") for note in notes)
    problem = refusal([one, f"--{AC}mode=selective"])
    assert "but the model has 1" in problem.message


def test_a_pipelines_micro_batches_and_gathering_are_explained() -> None:
    plans = load_config("debug_model.toml", 4, [f"--{PP}degree=2", f"--{PP}schedule=zbvzerobubble"])
    assert not plans.warnings
    assert any("pipeline micro-batches per step = 2: 2 of each batch of 4" in note for note in plans.notes)
    again = load_config("debug_model.toml", 4, [f"--{PP}degree=2", "--training.reshard_after_forward=always"])
    assert "gathers the weights again for each pipeline micro-batch" in again.warnings[0]
    parts = '[["tok_embeddings","layers.0"],["layers.1","layers.2","layers.3","layers.4","layers.5","norm","output"]]'
    named = load_config("debug_model.toml", 2, [f"--{PP}degree=2", f"--parallelism.module_fqns_per_model_part={parts}"])
    assert named.experimental.pipeline_parallel_split_points == ["layers.1"]


@pytest.mark.slow
def test_a_tokenizers_vocabulary_that_does_not_divide_ends_before_any_process_group(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """2,304 entries; the model's other numbers are divisible by five."""
    rank = {"WORLD_SIZE": "5", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in rank.items():
        monkeypatch.setenv(name, value)
    shape = [f"--model.overrides.{change}" for change in ("dim=320", "n_heads=10", "ffn_dim=320", "n_layers=1")]
    code = main.run([f"--{TP}=5", "--training.seq_len=40", f"--job.dump_folder={tmp_path}", *shape])
    assert code == exit_codes.CONFIG
    error = capsys.readouterr().err
    assert "the vocabulary = 2,304" in error and "model.vocab_size = 2305 leaves 1" in error
