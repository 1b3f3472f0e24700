"""Killed at each stage of a save: the next start resumes the newest published step, and the end is the same."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.failures.runs import INTERVAL, STEPS, batches, flags, rows, saved, unequal
from titanlite import exit_codes
from titanlite.checkpoint.manifest import steps_in
from titanlite.drill.ranks import train
from titanlite.drill.strike import PUBLISHED, STAGES, Strike
from titanlite.runs.record import read_entries

STRUCK = 4
KEEP = "--checkpoint.keep_latest_k=1"


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Runs that nothing happens to, by the number of their ranks."""
    found = {}
    for ranks in (1, 2):
        folder = found[ranks] = tmp_path_factory.mktemp(f"straight-{ranks}")
        codes, text = train(flags(folder, KEEP), ranks, folder / "console", Strike(batches=str(folder / "batches")))
        assert codes == [exit_codes.DONE] * ranks, text
        assert [row[0] for row in rows(folder)] == list(range(1, STEPS + 1))
    return found


CASES = [
    *((1, "disabled", stage, 0) for stage in STAGES),
    *((1, "async", stage, 0) for stage in ("shard half", "manifest", "manifest named", "published", "purge half")),
    (2, "disabled", "shard half", 1),
    (2, "disabled", "manifest named", 0),
    (2, "async", "shard half", 1),
    (2, "async", "published", 0),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "mode", "stage", "rank"), CASES)
def test_killed_in_a_save(
    tmp_path: Path, straight: dict[int, Path], ranks: int, mode: str, stage: str, rank: int
) -> None:
    arguments = flags(tmp_path, KEEP, f"--checkpoint.async_mode={mode}")
    strike = Strike("kill", STRUCK, rank, stage, batches=str(tmp_path / "batches"))
    codes, text = train(arguments, ranks, tmp_path / "killed", strike)
    assert codes[rank] == -signal.SIGKILL, text
    assert all(code in (-signal.SIGKILL, exit_codes.LOST_PEER) for code in codes), text
    newest = max(steps_in(tmp_path / "checkpoint"))
    if stage.startswith("purge"):
        assert newest >= STRUCK, "an old one goes when a new one is known to be good, which may be a save later"
    else:
        assert newest == (STRUCK if stage in PUBLISHED else STRUCK - INTERVAL)

    codes, text = train(arguments, ranks, tmp_path / "resumed", Strike(batches=str(tmp_path / "batches")))
    assert codes == [exit_codes.DONE] * ranks, text
    assert re.findall(r"resumed from step (\d+)", text) == [str(newest)]
    assert "passed over" not in text, "a save that was not finished is no checkpoint"
    assert rows(tmp_path) == rows(straight[ranks]), "each step once, with the numbers of the undisturbed run"
    assert batches(tmp_path, ranks) == batches(straight[ranks], ranks), "no sequence left out, none twice"
    assert unequal(tmp_path, straight[ranks]) == []
    *_, before, start, end = read_entries(tmp_path)
    assert (start["event"], start["step"], end["state"]) == ("start", newest, "done")
    # Rank 0 wrote an end, when it was another one that was killed.
    lost = start["lost"]["steps"] if "lost" in start else before["lost_steps"]
    assert lost <= (2 if mode == "async" else 1) * INTERVAL
    left = saved(tmp_path)
    assert f"step-{STEPS}" in left and all(name.startswith("step-") for name in left), "what the kill left is cleared"
