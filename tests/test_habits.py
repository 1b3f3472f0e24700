"""Files of a public project: workflows, forms, hooks, citation, changelog, and what they name."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import titanlite
from tests.support.processes import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: Rights beyond reading, by workflow and job.
RIGHTS = {
    ("docs", "publish"): {"pages": "write", "id-token": "write"},
    ("release", "publish"): {"id-token": "write"},
}


def content(path: Path) -> dict[Any, Any]:
    found = yaml.safe_load(path.read_text())
    assert isinstance(found, dict)
    return found


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    found = content(path)["jobs"]
    assert isinstance(found, dict)
    return found


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in jobs(path).values():
        yield from job["steps"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_the_least_rights_and_a_time_limit(path):
    assert content(path)["permissions"] == {"contents": "read"}
    for name, job in jobs(path).items():
        assert job.get("permissions", {}) == RIGHTS.get((path.stem, name), {})
        assert job["timeout-minutes"] <= 360
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


def test_the_version_is_the_same_in_all_files():
    released = re.findall(
        r"^## (\d+\.\d+\.\d+) · (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.M
    )
    citation = content(ROOT / "CITATION.cff")
    version, day = released[0]
    assert version == titanlite.__version__ == citation["version"]
    assert day == str(citation["date-released"])
    assert released == sorted(released, key=lambda one: one[1], reverse=True)
    assert citation["license"] == PROJECT["license"]
    assert citation["title"] == PROJECT["name"]


@pytest.mark.parametrize("name", ["AGENTS.md", "docs/extend.md", "docs/architecture.md"])
def test_files_and_names_of_a_page_for_contributors_are_there(name):
    """NAME and test_y stand for names of your own."""
    text = (ROOT / name).read_text()
    words = {word for word in re.findall(r"`([^`\n]+)`", text) if not re.search("NAME|_y", word)}
    files = [word for word in words if re.fullmatch(r"[\w./-]+/|[\w./-]+\.(py|md|sh|toml)", word)]
    assert len(files) > 15
    assert [word for word in files if not is_there(word)] == []
    names = [
        word for word in words if re.fullmatch(r"_[a-z_]+|_?[A-Z]{4,}|[A-Z][a-z]+[A-Z]\w+", word)
    ]
    sources = [*(ROOT / "titanlite").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    code = "\n".join(path.read_text() for path in sources if path != Path(__file__))
    assert names
    assert [word for word in names if word not in code] == []


def is_there(word: str) -> bool:
    """Whether a file or folder has this name, also below titanlite/."""
    return (ROOT / word).exists() or any((ROOT / "titanlite").rglob(word))
