"""`titanlite push`: what the hub holds afterwards, and what it does when the hub or the machine
fails. The client of the hub is the real one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from tests.support import s3
from tests.support.golden_run import MORE, STEPS, GoldenRun
from tests.support.hub_server import HubServer
from tests.support.processes import environment, python, titanlite
from tests.support.pushes import ADA, leaks, make_hub, push, pushed, uploads_of, variables
from titanlite import exit_codes
from titanlite.checkpoint.manifest import PIN
from titanlite.cli.push.stage import locked
from titanlite.cli.push.subject import find_subject
from titanlite.utils import LinkError

#: Prints the logits of three tokens by each of two models.
READ = """
import sys, torch
from transformers import AutoModelForCausalLM
for place in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(place, revision="main")
    with torch.no_grad():
        print(model(torch.tensor([[5, 6, 7]])).logits.double().sum().item())
"""


#: Pushes, and is cut short after the upload of the large files.
CUT = """
import sys
from titanlite.features.hub.contact import HubError
from titanlite.cli.main import main
from titanlite.cli.push import upload
additions = upload._additions
def cut(*about):
    additions(*about)
    raise HubError("cut short")
upload._additions = cut
sys.exit(main(["push", *sys.argv[1:]]))
"""

#: Pushes, while somebody else commits to the branch.
RACE = """
import os
import sys
from huggingface_hub import CommitOperationAdd, HfApi
from titanlite.cli.main import main
from titanlite.cli.push import upload
additions = upload._additions
heads = upload.heads
def commit(repository, branch, name):
    HfApi().create_branch(repository, branch=branch, exist_ok=True)
    other = [CommitOperationAdd(name, b"theirs")]
    HfApi().create_commit(repository, other, commit_message="theirs", revision=branch)
def overtaken(api, repository, branch, *more):
    mine = additions(api, repository, branch, *more)
    commit(repository, branch, "theirs.txt")
    return mine
def overtaken_before(repository):
    known = heads(repository)
    if not os.path.exists("once"):
        open("once", "x").close()
        commit(repository, "step-5", "model.safetensors")
    return known
if "--branch" in sys.argv:
    upload.heads = overtaken_before
else:
    upload._additions = overtaken
sys.exit(main(["push", *sys.argv[1:]]))
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
    commit = pushed(hub, home, run, "ada/tiny", "--private")[0]
    uploads = uploads_of(hub)
    branch = uploads.branch("ada/tiny")
    assert uploads.repositories["ada/tiny"].private
    assert commit["commit"] == uploads.repositories["ada/tiny"].branches["main"][-1].oid
    files = {file.name: file.read_bytes() for file in export.iterdir()}
    assert {name: branch[name] for name in files} == files
    extra = {"README.md", "train.toml", "loss.svg", ".gitattributes"}
    assert branch.keys() - files.keys() == extra
    read = python("-c", READ, "ada/tiny", export, env=variables(hub, home))
    assert read.returncode == 0, read.stderr
    published, exported = map(float, read.stdout.split())
    assert published == exported
    # Nothing is left that waits, and nothing is pinned.
    assert not list((run / ".hub").glob("step-*"))
    assert not (step / PIN).exists()
    # Again: no byte and no commit.
    before = len(uploads.puts), len(uploads.messages("ada/tiny"))
    assert pushed(hub, home, run, "ada/tiny")[0]["commit"] == commit["commit"]
    assert (len(uploads.puts), len(uploads.messages("ada/tiny"))) == before
    assert leaks(run) == leaks(export) == []
    assert not any(b"planted" in content for content in branch.values())


@pytest.mark.slow
def test_the_card_has_the_facts_of_the_run(golden: GoldenRun, hub: HubServer, home: Path) -> None:
    run = golden.copy(home / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 24, "eval/quiz/acc": 0.625, "eval/quiz/acc_norm": 0.5}\n')
    push(hub, home, run, "ada/tiny", "--step", STEPS, "--step", "latest")
    branches = uploads_of(hub).repositories["ada/tiny"].branches
    assert set(branches) == {"main", f"step-{STEPS}", f"step-{MORE}"}
    card = uploads_of(hub).branch("ada/tiny", f"step-{MORE}")["README.md"].decode()
    manifest = json.loads((run / "checkpoint" / f"step-{MORE}" / "manifest.json").read_text())
    loss = manifest["validation_loss"]
    _, head, body = card.split("---\n", 2)
    data = yaml.safe_load(head)
    assert data["library_name"] == "transformers"
    assert data["tags"] == ["titanlite"]
    (result,) = data["model-index"][0]["results"]
    figures = {one["type"]: one["value"] for one in result["metrics"]}
    assert figures == {"acc": 0.625, "acc_norm": 0.5}
    for fact in (
        "| architecture | LlamaForCausalLM |",
        f"| step | {MORE} of {MORE} |",
        f"| tokens of training | {manifest['train']['tokens_seen']:,} |",
        f"| loss on the held-out text | {loss:.4f} nats per token |",
        "| ranks | 2 |",
        f"torch {manifest['versions']['torch']}",
        f'revision="step-{MORE}"',
        "| quiz/acc | 0.6250 |",
        "- c4_test",
        "compared with those of transformers: they differ by 0.0e+00",
        "![Loss over the steps of training](loss.svg)",
        "[training]",
    ):
        assert fact in body, fact
    # Later figures are none of step 20.
    other = uploads_of(hub).branch("ada/tiny", f"step-{STEPS}")["README.md"].decode()
    assert "quiz" not in other
    # No place of this machine, and no table of a job.
    assert str(home) not in card
    assert '"/' not in card
    assert "\n[launch]" not in card


def test_a_list_of_ignored_files_on_the_hub_leaves_no_weights_out(
    hub: HubServer, home: Path, tmp_path: Path
) -> None:
    export = _shards(tmp_path / "export", [4000])
    files = uploads_of(hub).make("ada/parts").branches["main"][-1].files
    files[".gitignore"] = b"*.bin\n*.safetensors\n"
    before = dict(files)
    refused = push(hub, home, export, "ada/parts", code=exit_codes.CONFIG)
    assert "a .gitignore in ada/parts, branch main, leaves out model" in refused.stderr
    assert uploads_of(hub).branch("ada/parts") == before


def test_pushes_wait_for_each_other_and_leave_no_lock(tmp_path: Path) -> None:
    work = tmp_path / "titanlite-hub"
    inside: list[int] = []

    def enter(number: int) -> None:
        for _ in range(20):
            with locked(work):
                inside.append(number)
                time.sleep(0.001)
                assert inside == [number]
                inside.clear()

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(enter, number) for number in range(4)]:
            done.result()
    assert not work.exists()


def test_a_push_that_was_killed_goes_on_and_sends_no_file_twice(
    golden: GoldenRun, hub: HubServer, home: Path, tmp_path: Path
) -> None:
    export = _shards(tmp_path / "export", [4000, 5000, 6000])
    # With a byte order mark, as some editors write it.
    (export / "README.md").write_text("\ufeff---\nlicense: mit\n---\n# My words\n")
    (export / "onnx").mkdir()
    (export / ".cache").mkdir()
    (export / "vocab").symlink_to("nowhere")
    uploads = uploads_of(hub)
    # The second file comes in whole, and its answer does not.
    hub.fail("/lfs/whole/*", method="PUT", stall=60, after=1)
    words = [sys.executable, "-m", "titanlite", "push", export, "ada/parts"]
    process = subprocess.Popen(
        list(map(str, words)), env=environment(**variables(hub, home)), cwd=home
    )
    deadline = time.monotonic() + 60
    while len(uploads.puts) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert len(uploads.puts) == 2
    assert list(uploads.branch("ada/parts")) == [".gitattributes"]
    said = push(hub, home, export, "ada/parts").stderr
    assert "not uploaded, as folder, hidden or broken link: .cache/, onnx/, vocab" in said
    assert re.search(r"main: 4 of 4: model-2.safetensors, 5.9 KiB, 5.9 KiB left", said)
    assert len(uploads.puts) == len(set(uploads.puts)) == 3
    branch = uploads.branch("ada/parts")
    for file in export.glob("[!R]*.*"):
        assert branch[file.name] == file.read_bytes()
    assert branch["README.md"].startswith(b"---\nlicense: mit\n")
    assert b"# My words" in branch["README.md"]
    # What a push would refuse, a dry run refuses.
    (export / "README.md").write_text("# Other words\n")
    refused = push(hub, home, export, "ada/parts", "--dry-run", code=exit_codes.CONFIG)
    assert "differ in the text" in refused.stderr
    assert "15,000" not in branch["README.md"].decode()
    assert "| parameters | 3,750 |" in branch["README.md"].decode()


def test_large_files_go_to_the_store_of_xet_where_its_client_is_installed(
    hub: HubServer, home: Path, tmp_path: Path
) -> None:
    pytest.importorskip("hf_xet")
    export = _shards(tmp_path / "export", [400_000, 300_000])
    for file in export.glob("*.safetensors"):
        content = file.read_bytes()
        head = 8 + int.from_bytes(content[:8], "little")
        file.write_bytes(content[:head] + os.urandom(len(content) - head))
    push(hub, home, export, "ada/parts", HF_HUB_DISABLE_XET="0")
    branch = uploads_of(hub).branch("ada/parts")
    for file in export.iterdir():
        assert branch[file.name] == file.read_bytes()
    assert len(hub.of("/cas/v1/xorbs/*", "POST")) == len(uploads_of(hub).puts) == 2
    assert not hub.of("/lfs/*", "PUT")
    # Its logs and caches have no token; a store that refuses is told.
    assert leaks(home) == []
    hub.fail("/cas/*", method="POST", status=403, times=None)
    old = (export / "model-0.safetensors").read_bytes()
    (export / "model-0.safetensors").write_bytes(old[:-200_000] + os.urandom(200_000))
    said = push(hub, home, export, "ada/parts", HF_HUB_DISABLE_XET="0", code=exit_codes.CONFIG)
    assert "model-0.safetensors cannot be uploaded to ada/parts" in said.stderr


@pytest.mark.slow
def test_an_export_that_waits_is_uploaded_though_its_checkpoint_is_gone(
    golden: GoldenRun, hub: HubServer, home: Path
) -> None:
    run = golden.copy(home / "run")
    hub.fail("/api/models/ada/tiny/commit/*", method="POST", status=403, times=1)
    said = push(hub, home, run, "ada/tiny", "--step", STEPS, code=exit_codes.CONFIG).stderr
    assert "ada/tiny, branch main, takes no commit" in said
    (waiting,) = (run / ".hub").glob("step-20-*[0-9a-f]")
    content = (waiting / "model.safetensors").read_bytes()
    uploads = uploads_of(hub)
    sent = list(uploads.puts)
    for file in (run / "checkpoint" / f"step-{STEPS}").iterdir():
        file.unlink()
    (run / "checkpoint" / f"step-{STEPS}").rmdir()
    said = push(hub, home, run, "ada/tiny", "--step", STEPS).stderr
    assert "exporting" not in said
    assert uploads.puts == sent
    assert uploads.branch("ada/tiny")["model.safetensors"] == content
    assert "they differ by 0.0e+00" in uploads.branch("ada/tiny")["README.md"].decode()
    # Without the export the steps are named.
    said = push(hub, home, run, "ada/tiny", "--step", STEPS, code=exit_codes.CHECKPOINT).stderr
    assert "has no step-20 (steps there: 10, 24)" in said


@pytest.mark.slow
def test_faults_of_the_network_are_tried_again_and_refusals_are_told(
    hub: HubServer, home: Path, tmp_path: Path
) -> None:
    export = _shards(tmp_path / "export", [4000, 5000])
    uploads = uploads_of(hub)
    uploads.part = 3000
    hub.fail("/lfs/part/*", method="PUT", status=500, after=1, times=1)
    hub.fail("/lfs/part/*", method="PUT", after=3, times=1)
    push(hub, home, export, "ada/parts")
    branch = uploads.branch("ada/parts")
    assert branch["model-1.safetensors"] == (export / "model-1.safetensors").read_bytes()
    assert len(uploads.puts) == 4
    (export / "model-1.safetensors").write_bytes((export / "model-0.safetensors").read_bytes())
    hub.fail("*/info/lfs/objects/batch", method="POST", status=403, times=None)
    said = push(hub, home, export, "ada/parts", code=exit_codes.CONFIG).stderr
    assert re.search(r"error: model-\d.safetensors cannot be uploaded to ada/parts: .*403", said)
    hub.faults.clear()
    hub.fail("/lfs/*", method="PUT", status=403, times=None)
    uploads.objects.clear()
    said = push(hub, home, export, "ada/parts", code=exit_codes.CONFIG).stderr
    assert "Signature" not in said


@pytest.mark.slow
def test_weights_of_another_run_and_words_of_people_stay(
    golden: GoldenRun, hub: HubServer, home: Path, tmp_path: Path
) -> None:
    run = golden.copy(home / "run", newest=STEPS)
    uploads = uploads_of(hub)
    uploads.make("ada/tiny")
    files = uploads.branch("ada/tiny")
    files["model-0.safetensors"] = b"other weights"
    files["LICENSE"] = b"mine"
    files["onnx/model.safetensors"] = b"my own, in a folder"
    files["README.md"] = b"---\nlicense: mit\ntags: [mine]\n---\n\n# My words\n"
    said = push(hub, home, run, "ada/tiny", "--no-verify", code=exit_codes.CONFIG).stderr
    assert "holds weights that no push of titanlite wrote (model-0.safetensors)" in said
    assert "exporting" not in said
    push(hub, home, run, "ada/tiny", "--no-verify", "--force", "--message", "as I say")
    branch = uploads.branch("ada/tiny")
    assert "model-0.safetensors" not in branch
    assert branch["LICENSE"] == b"mine"
    assert branch["onnx/model.safetensors"] == b"my own, in a folder"
    card = branch["README.md"].decode()
    data = yaml.safe_load(card.split("---\n")[1])
    assert data["license"] == "mit"
    assert data["tags"] == ["mine", "titanlite"]
    assert card.index("# My words") < card.index("<!-- titanlite")
    assert "Check of the export" not in card
    assert uploads.messages("ada/tiny")[-1] == "as I say"
    # The same run needs no --force; another one does.
    push(hub, home, run, "ada/tiny", "--step", 10, "--no-verify")
    card = uploads.branch("ada/tiny")["README.md"].decode()
    assert card.count("# My words") == card.count("<!-- titanlite: end") == 1
    other = _shards(tmp_path / "other", [4000])
    said = push(hub, home, other, "ada/tiny", code=exit_codes.CONFIG).stderr
    assert "holds weights of another run (model.safetensors)" in said


@pytest.mark.slow
def test_checkpoints_in_a_store_are_found_by_the_config_of_the_run(
    golden: GoldenRun, hub: HubServer, home: Path
) -> None:
    run = golden.copy(home / "run", newest=STEPS)
    with s3.serving() as port:
        bucket = s3.new_bucket(port)
        for file in (run / "checkpoint" / f"step-{STEPS}").iterdir():
            bucket.client.put_object(
                Bucket=bucket.name,
                Key=f"run/checkpoint/step-{STEPS}/{file.name}",
                Body=file.read_bytes(),
            )
        objects = bucket.objects()
        push(hub, home, run, "ada/local", "--no-verify")
        config = run / "config.toml"
        old = 'folder = "checkpoint"'
        assert old in config.read_text()
        config.write_text(config.read_text().replace(old, f'folder = "{bucket.root}"'))
        push(hub, home, run, "ada/tiny", "--no-verify", **bucket.environment)
        assert bucket.objects() == objects
    uploads = uploads_of(hub)
    there = uploads.branch("ada/tiny")
    weights = uploads.branch("ada/local")["model.safetensors"]
    assert there["model.safetensors"] == weights
    assert bucket.name not in there["README.md"].decode()


@pytest.mark.slow
def test_a_commit_of_somebody_else_meanwhile_is_not_overwritten(
    hub: HubServer, home: Path, tmp_path: Path
) -> None:
    export = _shards(tmp_path / "export", [4000])
    done = python("-c", RACE, export, "ada/tiny", env=variables(hub, home), cwd=home)
    assert done.returncode == exit_codes.CONFIG
    assert "error: ada/tiny, branch main, takes no commit" in done.stderr
    uploads = uploads_of(hub)
    assert set(uploads.branch("ada/tiny")) == {".gitattributes", "theirs.txt"}
    push(hub, home, export, "ada/tiny")
    assert uploads.branch("ada/tiny")["theirs.txt"] == b"theirs"
    assert len(uploads.puts) == 1
    # Weights of somebody else on a branch that was not there a moment before.
    words = [export, "ada/tiny", "--branch", "step-5"]
    done = python("-c", RACE, *words, env=variables(hub, home), cwd=home)
    assert "error: ada/tiny, branch step-5, takes no commit" in done.stderr
    assert uploads.branch("ada/tiny", "step-5")["model.safetensors"] == b"theirs"
    # A new branch that is cut short is none, and begins as main was when it was read.
    words[-1] = "step-6"
    done = python("-c", CUT, *words, env=variables(hub, home), cwd=home)
    assert "cut short" in done.stderr
    assert "step-6" not in uploads.repositories["ada/tiny"].branches
    push(hub, home, *words)
    assert set(uploads.branch("ada/tiny")) <= set(uploads.branch("ada/tiny", "step-6"))


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(
    ("token", "repository", "more", "says"),
    [
        ("", "ada/tiny", {}, "there is no token for the hub (HF_TOKEN is empty): set HF_TOKEN"),
        ("hf_unknown", "ada/tiny", {}, "the hub does not know the token"),
        ("hf_planted_é", "ada/tiny", {}, "has odd characters: https://huggingface.co/settings"),
        ("hf_planted_eve", "eve/tiny", {}, "the token of eve may only read"),
        ("hf_planted_bob", "ada/tiny", {}, "bob may not write to ada/tiny. Name a repository"),
        ("hf_planted_bob", "ada/new", {}, "cannot make it: the owners open to this token are bob"),
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
        ([export, "ada/tiny", "--step", "last"], "expected a number, latest or best, got 'last'"),
        ([export, "ada/tiny", "--step", "²"], "expected a number, latest or best, got '²'"),
        ([export, "ada/tiny", "--step", "3"], "is one set of weights: --step says nothing here"),
        ([export, "ada/tiny", "--dtype", "float16"], "is exported already: --dtype says nothing"),
    ]
    for words, says in cases:
        done = titanlite("push", *words, env=variables(hub, home), cwd=home)
        assert done.returncode in (exit_codes.CONFIG, exit_codes.CHECKPOINT)
        assert says in done.stderr
    assert hub.requests == []


def test_a_dry_run_shows_the_card_and_changes_nothing(
    golden: GoldenRun, hub: HubServer, home: Path
) -> None:
    run = golden.copy(home / "run")
    said = push(hub, home, run, "lab/tiny", "--step", "best", "--private", "--dry-run").stdout
    best = _best_step(run)
    assert f"step-{best} → lab/tiny, which would be made, private, branch main, as ada" in said
    assert "| ranks | 2 |" in said
    assert uploads_of(hub).repositories == {}
    assert not (run / ".hub").exists()
    # The hub is not asked without a token.
    asked = len(hub.requests)
    env = {**variables(hub, home), "HF_TOKEN": ""}
    done = titanlite("push", run, "lab/tiny", "--dry-run", env=env, cwd=home)
    assert done.returncode == 0, done.stderr
    assert "→ lab/tiny, not asked, branch main, as nobody yet: there is no token" in done.stdout
    assert "| ranks | 2 |" in done.stdout
    assert len(hub.requests) == asked


def _best_step(run: Path) -> int:
    """The learning rate is 0 after step 20: of equal losses the first counts."""
    losses = {}
    for file in run.glob("checkpoint/step-*/manifest.json"):
        manifest = json.loads(file.read_text())
        losses[manifest["step"]] = manifest["validation_loss"]
    return min(losses, key=lambda step: (losses[step], step))


@pytest.mark.parametrize(
    "name",
    [
        "checkpoint",
        f"checkpoint/step-{STEPS}",
        f"checkpoint/step-{STEPS}/manifest.json",
        "config.toml",
        ".hub",
        ".hub/lock",
        ".hub/run",
        ".hub/step-20-0123456789ab",
    ],
)
def test_nothing_is_uploaded_or_emptied_through_a_link_in_a_run(
    golden: GoldenRun, tmp_path: Path, name: str
) -> None:
    """A foreign folder could hold links to files that nobody meant to upload, or to lose."""
    run = golden.copy(tmp_path / "run", newest=STEPS)
    private = golden.copy(tmp_path / "private", newest=STEPS)
    (private / ".hub" / ".partial-x").mkdir(parents=True)
    (private / ".hub" / "lock").write_text("not empty")
    before = sorted(str(path) for path in private.rglob("*"))
    link = run / name
    link.parent.mkdir(exist_ok=True)
    if link.is_dir():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    target = private / name
    link.symlink_to(target if target.exists() else private)
    with pytest.raises(LinkError, match=f"{link} is a link"):
        subject = find_subject(run, None, run / ".hub")
        assert subject.config_toml
        with locked(run / ".hub"):
            pytest.fail("it would be uploaded")
    assert sorted(str(path) for path in private.rglob("*")) == before
    assert (private / ".hub" / "lock").read_text() == "not empty"


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
