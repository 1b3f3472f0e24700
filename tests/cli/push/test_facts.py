"""What a card tells of a run, and what it leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.checkpoints import MANIFEST
from titanlite.checkpoint.errors import CheckpointError
from titanlite.cli.pictures import Axis, ticks
from titanlite.cli.push.card import Card, Place, make_card, merged
from titanlite.cli.push.curve import picture
from titanlite.cli.push.facts import Weights, shown_config, texts, weights_in
from titanlite.cli.push.results import index_of
from titanlite.cli.push.subject import Subject
from titanlite.config.toml import loads, quote
from titanlite.features.hub.branches import run_of
from titanlite.features.hub.contact import HubError


def _subject(toml: str) -> Subject:
    manifest = type(MANIFEST)(**{**vars(MANIFEST), "config": {"toml": toml}})
    return Subject(Path("/nowhere/step-5"), 5, manifest, None)


def test_a_config_for_everybody_has_no_secret_no_private_path_and_no_job() -> None:
    toml = """[job]
dump_folder = "/home/ada/secret-project/run"  # /home/ada/mine.toml:3
description = "a run"  # /home/ada/mine.toml:4

[launch]
queue = "gpu-of-ada"
environment.HF_TOKEN = "hf_planted"

[[launch.volumes]]
name = "volume-of-ada"

[training]
dataset_path = ["~/texts/a.jsonl", 's3://bucket-of-ada/b.jsonl', "https://u:p@host/c.jsonl?k=1"]
steps = 8

[checkpoint]
interval = 4
hub = "lab/tiny"
"""
    shown = shown_config(_subject(toml))
    values = loads(shown)
    assert values["job"] == {"dump_folder": "…/run", "description": "a run"}
    assert "launch" not in values
    assert values["checkpoint"] == {"interval": 4}
    assert values["training"]["steps"] == 8
    assert values["training"]["dataset_path"][:2] == ["…/a.jsonl", "…/b.jsonl"]
    for secret in ("ada", "planted", "u:p", "k=1"):
        assert secret not in shown


@pytest.mark.parametrize(
    "path",
    [
        "/home/ada/o'brien's/x.jsonl",
        '/home/ada/"quoted"/x.jsonl',
        "/home/ada/back\\slash/x.jsonl",
        "../../home/ada/x.jsonl",
        "$HOME/../ada/x.jsonl",
        "file:///home/ada/x.jsonl",
        "S3://bucket-of-ada/x.jsonl",
        "memory://ada/x.jsonl",
        "\\\\server-of-ada\\x.jsonl",
        "C:/Users/ada/x.jsonl",
    ],
)
def test_private_folders_are_left_out_however_they_are_written(path: str) -> None:
    written = quote(path)
    toml = f'[training]\ndataset_path = {written}  # /home/ada/o\'brien "x".toml:3\nsteps = 8\n'
    toml += f"[model.overrides]\n{written} = [{written}, 'a # b', {{path = {written}}}]\n"
    shown = shown_config(_subject(toml))
    assert "ada" not in shown
    assert "brien" not in shown
    values = loads(shown)
    assert values["training"] == {"dataset_path": "…/x.jsonl", "steps": 8}
    expected = ["…/x.jsonl", "a # b", {"path": "…/x.jsonl"}]
    assert values["model"]["overrides"] == {"…/x.jsonl": expected}


def test_public_places_and_other_texts_stay() -> None:
    texts = ["hf://datasets/me/web", "https://host/c.jsonl", "data/x", "50% / 50%", "a#b", ""]
    shown = shown_config(_subject(f"[x]\ny = {quote(texts)}"))
    assert loads(shown) == {"x": {"y": texts}}


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        ('[training]\ndataset = "c4"', [("allenai/c4", "allenai/c4", None)]),
        ('[training]\ndataset = "c4_test"', [("c4_test", "", None)]),
        ('[training]\ndataset = "x"\ndataset_path = "data/c4"', [("…/c4", "", None)]),
        (
            '[[data.source]]\nname = "me/books"\nweight = 2.0\n'
            '[[data.source]]\nname = "web"\npath = "hf://datasets/me/web/*.parquet"',
            [("me/books", "me/books", 2.0), ("me/web", "me/web", None)],
        ),
        ("", []),
    ],
)
def test_texts_are_named_without_their_folders(
    toml: str, expected: list[tuple[str, str, float | None]]
) -> None:
    found = [(text.name, text.dataset, text.weight) for text in texts(_subject(toml))]
    assert found == expected


def test_a_text_of_the_run_is_no_marker_no_table_and_no_html() -> None:
    place = Place("ada/tiny", "main")
    words = quote("<!-- titanlite: end --> <!-- titanlite 0f: x -->")
    path = quote("data/<img src=x> [a](b) | `c`\n# d.jsonl")
    toml = f"[job]\ndescription = {words}\n[training]\ndataset_path = {path}\n"
    weights = Weights(1, ("F32",), {"architectures": ["A | B\n\n# C"]}, False)
    card = make_card(_subject(toml), weights, place, ("a line\n## of two",), False)
    text = merged(card, "# My words\n")
    assert merged(card, text) == text
    assert merged(card, text.replace("\n", "\r\n")).count("\n## Config") == 1
    assert run_of(text) == run_of(text.replace("\n", "\r\n")) == card.run_id
    lines = text.splitlines()
    assert r"| architecture | A \| B # C |" in lines
    assert "- a line ## of two" in lines
    assert r"- …/\<img src=x> \[a](b) \| \`c\` # d.jsonl" in lines


def test_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no \*.safetensors"):
        weights_in(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    for content in (b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]", b"\x03" + b"\0" * 7 + b'{"a'):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match="model.safetensors is no safetensors file"):
            weights_in(tmp_path)
    header = b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    for text in ("[]", "[" * 100_000, "{"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match="config.json cannot be read"):
            weights_in(tmp_path)


def test_a_card_with_damaged_metadata_keeps_its_text() -> None:
    card = Card("facts", {"tags": ["titanlite"]}, "0f")
    text = merged(card, "---\n: [\n---\nmy words\n")
    assert "my words" in text
    assert text.startswith("---\ntags:\n- titanlite\n---")
    again = merged(Card("other facts", {"tags": ["titanlite"]}, "0f"), text)
    assert again == text.replace("facts", "other facts")


def _index(card: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(card.split("---\n")[1]).get("model-index", [])
    return found


def test_figures_take_the_place_of_their_own_and_those_of_others_stay() -> None:
    theirs = {
        "task": {"type": "text-generation", "name": "ours by hand"},
        "dataset": {"type": "quiz", "name": "Quiz"},
        "metrics": [
            {"type": "acc", "value": 0.1, "verified": False},
            {"type": "acc", "value": 0.3, "args": {"shots": 5}},
            {"type": "f1", "value": 0.2, "own": "kept"},
        ],
        "source": {"url": "https://x", "name": "them"},
    }
    other = {**theirs, "task": {"type": "question-answering"}}
    head = {"license": "mit", "model-index": [{"name": "Theirs", "results": [theirs, other]}]}
    readme = f"---\n{yaml.safe_dump(head)}---\nwords\n"

    def written(before: str, **tasks: float) -> str:
        named = {name.replace("_", "/"): value for name, value in tasks.items()}
        rows = "\n".join(f"| {name} | {value:.4f} |" for name, value in named.items())
        data = {"model-index": index_of("tiny", named)} if named else {}
        return merged(Card(f"| figure | |\n|---|---|\n{rows}", data, "0f"), before)

    first = written(readme, quiz_acc=0.5, arc_acc=0.25)
    (model,) = _index(first)
    assert model["name"] == "Theirs"
    kept, whole, quiz, arc = model["results"]
    assert kept == {**theirs, "metrics": theirs["metrics"][1:]}
    assert whole == other
    assert quiz["metrics"] == [{"type": "acc", "value": 0.5}]
    assert arc["dataset"] == {"name": "arc", "type": "arc"}
    # Newer weights, with a figure less.
    second = written(first, quiz_acc=0.625)
    assert _index(second)[0]["results"][2:] == [
        {**quiz, "metrics": [{"type": "acc", "value": 0.625}]}
    ]
    assert _index(written(second))[0]["results"] == [kept, whole]
    assert written(written(second), quiz_acc=0.625) == second
    # Without others none is left.
    assert _index(written(written("", quiz_acc=0.5))) == []
    damaged = "---\nmodel-index:\n- name: x\n---\n"
    assert _index(written(damaged)) == [{"name": "x"}]
    assert _index(written(damaged, quiz_acc=0.5))[0]["name"] == "tiny"
    # That of the branch is damaged, and that of the folder is not.
    assert _index(merged(Card("facts", {}, "0f"), damaged, written("", quiz_acc=0.5)))


def test_the_readme_of_a_folder_is_kept_and_two_that_differ_are_refused() -> None:
    card = Card("facts", {"tags": ["titanlite"]}, "0f")
    own = "---\nlicense: mit\ntags: [mine]\n---\n# My words\n"
    first = merged(card, "", own)
    assert "license: mit" in first
    assert "# My words" in first
    assert yaml.safe_load(first.split("---\n")[1])["tags"] == ["mine", "titanlite"]
    assert merged(card, first, own) == first == merged(card, first)
    # One that came from the hub, and one without words there.
    assert merged(card, first, first) == first == merged(card, "", first)
    assert "# My words" in merged(card, merged(card, ""), own)
    for other, what in (("# Others\n", "the text"), ("---\nlicense: bsd\n---\n", "license")):
        with pytest.raises(HubError, match=f"differ in {what}: make them the same"):
            merged(card, first, other)


def test_the_picture_has_both_losses_and_needs_two_points() -> None:
    rows = [{"step": step, "loss": 9.0 / step, "lr": 1.0} for step in range(1, 1001)]
    rows += [{"step": 500, "validation_loss": 2.0}, {"step": 501, "loss": float("nan")}]
    found = picture(rows, "a <title>") or ""
    assert "a &lt;title&gt;" in found
    assert "on the held-out text" in found
    # 1000 points are thinned.
    assert 300 < found.count(",") < 500
    assert picture(rows[:1], "x") is None


@pytest.mark.parametrize(
    "losses",
    [
        [2.0, 2.0],
        [0.0, 0.0],
        [5e-324, 1e-323],
        [1e-308, 2e-308],
        [1e-13, 2e-13],
        [1.0, 1.0 + 2e-16],
        [3.0, 3.0 + 1e-9],
        [1e15, 1e15 + 0.1],
        [-1.7e308, 1.7e308],
    ],
)
def test_losses_that_hardly_differ_have_a_picture(losses: list[float]) -> None:
    rows = [{"step": step, "loss": loss} for step, loss in enumerate(losses)]
    assert "nan" not in (picture(rows, "x") or "nan")
    lines = Axis(ticks(*losses, 6), 0, 100).lines()
    assert 2 <= len(lines) == len(dict(lines)) <= 12
    assert lines[-1][1] == 100
