"""The recipes of docs/extend.md name places that exist, and `scripts/recipe.py` prints them."""

from __future__ import annotations

import re

from tests.support.processes import ROOT, python
from tests.support.scripts import load_script

RECIPE = load_script("recipe")
GENERATE = load_script("generate")


def test_every_place_of_a_recipe_exists():
    pages = [RECIPE.PAGE, ROOT / "docs" / "add-a-model.md"]
    places = [place for page in pages for place in RECIPE.PLACE.findall(page.read_text())]
    assert len(places) > 30
    for file, symbol in places:
        assert RECIPE.source(file, symbol), (file, symbol)
    for file in re.findall(r"`([\w/]+/[\w/.-]+\.\w+)`", pages[0].read_text()):
        names_one = not {"NAME", "EXTENSION"} & set(re.findall(r"[A-Z]+", file))
        assert not names_one or (ROOT / file).is_file(), file


def test_a_recipe_prints_its_places_and_fits_a_screen():
    for heading, text in RECIPE.recipes().items():
        assert len(text.split()) < 260, heading
    done = python("scripts/recipe.py", "decay")
    assert done.returncode == 0
    assert "DECAYS = {" in done.stdout and "def test_decay_shapes_halfway" in done.stdout
    assert "from titanlite.optim.schedule import lr_factor\n" in done.stdout


def test_a_word_of_no_recipe_lists_them_and_key_prints_one():
    done = python("scripts/recipe.py", "nope")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[1:] == list(RECIPE.recipes())
    assert python("scripts/recipe.py", "key").stdout.count("\n## ") == 0


def test_one_command_writes_what_the_tests_compare():
    makers = {maker.split()[0] for maker in GENERATE.MAKERS}
    told = [
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "tests").rglob("test_*.py")
        if re.search(r'^if __name__ .*"--write" in', file.read_text(encoding="utf-8"), re.M)
    ]
    assert set(told) <= makers
    assert all((ROOT / maker).is_file() for maker in makers)
