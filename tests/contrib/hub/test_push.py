"""`titanlite push`: what the hub holds afterwards, and what is refused. Its client is real."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.golden_run import MORE, STEPS
from tests.support.hub_server import HubServer
from tests.support.processes import titanlite
from tests.support.pushes import ADA, leaks, make_hub, push, uploads_of
from titanlite import exit_codes
from titanlite.checkpoint.manifest import PIN
from titanlite.cli.main import main
from titanlite.contrib.hub.card import MARK


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with make_hub(tmp_path / "served") as found:
        yield found


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder for caches, and to work in."""
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


def _exported(folder: Path) -> Path:
    """An export; its content does not matter."""
    folder.mkdir()
    (folder / "model-0.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text('{"architectures": ["Tiny"], "model_type": "llama"}')
    return folder


@pytest.mark.slow
def test_the_hub_holds_the_export_byte_for_byte(golden, hub, home):
    run = golden.copy(home / "run")
    export = home / "export"
    step = run / "checkpoint" / f"step-{MORE}"
    done = titanlite("export", step, export, "--unchecked")
    assert done.returncode == 0, done.stderr
    url = push(hub, home, run, "ada/tiny", "--private").stdout.partition(": ")[0]
    repository = uploads_of(hub).repositories["ada/tiny"]
    branch = repository.branches["main"]
    assert repository.private
    files = {file.name: file.read_bytes() for file in export.iterdir()}
    assert {name: branch[name] for name in files} == files
    assert branch.keys() - files.keys() == {"README.md", "train.toml", ".gitattributes"}
    card = branch["README.md"].decode()
    assert f"| step | {MORE} of {MORE} |" in card
    assert "| loss on the held-out text | " in card
    assert "| ranks | 2 |" in card
    assert str(home) not in card
    # Nothing is left that waits, and nothing is pinned.
    assert not list(home.glob("titanlite-push-*"))
    assert not [name for name in step.iterdir() if name.name.startswith((PIN, ".reading"))]
    # Again: no commit.
    assert push(hub, home, run, "ada/tiny").stdout.startswith(url)
    assert len(repository.messages) == 1
    assert leaks(run) == leaks(export) == []
    assert not any(b"planted" in content for content in branch.values())


def test_older_weights_go_and_the_words_of_people_stay(hub, home, tmp_path):
    uploads = uploads_of(hub)
    uploads.make("ada/tiny")
    theirs = {
        "LICENSE": b"mine",
        "onnx/model.safetensors": b"my own, in a folder",
        "README.md": b"---\nlicense: mit\n---\n# My words\n",
    }
    uploads.branch("ada/tiny").update(theirs | {"model-00001-of-00002.safetensors": b"older"})
    export = _exported(tmp_path / "export")
    (export / ".env").write_text("planted")
    words = [export, "ada/tiny", "--branch", "step-5", "--branch", "main", "--license", "mit"]
    assert "not uploaded: .env" in push(hub, home, *words).stderr
    for branch in ("step-5", "main"):
        found = uploads.branch("ada/tiny", branch)
        assert {name: found[name] for name in theirs} == theirs
        assert found.keys() - theirs == {".gitattributes", "config.json", "model-0.safetensors"}
    # A card of a push is written anew, until somebody takes its last line away.
    del uploads.branch("ada/tiny")["README.md"]
    push(hub, home, export, "ada/tiny")
    push(hub, home, export, "ada/tiny", "--license", "mit")
    card = uploads.branch("ada/tiny")["README.md"]
    assert b"license: mit" in card
    mine = card.replace(MARK.encode(), b"")
    uploads.branch("ada/tiny")["README.md"] = mine
    push(hub, home, export, "ada/tiny", "--license", "mit")
    assert uploads.branch("ada/tiny")["README.md"] == mine


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("token", "more", "says"),
    [
        ("", {}, "an upload needs a token that may write"),
        ("hf_planted_bob", {}, "ada/tiny takes no upload of the owner of this token"),
        (ADA, {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        (ADA, {"HF_ENDPOINT": "http://127.0.0.1:9"}, "cannot be reached"),
    ],
)
def test_the_first_contact_says_what_is_missing(  # noqa: PLR0913
    hub, home, tmp_path, token, more, says
):
    uploads_of(hub).make("ada/tiny")
    export = _exported(tmp_path / "export")
    said = push(hub, home, export, "ada/tiny", token=token, code=exit_codes.CONFIG, **more).stderr
    assert says in said
    assert uploads_of(hub).repositories["ada/tiny"].messages == []


@pytest.mark.parametrize(
    "name", ["checkpoint", f"checkpoint/step-{STEPS}/manifest.json", ".hub", "LICENSE"]
)
def test_nothing_is_uploaded_or_emptied_through_a_link(golden, tmp_path, capsys, name):
    """A foreign folder could hold links to files that nobody meant to upload, or to lose."""
    run = golden.copy(tmp_path / "run", newest=STEPS)
    private = golden.copy(tmp_path / "private", newest=STEPS)
    if name == "LICENSE":
        run = _exported(tmp_path / "export")
    before = sorted(str(path) for path in private.rglob("*"))
    link = run / name
    if link.is_dir():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    target = private / name
    link.symlink_to(target if target.exists() else private)
    words = ["push", str(run), "ada/tiny", "--folder", str(run / ".hub")]
    assert main(words) == exit_codes.CONFIG
    assert f"{link} is a link" in capsys.readouterr().err
    assert sorted(str(path) for path in private.rglob("*")) == before
