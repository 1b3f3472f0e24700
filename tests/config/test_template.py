"""The template and the table of all keys."""

from __future__ import annotations

import re

from msgspec.structs import replace

from tests.support.processes import ROOT
from titanlite.cli.config_pages import markdown, template
from titanlite.config.keys import keys
from titanlite.config.load import load, read_text
from titanlite.resolve.load import resolve

PAGE = ROOT / "docs" / "config-keys.md"
COMMAND = "titanlite config template --markdown > docs/config-keys.md"


def uncommented() -> str:
    return re.sub(r"^#(?=\w)", "", template(), flags=re.MULTILINE)


def test_template_as_it_is_sets_nothing(tmp_path):
    config, problems = read_text(template(), tmp_path / "run.toml")
    assert problems == []
    assert config.sources == {}


def test_template_uncommented_is_exactly_the_defaults(tmp_path):
    config, problems = read_text(uncommented(), tmp_path / "run.toml")
    assert problems == []
    assert config.sections == load([]).sections
    ours, theirs = (replace(resolve(c, 2)[1], toml="", notes=()) for c in (config, load([])))
    assert ours == theirs
    said = {name for name in keys() if name in config.sources}
    open_ones = {key.name for key in keys().values() if key.default is None or key.default == {}}
    assert said == set(keys()) - open_ones - {"job.config_file"}


def test_page_of_all_keys_is_that_of_the_code():
    assert PAGE.read_text(encoding="utf-8") == markdown() + "\n", f"stale: {COMMAND}"
