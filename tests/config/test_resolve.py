"""Derived numbers: degrees, batch arithmetic, the length of the run, the schedule, folders."""

from __future__ import annotations

import pytest
import torch

from titanlite.config.errors import ConfigError
from titanlite.config.load import load
from titanlite.config.not_implemented import not_implemented, notes
from titanlite.config.not_implemented import refused as refused_unbuilt
from titanlite.config.plans import Plans
from titanlite.config.resolve import resolve, smallest_world
from titanlite.models import SHAPES
from titanlite.optim.optimizer import build_optimizer


def plans(*flags: str, world_size: int = 1, sequences: int | None = None) -> Plans:
    return resolve(load(flags), world_size=world_size, shapes=SHAPES, total_sequences=sequences)


def refused(*flags: str, world_size: int = 1):
    with pytest.raises(ConfigError) as caught:
        plans(*flags, world_size=world_size)
    (problem,) = caught.value.problems
    return problem


def test_ranks_left_over_shard_the_weights():
    assert plans(world_size=6).mesh.dp_shard == 6
    mesh = plans("--training.data_parallel_replicate_degree=2", world_size=6).mesh
    assert (mesh.dp_replicate, mesh.dp_shard, mesh.dp_degree) == (2, 3, 6)
    with_tp = plans("--training.tensor_parallel_degree=2", "--experimental.context_parallel_degree=2", world_size=8)
    assert with_tp.mesh.dp_shard == 2
    assert (
        "data_parallel_shard = 2: the ranks left over, 8 ranks / tensor_parallel 2 / context_parallel 2"
        in with_tp.notes
    )


@pytest.mark.parametrize(
    ("flags", "world_size", "equation"),
    [
        (["--training.data_parallel_shard_degree=4"], 2, "data_parallel_shard 4 = 4, which is not the world size 2"),
        (["--training.tensor_parallel_degree=4"], 6, "tensor_parallel 4 = 4, which does not divide the world size 6"),
        (
            ["--training.data_parallel_shard_degree=2", "--training.data_parallel_replicate_degree=3"],
            8,
            "data_parallel_replicate 3 * data_parallel_shard 2 = 6, which is not the world size 8",
        ),
        (["--training.data_parallel_shard_degree=1"], 2, "all degrees 1 = 1, which is not the world size 2"),
    ],
)
def test_degrees_that_do_not_fit_are_one_error_with_the_equation(flags, world_size, equation):
    problem = refused(*flags, world_size=world_size)
    assert equation in problem.message
    assert problem.where == "command line"
    assert problem.hint


def test_ddp_keeps_a_whole_copy_on_every_data_parallel_rank():
    resolved = plans("--training.data_parallel_type=ddp", world_size=4)
    assert (resolved.mesh.dp_replicate, resolved.mesh.dp_shard, resolved.mesh.dp_degree) == (4, 1, 4)
    assert resolved.batch.global_batch_size == 32
    note = 'data_parallel_replicate = 4: the ranks left over, 4 ranks (data_parallel_type = "ddp")'
    assert note in resolved.notes
    flags = ["--training.data_parallel_type=ddp", "--training.data_parallel_shard_degree=1"]
    mesh = plans(*flags, "--training.tensor_parallel_degree=2", world_size=4).mesh
    assert (mesh.dp_replicate, mesh.dp_shard) == (2, 1)
    mesh = plans(*flags, "--training.data_parallel_replicate_degree=4", world_size=4).mesh
    assert (mesh.dp_replicate, mesh.dp_shard) == (4, 1)
    problem = refused(*flags, "--training.data_parallel_replicate_degree=2", world_size=4)
    assert problem.key == "training.data_parallel_replicate_degree"
    assert "data_parallel_replicate 2 = 2, which is not the world size 4" in problem.message
    assert problem.hint.startswith("run on 2 ranks, or set training.data_parallel_replicate_degree = 1 ")


def test_replication_is_built():
    assert refused_unbuilt(load(["--training.data_parallel_type=ddp"])) == []
    assert refused_unbuilt(load(["--training.data_parallel_replicate_degree=2"])) == []


def test_ddp_with_a_shard_degree_is_a_contradiction_that_names_both():
    flags = ["--training.data_parallel_type=ddp", "--training.data_parallel_shard_degree=2"]
    problem = refused(*flags, world_size=2)
    assert (problem.key, problem.message) == (
        "training.data_parallel_shard_degree",
        'is 2, but training.data_parallel_type = "ddp" shards nothing',
    )


@pytest.mark.parametrize(
    ("wanted", "flags", "world_size", "works"),
    [
        (3, [], 8, "2, 4 or 8, or "),
        (8, [], 4, "2 or 4, or "),
        (4, ["--training.data_parallel_replicate_degree=4"], 8, "2, or "),
        (2, [], 1, ""),
        (2, ["--training.data_parallel_type=ddp"], 4, ""),
    ],
)
def test_partial_reshard_must_divide_the_ranks_that_share_a_copy(wanted, flags, world_size, works):
    problem = refused(f"--training.reshard_after_forward={wanted}", *flags, world_size=world_size)
    assert problem.key == "training.reshard_after_forward"
    assert f"is {wanted}, which does not divide the " in problem.message
    assert problem.hint == f'these work: {works}"default", "always" or "never"'


def test_partial_reshard_over_a_divisor_of_the_shard_degree_is_planned():
    for wanted in (2, 4, 8):
        flag = f"--training.reshard_after_forward={wanted}"
        assert plans(flag, world_size=8).shard.reshard_after_forward == wanted
        assert smallest_world(load([flag])) == wanted
        plans(flag, world_size=wanted)


def test_smallest_world_that_fits():
    assert smallest_world(load([])) == 1
    flags = ["--training.tensor_parallel_degree=2", "--experimental.pipeline_parallel_degree=3"]
    assert smallest_world(load(flags)) == 6
    assert smallest_world(load([*flags, "--training.data_parallel_shard_degree=4"])) == 24


def test_accumulation_follows_from_the_global_batch():
    batch = plans(
        "--training.batch_size=4", "--training.global_batch_size=24", "--training.seq_len=10", world_size=3
    ).batch
    assert (batch.micro_batch_size, batch.accumulation, batch.global_batch_size) == (4, 2, 24)
    assert batch.tokens_per_step == 240
    assert plans("--training.batch_size=4", world_size=3).batch.global_batch_size == 12


@pytest.mark.parametrize(
    ("micro", "wanted", "ranks", "works"),
    [
        (4, 30, 3, ["global_batch_size = 24 or 36", "batch_size = 1, 2, 5 or 10 on 3 ranks"]),
        (4, 28, 3, ["global_batch_size = 24 or 36", "1 or 7 data-parallel ranks with batch_size 4"]),
        (8, 4, 1, ["global_batch_size = 8", "batch_size = 1, 2 or 4 on 1 rank"]),
        (5, 7, 2, ["global_batch_size = 10"]),
    ],
)
def test_batch_that_cannot_be_split_names_numbers_that_work(micro, wanted, ranks, works):
    problem = refused(f"--training.batch_size={micro}", f"--training.global_batch_size={wanted}", world_size=ranks)
    assert problem.key == "training.global_batch_size"
    assert f"is {wanted}, not a multiple of batch_size {micro} * {ranks} data-parallel rank" in problem.message
    assert problem.hint == "these work: " + "; ".join(works)


def test_advice_on_batches_is_true():
    for flags in (
        ["--training.batch_size=10", "--training.global_batch_size=30"],
        ["--training.batch_size=4", "--training.global_batch_size=36"],
    ):
        plans(*flags, world_size=3)
    plans("--training.batch_size=4", "--training.global_batch_size=28", world_size=7)


def test_tokens_become_steps_rounded_up():
    flags = ["--training.seq_len=10", "--training.batch_size=5"]
    assert plans(*flags, "--training.tokens=100", world_size=2).train.steps == 1
    assert plans(*flags, "--training.tokens=101", world_size=2).train.steps == 2


def test_epochs_become_steps_once_the_text_is_counted():
    flags = ["--training.epochs=3", "--training.batch_size=4"]
    before = plans(*flags)
    assert (before.train.steps, before.schedule.total_steps, before.data.epochs) == (None, None, 3)
    after = plans(*flags, sequences=30)
    assert after.train.steps == after.schedule.total_steps == 8
    assert any("30 sequences in 3 epochs / 4 sequences per step" in note for note in after.notes)


def test_steps_that_are_left_out_shorten_a_run_in_epochs():
    flags = ["--training.epochs=3", "--training.batch_size=4", "--data.skip_steps=7-20,2,2-3"]
    resolved = plans(*flags, sequences=30)
    assert resolved.data.skip_steps == ((2, 2), (2, 3), (7, 20))
    assert resolved.train.steps == 4  # sequences 0-3, 12-15, 16-19, 20-23
    assert any("30 sequences in 3 epochs less 14 left out (data.skip_steps) / 4" in note for note in resolved.notes)
    assert plans("--training.steps=9", "--data.skip_steps=2").train.steps == 9


def test_schedule_is_as_long_as_the_run_unless_it_has_its_own_length():
    assert plans("--training.steps=50", "--training.warmup_steps=5").schedule.total_steps == 50
    short = plans("--training.steps=50", "--lr_scheduler.total_steps=5000")
    assert (short.train.steps, short.schedule.total_steps, short.schedule.warmup_steps) == (50, 5000, 200)
    assert short.warnings == ()


def test_warm_up_longer_than_the_run_is_shortened_with_a_warning():
    resolved = plans("--training.steps=50", "--training.warmup_steps=200")
    assert resolved.schedule.warmup_steps == 50
    assert resolved.warnings == ("the warm-up of 200 steps is shortened to 50: the schedule is no longer",)
    assert plans("--training.steps=200").warnings == ()


def test_decay_longer_than_what_follows_the_warm_up_is_shortened_with_a_warning():
    flags = ["--training.steps=100", "--training.warmup_steps=20"]
    for decay in ("--lr_scheduler.decay_steps=90", "--lr_scheduler.decay_ratio=0.9"):
        resolved = plans(*flags, decay)
        assert resolved.schedule.decay_steps == 80
        assert len(resolved.warnings) == 1 and "decay of 90 steps is shortened to 80" in resolved.warnings[0]
    assert plans(*flags, "--lr_scheduler.decay_ratio=0.3").schedule.decay_steps == 30


def test_plateau_is_a_share_of_the_schedule_and_then_decays():
    flags = ["--training.steps=100", "--training.warmup_steps=20", "--lr_scheduler.decay_type=plateau"]
    schedule = plans(*flags, "--lr_scheduler.plateau_ratio=0.5").schedule
    assert (schedule.decay_type, schedule.plateau_steps, schedule.decay_steps) == ("linear", 50, None)
    long = plans(*flags, "--lr_scheduler.plateau_ratio=0.9")
    assert long.schedule.plateau_steps == 80
    assert "plateau" in long.warnings[0]


def test_aws_schedule():
    resolved = plans(
        "--training.steps=5000",
        "--optimizer.lr=1e-4",
        "--lr_scheduler.style=fsdp",
        "--lr_scheduler.warmup_ratio=0.0032",
        "--lr_scheduler.decay_type=cosine",
        "--lr_scheduler.min_lr=1e-5",
    )
    from titanlite.optim.schedule import learning_rate

    # Printed by the AWS FSDP samples, as in their logs: steps 1 to 6, 35 and 2500.
    printed = {1: 6e-6, 2: 13e-6, 3: 19e-6, 4: 25e-6, 5: 31e-6, 6: 38e-6, 35: 100e-6, 2500: 51e-6}
    assert resolved.schedule.warmup_steps == 16
    for step, rate in printed.items():
        assert abs(learning_rate(resolved.schedule, 1e-4, step) - rate) <= 0.5001e-6, step


def test_folders_are_below_the_dump_folder_unless_absolute():
    flags = ["--job.dump_folder=out", "--metrics.enable_tensorboard", "--job.save_config_file=c.toml"]
    resolved = plans(*flags)
    assert resolved.checkpoint.folder == "out/checkpoint"
    assert (resolved.observe.tensorboard_folder, resolved.observe.save_config_file) == ("out/tb", "out/c.toml")
    resolved = plans(*flags, "--checkpoint.folder=/a/b", "--metrics.save_tb_folder=/c")
    assert (resolved.checkpoint.folder, resolved.observe.tensorboard_folder) == ("/a/b", "/c")
    assert plans().observe.tensorboard_folder is None


def test_peak_is_given_in_teraflops():
    assert plans("--metrics.peak_tflops=989").observe.peak_flops == 989e12
    assert plans().observe.peak_flops is None


def test_model_names_are_checked_against_the_shapes():
    problem = refused("--model.name=lama3")
    assert (problem.key, problem.message) == ("model.name", 'no model "lama3"')
    assert "nearest: llama3" in problem.hint and "there are llama2, llama3" in problem.hint
    problem = refused("--model.flavor=8b")
    assert (problem.key, problem.message) == ("model.flavor", 'llama3 has no flavor "8b"')
    assert problem.hint.startswith("nearest: 8B")


@pytest.mark.parametrize(
    ("flag", "message", "hint"),
    [
        ("n_layer=2", 'llama3 has no argument "n_layer"', "nearest: n_layers"),
        ("n_layers=2.0", "expected an integer, got 2.0", ""),
        ("n_layers=true", "expected an integer, got true", ""),
        ("tied=1", "expected true or false, got 1", ""),
        ("rope_theta=big", 'expected a number, got "big"', ""),
        ("n_kv_heads=1.5", "expected an integer, got 1.5", ""),
    ],
)
def test_overrides_are_checked_against_the_models_arguments(flag, message, hint):
    problem = refused(f"--model.overrides.{flag}")
    assert problem.key == f"model.overrides.{flag.partition('=')[0]}"
    assert problem.where == "command line"
    assert message in problem.message
    assert problem.hint.startswith(hint)


def test_overrides_reach_the_plan():
    model = plans("--model.overrides.n_layers=2", "--model.overrides.rope_theta=10000", "--model.rope_scaling=8").model
    assert model.overrides == (("n_layers", 2), ("rope_scaling", 8.0), ("rope_theta", 10000))


def test_llama2_goes_with_the_bundled_sentencepiece_model():
    assert plans("--model.name=llama3").tokenizer.bundled == "tiktoken"
    llama2 = plans("--model.name=llama2")
    assert llama2.tokenizer.bundled == "sentencepiece" and llama2.tokenizer.path is None
    assert "tokenizer: the bundled sentencepiece model, the kind that llama2 goes with" in llama2.notes
    own = plans("--model.name=llama2", "--model.tokenizer_path=/a/tokenizer.json")
    assert own.tokenizer.path == "/a/tokenizer.json" and not any("tokenizer" in note for note in own.notes)


def test_every_shape_resolves():
    for family, flavors in SHAPES.items():
        for flavor in flavors:
            assert plans(f"--model.name={family}", f"--model.flavor={flavor}").model.flavor == flavor


def test_unbuilt_feature_is_noted_and_only_training_refuses_it():
    autograd, mask = "experimental.enable_compiled_autograd", "data.mask_documents"
    config = load([f"--{autograd}", f"--{mask}"])
    resolve(config, world_size=2, shapes=SHAPES)
    assert not_implemented(config) == [mask, autograd]
    assert f"command line: {autograd} = true is not built yet: compiled autograd" in notes(config)
    assert all("not built yet" in problem.message for problem in refused_unbuilt(config))
    assert [problem.key for problem in refused_unbuilt(config)] == [mask, autograd]
    assert refused_unbuilt(load([])) == []


def test_setting_of_a_feature_that_is_off_refuses_nothing():
    flags = ["--float8.filter_fqns=output", "--profiling.profile_freq=100", "--optimizer.kahan=true"]
    assert refused_unbuilt(load(flags)) == []
    problems = refused_unbuilt(load(["--optimizer.name=AnyPrecisionAdamW", "--optimizer.kahan=true"]))
    assert [problem.key for problem in problems] == ["optimizer.name", "optimizer.kahan"]


@pytest.mark.parametrize("name", ["Muon", "AnyPrecisionAdamW"])
def test_an_optimizer_that_is_not_built_keeps_its_name_and_is_refused(name):
    plan = plans(f"--optimizer.name={name}").optimizer
    assert plan.name == name
    with pytest.raises(ConfigError, match=f'optimizer.name: "{name}" is not built yet\n.*take AdamW or Adam'):
        build_optimizer([torch.nn.Parameter(torch.zeros(2))], plan, torch.device("cpu"))


def test_streamed_text_is_unbuilt_unless_a_path_is_given():
    (problem,) = refused_unbuilt(load(["--training.dataset=c4"]))
    assert "streamed text" in problem.message
    assert refused_unbuilt(load(["--training.dataset=c4", "--training.dataset_path=/data"])) == []
