"""Dotted paths are looked up in the source of their module, and nothing is imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.refusals import refusal
from titanlite.config.dotted_names import unresolved

SOURCE = '''
"""los is a word in this text; so is words."""
import math, json as codec
import os.path
from collections import OrderedDict as Ordered
ready_too: int = 1
a, (b, *c) = 1, (2, 3)
for i in range(3):
    last = i
with open(__file__) as stream:
    inside = 1
try:
    import torch
except ImportError as missing:
    torch = None
if (walrus := 1):
    def loss(logits, labels):
        local = los = 1
        return local
class Big:
    attribute = 1
def later():
    pass
[hidden for hidden in range(3)]
'''
THERE = (
    "math",
    "codec",
    "os",
    "Ordered",
    "ready_too",
    "a",
    "b",
    "c",
    "i",
    "last",
    "stream",
    "inside",
    "torch",
    "walrus",
    "loss",
    "Big",
    "later",
    "Big.attribute",
)
MISSING = (
    "los",
    "words",
    "json",
    "path",
    "local",
    "attribute",
    "hidden",
    "OrderedDict",
    "logits",
)


def test_names_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    assert {name: unresolved(f"{file}:{name}") for name in THERE} == dict.fromkeys(THERE, "")
    for name in MISSING:
        assert unresolved(f"{file}:{name}") == f"cannot be imported: {file} has no {name}"
    assert "there is no file" in unresolved(f"{tmp_path}/gone.py:x")
    assert "no object" in unresolved(f"{file}:")
    file.write_text("def f(:\n")
    assert "is not Python" in unresolved(f"{file}:f")


@pytest.mark.parametrize(
    "line",
    [
        "from os.path import *",
        "def __getattr__(name): ...",
        "globals()['x'] = 1",
        "def f():\n global x",
    ],
)
def test_a_module_that_may_bind_more_is_left_to_its_import(tmp_path: Path, line: str) -> None:
    (tmp_path / "mine.py").write_text(f"{line}\n")
    assert unresolved(f"{tmp_path / 'mine.py'}:x") == ""


def test_names_of_installed_modules_without_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "packed"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nhere = 1\n")
    (package / "inner" / "__init__.py").write_text("")
    (package / "inner" / "deep.py").write_text("def loss(): ...\n")
    (tmp_path / "plain" / "sub").mkdir(parents=True)
    (tmp_path / "plain" / "sub" / "mod.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for path in (
        "packed:here",
        "packed:inner",
        "packed.inner.deep:loss",
        "packed.inner:deep",
        "plain.sub.mod:x",
    ):
        assert unresolved(path) == "", path
    assert unresolved("packed.inner.deep:los").endswith("deep.py has no los")
    assert unresolved("packed:los").endswith("__init__.py has no los")
    assert (
        unresolved("packed.iner.deep:loss") == "cannot be imported: No module named 'packed.iner'"
    )
    (package / "bare").mkdir()
    (package / "bare" / "mod.py").write_text("x = 1\n")
    assert unresolved("packed.bare.mod:y") == "", "a folder without a file is left to the import"
    assert (
        unresolved("nowhere_at_all.x:y") == "cannot be imported: No module named 'nowhere_at_all'"
    )
    assert not (tmp_path / "ran").exists()
    assert "packed" not in sys.modules
    for path in (
        "torch.optim:AdamW",
        "torch:nn",
        "math:sqrt",
        "json:JSONDecoder",
        "titanlite:ModelSpec",
    ):
        assert unresolved(path) == "", path


@pytest.mark.parametrize(
    "key",
    ["training.loss", "optimizer.name", "training.dataset", "validation.dataset", "job.callbacks"],
)
def test_the_check_of_a_config_finds_a_misspelt_name(tmp_path: Path, key: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def loss(logits, labels):\n    los = 1\n    return los\n")
    found = refusal([f"--{key}={file}:los"])
    assert (found.key, found.code) == (key, "unresolved")
    assert f"{file} has no los" in found.message
