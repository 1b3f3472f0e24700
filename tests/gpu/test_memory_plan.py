"""The plan beside the allocator of a GPU: the peak of a step, and the report of a run that is out
of memory.
"""

from __future__ import annotations

import gc
import re

import pytest
import torch

from tests.support.words import listening
from titanlite.assembly.build import build
from titanlite.data.tokenizer import load_tokenizer
from titanlite.exit_codes import OUT_OF_MEMORY, code_of
from titanlite.plan.memory import estimate, with_vocabulary
from titanlite.plan.out_of_memory import memory_report
from titanlite.plan.parts import GIB
from titanlite.resolve.load import load_config
from titanlite.runs.read_jsonl import read_metrics
from titanlite.trainer import Trainer

FLAGS = [
    "--model.overrides.dim=512",
    "--training.seq_len=1024",
    "--training.batch_size=8",
    "--no-validation.enable",
]


@pytest.mark.numbers
@pytest.mark.parametrize("ac", ["none", "full"])
def test_the_measured_peak_of_a_step_is_within_the_limit_of_its_plan(world, tmp_path, ac):
    more = [
        "--training.steps=3",
        "--metrics.log_freq=1",
        f"--activation_checkpoint.mode={ac}",
        f"--job.dump_folder={tmp_path}",
    ]
    gc.collect()  # a trainer refers to itself
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()  # of other tests
    run = load_config("debug_model.toml", 1, [*FLAGS, *more])
    with listening() as said:
        Trainer(build(run, world)).train()
    assert before < 2**26
    measured = read_metrics(tmp_path / "metrics.jsonl")[-1]["memory_gib"]
    vocabulary = load_tokenizer(run.model.tokenizer_path).vocab_size
    peak = estimate(with_vocabulary(run, vocabulary), 0).peak.total
    assert measured == pytest.approx(peak / GIB, rel=0.15)
    assert any(
        re.match(
            r"memory planned: [\d.]+ GiB of tensors, [\d.]+ with overhead, of [\d.]+ per GPU",
            one,
        )
        for one in said
    )


def test_a_run_without_memory_reports_the_figures_of_the_allocator(world, tmp_path):
    more = ["--training.steps=3", "--training.batch_size=64", f"--job.dump_folder={tmp_path}"]
    run = load_config("debug_model.toml", 1, [*FLAGS, *more])
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(
        2**30 / torch.cuda.get_device_properties().total_memory
    )
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            Trainer(build(run, world)).train()
        assert code_of(caught.value) == OUT_OF_MEMORY
        report = memory_report(run, caught.value, "forward of step 1", 0, "cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "Tried to allocate" in report
    assert "planned for rank 0, " in report and "training.loss_chunks = 8" in report, report
