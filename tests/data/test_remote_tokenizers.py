"""Tokenizers of the hub and behind URLs: the ids of the same file on disk, and an error for each
refusal.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.hub_server import HubServer
from tests.support.processes import python
from titanlite.config.checks import missing_files
from titanlite.config.load import load
from titanlite.data import DataError
from titanlite.data.chat import load_template
from titanlite.data.tokenizer import BUNDLED_SENTENCEPIECE, BUNDLED_TOKENIZER, load_tokenizer

TEXT = "In the beginning God created naïve cafés."
#: Runs commands given as JSON; prints exit code and output of each.
SCRIPT = """
import contextlib, io, json, os, sys
from titanlite.cli.main import main
for words in json.loads(sys.argv[1]):
    os.environ["HF_TOKEN"] = words.pop(0) if words[0].startswith("hf_") else ""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(["tokenizer", "fetch", *words])
    print(json.dumps([code, said.getvalue()]))
"""


def word_tokenizer(folder: Path) -> Path:
    """Write a tokenizer.json whose BOS and EOS only the file beside it names."""
    import tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[B]": 0, "[E]": 1, "In": 2, "?": 3}, unk_token="?")
    )
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "[B]", "eos_token": "[E]"})
    )
    return folder


def test_fetch_downloads_what_there_is_and_explains_what_there_is_not(tmp_path: Path) -> None:
    models = tmp_path / "hub" / "models" / "owner"
    word_tokenizer(models / "words")
    (models / "words" / "chat_template.jinja").write_text("{{ messages }}")
    (models / "words" / "model.safetensors").write_bytes(b"weights")
    for name in ("gated", "Llama-3"):
        (models / name / "original").mkdir(parents=True)
        shutil.copy(BUNDLED_TOKENIZER, models / name / "original" / "tokenizer.model")
    (models / "bare").mkdir()
    expected = {
        "owner/words --out here": (0, 'tokenizer_path = "here"'),
        "owner/Llama-3": (
            0,
            "assets/hf/Llama-3: original/tokenizer.model of owner/Llama-3; 2,304 ids",
        ),
        "owner/gated": (
            2,
            "owner/gated is gated: ask for access at https://huggingface.co/owner/gated",
        ),
        "hf_right owner/gated": (0, "2,304 ids"),
        "owner/missing": (2, "owner/missing is not on the hub, or not visible to you"),
        "owner/bare": (2, "owner/bare holds no tokenizer.json or tokenizer.model"),
        "owner/words --revision v9": (2, "owner/words, revision v9, is not on the hub"),
        "a/b/c": (2, "a/b/c is not on the hub"),
    }
    with HubServer(tmp_path / "hub", gated={"owner/gated": "hf_right"}) as hub:
        commands = json.dumps([words.split() for words in expected])
        done = python("-c", SCRIPT, commands, cwd=tmp_path, env=hub.environment(tmp_path))
        assert not hub.of("*safetensors")
    for (code, part), line in zip(expected.values(), done.stdout.splitlines(), strict=True):
        found, said = json.loads(line)
        assert found == code and part in said, said
    fetched = load_tokenizer(str(tmp_path / "here"))
    assert fetched.encode("In", bos=True, eos=True) == [0, 2, 1]
    assert load_template(None, fetched).source == "{{ messages }}"
    assert load_tokenizer(str(tmp_path / "assets/hf/Llama-3")).encode(
        TEXT
    ) == load_tokenizer().encode(TEXT)


def test_a_url_gives_the_ids_of_its_file(tmp_path: Path) -> None:
    files = word_tokenizer(tmp_path / "hub" / "files")
    shutil.copy(BUNDLED_SENTENCEPIECE, files / "llama2.model")
    (files / "page.json").write_text("<html>")
    with HubServer(tmp_path / "hub") as hub:
        url = f"{hub.url}/files"
        assert load_tokenizer(f"{url}/llama2.model").encode(TEXT) == load_tokenizer(
            family="llama2"
        ).encode(TEXT)
        for words in (load_tokenizer(f"{url}/tokenizer.json"), load_tokenizer(f"{url}/")):
            assert words.encode("In", bos=True, eos=True) == [0, 2, 1]
            with pytest.raises(DataError, match=f"brings no chat template .* in {url}"):
                load_template(None, words)
        config = json.loads((files / "tokenizer_config.json").read_text())
        config |= {"chat_template": "{{ pad_token }}", "pad_token": "[P]"}
        (files / "tokenizer_config.json").write_text(json.dumps(config))
        assert load_template(None, words).prompt([], "") == "[P]"
        (files / "chat_template.jinja").write_text("{{ pad_token * 2 }}")
        assert load_template(None, words).prompt([], "") == "[P][P]"
        for name, message in (
            ("none.json", "none.json does not exist"),
            ("page.json", f"{url}/page.json is a web page"),
            ("sub/", "does not exist: no tokenizer.json or tokenizer.model"),
        ):
            with pytest.raises(DataError, match=message):
                load_tokenizer(f"{url}/{name}")
        hub.gated["files"] = "hf_secret"
        with pytest.raises(DataError, match="cannot be read .*401"):
            load_tokenizer(f"{url}/tokenizer.json")


def test_an_id_of_the_hub_is_refused_with_the_command_that_fetches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "assets").mkdir()
    with pytest.raises(DataError, match="titanlite tokenizer fetch meta-llama/Llama-3.1-8B"):
        load_tokenizer("meta-llama/Llama-3.1-8B")
    hints = {}
    for path in ("meta-llama/Llama-3.1-8B", "./tokenizer.model", "assets/tokenizer.model"):
        (problem,) = missing_files(load([f"--model.tokenizer_path={path}"]))
        hints[path] = problem.remedy
    assert list(hints.values()) == [
        "for a model of the hub: titanlite tokenizer fetch meta-llama/Llama-3.1-8B",
        "",
        "",
    ]
