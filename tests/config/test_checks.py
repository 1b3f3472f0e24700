"""Three stages of checks: each reports all its problems at once, and the next runs only if there
are none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.pool import free_port
from tests.support.refusals import refusal, refusals
from tests.support.tiny import KEPT_TOKENS
from titanlite import exit_codes, main
from titanlite.config.dataset_names import BUNDLED_IDS
from titanlite.config.errors import Problem
from titanlite.config.load import load
from titanlite.config.rules import divisors
from titanlite.data.tokenizer import load_tokenizer
from titanlite.resolve.load import check_config, load_config, resolve

RUN = """\
[training]
batch_size = "four"
global_batch_size = 12
[checkpoint]
start = "resume"
[model]
flavor = "debugmodle"
"""


def keys(problems: Sequence[Problem]) -> set[str]:
    return {problem.key for problem in problems}


def words(text: str) -> list[str]:
    return [f"--{flag}" for flag in text.split()]


def test_a_stage_reports_all_its_problems_and_hides_the_later_ones(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"

    def found(text: str, *flags: str) -> list[str]:
        file.write_text(text)
        return [
            f"{p.where.rpartition(':')[2]} {p.key}"
            for p in refusals([f"--job.config_file={file}", *flags], 8)
        ]

    first = ["2 training.batch_size", "command line training.setps"]
    assert found(RUN, "--training.setps=3") == first
    second = RUN.replace('"four"', "4")
    assert found(second, "--model.tokenizer_path=/nope") == [
        "5 checkpoint.start",
        "command line model.tokenizer_path",
    ]
    third = second.replace('"resume"', '"fresh"')
    assert found(third) == ["3 training.global_batch_size", "7 model.flavor"]
    file.write_text(third.replace("12", "32").replace("modle", "model"))
    assert load_config(str(file), 8).batch.global_batch_size == 32


def test_ranks_and_model_are_checked_together_and_divided_only_if_they_are_right() -> None:
    wrong = words(
        "training.global_batch_size=12 training.reshard_after_forward=3 model.overrides.n_heads=7"
    )
    assert keys(refusals(wrong, 2)) == {
        "training.global_batch_size",
        "training.reshard_after_forward",
        "model",
    }
    wrong = words(
        "training.data_parallel_shard_degree=3 model.overrides.dimm=7 model.overrides.tied=1"
    )
    found = {"training.data_parallel_shard_degree", "model.overrides.dimm", "model.overrides.tied"}
    assert keys(refusals(wrong, 2)) == found
    assert (
        refusal(words("training.tensor_parallel_degree=3 training.global_batch_size=5"), 3).code
        == "batch"
    )
    odd = words("experimental.context_parallel_degree=2 training.seq_len=30 validation.enable")
    assert refusal(odd, 2).message.count("training.seq_len") == 1, "validation has the same length"
    shared = [
        problem
        for problem in refusals(words("training.tensor_parallel_degree=3"), 3)
        if "seq_len" in problem.key
    ]
    assert [problem.where for problem in shared] == ["command line"], "the length is a default"


ON = "float8.enable_float8_linear"
GATHER = "float8.enable_fsdp_float8_all_gather"
PRECOMPUTE = "float8.precompute_float8_dynamic_scale_for_fsdp"
AC = "activation_checkpoint."
RATE = "lr_scheduler."
COMPILE = "training.compile"
ASYNC = "experimental.enable_async_tensor_parallel"
DDP = "training.data_parallel_type=ddp"
TP = "training.tensor_parallel_degree"
CP = "experimental.context_parallel_degree"
PP = "experimental.pipeline_parallel_"
SPLIT = "experimental.pipeline_parallel_split_points"
PP2 = f"{PP}degree=2"
MICRO = f"{PP}microbatches"
ZBV = f"{PP2} {PP}schedule=ZBVZeroBubble"
#: One source, and room for another.
SOURCE = 'data.source=[{path="."},'
SMALL = (
    f"{ON} model.overrides.dim=64 model.overrides.n_heads=4 training.seq_len=32 "
    "training.batch_size=2"
)
HELD_OUT = "validation.sources="
#: Code, key, flags, words of the message or the remedy; and the ranks, 1 unless said otherwise.
REFUSED: list[tuple[str, str, str, str] | tuple[str, str, str, str, int]] = [
    # A key that needs another
    ("needs", "checkpoint.start", "checkpoint.start=from", "initial_load_path"),
    ("needs", "checkpoint.start", "checkpoint.start=resume", "enable_checkpoint = true"),
    (
        "needs",
        "checkpoint.initial_load_path",
        "checkpoint.initial_load_path=.",
        "enable_checkpoint = true",
    ),
    (
        "needs",
        "checkpoint.create_seed_checkpoint",
        "checkpoint.create_seed_checkpoint",
        "enable_checkpoint = true",
    ),
    (
        "needs",
        "checkpoint.keep_best",
        "checkpoint.enable_checkpoint checkpoint.keep_best=2",
        "validation.enable",
    ),
    ("needs", "guard.policy", "guard.policy=rollback", "checkpoint.enable_checkpoint = true"),
    ("needs", f"{RATE}decay_type", f"{RATE}decay_type=plateau", "lr_scheduler.plateau_ratio"),
    ("needs", f"{AC}mode", f"{AC}mode=budget", "training.compile = true"),
    (
        "needs",
        f"{AC}mode",
        f"{AC}mode=budget {COMPILE} compile.components=loss",
        "compile.components",
    ),
    ("needs", ASYNC, f"{TP}=2 {ASYNC}", "training.compile", 2),
    (
        "needs",
        ASYNC,
        f"{TP}=2 {ASYNC} {COMPILE} compile.backend=aot_eager",
        'compile.backend = "inductor"',
        2,
    ),
    ("needs", PRECOMPUTE, f"{ON} {PRECOMPUTE}", f"{GATHER} = true"),
    # Keys that contradict each other
    ("conflict", "training.prefetch", "training.prefetch=1 training.fsdp_units=root", "fsdp_units"),
    ("conflict", f"{RATE}min_lr", f"{RATE}min_lr=0.5", "optimizer.lr"),
    (
        "conflict",
        f"{RATE}decay_ratio",
        f"{RATE}decay_type=constant {RATE}decay_ratio=0.5",
        "decay_type",
    ),
    (
        "conflict",
        f"{RATE}min_lr_factor",
        f"{RATE}decay_type=constant {RATE}min_lr_factor=0.1",
        "decay_type",
    ),
    ("conflict", f"{RATE}decay_steps", f"{RATE}style=fsdp {RATE}decay_steps=5", "style"),
    (
        "conflict",
        "model.vocab_size",
        "model.vocab_size=9 model.overrides.vocab_size=8",
        "overrides.vocab_size = 8",
    ),
    (
        "conflict",
        "model.norm_type",
        "model.norm_type=rmsnorm model.overrides.norm_type=fused_rmsnorm",
        "overrides",
    ),
    (
        "conflict",
        "model.rope_scaling",
        "model.rope_scaling=8 model.overrides.rope_scaling=8",
        "overrides",
    ),
    (
        "conflict",
        "checkpoint.load_step",
        "checkpoint.start=fresh checkpoint.load_step=5",
        "checkpoint.start",
    ),
    ("conflict", "guard.max_skips", "guard.policy=skip guard.max_skips=100", "guard.window = 100"),
    (
        "conflict",
        "profiling.profile_freq",
        "profiling.enable_profiling profiling.profiler_active=9",
        "warmup 3",
    ),
    (
        "conflict",
        f"{AC}offload",
        f"{AC}offload {AC}selective_ac_option=op",
        'selective_ac_option = "op"',
    ),
    ("conflict", GATHER, f"{ON} float8.recipe_name=rowwise {GATHER}", 'recipe_name = "rowwise"'),
    (
        "conflict",
        GATHER,
        f"{ON} {GATHER} training.reshard_after_forward=2",
        "reshard_after_forward = 2",
        2,
    ),
    (
        "conflict",
        PRECOMPUTE,
        f"{ON} {GATHER} {PRECOMPUTE} training.enable_cpu_offload",
        "enable_cpu_offload",
    ),
    (
        "conflict",
        "float8.recipe_name",
        f"{ON} float8.recipe_name=rowwise {TP}=2",
        "tensor_parallel_degree = 2",
        2,
    ),
    (
        "conflict",
        "float8.filter_fqns",
        f"{ON} float8.recipe_name=rowwise_with_gw_hp float8.filter_fqns=auto_filter_small_kn",
        "float8.recipe_name",
    ),
    (
        "conflict",
        "validation.dataset",
        f"validation.dataset=c4_test {HELD_OUT}[{{name='c4_test'}}]",
        "one of the sources",
    ),
    (
        "conflict",
        "validation.dataset_path",
        f"validation.dataset_path=. {HELD_OUT}[{{name='c4_test'}}]",
        "one of the sources",
    ),
    ("missing", "validation.sources[0].name", f"{HELD_OUT}[{{path='.'}}]", "losses"),
    (
        "conflict",
        "validation.sources[1].name",
        f"{HELD_OUT}[{{name='a',path='.'}},{{name='a',path='/'}}]",
        "two",
    ),
    (
        "conflict",
        "validation.sources[0].weight",
        f"{HELD_OUT}[{{name='c4_test',weight=2}}]",
        "training text",
    ),
    (
        "conflict",
        "validation.sources[0].epochs",
        f"{HELD_OUT}[{{name='c4_test',epochs=1}}]",
        "training text",
    ),
    ("unknown-value", "validation.sources[0].name", f"{HELD_OUT}[{{name='c4_tst'}}]", "c4_test"),
    ("unknown-value", "validation.sources[0].name", f"{HELD_OUT}[{{name='a.b:c'}}]", "dotted path"),
    (
        "no-file",
        "validation.sources[0].path",
        f"validation.enable {HELD_OUT}[{{name='a',path='/no'}}]",
        "/no",
    ),
    ("out-of-range", "data.skip_steps", "data.skip_steps=3,9-3", "ends before it begins"),
    (
        "unknown-value",
        "optimizer.groups[1].pattern",
        'optimizer.groups=[{pattern="norm"},{pattern="("}]',
        "regular expression",
    ),
    # Degrees and ranks
    (
        "ranks",
        "training.data_parallel_shard_degree",
        "training.data_parallel_shard_degree=4",
        "4 = 4, which is not",
        2,
    ),
    ("ranks", TP, f"{TP}=4", "tensor_parallel 4 = 4, which does not divide the world size 6", 6),
    (
        "ranks",
        "training.data_parallel_replicate_degree",
        f"{DDP} training.data_parallel_replicate_degree=2",
        "= 2",
        4,
    ),
    (
        "ranks",
        "checkpoint.create_seed_checkpoint",
        "checkpoint.create_seed_checkpoint checkpoint.enable_checkpoint",
        "one",
        2,
    ),
    # Batches
    ("batch", MICRO, f"{PP2} {MICRO}=1", "each of the 2", 2),
    (
        "batch",
        MICRO,
        f"{PP2} {MICRO}=5 training.batch_size=5 {PP}schedule=Interleaved1F1B",
        "multiple of 2",
        2,
    ),
    ("divide", MICRO, f"{PP2} {MICRO}=3", "batch_size = 8", 2),
    ("divide", MICRO, f"{PP}degree=3", f"that of {PP}degree", 3),
    # The model and its sequences
    ("divide", TP, f"{TP}=3 training.seq_len=2049", "n_heads = 16 nor n_kv_heads = 16", 3),
    ("divide", TP, f"{TP}=16 model.flavor=8B", "these work: 1, 2, 4, 8", 16),
    ("divide", TP, f"{TP}=2 model.vocab_size=2305", "model.vocab_size = 2306 leaves 1", 2),
    ("divide", "training.seq_len", f"{TP}=2 training.seq_len=2047", "2046 or 2048", 2),
    (
        "divide",
        "validation.seq_len",
        f"{TP}=2 validation.enable validation.seq_len=33",
        "32 or 34",
        2,
    ),
    ("divide", "training.seq_len", f"{TP}=4 {CP}=2 training.seq_len=2052", "= 8 ranks", 8),
    ("divide", CP, f"{CP}=4 training.seq_len=2052", "2048 or 2056", 4),
    ("divide", f"{PP}degree", f"{PP2} model.flavor=3.2-1B", "share one weight", 2),
    ("divide", f"{PP}degree", f"{PP}degree=16 training.batch_size=16", "smaller degree", 16),
    ("divide", SPLIT, f"{PP2} {SPLIT}=layers.9", "'layers.9'", 2),
    (
        "divide",
        SPLIT,
        f"{PP}degree=4 {SPLIT}=layers.3,layers.2,norm",
        "layers.2 does not come after layers.3",
        4,
    ),
    ("divide", SPLIT, f"{PP2} {SPLIT}=layers.1,layers.2", "one stage per rank: 1 split points", 2),
    ("divide", SPLIT, f"{ZBV} {SPLIT}=layers.1", "two stages per rank: 3 split points", 2),
    ("unknown-value", f"{PP}schedule", f"{PP}schedule=1F2B", "there are GPipe, 1F1B"),
    (
        "conflict",
        "training.gradient_sync",
        f"{PP2} training.gradient_sync=every",
        "reduces gradients once",
        2,
    ),
    ("conflict", f"{PP}schedule", f"{ZBV} {COMPILE}", "run twice or fail", 2),
    ("conflict", f"{PP}schedule", f"{ZBV} {SMALL}", "float8.enable_float8_linear = false", 2),
    (
        "conflict",
        f"{PP}schedule",
        f"{ZBV} training.reshard_after_forward=always",
        "get no gradient",
        2,
    ),
    ("conflict", f"{PP}schedule", f"{ZBV} {AC}selective_ac_option=op", "run again only once", 2),
    ("model", f"{AC}selective_ac_option", f"{AC}selective_ac_option=9", "has 8"),
    # float8
    ("unknown-value", "float8.filter_fqns", f"{SMALL} float8.filter_fqns=wq,wz", '"wz"'),
    ("unknown-value", "float8.filter_fqns", f'{SMALL} float8.filter_fqns=[""]', "feed_forward"),
    ("model", ON, f"{SMALL} float8.filter_fqns=attention,feed_forward", "filter_fqns: attention"),
    ("model", ON, f"{SMALL} float8.min_features=65", "min_features = 65"),
    ("model", ON, f"{SMALL} float8.filter_fqns=auto_filter_small_kn", "tensorwise"),
    ("divide", ON, f"{SMALL} training.seq_len=20", "training.batch_size = 4 or a multiple of it"),
    (
        "divide",
        ON,
        f"{SMALL} training.seq_len=48 training.batch_size=1 {CP}=2",
        "1 sequence x 24 tokens on each rank",
        2,
    ),
    ("divide", GATHER, f"{SMALL} {GATHER}", "the 48 ranks", 48),
    # Features to come
    (
        "unsupported",
        "memory_estimation.disable_fake_mode",
        "memory_estimation.enabled memory_estimation.disable_fake_mode",
        "a plan needs no tensors",
    ),
    ("unsupported", "experimental.custom_import", 'experimental.custom_import="m"', ":SPEC"),
    # Text
    ("unknown-value", "training.dataset", "training.dataset=c4test", "c4_test"),
    ("unknown-value", "data.source[1].name", f'{SOURCE}{{name="nope"}}]', "nope"),
    ("unknown-value", "data.source[1].name", f'{SOURCE}{{name="m:f"}}]', "only training.dataset"),
    ("missing", "data.source[1].name", f"{SOURCE}{{weight=2}}]", "path"),
    ("conflict", "data.source[1].name", f'{SOURCE}{{path="."}}]', "two sources"),
    ("conflict", "training.epochs", f"{SOURCE}] training.epochs=2", "data.source"),
    ("conflict", "training.dataset_path", f"{SOURCE}] training.dataset_path=.", "data.source"),
    ("conflict", "data.phase[0]", f"{SOURCE}] data.phase=[{{lr_factor=1}}]", "step or tokens"),
    (
        "unknown-value",
        "data.phase[0]",
        f"{SOURCE}] data.phase=[{{step=2,weights={{b=1}}}}]",
        "data.source",
    ),
    (
        "conflict",
        "data.phase[0]",
        f'{SOURCE}] data.phase=[{{step=2,weights={{"."=0}}}}]',
        "no source",
    ),
]


@pytest.mark.parametrize("row", REFUSED, ids=[row[2] for row in REFUSED])
def test_it_is_refused(row: tuple[str, str, str, str, int]) -> None:
    code, key, flags, part, *ranks = row
    problem = refusal(words(flags), *ranks)
    assert (problem.code, problem.key) == (code, key)
    assert problem.where == "command line"
    assert part in f"{problem.message} {problem.remedy}", str(problem)


def test_what_fits_is_accepted(tmp_path: Path) -> None:
    check_config(words(f"{AC}mode=budget {COMPILE}"), 1, training=False)
    resolve(load(words(f"{CP}=2 validation.seq_len=34")), 4)[1]  # nothing is validated
    run = resolve(load(words(f"{CP}=2 training.reshard_after_forward=4 training.prefetch=1")), 4)[1]
    assert (run.mesh.weight_shards, run.warnings) == (4, ()), "all ranks that share weights count"
    check_config(words(f"training.dataset=c4 training.dataset_path={tmp_path}"), 1)
    check_config(
        words("float8.filter_fqns=output profiling.profile_freq=100 optimizer.kahan=true"), 1
    )  # all off
    flags = words("model.tokenizer_path=/nope")
    assert len(refusals(flags)) == 1
    check_config(flags, 1, training=False)


@pytest.mark.skipif(version("torch") < "2.13", reason="an older torch always compiles halves")
def test_halves_of_blocks_are_asked_for_only_where_they_are_compiled(tmp_path: Path) -> None:
    text = "from dataclasses import replace\nfrom titanlite.models import get_spec\n"
    text += "SPEC = replace(get_spec('llama3'), name='whole', sublayer_names=None)\n"
    (tmp_path / "whole.py").write_text(text)
    flags = words(
        f"model.name={tmp_path}/whole.py:SPEC {COMPILE} {TP}=2 training.seq_len=32 {AC}mode="
    )
    flags, mode = flags[:-1], flags[-1]
    check_config([*flags, f"{mode}none"], 2)
    check_config([*flags, f"{mode}selective", f"--{AC}selective_ac_option=op"], 2)
    for halves in ([f"{mode}full"], [f"{mode}none", f"--{AC}offload"]):
        assert "sublayer_names" in refusal([*flags, *halves], 2).message


def test_the_resolved_config_of_a_run_is_as_right_as_the_run(tmp_path: Path) -> None:
    """A resolved config sets each key, also one whose default recomputes none of a single block."""
    run = check_config(["--model.overrides.n_layers=1"], 1)[1]
    (tmp_path / "config.toml").write_text(run.toml)
    again = check_config([f"--job.config_file={tmp_path / 'config.toml'}"], 1)[1]
    assert (again.activation_checkpoint, again.model) == (run.activation_checkpoint, run.model)


@pytest.mark.parametrize(
    "model", ["name=lama3", "flavor=8b", "overrides.n_layers=1.5", "overrides.rope_theta=-1"]
)
@pytest.mark.parametrize("other", [PP2, f"{TP}=2", f"{CP}=2", ON])
def test_a_wrong_model_is_one_problem_whatever_divides_it(model: str, other: str) -> None:
    problem = refusal(words(f"model.{model} {other}"), 1 if other == ON else 2)
    key = "model" if "theta" in model else f"model.{model.partition('=')[0]}"
    assert (problem.code, problem.key, problem.where) == ("model", key, "command line")


def test_all_missing_files_are_named(tmp_path: Path) -> None:
    flags = words("model.tokenizer_path=/a training.dataset_path=/b validation.dataset_path=/c")
    assert keys(refusals(flags)) == {"model.tokenizer_path", "training.dataset_path"}
    assert len(refusals([*flags, "--validation.enable"])) == 3
    start = words(
        f"checkpoint.enable_checkpoint checkpoint.initial_load_path=/a job.dump_folder={tmp_path}"
    )
    assert (refusal(start).code, refusal(start).key) == ("no-file", "checkpoint.initial_load_path")
    (tmp_path / "checkpoint" / "step-3").mkdir(parents=True)
    check_config(start, 1)  # the run has a checkpoint of its own


@pytest.mark.parametrize(
    ("wanted", "flags", "ranks", "works"),
    [(3, "", 8, "2, 4, 8, "), (2, "", 1, ""), (2, DDP, 4, "")],
)
def test_partial_reshard_divides_the_ranks_that_share_a_copy(
    wanted: int, flags: str, ranks: int, works: str
) -> None:
    problem = refusal(words(f"training.reshard_after_forward={wanted} {flags}"), ranks)
    assert problem.key == "training.reshard_after_forward"
    assert problem.remedy == f'these work: {works}"default", "always" or "never"'


@pytest.mark.parametrize(
    ("micro", "wanted", "ranks", "works"), [(4, 30, 3, "24 or 36"), (8, 4, 1, "8"), (5, 7, 2, "10")]
)
def test_a_batch_that_cannot_be_split_names_numbers_that_work(
    micro: int, wanted: int, ranks: int, works: str
) -> None:
    problem = refusal(
        words(f"training.batch_size={micro} training.global_batch_size={wanted}"), ranks
    )
    assert problem.key == "training.global_batch_size"
    assert problem.remedy == f"these work: global_batch_size = {works}"
    for number in works.split(" or "):
        check_config(
            words(f"training.batch_size={micro} training.global_batch_size={number}"), ranks
        )


def test_divisors_of_a_slip_are_found_at_once() -> None:
    """A loop over all numbers up to it would take minutes."""
    slip = refusal(words("training.batch_size=3 training.global_batch_size=3000000021"), 2)
    assert slip.remedy.endswith("or one of 1, 1000000007 data-parallel ranks")
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]


@pytest.mark.slow
def test_a_tokenizers_vocabulary_that_does_not_divide_ends_before_any_process_group(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """2,304 entries; the model's other numbers are divisible by five."""
    rank = {
        "WORLD_SIZE": "5",
        "RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    for name, value in rank.items():
        monkeypatch.setenv(name, value)
    shape = [
        f"--model.overrides.{change}"
        for change in ("dim=320", "n_heads=10", "ffn_dim=320", "n_layers=1")
    ]
    # There are no other ranks to wait for.
    monkeypatch.setattr("titanlite.dist.rendezvous._REPORT_SECONDS", 0.0)
    words = [f"--{TP}=5", "--training.seq_len=40", f"--job.dump_folder={tmp_path}", KEPT_TOKENS]
    code = main.run([*words, *shape])
    assert code == exit_codes.CONFIG
    error = capsys.readouterr().err
    assert f"command line: {TP}: is 5" in error
    assert "the vocabulary = 2,304" in error
    assert "model.vocab_size = 2305 leaves 1" in error


def test_a_model_with_a_vocabulary_of_its_own_needs_its_tokenizer(tmp_path: Path) -> None:
    """Of a family's flavor, of transformers, and given by the config."""
    folder = tmp_path / "gpt2"
    folder.mkdir()
    shape = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 50257}
    (folder / "config.json").write_text(json.dumps(shape))
    models = {
        "llama3 3.1-8B has a vocabulary of 128,256": "model.flavor=3.1-8B training.dataset=c4",
        "llama2 7B has a vocabulary of 32,000": "model.name=llama2 model.flavor=7B",
        f"hf {folder} has a vocabulary of 50,257": f"model.name=hf model.hf_config={folder}",
        "llama3 debugmodel has a vocabulary of 8,192": "model.vocab_size=8192",
    }
    for said, flags in models.items():
        flags = f"training.seq_len=16 {flags}"
        problem = refusal(words(flags))
        assert problem.key == "model.tokenizer_path"
        assert said in problem.message
        assert said.partition(" ")[2] in problem.message
        run = check_config(words(f"{flags} model.tokenizer_path=bundled"), 1)[1]
        assert 'tokenizer_path = "bundled"  # command line' in run.toml
        # The machines of a job may have what this one lacks; a plan needs no tokenizer.
        check_config(words(flags), 1, training=False)
    for flags in ("model.vocab_size=2304", "model.name=llama2"):
        assert 'tokenizer_path = "bundled"\n' in check_config(words(flags), 1)[1].toml


def test_the_bundled_tokenizers_have_the_ids_that_the_check_knows() -> None:
    sizes = {load_tokenizer("bundled", family).vocab_size for family in ("llama2", "llama3")}
    assert sizes == {BUNDLED_IDS}


@pytest.mark.parametrize(
    "key",
    ["training.loss", "optimizer.name", "training.dataset", "validation.dataset", "job.callbacks"],
)
def test_a_dotted_path_without_its_file_or_package_is_refused(key: str) -> None:
    for path, reason in (
        ("./gone.py:loss", "there is no file"),
        ("nowhere_at_all.x:y", "No module named 'nowhere_at_all'"),
        ("here.py:", "names no object"),
    ):
        found = refusal([f"--{key}={path}"])
        assert (found.key, found.code) == (key, "unresolved")
        assert reason in found.message
