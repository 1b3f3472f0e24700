"""`titanlite plan --search`, and the larger models that sharding and offload make room for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.processes import ROOT
from tests.support.run_of import run_from
from titanlite import exit_codes
from titanlite.cli.main import main
from titanlite.cli.plan import search as plan_search
from titanlite.cli.plan.search import LEAST_GAIN, MARGIN, SearchResult
from titanlite.cli.plan.search_text import overlay, search_text
from titanlite.config.keys import sections
from titanlite.plan.hardware import Cluster, find_gpu
from titanlite.plan.parts import GIB, needed_bytes
from titanlite.plan.plan import formula, make_plan
from titanlite.resolve.load import check_config
from titanlite.runs.text_tables import Style

CONFIGS = ROOT / "train_configs"
H100 = Cluster(find_gpu("h100-80g"), 4, 1, 200e9)
#: Quick to search, yet large enough that memory and recomputation matter.
BASE = f"""
[job]
extends = ["{CONFIGS / "llama3_2_1b.toml"}"]
[training]
batch_size = 1
global_batch_size = 32
seq_len = 8192
[model.overrides]
n_layers = 4
[activation_checkpoint]
mode = "full"
"""
FIXED = (
    "model.",
    "optimizer.",
    "lr_scheduler.",
    "training.dtype",
    "training.mixed",
    "training.seq_len",
    "float8.",
)
OFFLOAD = {"activation_checkpoint.offload", "training.enable_cpu_offload"}


def search(argv: list[str], cluster: Cluster) -> SearchResult:
    config, run = check_config(argv, cluster.gpus, training=False)
    return plan_search.search(config, run, cluster)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("search") / "base.toml"
    file.write_text(BASE)
    return str(file)


@pytest.fixture(scope="module")
def result(base: str) -> SearchResult:
    return search([f"--job.config_file={base}"], H100)


def test_the_best_settings_are_faster_and_fit_and_the_others_follow(result):
    best, *rest = result.ranked
    assert not result.config_is_best
    assert best.rate > 1.2 * result.base.rate
    assert all(other.rate <= best.rate * 1.006 for other in rest)
    for candidate in result.ranked:
        plan = make_plan(candidate.run, H100)
        assert plan.needed == candidate.needed <= H100.gpu.memory * (1 - MARGIN)
        assert plan.speed.tokens_per_second == candidate.rate


def test_a_search_keeps_batch_and_numerics_and_offloads_nothing_without_need(result):
    for candidate in result.ranked:
        assert candidate.run.batch.tokens_per_step == 32 * 8192
        assert not [key for key in candidate.changes if key.startswith(FIXED) or key in OFFLOAD]


def test_an_overlay_read_as_second_file_gives_the_settings_that_were_searched(
    result, base, tmp_path
):
    for candidate in result.ranked:
        (tmp_path / "overlay.toml").write_text(overlay(result, candidate))
        run = check_config(
            ["--job.config_file", base, str(tmp_path / "overlay.toml")], 4, training=False
        )[1]
        for name in [*sections(), "mesh", "batch", "pipeline", "schedule"]:
            assert name in ("job", "model") or getattr(run, name) == getattr(candidate.run, name)


def test_a_search_tells_what_each_choice_brings(result, base, tmp_path):
    """By plans of the proposed file with one key changed, as a user would make them."""
    (tmp_path / "best.toml").write_text(overlay(result, result.ranked[0]))
    lines = search_text(result, Style(False)).splitlines()
    given = {
        "mixed precision": "training.mixed_precision_param=float32",
        "recomputation": "activation_checkpoint.mode=full",
        "wrapping": "training.fsdp_units=root",
        "sharding": "training.data_parallel_type=ddp",
        "offload": "training.enable_cpu_offload=true",
    }
    for choice, flag in given.items():
        argv = ["--job.config_file", base, str(tmp_path / "best.toml"), f"--{flag}"]
        plan = make_plan(check_config(argv, 4, training=False)[1], H100)
        line = next(line for line in lines if line.startswith(f"# {choice}"))
        speed, gib = f"{plan.speed.tokens_per_second:,.0f}", f"{plan.needed / GIB:.1f}"
        assert f" {speed} " in line
        assert f" {gib}" in line
        assert ("does not fit" in line) == (not plan.fits)
    refused = result._replace(otherwise=dict.fromkeys(result.otherwise))
    assert search_text(refused, Style(False)).count("not valid here") == len(given)


def test_a_run_in_phases_is_ranked_by_its_largest_steps(base):
    """A first phase of small steps, which would favour other settings, decides nothing."""
    phases = "--data.phase=[{step=11, global_batch_size=32}]"
    found = search([f"--job.config_file={base}", "--training.global_batch_size=4", phases], H100)
    for candidate in (found.base, *found.ranked):
        assert candidate.speed == make_plan(candidate.run, H100).legs[1].speed


def test_settings_that_are_best_already_are_said_to_be(result, base, tmp_path):
    (tmp_path / "best.toml").write_text(search_text(result, Style(False)))
    again = search(["--job.config_file", base, str(tmp_path / "best.toml")], H100)
    assert again.config_is_best
    assert again.ranked[0].changes == {}
    said = f"the config is best as it is: nothing is faster by {LEAST_GAIN:.0%}"
    assert said in search_text(again, Style(False))


def test_a_search_keeps_offload_and_says_so_where_nothing_fits_without(base):
    argv = [f"--job.config_file={base}"]
    lean = run_from(base, 4, "--training.loss_chunks=8", "--activation_checkpoint.mode=full")
    half = replace(H100, gpu=replace(H100.gpu, memory=needed_bytes(formula(lean)) // 2))
    nothing = search(argv, half)
    assert not nothing.ranked
    assert "--training.enable_cpu_offload" in search_text(nothing, Style(False))
    with_offload = [*argv, "--training.enable_cpu_offload"]
    offloaded = search(with_offload, half)
    assert offloaded.ranked
    assert all(one.run.training.enable_cpu_offload for one in offloaded.ranked)
    # A host of 16 GiB has too little for that.
    assert not search(with_offload, replace(half, instance="g6.xlarge")).ranked


def test_the_command_prints_the_best_settings(base, capsys, result):
    argv = ["plan", base, "--gpus=4", "--gpu=h100-80g", "--search"]
    assert main(argv) == exit_codes.DONE
    assert capsys.readouterr().out == search_text(result, Style(False)) + "\n"
    assert main([*argv, "--json"]) == exit_codes.CONFIG
