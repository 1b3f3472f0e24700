"""Texts that the plan makes: comments of train_configs/ on hardware, examples of README.md,
docs/plan.md and docs/from-aws-fsdp.md.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.support.run_of import run_from
from titanlite.cli import main as cli
from titanlite.plan.hardware import cluster_of
from titanlite.plan.parts import GIB
from titanlite.plan.plan import make_plan

FOLDER = Path(__file__).parents[2] / "train_configs"
#: Page → examples in it.
PAGES = {
    FOLDER.parent / "docs" / "plan.md": 1,
    FOLDER.parent / "README.md": 1,
    FOLDER.parent / "docs" / "from-aws-fsdp.md": 1,
}
#: File → the hardware that it names. hf_debug.toml has no formulas.
HARDWARE = {
    **dict.fromkeys(
        (
            "llama3_8b",
            "llama3_1_8b",
            "mistral_7b",
            "mathstral_7b",
            "qwen3_8b",
            "olmo2_7b",
            "olmo3_7b",
            "gemma3_4b",
            "llama3_8b_level1_default",
            "llama3_8b_level2_compile",
            "llama3_8b_level3_float8",
            "llama3_8b_level4_float8_all_gather",
        ),
        [(8, "h100-80g")],
    ),
    "llama3_8b_h200": [(1, "h200-141g")],
    "llama2_7b": [(8, "a100-40g")],
    "llama2_13b": [(8, "a100-80g")],
    **dict.fromkeys(("llama2_70b", "llama3_70b", "llama3_1_70b"), [(32, "h100-80g")]),
    "llama3_1_405b": [(256, "h200-141g")],
    "llama3_2_1b": [(1, "l40s-48g")],
    "llama3_2_3b": [(8, "a100-40g"), (2, "a100-80g")],
    **dict.fromkeys(("mixtral_8x7b", "qwen3_30b_a3b"), [(16, "h100-80g")]),
    **dict.fromkeys(("deepseek_v3_16b", "gpt_oss_20b"), [(8, "h100-80g")]),
    **dict.fromkeys(("gpt_oss_120b", "llama4_17bx16e"), [(64, "h100-80g")]),
    **dict.fromkeys(("debug_model", "debug_deepseek_v3", "sft_debug"), [(2, "l4-24g")]),
    "llama3_1_8b_lora": [(1, "l4-24g")],
}


def comment(name: str) -> str:
    """Return the lines on hardware: the needs, and how full each GPU is. All of it fits."""
    needs = []
    lines = []
    for gpus, kind in HARDWARE[name]:
        run = run_from(FOLDER / f"{name}.toml", gpus)
        plan = make_plan(run, cluster_of(run, gpu=kind, gpus=gpus))
        assert plan.fits, f"{name} on {gpus} x {kind}: {plan.needed / GIB:.1f} GiB"
        needs.append(
            f"{gpus if gpus > 1 else 'one'} GPU{'s' * (gpus > 1)} of {kind.split('-')[-1][:-1]} GB"
        )
        size = f"{plan.needed / GIB:.1f} GiB of {plan.cluster.gpu.memory / GIB:.1f}"
        lines.append(f"# Fits {gpus} x {kind}: {size} per GPU, by `titanlite plan`.\n")
    return f"# Hardware: {', or '.join(needs)}.\n{''.join(lines)}"


def stated(text: str) -> str:
    """Return the lines of a file on hardware, up to the end of the paragraph."""
    found = re.search(r"^# Hardware: .*\n(# .*\n)*", text, re.MULTILINE)
    return found[0] if found else ""


@pytest.mark.slow_after(15)
@pytest.mark.parametrize("name", HARDWARE)
def test_a_file_says_how_much_of_its_gpus_it_takes(name):
    assert stated((FOLDER / f"{name}.toml").read_text()) == comment(name), (
        "run: python scripts/generate.py"
    )


def test_every_file_says_it():
    assert {file.stem for file in FOLDER.glob("*.toml")} - set(HARDWARE) == {"hf_debug"}


def examples(page: str) -> str:
    """Return the page with the output of each command in a block that begins with "$ titanlite
    plan", or with the first or last lines of it where the command says so.
    """

    def printed(block: re.Match[str]) -> str:
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            cli.main(shlex.split(block["command"]))
        lines = text.getvalue().splitlines(keepends=True)
        if block["head"]:
            lines = lines[: int(block["head"])]
        if block["tail"]:
            lines = lines[-int(block["tail"]) :]
        return f"{block['shown']}{''.join(lines)}```"

    command = r"(?P<command>plan [^|\n]*)(?: \| head -(?P<head>\d+)| \| tail -(?P<tail>\d+))?"
    return re.sub(rf"(?P<shown>```\n\$ titanlite {command}\n)(?:(?!```).*\n)*```", printed, page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_of_a_page_are_what_is_printed(page):
    text = page.read_text()
    assert text.count("$ titanlite plan") == PAGES[page]
    assert examples(text) == text, "run: python scripts/generate.py"


def write() -> None:
    """Write the examples, and the comment of each file; in one that has none after the first
    paragraph of comments.
    """
    for page in PAGES:
        page.write_text(examples(page.read_text()))
    for name in HARDWARE:
        file = FOLDER / f"{name}.toml"
        text = file.read_text()
        old = stated(text)
        if not old:
            text = text.replace("\n\n", "\n#\n# Hardware: .\n\n", 1)
            old = stated(text)
        file.write_text(text.replace(old, comment(name), 1))


if __name__ == "__main__" and "--write" in sys.argv:
    write()
