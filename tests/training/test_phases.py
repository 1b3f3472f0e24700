"""Whole runs in phases: the batch and the learning rate change at a border, and nothing else does.

A straight run of steps of four sequences tells the order of the text. The hash of a step is a sum
over its sequences, so the hash of a larger step is the sum over several of the small ones.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.train_runs import flags, global_batches, rows, saved, train, unequal
from titanlite.data.hashes import add_hashes

#: Sequences of each of eight steps, and tokens of one.
SIZES = [4, 4, 8, 8, 8, 12, 12, 4]
SEQ_LEN = 16
#: 4 · 2 + 8 · 3 sequences of 16 tokens come before the third phase.
PHASES = (
    "--data.phase=[{step=3,global_batch_size=8,lr=0.002},"
    "{tokens=512,global_batch_size=12,lr_factor=0.5},{step=8,global_batch_size=4}]"
)


def straight(folder: Path, *more: str) -> list[str]:
    """Return the hash of each four sequences of the text, in order."""
    steps = sum(SIZES) // 4
    wanted = flags(folder, *more, f"--training.steps={steps}", "--no-checkpoint.enable_checkpoint")
    codes, console = train(wanted, 1, folder.parent / "console")
    assert codes == [0], console
    found = global_batches(folder, 1)
    return [found[step] for step in range(1, steps + 1)]


def cut(hashes: list[str], sizes: list[int]) -> dict[int, str]:
    """Return the hash of each step of these sizes."""
    found = {}
    place = 0
    for step, size in enumerate(sizes, 1):
        found[step] = add_hashes(hashes[place : place + size // 4])
        place += size // 4
    return found


def tokens(folder: Path) -> list[int]:
    return [row[4] for row in rows(folder)]


def small_lines(folder: Path) -> Path:
    """Write a folder of JSON lines, which is streamed in lanes."""
    folder.mkdir()
    for number in range(8):
        lines = []
        for line in range(40):
            text = " ".join(f"w{number}x{line}x{word}" for word in range(12))
            lines.append(json.dumps({"text": text}))
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["corpus", "stream", "mixture"])
def test_a_ramp_of_batches_serves_each_sequence_once_on_any_number_of_ranks(
    tmp_path: Path, kind: str
) -> None:
    more: list[str] = []
    if kind != "corpus":
        lines = small_lines(tmp_path / "lines")
        more = ["--data.streaming", "--data.lanes=4", "--data.shuffle_buffer=16"]
        text = f"--training.dataset_path={lines}"
        if kind == "mixture":
            text = f'--data.source=[{{name="a",path="{lines}",weight=2}},{{name="c4_validation"}}]'
        more.append(text)
    wanted = cut(straight(tmp_path / "straight", *more), SIZES)
    for ranks in (1, 2, 4):
        folder = tmp_path / str(ranks)
        codes, console = train(flags(folder, *more, PHASES), ranks, tmp_path / "console")
        assert codes == [0] * ranks, console
        assert global_batches(folder, ranks) == wanted
        assert tokens(folder) == [sum(SIZES[:step]) * SEQ_LEN for step in range(1, 9)]
        assert "from here on a step has 8 sequences of 16 tokens, 128 in all; it had 4" in console


@pytest.mark.slow
def test_a_resume_before_at_and_after_a_border_is_exact_also_on_other_ranks(
    tmp_path: Path,
) -> None:
    straight_run = tmp_path / "straight"
    assert train(flags(straight_run, PHASES), 2, tmp_path / "console")[0] == [0, 0]
    wanted = global_batches(straight_run, 2)
    # Checkpoints lie after steps 2, 4 and 6. Borders are after steps 2, 5 and 7.
    for stopped in (2, 4, 5, 6, 7):
        first = tmp_path / f"to-{stopped}"
        codes, console = train(
            flags(first, PHASES, f"--training.steps={stopped}"), 2, tmp_path / "console"
        )
        assert codes == [0, 0], console
        assert saved(first)[-1] == f"step-{stopped}"
        for ranks in (1, 2, 4):
            again = tmp_path / f"{stopped}-{ranks}"
            shutil.copytree(first, again, ignore=shutil.ignore_patterns("batches.*"))
            codes, console = train(flags(again, PHASES), ranks, tmp_path / "console")
            assert codes == [0] * ranks, console
            assert "resume verified" in console or ranks != 2, console
            found = global_batches(again, ranks)
            assert all(found[step] == wanted[step] for step in range(stopped + 1, 9))
            assert tokens(again) == tokens(straight_run)
        assert rows(tmp_path / f"{stopped}-2") == rows(straight_run)
        assert unequal(straight_run, tmp_path / f"{stopped}-2") == []


@pytest.mark.slow
def test_skipped_steps_are_those_of_the_ramp(tmp_path: Path) -> None:
    hashes = straight(tmp_path / "straight")
    folder = tmp_path / "skip"
    wanted = cut(hashes, SIZES)
    more = [PHASES, "--data.skip_steps=[2,4]", "--training.steps=6"]
    codes, console = train(flags(folder, *more), 2, tmp_path / "console")
    assert codes == [0, 0], console
    # Undisturbed, step 2 has sequences 4 to 8, and step 4 those of 16 to 24.
    left = [hashes[0], *hashes[2:4], *hashes[6:]]
    assert global_batches(folder, 2) == cut(left, SIZES[:6])
    assert global_batches(folder, 2)[1] == wanted[1]


@pytest.mark.slow
def test_a_pipeline_follows_the_batch(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    pipeline = tmp_path / "pipeline"
    more = ["--model.overrides.n_layers=2", "--training.batch_size=2", PHASES]
    more.append("--no-checkpoint.enable_checkpoint")
    assert train(flags(plain, *more), 1, tmp_path / "console")[0] == [0]
    more += ["--experimental.pipeline_parallel_degree=2"]
    more += ["--experimental.pipeline_parallel_schedule=GPipe"]
    codes, console = train(flags(pipeline, *more), 2, tmp_path / "console")
    assert codes == [0, 0], console
    for one, other in zip(rows(plain), rows(pipeline), strict=True):
        assert one[1:3] == pytest.approx(other[1:3], rel=2e-5)
        assert one[3:] == other[3:]


def test_another_batch_for_steps_that_are_done_is_refused(tmp_path: Path) -> None:
    more = ["--training.steps=4", "--data.phase=[{step=3,global_batch_size=8}]"]
    assert train(flags(tmp_path / "run", *more), 1, tmp_path / "console")[0] == [0]
    late: list[Any] = ["--training.steps=6", "--data.phase=[{step=2,global_batch_size=12}]"]
    codes, console = train(flags(tmp_path / "run", *late), 1, tmp_path / "console")
    assert codes != [0]
    assert "global batch: 8 there, 12 here" in console
    later = ["--training.steps=6", f"{more[1][:-1]},{{step=5,global_batch_size=12}}]"]
    codes, console = train(flags(tmp_path / "run", *later), 1, tmp_path / "console")
    assert codes == [0], console
    assert tokens(tmp_path / "run") == [64, 128, 256, 384, 576, 768]
