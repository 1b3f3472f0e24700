"""`titanlite data at-step` finds the documents that a step was trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.pool import Pools
from tests.support.steps import train_rows
from tests.support.texts import write_texts
from tests.support.tiny import TWO_LAYERS
from titanlite.cli import main as cli
from titanlite.dist.dist_env import DistEnv

FLAGS = [
    *TWO_LAYERS,
    "--training.seq_len=32",
    "--training.batch_size=2",
    "--training.global_batch_size=8",
    "--training.steps=1",
    "--data.skip_steps=[2]",
    "--checkpoint.enable_checkpoint",
    "--no-validation.enable",
]


def _run(world: DistEnv, folder: str, *flags: str) -> None:
    train_rows(world, folder, *FLAGS, *flags)


def test_at_step_lists_the_documents_of_a_run_until_its_text_has_changed(
    pool: Pools, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = write_texts(
        tmp_path / "text.jsonl", [f"record {n} " + "word " * (n % 40) for n in range(300)]
    )
    pool(1).run(_run, str(tmp_path), f"--training.dataset_path={text}")
    for step, first in ((1, 0), (2, 16), (5, 40)):
        capsys.readouterr()
        assert cli.main(["data", "at-step", str(step), str(tmp_path), "--json"]) == 0
        sequences = json.loads(capsys.readouterr().out)["sequences"]
        assert list(map(int, sequences)) == list(range(first, first + 8))
        for found in sequences.values():
            assert sum(one["tokens"] for one in found) == 32
            assert all(one["file"] == str(text) for one in found)
            assert any(one["text"] for one in found)
    write_texts(text, ["another"])
    assert cli.main(["data", "at-step", "1", str(tmp_path)]) == 2
    assert "the text has changed since: its fingerprint was " in capsys.readouterr().err
