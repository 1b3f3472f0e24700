"""`titanlite plan`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from titanlite import exit_codes
from titanlite.cli import main as cli

H100 = ["--gpus", "8", "--gpu", "h100-80g"]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `titanlite plan`; return its exit code, output and errors."""

    def run(*words: str) -> tuple[int, str, str]:
        code = cli.main(["plan", *words])
        return (code, *capsys.readouterr())

    return run


def test_the_exit_code_says_whether_it_fits(plan):
    code, out, _ = plan("llama3_8b.toml", *H100, "--json")
    assert (code, json.loads(out)["fits"]) == (0, True)
    code, out, _ = plan("llama3_8b.toml", *H100, "--json", "--training.batch_size=4")
    assert code == exit_codes.OUT_OF_MEMORY
    assert json.loads(out)["margin_gib"] < 0
    code, out, _ = plan("llama3_8b.toml", *H100, "--training.batch_size=4")
    assert code == exit_codes.OUT_OF_MEMORY
    assert "does not fit" in out.splitlines()[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("llama3_2_1b.toml --instance g5.8xlarge --nodes 2", "--training.loss_chunks=8"),
        (
            "llama3_1_8b.toml --instance g6e.12xlarge",
            "--training.loss_chunks=8 --activation_checkpoint.mode=full",
        ),
        (
            "llama3_8b.toml --gpus 8 --gpu h100-80g --training.batch_size=4 "
            "--training.global_batch_size=-1",
            "--training.batch_size=1 --training.global_batch_size=32",
        ),
        (
            "llama3_1_8b.toml --instance g5.12xlarge",
            "--training.enable_cpu_offload=True --activation_checkpoint.mode=full",
        ),
    ],
)
def test_a_plan_that_does_not_fit_ends_with_the_cheapest_flags_that_do(plan, words, said):
    code, out, _ = plan(*words.split())
    assert code == exit_codes.OUT_OF_MEMORY
    flags, _, figures = out.splitlines()[-1].removeprefix("it fits with ").partition(": ")
    assert flags == said
    code, out, _ = plan(*words.split(), *flags.split(), "--json")
    found = json.loads(out)
    assert code == 0
    assert figures.startswith(f"{found['needed_gib']:.1f} of ")
    # None is needless.
    for flag in flags.split():
        if "global_batch" not in flag:
            fewer = [one for one in flags.split() if one != flag]
            assert plan(*words.split(), *fewer)[0] == exit_codes.OUT_OF_MEMORY


def test_where_no_setting_is_enough_a_plan_asks_for_gpus(plan):
    code, out, _ = plan("llama3_1_405b.toml", "--instance", "g5.xlarge")
    assert code == exit_codes.OUT_OF_MEMORY
    assert out.splitlines()[-1] == (
        "no setting of this mesh makes it fit: try --search, more GPUs or more memory"
    )


def test_the_section_launch_is_the_hardware(plan):
    flags = ["--launch.instance_type=p5.48xlarge", "--launch.nodes=2"]
    assert json.loads(plan("llama3_8b.toml", *flags, "--json")[1])["world_size"] == 16


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["llama3_8b.toml", "--gpus", "8", "--gpu", "h100-80"], "h100-80g"),
        (["llama3_8b.toml", "--instance", "p5.48"], "nearest: p5.48xlarge"),
        (
            ["llama3_8b.toml", "--gpus", "24", "--gpu", "h100-80g"],
            "not a multiple of batch_size 1 * 24",
        ),
        (["llama3_8.toml", *H100], "nearest: llama3_8b.toml"),
        (["llama3_8b.toml"], "no GPU is named"),
        (["llama3_8b.toml", *H100, "--search", "--exact"], "is not for a search"),
        (["hf_debug.toml", *H100], "`titanlite plan CONFIG --gpus 8 --gpu NAME --exact` traces"),
        (["debug_model.toml", *H100, "--model.tokenizer_path=/nowhere"], "/nowhere"),
    ],
)
def test_errors_say_what_to_do(plan, words, said):
    code, out, error = plan(*words)
    assert (code, out) == (exit_codes.CONFIG, "")
    assert said in error
