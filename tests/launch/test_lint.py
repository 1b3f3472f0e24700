"""Scripts, Dockerfile and manifests, also the rendered examples, under shellcheck, hadolint and
yamllint.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.support.processes import ROOT

#: Linter → its options and its files. SC2015: `a && b || die` is meant so.
LINTERS = {
    "shellcheck": (
        ["--external-sources", "--exclude=SC2015"],
        [
            "*.sh",
            ".ci/run",
            "scripts/*.sh",
            "benchmarks/*.sh",
            "deploy/**/*.sh",
            "deploy/examples/**/*.sbatch",
        ],
    ),
    "hadolint": ([], ["deploy/Dockerfile"]),
    "yamllint": (
        [
            "--strict",
            "-d",
            # `on:` of a workflow is a key, not a truth value.
            "{extends: default, rules: {line-length: disable, document-start: disable, "
            "truthy: {check-keys: false}}}",
        ],
        [
            "deploy/**/*.yaml",
            "deploy/**/*.yml",
            ".github/**/*.yml",
            ".pre-commit-config.yaml",
            "CITATION.cff",
        ],
    ),
}


def _lint(name: str, files: list[Path]) -> subprocess.CompletedProcess[str]:
    """Run a linter of this environment; an empty list passes."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if (program := shutil.which(name, path=path)) is None:
        warnings.warn(
            message := f"{name} is not installed: pip install -c constraints.txt -e '.[dev]'",
            stacklevel=1,
        )
        pytest.skip(message)
    command = [program, *LINTERS[name][0], *map(str, files)] if files else ["true"]
    return subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", LINTERS)
def test_linters_pass(name):
    done = _lint(name, sorted(file for pattern in LINTERS[name][1] for file in ROOT.glob(pattern)))
    assert done.returncode == 0, done.stdout
