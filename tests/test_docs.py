"""The pages of docs/ are listed, their links lead somewhere, and the messages they explain are this
program's.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.support.processes import ROOT, python
from titanlite.config.import_objects import resolve

DOCS = ROOT / "docs"
#: Pages that name what is not there: of earlier code, or to be added (test_add_a_feature.py).
OWN_NAMES = {"CHANGELOG.md", "log.md", "add-a-feature.md"}
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(DOCS.rglob("*.md")),
    ROOT / "titanlite" / "README.md",
    ROOT / "titanlite" / "plan" / "FORMULAS.md",
    ROOT / "tests" / "failures" / "README.md",
    ROOT / "tests" / "nullgpu" / "README.md",
]


@cache
def _prose(page: Path) -> str:
    """The page without its code: a bracket there is no link."""
    text = re.sub(
        r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    return re.sub(r"`[^`\n]*`", lambda code: re.sub(r"[\[\]()<>|]", "", code[0]), text)


@cache
def _anchors(page: Path) -> set[str]:
    """What `#...` may name on a page, by GitHub's rule."""
    seen: Counter[str] = Counter()
    found = set()
    for title in re.findall(r"^#+ +(.+?) *$", _prose(page), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        if re.match(r"https?://|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            broken.append(target)
    assert not broken, f"{page.relative_to(ROOT)}: {broken}"


def test_the_index_lists_every_page():
    listed = re.findall(
        r"^- \[[^]]+\]\(([a-z0-9-]+\.md)\): \S", (DOCS / "README.md").read_text(), re.MULTILINE
    )
    assert sorted(listed) == sorted(
        page.name for page in DOCS.glob("*.md") if page.name != "README.md"
    )


@pytest.mark.slow
def test_messages_in_troubleshooting_are_in_the_code():
    """The first column of the tables of messages has them in backticks, `…` where a name or a
    number stands.
    """
    strings = [
        path.read_text()
        for path in (ROOT / "run_llama_train.sh", ROOT / "scripts" / "setup_env.sh")
    ]
    for path in (ROOT / "titanlite").rglob("*.py"):
        tree = ast.walk(ast.parse(path.read_text()))
        strings += [
            node.value
            for node in tree
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
    source = "\0".join(strings)
    page = (DOCS / "troubleshooting.md").read_text()
    tables = page.split("| message | cause | fix |\n|---|---|---|\n")[1:]
    rows = [row for table in tables for row in table.partition("\n\n")[0].splitlines()]
    messages = [
        message for row in rows for message in re.findall(r"`([^`]+)`", row.split(" | ")[0])
    ]
    assert len(messages) > 30
    parts = [part.strip() for message in messages for part in message.split("…")]
    unknown = [part for part in parts if part not in source]
    assert not unknown


def test_modules_that_a_room_names_are_there():
    """The first lines of a folder's `__init__.py` say what is inside."""
    rooms = [path.parent for path in (ROOT / "titanlite").glob("*/__init__.py")]
    named = 0
    for room in rooms:
        text = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
        for name in set(re.findall(r"`([a-z_0-9]+)/?`", text)) - {"titanlite"}:
            assert (room / f"{name}.py").exists() or (room / name).is_dir(), f"{room.name}: {name}"
            named += 1
    assert named > 50


def test_files_and_names_in_architecture_are_there():
    page = (DOCS / "architecture.md").read_text()
    folders = (
        "titanlite",
        "tests",
        "docs",
        "scripts",
        "train_configs",
        "deploy",
        "examples",
        "benchmarks",
        ".ci",
    )
    files = [
        *ROOT.glob("*.*"),
        *(path for folder in folders for path in (ROOT / folder).rglob("*.*")),
    ]
    paths = "\n".join(f"/{path.relative_to(ROOT)}\n" for path in files)
    named = set(re.findall(r"[\w./-]+\.(?:py|sh|toml|md|txt|json)\b", page))
    assert len(named) > 40
    assert not [name for name in named if f"/{name}\n" not in paths]
    code = "\0".join(path.read_text() for path in (ROOT / "titanlite").rglob("*.py"))
    words = {
        word
        for name in re.findall(r"`([^`\n/ ]+)`", page)
        for word in re.findall(r"[A-Za-z_]\w{3,}", name)
    }
    assert len(words) > 40
    assert not [word for word in words if not re.search(rf"\b{word}\b", code)]


def test_names_that_the_pages_import_are_there():
    text = "\n".join(page.read_text() for page in PAGES if page.name not in OWN_NAMES)
    one_line = r"([^(\n]+)$"
    in_brackets = r"\(([^)]+)\)$"
    shown = re.findall(
        rf"^ *from (titanlite[\w.]*) import (?:{one_line}|{in_brackets})", text, re.MULTILINE
    )
    found = {
        f"{module}:{name.strip()}"
        for module, *both in shown
        for name in "".join(both).split(",")
        if name.strip()
    }
    for path in re.findall(r"`(titanlite(?:\.\w+)+)\b(?!\.)", text):
        module, _, name = path.rpartition(".")
        is_module = (ROOT / f"{path.replace('.', '/')}.py").is_file() or (
            ROOT / path.replace(".", "/")
        ).is_dir()
        found |= {f"{module}:{name}"} if not is_module else set()
    assert len(found) > 40
    for path in sorted(found):
        resolve(path)


def test_every_failure_that_is_survived_has_a_test_as_its_proof():
    text = (ROOT / "tests" / "failures" / "README.md").read_text()
    rows = re.findall(r"^\| (\d+) \|.*$", text, re.MULTILINE)
    proofs = re.findall(r"`([a-z_/]+\.py)::(test_\w+)`", text)
    assert len(proofs) >= len(rows)
    assert rows == [str(n) for n in range(1, 20)]
    for file, name in proofs:
        assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(), f"{file} has no {name}"


def test_the_readme_is_short_and_its_numbers_are_true():
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 130
    words = re.sub(r"\]\([^)]*\)", "]", text).replace("|", " ").split()
    assert len(words) <= 1000
    (stated,) = re.findall(r"`trainer.py` and `step.py`, (\d+) lines in all", text)
    files = [ROOT / "titanlite" / name for name in ("trainer.py", "step.py")]
    assert int(stated) == sum(len(file.read_text().splitlines()) for file in files)


def test_the_badges_are_up_to_date():
    done = python("scripts/badges.py", "--check")
    assert done.returncode == 0, done.stdout + done.stderr
