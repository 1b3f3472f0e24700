"""The template and the table of all keys."""

from __future__ import annotations

import re
from pathlib import Path

from msgspec.structs import replace

from titanlite.config.aliases import ALIASES
from titanlite.config.keys import keys
from titanlite.config.load import load, read_text
from titanlite.config.not_implemented import NOT_IMPLEMENTED, refused
from titanlite.config.unsupported_keys import UNSUPPORTED
from titanlite.fit import fitted
from titanlite.tools.config_pages import markdown, template

PAGE = Path(__file__).resolve().parents[2] / "docs" / "config-keys.md"
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
    ours, theirs = (replace(fitted(c, 2), toml="", notes=()) for c in (config, load([])))
    assert ours == theirs
    assert refused(config) == []
    said = {name for name in keys() if name in config.sources}
    open_ones = {key.name for key in keys().values() if key.default is None or key.default == {}}
    assert said == set(keys()) - open_ones


def test_template_shows_every_key_with_its_meaning():
    text = " ".join(template().replace("\n# ", " ").split())
    for key in keys().values():
        if key.name != "job.config_file":
            assert re.search(rf"^#( ?){key.field} = ", template(), re.MULTILINE)
            assert " ".join(key.description.split()) in text


def test_page_of_all_keys_is_that_of_the_code():
    assert PAGE.read_text(encoding="utf-8") == markdown() + "\n", f"stale: {COMMAND}"


def test_page_names_every_key_and_every_other_name():
    sections = dict(re.findall(r"^## \[(\w+)\]\n(.*?)(?=^## )", markdown(), re.MULTILINE | re.DOTALL))
    for key in keys().values():
        mark = " ◌" if key.name in NOT_IMPLEMENTED else ""
        row = next(line for line in sections[key.section].splitlines() if line.startswith(f"| `{key.field}`{mark} |"))
        assert key.expected.replace("|", "\\|") in row
        assert all(f"`{alias.name}`" in row for alias in ALIASES.values() if alias.key == key.name)
    assert all(f"| `{name}` |" in markdown() for name in UNSUPPORTED)
    assert "| `checkpoint.keep_latest_k` | `10` | `0` |" in markdown()
