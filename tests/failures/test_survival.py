"""Failures that need whole processes and real files: other ranks, epochs, full disks, damage."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import torch

from tests.support.faults import Fault
from tests.support.ranks import Ranks
from tests.support.train_runs import STEPS, finish, flags, rows, saved, train, unequal
from titanlite import exit_codes
from titanlite.checkpoint.manifest import step_folder
from titanlite.cli.hub.compare_checkpoints import Contents
from titanlite.config.errors import ConfigError
from titanlite.resolve.load import check_config
from titanlite.runs.attempts import read_entries


def _check_end(run: Path, other: Path) -> None:
    assert rows(run) == rows(other)
    assert unequal(run, other) == []


def test_a_batch_that_three_ranks_cannot_share_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="one of 1, 2, 4 data-parallel ranks"):
        check_config(flags(tmp_path), 3)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "rank"), [("disabled", 1), ("async", 0)])
def test_no_space_in_a_save(tmp_path, straight, mode, rank):
    """No file may grow beyond 64 KiB while step 4 is saved."""
    arguments = flags(tmp_path, f"--checkpoint.async_mode={mode}")
    text = finish(arguments, 2, tmp_path / "console", Fault("full", "save", 4, rank))
    (told,) = re.findall(r".*NO CHECKPOINT WAS WRITTEN.*", text)
    assert "step 4: " in told
    assert f"rank {rank}: [Errno 27] File too large: '{tmp_path}" in told
    for part in ("step-4", f"__{rank}_0.distcp", "Training continues"):
        assert part in told
    assert saved(tmp_path) == ["step-2", "step-6", "step-8"]
    _check_end(tmp_path, straight(2))


@pytest.mark.slow
def test_no_space_in_the_last_save_is_no_success(tmp_path, straight):
    arguments = flags(tmp_path, "--checkpoint.async_mode=async")
    codes, text = train(arguments, 2, tmp_path / "console", Fault("full", "save", STEPS, 1))
    assert codes == [exit_codes.CHECKPOINT] * 2, text
    assert re.search(
        r"error: saving .*step-8 failed: rank 1: .*File too large: .*__1_0.distcp", text
    ), text
    assert saved(tmp_path) == ["step-2", "step-4", "step-6"], "what was half-written takes no space"
    assert "resumed from step 6" in finish(arguments, 2, tmp_path / "console")
    _check_end(tmp_path, straight(2))


FEATURES = [
    "--activation_checkpoint.mode=full",
    "--training.compile",
    "--compile.backend=aot_eager",
    "--float8.enable_float8_linear",
    "--float8.emulate",
    "--float8.enable_fsdp_float8_all_gather",
]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("first", "then"), [(FEATURES, []), ([], FEATURES)], ids=["on, off", "off, on"]
)
def test_saved_with_features_on_and_loaded_with_them_off_and_the_reverse(tmp_path, first, then):
    """One step at a learning rate of zero after the load: its checkpoint holds the weights that
    were loaded.
    """
    length = ["--training.batch_size=2", "--optimizer.weight_decay=0"]
    finish(flags(tmp_path, *length, "--training.steps=2", *first), 2, tmp_path / "console")
    three = [*length, "--training.steps=3", "--optimizer.lr=0", *then]
    assert "resumed from step 2" in finish(flags(tmp_path, *three), 2, tmp_path / "console")
    before, after = (Contents(step_folder(tmp_path / "checkpoint", step)) for step in (2, 3))
    assert before.manifest.tensors == after.manifest.tensors, "the same names, types and shapes"
    weights = [name for name in before.manifest.tensors if name.startswith("model.")]
    assert len(weights) > 8
    assert "model.layers.0.attention.wq.weight" in weights
    for name in weights:
        assert torch.equal(before.read(name), after.read(name)), name


@pytest.mark.slow
def test_a_rank_out_of_memory_says_what_to_change_and_the_run_resumes(tmp_path, straight):
    arguments = flags(tmp_path, "--checkpoint.async_mode=async")
    codes, text = train(arguments, 2, tmp_path / "console", Fault("memory", "step", 6, 1))
    assert codes == [exit_codes.LOST_PEER, exit_codes.OUT_OF_MEMORY], text
    report = text[text.index("error: [rank 1] out of memory") :]
    assert "in backward of step 6: CUDA out of memory. Tried to allocate 2.00 GiB.\n" in report
    assert re.search(r"\nplanned for rank 1, .*\nparameters .*\n", report)
    assert "\nWhat lowers it, the cheapest in speed first: training.loss_chunks = 8," in report
    assert "_run_out" in (tmp_path / "logs" / "rank_1.log").read_text(), "the traceback"
    end = read_entries(tmp_path)[-1]
    assert end["exit_code"] == exit_codes.LOST_PEER
    assert "rank 1" in end["reason"]
    text = finish(arguments, 2, tmp_path / "console")
    newest = re.findall(r"resumed from step (\d+)", text)[0]
    assert newest in ("2", "4"), "a save in flight is not waited for"
    _check_end(tmp_path, straight(2))


@pytest.mark.slow
def test_a_rank_out_of_memory_before_the_first_step_reports_it_in_spite_of_sigterm(tmp_path):
    """As torchrun sends it when the first of the other ranks has ended."""
    fault = Fault("memory", "build", rank=1)
    with Ranks(flags(tmp_path), 2, tmp_path / "console", fault) as ranks:
        ranks.processes[0].join(300)
        ranks.send(signal.SIGTERM, rank=1)
        codes, text = ranks.wait(), ranks.output()
    assert codes == [exit_codes.LOST_PEER, exit_codes.OUT_OF_MEMORY], text
    out_of_memory = r"error: \[rank 1\] out of memory of the GPU, before .*\nplanned for rank 1"
    assert re.search(out_of_memory, text)
