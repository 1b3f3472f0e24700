"""Three stages of checks: each reports all its problems at once, and the next runs only if there
are none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version

import pytest

from tests.support.pool import free_port
from tests.support.refusals import refusal, refusals
from tests.support.tiny import size
from titanlite import exit_codes, main
from titanlite.assembly.preflight import check_model
from titanlite.config.dataset_registry import BUNDLED_IDS
from titanlite.config.errors import ConfigError, Problem
from titanlite.config.load import load
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


def test_a_stage_reports_all_its_problems_and_hides_the_later_ones(tmp_path):
    file = tmp_path / "run.toml"

    def found(text, *flags):
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


def test_ranks_and_model_are_checked_together_and_divided_only_if_they_are_right():
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
    uneven = words("training.tensor_parallel_degree=3 training.global_batch_size=5")
    assert refusal(uneven, 3).code == "batch"
    odd = words("experimental.context_parallel_degree=2 training.seq_len=30 validation.enable")
    assert refusal(odd, 2).message.count("training.seq_len") == 1, "validation has the same length"


AC = "activation_checkpoint."
COMPILE = "training.compile"
TP = "training.tensor_parallel_degree"
CP = "experimental.context_parallel_degree"


def test_what_fits_is_accepted(tmp_path):
    check_config(words(f"{AC}mode=budget {COMPILE}"), 1, training=False)
    resolve(load(words(f"{CP}=2 validation.seq_len=34")), 4)[1]  # nothing is validated
    run = resolve(load(words(f"{CP}=2 training.reshard_after_forward=4 training.prefetch=1")), 4)[1]
    assert (run.mesh.weight_shards, run.notes) == (4, ()), "all ranks that share weights count"
    check_config(words(f"training.dataset=c4 training.dataset_path={tmp_path}"), 1)
    check_config(
        words("float8.filter_fqns=output profiling.profile_freq=100 optimizer.kahan=true"), 1
    )  # all off
    flags = words("model.tokenizer_path=/nope")
    refusal(flags)
    check_config(flags, 1, training=False)


@pytest.mark.skipif(version("torch") < "2.13", reason="an older torch always compiles halves")
def test_halves_of_blocks_are_asked_for_only_where_they_are_compiled(tmp_path):
    text = "from dataclasses import replace\nfrom titanlite.models import get_spec\n"
    text += "SPEC = replace(get_spec('llama3'), name='whole', sublayer_names=None)\n"
    (tmp_path / "whole.py").write_text(text)
    flags = f"model.name={tmp_path}/whole.py:SPEC {COMPILE} {TP}=2 training.seq_len=32 {AC}mode="
    check_config(words(f"{flags}none"), 2)
    check_config(words(f"{flags}selective {AC}selective_ac_option=op"), 2)
    for halves in ("full", f"none {AC}offload"):
        assert "sublayer_names" in refusal(words(f"{flags}{halves}"), 2).message


def test_all_missing_files_are_named(tmp_path):
    flags = words("model.tokenizer_path=/a training.dataset_path=/b validation.dataset_path=/c")
    assert keys(refusals(flags)) == {"model.tokenizer_path", "training.dataset_path"}
    assert len(refusals([*flags, "--validation.enable"])) == 3
    start = words(
        f"checkpoint.enable_checkpoint checkpoint.initial_load_path=/a job.dump_folder={tmp_path}"
    )
    problem = refusal(start)
    assert (problem.code, problem.key) == ("no-file", "checkpoint.initial_load_path")
    (tmp_path / "checkpoint" / "step-3").mkdir(parents=True)
    check_config(start, 1)  # the run has a checkpoint of its own


@pytest.mark.slow
def test_a_tokenizers_vocabulary_that_does_not_divide_ends_before_any_process_group(
    monkeypatch, capsys, tmp_path
):
    """2,304 entries; the model's other numbers are divisible by five."""
    monkeypatch.setenv("WORLD_SIZE", "5")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    # There are no other ranks to wait for.
    monkeypatch.setattr("titanlite.dist.rendezvous._REPORT_SECONDS", 0.0)
    flags = [*size(320, 1, 10, 40), "--model.overrides.ffn_dim=320"]
    code = main.run([f"--{TP}=5", f"--job.dump_folder={tmp_path}", *flags])
    assert code == exit_codes.CONFIG
    error = capsys.readouterr().err
    assert f"command line: {TP}: is 5" in error
    assert "the vocabulary = 2,304" in error
    assert "model.vocab_size = 2305 leaves 1" in error


def test_a_model_with_a_vocabulary_of_its_own_needs_its_tokenizer(tmp_path):
    """Of a family's flavor, of transformers, and given by the config."""
    shape = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 50257}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    models = {
        "llama3 3.1-8B has a vocabulary of 128,256": "model.flavor=3.1-8B training.dataset=c4",
        "llama2 7B has a vocabulary of 32,000": "model.name=llama2 model.flavor=7B",
        f"hf {tmp_path} has a vocabulary of 50,257": f"model.name=hf model.hf_config={tmp_path}",
        "llama3 debugmodel has a vocabulary of 8,192": "model.vocab_size=8192",
    }
    for said, flags in models.items():
        flags = f"training.seq_len=16 {flags}"
        problem = refusal(words(flags))
        assert problem.key == "model.tokenizer_path"
        assert said in problem.message
        run = check_config(words(f"{flags} model.tokenizer_path=bundled"), 1)[1]
        assert 'tokenizer_path = "bundled"  # command line' in run.toml
        # The machines of a job may have what this one lacks; a plan needs no tokenizer.
        check_config(words(flags), 1, training=False)
    for flags in ("model.vocab_size=2304", "model.name=llama2"):
        assert 'tokenizer_path = "bundled"\n' in check_config(words(flags), 1)[1].toml


def test_the_bundled_tokenizers_have_the_ids_that_the_check_knows():
    sizes = {load_tokenizer("bundled", family).vocab_size for family in ("llama2", "llama3")}
    assert sizes == {BUNDLED_IDS}


# Keys of sharding


def check_units(flags: str) -> None:
    check_model(resolve(load(words(f"training.fsdp_units={flags}")), 4)[1], 512)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("Atention", "training.fsdp_units: no FSDP group can be made of Atention"),
        (
            f"Attention {COMPILE}",
            "training.fsdp_units: makes layers.0.attention an FSDP group, but training.compile "
            "makes one graph",
        ),
        (
            f"Linear {AC}selective_ac_option=op",
            f"makes layers.0.attention.wq an FSDP group, but {AC}selective_ac_option",
        ),
        (
            f"Attention {AC}offload",
            f"makes layers.0.attention an FSDP group, but {AC}offload would send its gathered "
            "weights",
        ),
    ],
)
def test_units_that_do_not_fit_the_model_are_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        check_units(flags)
    check_units("Attention")
    check_units(f"Block {COMPILE}")
