"""Names of torchtitan that count only where `model.converters` has their converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from titanlite.config.errors import Problem
from titanlite.config.load import load_file, read_text
from titanlite.config.loaded import LoadedConfig

ON = '[model]\nconverters = ["quantize.linear.mx"]\n'
OFF = "[model]\nconverters = []\n"
FILTERS = '[quantize.linear.mx]\nfilter_fqns = ["output", "wk"]\n'
FLOAT8 = """[quantize.linear.float8]
filter_fqns = ["wv"]
recipe_name = "rowwise"
enable_fsdp_float8_all_gather = true
"""


def recipe(name: str) -> str:
    return f'{ON}[quantize.linear.mx]\nrecipe_name = "{name}"\n'


def read(text: str) -> tuple[LoadedConfig, list[Problem]]:
    return read_text(text, Path("run.toml"))


def float8(text: str) -> dict[str, Any]:
    """What the float8 section of a text without problems has beside its defaults."""
    config, problems = read(text)
    assert problems == []
    section = config.sections.float8
    fields = type(section)()
    names = section.__struct_fields__
    return {n: getattr(section, n) for n in names if getattr(section, n) != getattr(fields, n)}


MX = {"enable_float8_linear": True, "recipe_name": "mxfp8_floor"}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        # torchtitan's own default is mxfp8_cublas, whose scales are rounded down.
        (ON, MX),
        (recipe("mxfp8_cublas"), MX),
        (recipe("mxfp8_cublas_rceil"), MX | {"recipe_name": "mxfp8"}),
        (ON + FILTERS, MX | {"filter_fqns": ["output", "wk"]}),
        (
            ON + '[quantize.linear.mx]\nfilter_fqns = "output,wk"',
            MX | {"filter_fqns": ["output", "wk"]},
        ),
        # The table of the other converter does not count, on either side.
        (ON + FLOAT8 + FILTERS, MX | {"filter_fqns": ["output", "wk"]}),
        (ON + FLOAT8, MX),
        (OFF + FILTERS, {}),
        (
            '[model]\nconverters = ["float8"]\n' + FILTERS + '[float8]\nfilter_fqns = ["wo"]',
            {"enable_float8_linear": True, "filter_fqns": ["wo"]},
        ),
        # Own names beside theirs.
        (ON + "[float8]\nenable_float8_linear = true", MX),
        (
            ON + '[float8]\nrecipe_name = "mxfp8"\nemulate = true',
            MX | {"recipe_name": "mxfp8", "emulate": True},
        ),
        (
            '[float8]\nenable_float8_linear = true\nrecipe_name = "mxfp8"\n' + FILTERS,
            MX | {"recipe_name": "mxfp8", "filter_fqns": ["output", "wk"]},
        ),
        *(
            (f'{ON}[quantize.linear.mx]\nmxfp8_dim1_cast_kernel_choice = "{kernel}"', MX)
            for kernel in ("triton", "cuda", "torch")
        ),
    ],
)
def test_the_table_of_a_converter_counts_where_the_converter_is_named(
    text: str, wanted: dict[str, Any]
) -> None:
    assert float8(text) == wanted


def test_a_table_that_does_not_count_is_told() -> None:
    told = "no effect, by model.converters: quantize.linear."
    for text, table in ((OFF + FILTERS, "mx"), (ON + FLOAT8, "float8")):
        (note,) = (one.text for one in read(text)[0].notes if one.text.startswith("no effect"))
        assert note.startswith(f"{told}{table}.filter_fqns")


def test_flags_lie_over_the_table(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(ON + FILTERS)
    flags = ["--float8.filter_fqns=wo", "--float8.recipe_name=mxfp8"]
    config = load_file(tmp_path / "run.toml", flags)
    assert config.value("float8.filter_fqns") == ["wo"]
    assert config.value("float8.recipe_name") == "mxfp8"
    off = load_file(tmp_path / "run.toml", ["--model.converters="])
    assert off.value("float8.filter_fqns") == []
    assert not off.value("float8.enable_float8_linear")


@pytest.mark.parametrize(
    "text",
    [ON + FILTERS, OFF + FILTERS, recipe("mxfp8_cublas_rceil") + FLOAT8],
)
def test_the_shown_config_has_the_same_linears_in_the_same_numbers(text: str) -> None:
    shown = read_text(text, Path("run.toml"))[0].to_toml(defaults=False)
    assert float8(shown) == float8(text)
    rows = [line for line in shown.split("\n") if not line.startswith("#")]
    assert not any("quantize" in row or "converters" in row for row in rows)
