"""The log of each step's documents: those of its rows, and none twice after a resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import Pools
from tests.support.steps import train_rows
from tests.support.texts import write_texts
from tests.support.tiny import TWO_LAYERS
from titanlite.assembly.datasets import read_training_text
from titanlite.data.documents import documents_of
from titanlite.data.tokenizer import load_tokenizer
from titanlite.dist.dist_env import DistEnv
from titanlite.resolve.load import load_config

FLAGS = [
    *TWO_LAYERS,
    "--training.seq_len=32",
    "--training.batch_size=2",
    "--training.global_batch_size=8",
    "--training.steps=5",
    "--data.skip_steps=[2]",
    "--data.log_documents",
    "--checkpoint.enable_checkpoint",
    "--checkpoint.interval=3",
    "--no-validation.enable",
]


def _run(world: DistEnv, folder: str, *flags: str) -> None:
    train_rows(world, folder, *FLAGS, *flags)


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_each_step_is_there_once_after_a_resume_with_the_documents_of_its_rows(
    pool: Pools, tmp_path: Path
) -> None:
    text = write_texts(
        tmp_path / "text.jsonl", [f"record {n} " + "word " * (n % 40) for n in range(300)]
    )
    pool(2).run(_run, str(tmp_path), f"--training.dataset_path={text}")
    shutil.rmtree(tmp_path / "checkpoint/step-5")
    before = (tmp_path / "documents.jsonl").read_bytes()
    with (tmp_path / "documents.jsonl").open("a") as file:
        file.write('{"step": 5, "sequences"')  # of a process that was killed
    pool(2).run(_run, str(tmp_path), f"--training.dataset_path={text}")
    assert (tmp_path / "documents.jsonl").read_bytes() == before
    rows = _rows(tmp_path / "documents.jsonl")
    assert [list(map(int, row["sequences"])) for row in rows] == [
        list(range(first, first + 8)) for first in (0, 16, 24, 32, 40)
    ]
    assert not list(tmp_path.glob("documents-*"))
    run = load_config("debug_model.toml", 2, [*FLAGS, f"--training.dataset_path={text}"])
    text_rows = read_training_text(run, load_tokenizer())
    for row in rows:
        for number, logged in row["sequences"].items():
            assert sum(one["tokens"] for one in logged) == 32
            found = documents_of(text_rows, int(number), str(text))
            assert logged == [one._asdict() for one in found]


@pytest.mark.slow
def test_ranks_log_their_part_of_a_stream(pool: Pools, tmp_path: Path) -> None:
    files = [tmp_path / f"{n}.jsonl" for n in range(4)]
    for n, file in enumerate(files):
        write_texts(file, [f"file {n} record {i} " + "word " * (i % 9) for i in range(40)])
    flags = [
        f"--data.source=[{{name='own', path='{tmp_path}/*.jsonl'}}, {{name='sft_test'}}]",
        "--data.streaming",
    ]
    pool(2).run(_run, str(tmp_path / "run"), *flags)
    parts = [
        _rows(tmp_path / "run" / name) for name in ("documents.jsonl", "documents-rank_1.jsonl")
    ]
    shutil.rmtree(tmp_path / "run/checkpoint/step-5")
    pool(1).run(_run, str(tmp_path / "run"), *flags)
    assert _rows(tmp_path / "run/documents-rank_1.jsonl") == parts[1][:3], (
        "rank 1 is gone, and its steps 4 and 5 too"
    )
    assert [len(row["sequences"]) for row in _rows(tmp_path / "run/documents.jsonl")] == [
        4,
        4,
        4,
        8,
        8,
    ]
    rows = read_training_text(
        load_config("debug_model.toml", 2, [*FLAGS, *flags]), load_tokenizer()
    )
    for first, *same in zip(*parts, strict=True):
        merged = first["sequences"] | same[0]["sequences"]
        assert len(merged) == 8
        assert len(first["sequences"]) == 4
        for number, logged in merged.items():
            assert logged == [one._asdict() for one in documents_of(rows, int(number), "")]
            assert {one["source"] for one in logged} in ({"own"}, {"sft_test"})
            for one in logged:
                if one["source"] == "own":
                    assert one["name"] == f"{one['file']}:{one['record']}"
                    assert 1 <= one["record"] <= 40
