"""The packages that titanlite needs, and those that an extra brings.

What an extra brings is hidden here, as if it were not installed. Then one line says how to get it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fsspec.registry import _registry

from tests.support.processes import ROOT
from titanlite.checkpoint import store_paths
from titanlite.checkpoint.store_paths import StoreError, to_path
from titanlite.cli.hub.compare_checkpoints import compare_ids
from titanlite.config.checks import TRACKER_PACKAGES, missing_packages
from titanlite.config.dataset_registry import hub_text
from titanlite.config.errors import ConfigError
from titanlite.config.load import load
from titanlite.data import DataError
from titanlite.data.listing import Place
from titanlite.data.remote import open_file
from titanlite.data.stream_files import hub_files, url_text
from titanlite.models.hf import read_config
from titanlite.models.spec import ShapeError
from titanlite.resolve.load import check_alone
from titanlite.utils import EXTRAS, pip_install

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = PROJECT["optional-dependencies"]
#: Extras that none of its commands asks for.
FOR_DEVELOPERS = {"dev", "docs", "notebook"}
#: Packages that others bring: torch, datasets, tensorboard.
BROUGHT = {"fsspec", "pyarrow", "google"}
#: Packages that type checkers alone read. torch brings them.
FOR_TYPES = {"typing_extensions"}
#: A package of huggingface_hub and lm-evaluation-harness: it shows how far `titanlite eval` is.
PROGRESS = {"tqdm"}
#: nvidia-ml-py, without which the energy of a run is not known, and what `titanlite parity` runs in
#: another environment.
ELSEWHERE = {"pynvml", "torchtitan"}


def names(requirements: list[str]) -> set[str]:
    """The packages of some requirements, without their bounds."""
    found = [re.match(r"[\w-]+", requirement) for requirement in requirements]
    return {match[0] for match in found if match is not None}


def test_the_table_of_extras_is_that_of_the_project():
    listed = {
        package: extra
        for extra, requirements in OPTIONAL.items()
        if extra not in FOR_DEVELOPERS
        for package in names(requirements)
    }
    assert listed == EXTRAS
    assert pip_install("s3fs") == "pip install 'titanlite[s3]'"
    assert pip_install("gcsfs") == "pip install gcsfs"


def test_an_environment_is_searched_for_every_package_of_a_run():
    script = (ROOT / "scripts" / "setup_env.sh").read_text()
    searched = script.partition('_RUN_MODULES="')[2].partition('"')[0].split()
    assert {*searched} == names(PROJECT["dependencies"]) - {"tomli"} | {"titanlite"}


def imported(path: Path) -> Iterator[str]:
    """The packages that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


@pytest.mark.slow
def test_each_import_of_the_library_is_installed_with_it_or_has_an_extra():
    found = {name for path in (ROOT / "titanlite").rglob("*.py") for name in imported(path)}
    others = found - set(sys.stdlib_module_names) - {"titanlite"}
    trackers = {module for module, package in TRACKER_PACKAGES.values() if package in EXTRAS}
    known = names(PROJECT["dependencies"]) | set(EXTRAS) | trackers
    assert others - known - BROUGHT - PROGRESS - FOR_TYPES - ELSEWHERE == set()


def test_each_extra_that_a_page_names_exists():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts = "".join(page.read_text() for page in pages if page.name != "log.md")
    extras = ",".join(re.findall(r"(?:titanlite|\.)\[([a-z0-9,]+)\]'", texts)).split(",")
    assert len(extras) > 5
    assert {*extras} <= {*OPTIONAL}


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Hides a package: its import fails, and a search finds nothing."""

    def hidden(package: str) -> None:
        for name in [package, *sys.modules]:
            if name == package or name.startswith(f"{package}."):
                monkeypatch.setitem(sys.modules, name, None)
        for protocol in ("s3", "s3a", "http", "https", "hf"):
            monkeypatch.delitem(_registry, protocol, raising=False)

    # Another test of this process may have opened a store.
    monkeypatch.setattr(store_paths, "_filesystem", store_paths._filesystem.__wrapped__)
    return hidden


S3 = r"s3:// needs the package s3fs: pip install 'titanlite\[s3\]'$"


def test_without_a_package_of_its_own_each_source_names_it(hide):
    for package in ("s3fs", "aiohttp", "datasets", "huggingface_hub"):
        hide(package)
    url = "s3://bucket/folder"
    with pytest.raises(DataError, match=rf"^key: {url} cannot be listed: {S3}"):
        url_text(Place(url, "key"))
    with pytest.raises(DataError, match=rf"^{url}/a.jsonl cannot be read at byte 0: {S3}"):
        open_file(f"{url}/a.jsonl", patience=60)
    with pytest.raises(StoreError, match=S3):
        to_path(url).exists()
    with pytest.raises(DataError, match="https:// needs the package aiohttp: pip install aiohttp$"):
        open_file("https://example.com/a.jsonl", patience=60)
    with pytest.raises(DataError, match="needs the package huggingface_hub: pip install hugg"):
        url_text(Place("hf://datasets/owner/name", "key"))
    text = hub_text("c4")
    assert text is not None
    with pytest.raises(DataError, match="^key: .* package datasets: pip install datasets$"):
        hub_files(text, None, None, "key")


@pytest.mark.parametrize(
    ("package", "flags", "extra"),
    [
        ("s3fs", "--checkpoint.enable_checkpoint --checkpoint.folder=s3://bucket/a", "s3"),
        ("wandb", "--metrics.enable_wandb", "wandb"),
        ("lm_eval", "--eval.tasks=hellaswag", "eval"),
    ],
)
def test_without_its_package_a_key_is_refused_with_the_extra(hide, package, flags, extra):
    hide(package)
    with pytest.raises(ConfigError) as error:
        check_alone(load(flags.split()), machine=True)
    (problem,) = error.value.problems
    assert problem.remedy.startswith(f"pip install 'titanlite[{extra}]'")


def test_without_transformers_models_and_exports_name_the_extra(hide, tmp_path):
    hide("transformers")
    with pytest.raises(ShapeError) as refused:
        read_config({"model_type": "llama"})
    assert str(refused.value).count("\n") == 0
    assert '"hf" needs the package transformers' in str(refused.value)
    assert "pip install 'titanlite[hf]'" in str(refused.value)
    bundled = ROOT / "titanlite" / "data" / "assets" / "tokenizer.model"
    assert compare_ids(str(bundled), tmp_path).endswith(
        "transformers is not installed: pip install 'titanlite[hf]'"
    )


def test_each_shipped_config_needs_no_extra_but_that_which_it_names(hide):
    for package in EXTRAS:
        hide(package)
    for config in (ROOT / "train_configs").glob("*.toml"):
        loaded = load([f"--job.config_file={config}"])
        assert list(missing_packages(loaded)) == []
        needs_transformers = loaded.sections.model.name == "hf"
        assert ("pip install 'titanlite[hf]'" in config.read_text()) is needs_transformers
