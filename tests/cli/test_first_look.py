"""`config check`, `run` and `train` open tokenizer and first records before any process starts."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.support.hf import bundled_as_json
from titanlite.assembly.early_text_check import first_look
from titanlite.cli import train as train_command
from titanlite.cli.main import main
from titanlite.data import tokenizer
from titanlite.resolve.load import check_config


def _never(*_: Any) -> NoReturn:
    raise AssertionError("a process starts, or a server is asked")


def _fault(kind: str, folder: Path) -> tuple[list[str], str]:
    """Return flags with a fault in tokenizer or text, and words of the error."""
    lines = [json.dumps({"text": "whole"})] * 2 + [json.dumps({"body": "none"})]
    (folder / "a.jsonl").write_text("\n".join(lines))
    if kind == "tokenizer":
        bundled_as_json().save(str(folder / "tokenizer.json"))
        content = (folder / "tokenizer.json").read_text()
        (folder / "tokenizer.json").write_text(content[:-9])
        return [f"--model.tokenizer_path={folder}"], "tokenizer.json is JSON that is damaged"
    if kind == "vocabulary":
        return ["--model.vocab_size=2000"], "2304"
    if kind == "tokens":  # of the other bundled tokenizer
        (folder / "b.jsonl").write_text(lines[0])
        words = ["data", "prepare", str(folder / "b.jsonl"), "--out", str(folder / "tokens")]
        assert main([*words, "--tokenizer=bundled", "--workers=1"]) == 0
        path = f"--training.dataset_path={folder}/tokens"
        return [path, "--model.name=llama2"], "was prepared with the tokenizer"
    return [f"--{kind}.dataset_path={folder}/a.jsonl"], "a.jsonl, line 3"


@pytest.mark.parametrize("kind", ["tokenizer", "vocabulary", "tokens", "training", "validation"])
def test_a_fault_ends_the_command_before_any_process_starts(kind, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(first_look, "__defaults__", (600.0,))
    monkeypatch.setattr(train_command, "start_ranks", _never)
    flags, said = _fault(kind, tmp_path)
    for words in (["config", "check"], ["train", "--nproc=2"]):
        capfd.readouterr()
        assert main([*words, "debug_model.toml", *flags]) == 2
        assert said in capfd.readouterr().err


def test_text_behind_a_url_and_missing_files_are_left_to_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", _never)
    monkeypatch.setattr(socket, "getaddrinfo", _never)
    for flag in (
        "training.dataset=c4",
        "training.dataset_path=https://example.com/a.jsonl",
        "model.tokenizer_path=https://example.com/tokenizer.json",
        f"training.dataset_path={tmp_path}/none.jsonl",
        f"model.tokenizer_path={tmp_path}/none.json",
    ):
        run = check_config(["--job.config_file=debug_model.toml", f"--{flag}"], training=False)[1]
        assert first_look(run, 600.0) == ""


def test_a_tokenizer_with_far_fewer_ids_than_the_model_is_told(tmp_path, capsys):
    bundled_as_json().save(str(tmp_path / "tokenizer.json"))
    words = ["config", "check", "debug_model.toml", f"--model.tokenizer_path={tmp_path}"]
    for size, told in ((2 * 2304, False), (2 * 2304 + 1, True)):
        assert main([*words, f"--model.vocab_size={size}"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert (
            f"has 2,304 ids, and llama3 debugmodel with n_layers = 6 {size:,}: " in said
        ) == told


def test_a_look_that_takes_long_stops_nothing(monkeypatch):
    end = threading.Event()
    monkeypatch.setattr(tokenizer, "load_tokenizer", lambda *_: end.wait(600))
    said = first_look(check_config(["--job.config_file=debug_model.toml"])[1], 0.01)
    end.set()
    assert said == "tokenizer and first records take more than 0.01 s: not all were looked at"
