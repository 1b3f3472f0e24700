"""CONTRIBUTING.md's recipes name places that exist, and `scripts/recipe.py` prints them."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.processes import ROOT
from tests.support.scripts import load_script

RECIPE = load_script("recipe")
GENERATE = load_script("generate")


def test_every_place_of_a_recipe_exists():
    pages = [ROOT / "CONTRIBUTING.md", ROOT / "docs" / "add-a-model.md"]
    places = [place for page in pages for place in RECIPE.PLACE.findall(page.read_text())]
    assert len(places) > 30
    for file, symbol in places:
        assert RECIPE.source(file, symbol), (file, symbol)
    for file in re.findall(r"`([\w/]+/[\w/.-]+\.\w+)`", pages[0].read_text()):
        names_one = not {"NAME", "EXTENSION"} & set(re.findall(r"[A-Z]+", file))
        assert not names_one or (ROOT / file).is_file(), file


def test_places_are_whole_functions_tables_and_fields():
    def lines(file, symbol):
        return RECIPE.source(file, symbol).splitlines()

    field = lines("titanlite/config/run_sections.py", "Metrics.log_freq")
    assert len(field) == 2 and field[0].endswith("log_freq: Count = 10")
    function = lines("titanlite/optim/gradients.py", "square_norm")
    assert function[0].endswith("@torch.no_grad()") and function[-1].endswith("return total")
    with pytest.raises(KeyError, match="absent"):
        lines("titanlite/config/decays.py", "DECAYS.absent")


def test_a_recipe_prints_its_places_and_fits_a_screen():
    for heading, text in RECIPE.recipes().items():
        assert len(text.split()) < 260, heading
    words = [sys.executable, str(ROOT / "scripts" / "recipe.py"), "decay"]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "DECAYS = {" in printed and "def test_decay_shapes_halfway" in printed


def test_one_command_writes_what_the_tests_compare():
    makers = {maker.split()[0] for maker in GENERATE.MAKERS}
    told = [
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "tests").rglob("test_*.py")
        if re.search(r'^if __name__ .*"--write" in', file.read_text(encoding="utf-8"), re.M)
    ]
    assert set(told) <= makers
    assert all((ROOT / maker).is_file() for maker in makers)
