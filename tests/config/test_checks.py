"""Three stages of checks: each reports all its problems at once, and the next runs only if there are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.refusals import refusal, refusals
from titanlite.config.errors import ConfigError, Problem
from titanlite.config.load import load
from titanlite.fit import check_config, load_config

T, E, L, C, F8 = "--training.", "--experimental.", "--lr_scheduler.", "--checkpoint.", "--float8."
ON = f"{F8}enable_float8_linear"
MICRO = "experimental.pipeline_parallel_microbatches"
PP2, TP2, CP2 = f"{E}pipeline_parallel_degree=2", f"{T}tensor_parallel_degree=2", f"{E}context_parallel_degree=2"
DDP = f"{T}data_parallel_type=ddp"
SMALL = ["--model.overrides.dim=64", "--model.overrides.n_heads=4", f"{T}seq_len=32", f"{T}batch_size=2"]


def keys(problems: tuple[Problem, ...]) -> set[str]:
    return {problem.key for problem in problems}


# The stages

RUN = """\
[training]
batch_size = "four"
global_batch_size = 12
[checkpoint]
start = "resume"
[model]
flavor = "debugmodle"
"""


def test_a_stage_reports_all_its_problems_and_hides_the_later_ones(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"

    def found(text: str, *flags: str) -> list[str]:
        file.write_text(text)
        return [f"{p.where.rpartition(':')[2]} {p.key}" for p in refusals([f"--job.config_file={file}", *flags], 8)]

    assert found(RUN, f"{T}setps=3") == ["2 training.batch_size", "command line training.setps"]
    second = RUN.replace('"four"', "4")
    assert found(second, "--data.mask_documents", "--model.tokenizer_path=/nope") == [
        "5 checkpoint.start",
        "command line data.mask_documents",
        "command line model.tokenizer_path",
    ]
    third = second.replace('"resume"', '"fresh"')
    assert found(third) == ["3 training.global_batch_size", "7 model.flavor"]
    file.write_text(third.replace("12", "32").replace("modle", "model"))
    assert load_config(str(file), 8).batch.global_batch_size == 32


def test_without_training_missing_features_and_files_are_no_problem() -> None:
    flags = ["--data.mask_documents", "--model.tokenizer_path=/nope"]
    assert keys(refusals(flags)) == {"data.mask_documents", "model.tokenizer_path"}
    assert check_config(flags, 1, training=False)[1].model.tokenizer_path == "/nope"


def test_ranks_and_model_are_checked_together_and_divided_only_if_they_are_right() -> None:
    wrong = [f"{T}global_batch_size=12", f"{T}reshard_after_forward=3", "--model.overrides.n_heads=7"]
    assert keys(refusals(wrong, 2)) == {"training.global_batch_size", "training.reshard_after_forward", "model"}
    wrong = [f"{T}data_parallel_shard_degree=3", "--model.overrides.dimm=7", "--model.overrides.tied=1"]
    assert keys(refusals(wrong, 2)) == {
        "training.data_parallel_shard_degree",
        "model.overrides.dimm",
        "model.overrides.tied",
    }
    assert refusal([f"{T}tensor_parallel_degree=3", f"{T}global_batch_size=5"], 3).code == "batch"


@pytest.mark.parametrize(
    "model",
    ["name=lama3", "flavor=8b", "overrides.n_layers=1.5", "overrides.multiple_of=0", "overrides.rope_theta=inf"],
)
@pytest.mark.parametrize("other", [PP2, TP2, CP2, ON])
def test_a_wrong_model_is_one_problem_whatever_divides_it(model: str, other: str) -> None:
    problem = refusal([f"--model.{model}", other], 1 if other == ON else 2)
    key = f"model.{model.partition('=')[0]}"
    assert (problem.code, problem.where) == ("model", "command line")
    assert problem.key == ("model" if "multiple_of" in model else key)


# Contradictions


def contradiction(flags: list[str]) -> Problem:
    """Return the one contradiction that loading finds, whatever the ranks."""
    with pytest.raises(ConfigError) as caught:
        load(flags)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("flags", "key", "others"),
    [
        ([f"{C}start=from"], "checkpoint.start", "initial_load_path"),
        ([f"{C}start=resume"], "checkpoint.start", "enable_checkpoint = true"),
        ([f"{C}initial_load_path=/a"], "checkpoint.initial_load_path", "enable_checkpoint = true"),
        ([f"{C}create_seed_checkpoint"], "checkpoint.create_seed_checkpoint", "enable_checkpoint = true"),
        ([f"{C}enable_checkpoint", f"{C}keep_best=2"], "checkpoint.keep_best", "validation.enable = true"),
        (["--guard.policy=rollback"], "guard.policy", "checkpoint.enable_checkpoint = true"),
        (["--debug.deterministic_warn_only"], "debug.deterministic_warn_only", "debug.deterministic = true"),
        ([f"{L}decay_type=plateau"], "lr_scheduler.decay_type", "lr_scheduler.plateau_ratio"),
        (["--activation_checkpoint.mode=budget"], "activation_checkpoint.mode", "training.compile = true"),
        (
            ["--activation_checkpoint.mode=budget", f"{T}compile", "--compile.components=loss"],
            "activation_checkpoint.mode",
            "model in compile.components",
        ),
        ([TP2, f"{E}enable_async_tensor_parallel"], "experimental.enable_async_tensor_parallel", "training.compile"),
        (
            [TP2, f"{E}enable_async_tensor_parallel", f"{T}compile", "--compile.backend=aot_eager"],
            "experimental.enable_async_tensor_parallel",
            'compile.backend = "inductor"',
        ),
        (
            [ON, f"{F8}precompute_float8_dynamic_scale_for_fsdp"],
            "float8.precompute_float8_dynamic_scale_for_fsdp",
            "float8.enable_fsdp_float8_all_gather = true",
        ),
    ],
)
def test_a_key_that_needs_another_names_it(flags: list[str], key: str, others: str) -> None:
    problem = contradiction(flags)
    assert (problem.code, problem.key, problem.where) == ("needs", key, "command line")
    assert others in problem.message


GATHER, PRECOMPUTE = f"{F8}enable_fsdp_float8_all_gather", f"{F8}precompute_float8_dynamic_scale_for_fsdp"
ZERO_BUBBLE = [PP2, f"{E}pipeline_parallel_schedule=ZBVZeroBubble"]


@pytest.mark.parametrize(
    ("flags", "key", "other"),
    [
        ([DDP, f"{T}data_parallel_shard_degree=2"], "training.data_parallel_shard_degree", "data_parallel_type"),
        ([f"{T}prefetch=1", f"{T}fsdp_units=root"], "training.prefetch", "fsdp_units"),
        ([f"{T}compile", "--compile.components="], "compile.components", "training.compile"),
        ([f"{T}loss_chunks=9", *SMALL, f"{T}seq_len=4"], "training.loss_chunks", "8 tokens"),
        ([f"{L}min_lr=0.5"], "lr_scheduler.min_lr", "optimizer.lr"),
        ([f"{L}decay_type=constant", f"{L}decay_ratio=0.5"], "lr_scheduler.decay_ratio", "decay_type"),
        ([f"{L}style=fsdp", f"{L}decay_steps=5"], "lr_scheduler.decay_steps", "style"),
        (["--model.vocab_size=9", "--model.overrides.vocab_size=8"], "model.vocab_size", "overrides.vocab_size = 8"),
        (
            ["--model.norm_type=rmsnorm", "--model.overrides.norm_type=layernorm"],
            "model.overrides.norm_type",
            "model.norm_type",
        ),
        (["--model.rope_scaling=8", "--model.overrides.rope_scaling=8"], "model.overrides.rope_scaling", ""),
        ([f"{C}start=fresh", f"{C}load_step=5"], "checkpoint.load_step", "checkpoint.start"),
        (["--guard.policy=skip", "--guard.max_skips=100"], "guard.max_skips", "guard.window = 100"),
        (["--stall.deadline_seconds=100"], "stall.deadline_seconds", "comm.train_timeout_seconds = 100"),
        (
            ["--stall.deadline_seconds=5", "--stall.heartbeat_seconds=6"],
            "stall.heartbeat_seconds",
            "stall.deadline_seconds = 5.0",
        ),
        (["--profiling.enable_profiling", "--profiling.profiler_active=9"], "profiling.profiler_active", "warmup 3"),
        (
            ["--activation_checkpoint.offload", "--activation_checkpoint.selective_ac_option=op"],
            "activation_checkpoint.offload",
            'selective_ac_option = "op"',
        ),
        ([ON, f"{F8}recipe_name=rowwise", GATHER], GATHER[2:], 'recipe_name = "rowwise"'),
        ([ON, GATHER, PRECOMPUTE, f"{T}enable_cpu_offload"], PRECOMPUTE[2:], "enable_cpu_offload"),
        ([ON, f"{F8}recipe_name=rowwise", TP2], "float8.recipe_name", "tensor_parallel_degree = 2"),
        ([ON, GATHER, f"{T}reshard_after_forward=2"], GATHER[2:], "reshard_after_forward = 2"),
        (
            [ON, f"{F8}recipe_name=rowwise_with_gw_hp", f"{F8}filter_fqns=auto_filter_small_kn"],
            "float8.filter_fqns",
            "float8.recipe_name",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_both_named(flags: list[str], key: str, other: str) -> None:
    problem = contradiction(flags)
    assert (problem.code, problem.key, problem.where) == ("conflict", key, "command line")
    assert other in problem.message


@pytest.mark.parametrize(
    ("flag", "key"),
    [
        (f"{C}milestones=[0]", "checkpoint.milestones"),
        ("--data.skip_steps=9-3", "data.skip_steps"),
    ],
)
def test_numbers_out_of_range(flag: str, key: str) -> None:
    assert (refusal([flag]).code, refusal([flag]).key) == ("out-of-range", key)


# Files, packages, features


def test_all_missing_files_are_named(tmp_path: Path) -> None:
    flags = ["--model.tokenizer_path=/a", f"{T}dataset_path=/b", "--validation.dataset_path=/c"]
    assert keys(refusals(flags)) == {"model.tokenizer_path", "training.dataset_path"}
    assert len(refusals([*flags, "--validation.enable"])) == 3
    start = [f"{C}enable_checkpoint", f"{C}initial_load_path=/a", f"--job.dump_folder={tmp_path}"]
    assert (refusal(start).code, refusal(start).key) == ("no-file", "checkpoint.initial_load_path")
    (tmp_path / "checkpoint" / "step-3").mkdir(parents=True)
    check_config(start, 1)  # the run has a checkpoint of its own


@pytest.mark.parametrize("name", ["Muon", "AnyPrecisionAdamW"])
def test_an_optimizer_that_is_not_implemented_is_refused(name: str) -> None:
    problem = refusal([f"--optimizer.name={name}"])
    assert problem.key == "optimizer.name" and name in problem.message
    assert check_config([f"--optimizer.name={name}"], 1, training=False)[1].optimizer.name == name


def test_streamed_text_is_refused_unless_a_path_is_given(tmp_path: Path) -> None:
    assert refusal([f"{T}dataset=c4"]).key == "training.dataset"
    check_config([f"{T}dataset=c4", f"{T}dataset_path={tmp_path}"], 1)


def test_settings_of_a_feature_that_is_off_are_not_refused() -> None:
    check_config([f"{F8}filter_fqns=output", "--profiling.profile_freq=100", "--optimizer.kahan=true"], 1)
    named = refusals(["--optimizer.name=AnyPrecisionAdamW", "--optimizer.kahan=true"])
    assert keys(named) == {"optimizer.name", "optimizer.kahan"}


# Ranks


@pytest.mark.parametrize(
    ("flags", "ranks", "equation"),
    [
        ([f"{T}data_parallel_shard_degree=4"], 2, "data_parallel_shard 4 = 4, which is not the world size 2"),
        ([f"{T}tensor_parallel_degree=4"], 6, "tensor_parallel 4 = 4, which does not divide the world size 6"),
        (
            [f"{T}data_parallel_shard_degree=2", f"{T}data_parallel_replicate_degree=3"],
            8,
            "data_parallel_replicate 3 * data_parallel_shard 2 = 6, which is not the world size 8",
        ),
        ([f"{T}data_parallel_shard_degree=1"], 2, "all degrees 1 = 1, which is not the world size 2"),
        ([DDP, f"{T}data_parallel_replicate_degree=2"], 4, "data_parallel_replicate 2 = 2"),
    ],
)
def test_degrees_that_do_not_fit_are_one_problem_with_the_equation(flags, ranks, equation) -> None:
    problem = refusal(flags, ranks)
    assert problem.code == "ranks" and equation in problem.message
    assert problem.where == "command line" and problem.hint.startswith("run on ")


def test_a_seed_checkpoint_is_made_by_one_process() -> None:
    flags = [f"{C}create_seed_checkpoint", f"{C}enable_checkpoint", TP2]
    assert (refusal(flags, 2).code, refusal(flags, 2).key) == ("ranks", "checkpoint.create_seed_checkpoint")
    check_config(flags, 1)


@pytest.mark.parametrize(
    ("wanted", "flags", "ranks", "works"),
    [
        (3, [], 8, "2, 4 or 8, or "),
        (4, [f"{T}data_parallel_replicate_degree=4"], 8, "2, or "),
        (2, [], 1, ""),
        (2, [DDP], 4, ""),
    ],
)
def test_partial_reshard_divides_the_ranks_that_share_a_copy(wanted, flags, ranks, works) -> None:
    problem = refusal([f"{T}reshard_after_forward={wanted}", *flags], ranks)
    assert problem.key == "training.reshard_after_forward"
    assert problem.hint == f'these work: {works}"default", "always" or "never"'


@pytest.mark.parametrize(
    ("micro", "wanted", "ranks", "works"),
    [
        (4, 30, 3, ["global_batch_size = 24 or 36", "batch_size = 1, 2, 5 or 10 on 3 ranks"]),
        (4, 28, 3, ["global_batch_size = 24 or 36", "1 or 7 data-parallel ranks with batch_size 4"]),
        (8, 4, 1, ["global_batch_size = 8", "batch_size = 1, 2 or 4 on 1 rank"]),
        (5, 7, 2, ["global_batch_size = 10"]),
    ],
)
def test_a_batch_that_cannot_be_split_names_numbers_that_work(micro, wanted, ranks, works) -> None:
    flags = [f"{T}batch_size={micro}", f"{T}global_batch_size={wanted}"]
    problem = refusal(flags, ranks)
    assert problem.key == "training.global_batch_size" and problem.hint == "these work: " + "; ".join(works)
    if "7 data" in works[-1]:
        check_config(flags, 7)
    else:
        check_config(
            [f"{T}batch_size={micro}", works[0].replace("global", f"{T}global").split(" or")[0].replace(" ", "")], ranks
        )


@pytest.mark.parametrize(
    ("flags", "ranks", "key"),
    [
        ([TP2, "--model.overrides.n_kv_heads=1"], 2, "training.tensor_parallel_degree"),
        ([TP2, f"{T}seq_len=33"], 2, "training.seq_len"),
        ([TP2, "--validation.enable", "--validation.seq_len=33"], 2, "validation.seq_len"),
        ([CP2, f"{T}seq_len=66"], 2, "experimental.context_parallel_degree"),
        ([PP2, "--model.flavor=3.2-1B"], 2, "experimental.pipeline_parallel_degree"),
        ([f"{E}pipeline_parallel_degree=16", f"{T}batch_size=16"], 16, "experimental.pipeline_parallel_degree"),
        ([PP2, f"{E}pipeline_parallel_split_points=layers.9"], 2, "experimental.pipeline_parallel_split_points"),
        (
            [PP2, f"{E}pipeline_parallel_split_points=layers.1,layers.2"],
            2,
            "experimental.pipeline_parallel_split_points",
        ),
        ([PP2, f"{T}batch_size=3"], 2, MICRO),
    ],
)
def test_what_cannot_be_divided_names_its_key(flags: list[str], ranks: int, key: str) -> None:
    problem = refusal(flags, ranks)
    assert (problem.code, problem.key) == ("divide", key)


@pytest.mark.parametrize(
    ("flags", "code", "key"),
    [
        ([f"{E}pipeline_parallel_schedule=1F2B"], "unknown-value", "experimental.pipeline_parallel_schedule"),
        ([PP2, f"--{MICRO}=1"], "batch", MICRO),
        ([PP2, f"{T}gradient_sync=every"], "conflict", "training.gradient_sync"),
        ([*ZERO_BUBBLE, f"{T}compile"], "conflict", "experimental.pipeline_parallel_schedule"),
        ([*ZERO_BUBBLE, ON, *SMALL], "conflict", "experimental.pipeline_parallel_schedule"),
        ([*ZERO_BUBBLE, f"{T}reshard_after_forward=always"], "conflict", "experimental.pipeline_parallel_schedule"),
        (
            [*ZERO_BUBBLE, "--activation_checkpoint.selective_ac_option=op"],
            "conflict",
            "experimental.pipeline_parallel_schedule",
        ),
    ],
)
def test_a_pipeline_that_cannot_run(flags: list[str], code: str, key: str) -> None:
    problem = refusal(flags, 2 if PP2 in flags else 1)
    assert (problem.code, problem.key) == (code, key) and problem.hint


def test_a_block_is_recomputed_of_each_n_only_if_there_are_n() -> None:
    problem = refusal(["--activation_checkpoint.selective_ac_option=9"])
    assert problem.key == "activation_checkpoint.selective_ac_option" and "has 8" in problem.message


@pytest.mark.parametrize(
    ("flags", "ranks", "code", "key", "words"),
    [
        ([f"{F8}filter_fqns=wq,wz"], 1, "unknown-value", "filter_fqns", '"wz"'),
        ([f'{F8}filter_fqns=[""]'], 1, "unknown-value", "filter_fqns", '""'),
        ([f"{F8}filter_fqns=attention,feed_forward"], 1, "model", "enable_float8_linear", "filter_fqns: attention"),
        ([f"{F8}min_features=65"], 1, "model", "enable_float8_linear", "min_features = 65"),
        ([f"{F8}filter_fqns=auto_filter_small_kn"], 1, "model", "enable_float8_linear", "tensorwise"),
        ([f"{T}seq_len=20"], 1, "divide", "enable_float8_linear", "2 sequences x 20 tokens = 40"),
        (
            [f"{T}seq_len=48", f"{T}batch_size=1", CP2],
            2,
            "divide",
            "enable_float8_linear",
            "1 sequence x 24 tokens on each of 2",
        ),
        ([GATHER], 48, "divide", "enable_fsdp_float8_all_gather", "the 48 ranks"),
    ],
)
def test_products_that_float8_cannot_take(flags: list[str], ranks: int, code: str, key: str, words: str) -> None:
    problem = refusal([ON, *SMALL, *flags], ranks)
    assert (problem.code, problem.key) == (code, f"float8.{key}") and words in problem.message and problem.hint
    check_config([*SMALL, *(flag for flag in flags if not flag.startswith(F8))], ranks)


def test_hints_of_float8_hold() -> None:
    flags = [ON, *SMALL, f"{T}seq_len=20"]
    assert "training.batch_size = 4 or a multiple of it" in refusal(flags).hint
    for batch in (4, 8):
        check_config([*flags, f"{T}batch_size={batch}"], 1)
    hint = refusal([ON, f"{F8}filter_fqns=output,outptu"]).hint
    assert "nearest: output; " in hint and "wq" in hint
    assert "nearest: auto_filter_small_kn; " in refusal([ON, f"{F8}filter_fqns=auto_filter_small"]).hint
