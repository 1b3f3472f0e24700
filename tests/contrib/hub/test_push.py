"""`titanlite push`: what the hub holds afterwards, and what it does when the hub or the machine
fails. The client of the hub is the real one.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.golden_run import MORE, STEPS, GoldenRun
from tests.support.hub_server import HubServer
from tests.support.processes import environment, python, titanlite
from tests.support.pushes import ADA, leaks, make_hub, push, uploads_of, variables
from titanlite import exit_codes
from titanlite.checkpoint.manifest import PIN
from titanlite.contrib.hub.card import MARK

#: Prints the logits of three tokens by each of two models.
READ = """
import sys, torch
from transformers import AutoModelForCausalLM
for place in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(place, revision="main")
    with torch.no_grad():
        print(model(torch.tensor([[5, 6, 7]])).logits.double().sum().item())
"""


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


def _shards(folder: Path, sizes: list[int]) -> Path:
    """An export of several files; only their sizes and headers matter."""
    folder.mkdir()
    for number, size in enumerate(sizes):
        shape = f'[{size // 4}],"data_offsets":[0,{size}]'
        header = f'{{"w{number}":{{"dtype":"F32","shape":{shape}}}}}'
        header += " " * (-len(header) % 8)
        content = len(header).to_bytes(8, "little") + header.encode() + bytes([number]) * size
        (folder / f"model-{number}.safetensors").write_bytes(content)
    (folder / "config.json").write_text('{"architectures": ["Tiny"], "model_type": "llama"}')
    return folder


@pytest.mark.slow
def test_the_hub_holds_the_export_byte_for_byte_and_transformers_loads_it(
    golden: GoldenRun, hub: HubServer, home: Path
) -> None:
    run = golden.copy(home / "run")
    export = home / "export"
    step = run / "checkpoint" / f"step-{MORE}"
    done = titanlite("export", step, export, env={"PYTHONWARNINGS": "ignore"})
    assert done.returncode == 0, done.stderr
    url = push(hub, home, run, "ada/tiny", "--private").stdout.partition(": ")[0]
    uploads = uploads_of(hub)
    branch = uploads.branch("ada/tiny")
    assert uploads.repositories["ada/tiny"].private
    assert url.endswith(uploads.repositories["ada/tiny"].branches["main"][-1].oid)
    files = {file.name: file.read_bytes() for file in export.iterdir()}
    assert {name: branch[name] for name in files} == files
    extra = {"README.md", "train.toml", ".gitattributes"}
    assert branch.keys() - files.keys() == extra
    read = python("-c", READ, "ada/tiny", export, env=variables(hub, home))
    assert read.returncode == 0, read.stderr
    published, exported = map(float, read.stdout.split())
    assert published == exported
    card = branch["README.md"].decode()
    assert f"| step | {MORE} of {MORE} |" in card
    assert "| loss on the held-out text | " in card
    assert "| ranks | 2 |" in card
    assert str(home) not in card
    # Nothing is left that waits, and nothing is pinned.
    assert not list(home.glob("titanlite-push-*"))
    assert not (step / PIN).exists()
    # Again: no byte and no commit.
    before = len(uploads.puts), len(uploads.messages("ada/tiny"))
    assert push(hub, home, run, "ada/tiny").stdout.startswith(url)
    assert (len(uploads.puts), len(uploads.messages("ada/tiny"))) == before
    assert leaks(run) == leaks(export) == []
    assert not any(b"planted" in content for content in branch.values())


def test_a_push_that_was_killed_goes_on_and_sends_no_file_twice(
    hub: HubServer, home: Path, tmp_path: Path
) -> None:
    export = _shards(tmp_path / "export", [4000, 5000, 6000])
    (export / "README.md").write_text("# My words\n")
    (export / "onnx").mkdir()
    (export / ".env").write_text("planted")
    uploads = uploads_of(hub)
    # A file comes in whole, and its answer does not.
    hub.fail("/lfs/whole/*", method="PUT", stall=60, after=1)
    words = [sys.executable, "-m", "titanlite", "push", export, "ada/parts"]
    process = subprocess.Popen(
        list(map(str, words)), env=environment(**variables(hub, home)), cwd=home
    )
    deadline = time.monotonic() + 60
    while len(uploads.puts) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert list(uploads.branch("ada/parts")) == [".gitattributes"]
    said = push(hub, home, export, "ada/parts").stderr
    assert "not uploaded: .env" in said
    assert "not uploaded: onnx" in said
    assert len(uploads.puts) == len(set(uploads.puts)) == 3
    branch = uploads.branch("ada/parts")
    names = [*(f"model-{number}.safetensors" for number in range(3)), "config.json", "README.md"]
    assert branch.keys() == {*names, ".gitattributes"}
    for name in names:
        assert branch[name] == (export / name).read_bytes()


def test_older_weights_go_and_the_words_of_people_stay(
    hub: HubServer, home: Path, tmp_path: Path
) -> None:
    uploads = uploads_of(hub)
    uploads.make("ada/tiny")
    files = uploads.branch("ada/tiny")
    theirs = {
        "LICENSE": b"mine",
        "onnx/model.safetensors": b"my own, in a folder",
        "README.md": b"---\nlicense: mit\n---\n# My words\n",
    }
    files |= theirs | {"model-00001-of-00002.safetensors": b"older"}
    export = _shards(tmp_path / "export", [4000])
    words = [export, "ada/tiny", "--branch", "step-5", "--branch", "main", "--license", "mit"]
    push(hub, home, *words)
    for branch in ("step-5", "main"):
        found = uploads.branch("ada/tiny", branch)
        assert {name: found[name] for name in theirs} == theirs
        assert found.keys() - theirs == {".gitattributes", "config.json", "model-0.safetensors"}
    # A card of a push is written anew, until somebody takes its last line away.
    del uploads.branch("ada/tiny")["README.md"]
    push(hub, home, export, "ada/tiny")
    card = uploads.branch("ada/tiny")["README.md"]
    assert b"license" not in card
    push(hub, home, export, "ada/tiny", "--license", "mit")
    assert b"license: mit" in uploads.branch("ada/tiny")["README.md"]
    mine = card.replace(MARK.encode(), b"")
    uploads.branch("ada/tiny")["README.md"] = mine
    push(hub, home, export, "ada/tiny", "--license", "mit")
    assert uploads.branch("ada/tiny")["README.md"] == mine


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(
    ("token", "repository", "more", "says"),
    [
        ("", "ada/tiny", {}, "an upload needs a token that may write"),
        ("hf_unknown", "ada/tiny", {}, "ada/tiny takes no upload of the owner of this token"),
        ("hf_planted_é", "ada/tiny", {}, "an upload needs a token that may write"),
        ("hf_planted_eve", "eve/tiny", {}, "eve/tiny takes no upload"),
        ("hf_planted_bob", "ada/tiny", {}, "ada/tiny takes no upload"),
        ("hf_planted_bob", "ada/new", {}, "ada/new takes no upload"),
        (ADA, "ada/tiny", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        (ADA, "ada/tiny", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "cannot be reached"),
    ],
)
def test_the_first_contact_says_what_is_missing(  # noqa: PLR0913
    hub: HubServer,
    home: Path,
    tmp_path: Path,
    token: str,
    repository: str,
    more: dict[str, str],
    says: str,
) -> None:
    uploads_of(hub).make("ada/tiny")
    export = _shards(tmp_path / "export", [4000])
    said = push(hub, home, export, repository, token=token, code=exit_codes.CONFIG, **more).stderr
    assert says in said
    assert uploads_of(hub).puts == []
    assert list(uploads_of(hub).repositories) == ["ada/tiny"]


def test_words_without_sense_are_refused(hub: HubServer, home: Path, tmp_path: Path) -> None:
    export = _shards(tmp_path / "export", [4000])
    cases = [
        ([export, "tiny"], "expected OWNER/NAME, got 'tiny'"),
        ([export, "ada/tiny", "--dtype", "float16"], "is exported already: --dtype and --ema say"),
    ]
    for words, says in cases:
        done = titanlite("push", *words, env=variables(hub, home), cwd=home)
        assert done.returncode in (exit_codes.CONFIG, exit_codes.CHECKPOINT)
        assert says in done.stderr
    assert hub.requests == []


@pytest.mark.parametrize(
    "name",
    [
        "checkpoint",
        f"checkpoint/step-{STEPS}",
        f"checkpoint/step-{STEPS}/manifest.json",
        ".hub",
    ],
)
def test_nothing_is_uploaded_or_emptied_through_a_link_in_a_run(
    golden: GoldenRun, hub: HubServer, home: Path, tmp_path: Path, name: str
) -> None:
    """A foreign folder could hold links to files that nobody meant to upload, or to lose."""
    run = golden.copy(tmp_path / "run", newest=STEPS)
    private = golden.copy(tmp_path / "private", newest=STEPS)
    (private / ".hub").mkdir()
    before = sorted(str(path) for path in private.rglob("*"))
    link = run / name
    link.parent.mkdir(exist_ok=True)
    if link.is_dir():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    target = private / name
    link.symlink_to(target if target.exists() else private)
    words = [run, "ada/tiny", "--folder", run / ".hub"]
    said = push(hub, home, *words, code=exit_codes.CONFIG).stderr
    assert f"{link} is a link" in said
    assert uploads_of(hub).puts == []
    assert sorted(str(path) for path in private.rglob("*")) == before


@pytest.mark.parametrize("name", ["LICENSE", "README.md", "model-0.safetensors", "config.json"])
def test_a_link_in_exported_weights_is_not_uploaded(
    hub: HubServer, home: Path, tmp_path: Path, name: str
) -> None:
    export = _shards(tmp_path / "export", [4000])
    (export / name).unlink(missing_ok=True)
    private = _shards(tmp_path / "private", [4000]) / name
    if not private.exists():
        private.write_text("private")
    (export / name).symlink_to(private)
    said = push(hub, home, export, "ada/parts", code=exit_codes.CONFIG).stderr
    assert f"{export / name} is a link" in said
    assert "ada/parts" not in uploads_of(hub).repositories
