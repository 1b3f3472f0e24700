"""`titanlite plan`, and `memory_estimation.enabled` of a run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import python
from titanlite import exit_codes, main
from titanlite.cli import main as cli
from titanlite.plan.text import print_plan
from titanlite.resolve.load import check_config

H100 = ["--gpus", "8", "--gpu", "h100-80g"]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `titanlite plan`; return its exit code, output and errors."""

    def run(*words: str) -> tuple[int, str, str]:
        code = cli.main(["plan", *words])
        return (code, *capsys.readouterr())

    return run


def test_the_exit_code_says_whether_it_fits(plan: Any) -> None:
    code, out, _ = plan("llama3_8b.toml", *H100, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["fits"]
    assert found["margin_gib"] > 0
    code, out, _ = plan("llama3_8b.toml", *H100, "--json", "--training.batch_size=4")
    assert code == exit_codes.OUT_OF_MEMORY
    assert json.loads(out)["margin_gib"] < 0
    code, out, _ = plan("llama3_8b.toml", *H100, "--training.batch_size=4")
    assert code == exit_codes.OUT_OF_MEMORY
    assert "does not fit" in out.splitlines()[0]


def test_the_report_names_parts_time_and_cost(plan: Any) -> None:
    _, out, _ = plan(
        "llama3_8b.toml",
        "--instance",
        "p5.48xlarge",
        "--nodes",
        "2",
        "--price",
        "98.32",
        "--tokens",
        "1B",
    )
    assert re.search(r"^activations +\d+\.\d\d +\d+\.\d%  █+$", out, re.MULTILINE)
    found = json.loads(
        plan("llama3_8b.toml", "--instance=p5.48xlarge", "--nodes=2", "--tokens=1B", "--json")[1]
    )
    assert found["steps"] == -(-(10**9) // found["tokens_per_step"]) == 1908
    cost = f"{2 * 98.32 * found['hours']:,.0f} ("
    assert f"1,908 steps, 1.0B tokens in {found['hours']:.1f} hours (" in out
    assert f", for {cost}" in out
    assert ") at 98.32 per machine and hour" in out
    assert found["cost"] is None


@pytest.mark.slow
def test_without_hardware_it_shows_the_fewest_gpus_of_each_kind(plan: Any) -> None:
    code, out, _ = plan("llama3_8b.toml", "--json")
    found = {entry["gpu"]: entry for entry in json.loads(out)}
    assert code == 0
    assert all(entry["fits"] for entry in found.values())
    assert "l4-24g" not in found
    for name, entry in found.items():
        half = str(entry["world_size"] // 2)
        assert (
            half == "0"
            or plan("llama3_8b.toml", "--gpus", half, "--gpu", name)[0] == exit_codes.OUT_OF_MEMORY
        )
    assert re.search(r"^l4-24g .* none ", plan("llama3_8b.toml")[1], re.MULTILINE)
    assert plan("llama3_8b.toml", "--gpu", "l4-24g")[0] == exit_codes.OUT_OF_MEMORY
    rows = plan("llama3_8b_level3_float8.toml", "--gpus", "8")[1]
    assert re.search(r"^a100-80g .* a100-80g has no float8$", rows, re.MULTILINE)


def test_the_section_launch_is_the_hardware(plan: Any) -> None:
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
        (["llama3_8.toml", *H100], "nearest in train_configs/: llama3_8b.toml"),
        (["llama3_8b.toml", *H100, "--rank", "8"], "expected one of 0 … 7"),
        (["llama3_8b.toml", "--rank", "0"], "is for one cluster"),
        (
            ["llama3_8b.toml", "--gpus", "12", "--training.global_batch_size=48"],
            "12 GPUs are no whole machines of 8",
        ),
        (["llama3_8b.toml", "--price", "3"], "give --gpu NAME"),
        (["llama3_8b.toml", *H100, "--search", "--tokens", "1B"], "is not for a search"),
        (["llama3_8b.toml", *H100, "--write", "x.toml"], "give --search"),
        (
            ["llama3_8b.toml", *H100, "--html", "/nonexistent/x.html"],
            "--html: cannot write /nonexistent/x.html",
        ),
        (["hf_debug.toml"], "`titanlite plan CONFIG --gpus 1 --gpu NAME --exact` traces a step"),
        (
            [
                "llama3_8b.toml",
                *H100,
                "--model.tokenizer_path=/nowhere",
                "--model.flavor=debugmodel",
            ],
            "/nowhere",
        ),
    ],
)
def test_errors_say_what_to_do(plan: Any, words: list[str], said: str) -> None:
    code, out, error = plan(*words)
    assert (code, out) == (exit_codes.CONFIG, "")
    assert said in error


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--tokens=many", "a number of tokens as 15T"),
        ("--price=nan", "a price"),
        ("--price=-1", "a price"),
    ],
)
def test_a_flag_that_is_no_number_is_refused(
    plan: Any, capsys: pytest.CaptureFixture[str], flag: str, said: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        plan("llama3_8b.toml", *H100, flag)
    assert f"expected {said}, got '{flag.partition('=')[2]}'" in capsys.readouterr().err


def test_the_page_draws_the_step_and_fetches_nothing(plan: Any, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    found = json.loads(plan("llama3_8b.toml", *H100, "--html", str(file), "--json")[1])
    page = file.read_text()
    assert not re.search(r"https?://|<link|src=", page)
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    sums = [sum(values) for _, values in data["moments"]]
    assert max(sums) == pytest.approx(found["peak_gib"], abs=0.01)
    assert f">peak {max(sums):.2f} GiB<" in page
    assert data["moments"][sums.index(max(sums))][0] == f"{found['phase']} {found['module']}"
    # The highest point of all areas is the peak, on the scale of the marked memory of the GPU.
    heights = [
        float(y)
        for points in re.findall(r'<polygon [^>]*points="([^"]+)"', page)
        for y in re.findall(r",(\S+)", points)
    ]
    limit = float(re.search(r'class="limit" d="M70 (\S+)H', page)[1])  # type: ignore[index]
    share = (found["usable_gib"] - found["overhead_gib"]) / found["peak_gib"]
    assert (max(heights) - limit) / (max(heights) - min(heights)) == pytest.approx(share, abs=0.01)
    bars = dict(re.findall(r'<tr><th>([a-z ]+)</th><td class="number">([\d.]+)<', page))
    assert float(bars["activations"]) == pytest.approx(found["parts"]["activations"], abs=0.006)
    assert float(bars["allocator overhead"]) == pytest.approx(found["overhead_gib"], abs=0.006)


def test_a_plan_needs_no_torch() -> None:
    words = ["plan", "llama3_8b.toml", *H100]
    code = (
        f"import sys; from titanlite.cli.main import main; main({words}); sys.exit('torch' in "
        "sys.modules)"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_memory_estimation_prints_the_plan_instead_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--memory_estimation.enable",
        f"--job.dump_folder={tmp_path / 'run'}",
        "--job.config_file=debug_model.toml",
    ]
    assert main.run(flags) == exit_codes.DONE
    assert capsys.readouterr().out.startswith(
        "llama3 debugmodel with n_layers = 6 on 1 x h100-80g fits, with 77"
    )
    assert not (tmp_path / "run").exists()


def test_ranks_beyond_the_gpus_of_a_machine_are_planned_for_several(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = check_config(["--job.config_file=llama3_8b.toml"], 16, training=False)[1]
    print_plan(run, gpus_per_node=16)
    assert "for each machine of 8 GPUs" in capsys.readouterr().out
