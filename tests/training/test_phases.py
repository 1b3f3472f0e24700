"""Whole runs in phases: the batch and the learning rate change at a border, and nothing else does.

A straight run of steps of four sequences tells the order of the text. The hash of a step is a sum
over its sequences, so the hash of a larger step is the sum over several of the small ones.
"""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.train_runs import (
    STEPS,
    TINY,
    batches,
    flags,
    global_batches,
    rows,
    train,
    unequal,
)
from titanlite.assembly.phase_resize import Resizer
from titanlite.config.data_sections import DataPhase
from titanlite.config.run_sections import Comm, Stall
from titanlite.data.batch_hash import add_hashes
from titanlite.data.phases import Phases
from titanlite.metrics import housekeeping, timeouts
from titanlite.metrics.watchdog import HangWatchdog
from titanlite.resolve.load import load_config
from titanlite.run.features import moe_layers_of

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


def mixture(folder: Path) -> list[str]:
    """Write a folder of JSON lines; return the flags of a mixture that streams it in lanes."""
    folder.mkdir()
    for number in range(8):
        lines = []
        for line in range(40):
            text = " ".join(f"w{number}x{line}x{word}" for word in range(12))
            lines.append(json.dumps({"text": text}))
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    text = f'--data.source=[{{name="a",path="{folder}",weight=2}},{{name="c4_validation"}}]'
    return ["--data.streaming", "--data.lanes=4", "--data.shuffle_buffer=16", text]


def stop_and_go_on(whole: Path, ranks: int, stops: tuple[int, ...], *more: str) -> None:
    """Train as `whole` was on so many ranks, with stops after these steps: the end is the same."""
    folder = whole.with_name("stopped")
    for last in (*stops, STEPS):
        asked = flags(folder, *more, f"--training.steps={last}")
        codes, console = train(asked, ranks, folder.parent / "console")
        assert codes == [0] * ranks, console
    assert rows(folder) == rows(whole)
    assert batches(folder, ranks) == batches(whole, ranks)
    assert unequal(folder, whole) == []


@pytest.mark.slow
def test_a_ramp_of_batches_is_exact_on_four_ranks_also_when_it_is_stopped_at_its_borders(tmp_path):
    """The straight run, which tells the order of the text, has one rank."""
    more = [*mixture(tmp_path / "lines"), PHASES]
    wanted = cut(straight(tmp_path / "straight", *more[:-1]), SIZES)
    folder = tmp_path / "whole"
    codes, console = train(flags(folder, *more), 4, tmp_path / "console")
    assert codes == [0] * 4, console
    assert global_batches(folder, 4) == wanted
    assert tokens(folder) == [sum(SIZES[:step]) * SEQ_LEN for step in range(1, 9)]
    assert "from here on a step has 8 sequences of 16 tokens, 128 in all; it had 4" in console
    # Borders are after steps 2, 5 and 7.
    stop_and_go_on(folder, 4, (2, 3, 5, 7), *more)


#: Steps of 8 sequences of 16 tokens, from step 3 on 4 of 32, from step 6 on 4 of 64, then 16 of 16.
LENGTHS = (
    "--data.phase=[{step=3,seq_len=32,global_batch_size=4,lr=0.002},{tokens=640,seq_len=64},"
    "{step=8,seq_len=16,global_batch_size=16}]"
)
EIGHT = ["--training.global_batch_size=8"]


@pytest.mark.slow
def test_a_resume_around_a_border_of_lengths_is_exact_also_on_other_ranks(tmp_path):
    more = [*mixture(tmp_path / "lines"), "--data.mask_documents", *EIGHT, LENGTHS]
    whole = tmp_path / "whole"
    assert train(flags(whole, *more), 2, tmp_path / "console")[0] == [0, 0]
    stop_and_go_on(whole, 2, (2, 6), *more)
    alone = tmp_path / "alone"
    shutil.copytree(whole, alone, ignore=shutil.ignore_patterns("batches.*", "step-8", "step-6"))
    codes, console = train(flags(alone, *more), 1, tmp_path / "console")
    assert codes == [0], console
    wanted = global_batches(whole, 2)
    assert global_batches(alone, 1) == {step: wanted[step] for step in range(5, 9)}
    sizes = [128, 128, 128, 128, 128, 256, 256, 256]
    assert tokens(alone) == tokens(whole) == list(itertools.accumulate(sizes))


#: Flags of runs that are divided over ranks.
TWO_LAYERS = [*EIGHT, "--model.overrides.n_layers=2", "--training.batch_size=2", LENGTHS]
TWO_LAYERS.append("--no-checkpoint.enable_checkpoint")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("plain")
    assert train(flags(folder / "run", *TWO_LAYERS), 1, folder / "console")[0] == [0]
    return rows(folder / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["--experimental.context_parallel_degree=2", "--data.mask_documents=false"],
        [
            "--experimental.pipeline_parallel_degree=2",
            "--experimental.pipeline_parallel_schedule=1F1B",
        ],
        ["--training.tensor_parallel_degree=2"],
    ],
    ids=["context", "pipeline", "tensor"],
)
def test_ranks_that_share_the_work_follow_the_length(plain, tmp_path, more):
    other = tmp_path / "other"
    codes, console = train(flags(other, *TWO_LAYERS, *more), 2, tmp_path / "console")
    assert codes == [0, 0], console
    for one, shared in zip(plain, rows(other), strict=True):
        assert one[1:3] == pytest.approx(shared[1:3], rel=2e-5)
        assert one[3:] == shared[3:]


@pytest.mark.slow
def test_a_compiled_model_compiles_each_length_once_and_says_so(tmp_path):
    more = [*EIGHT, LENGTHS, "--training.compile", "--compile.backend=aot_eager"]
    codes, console = train(flags(tmp_path / "run", *more), 1, tmp_path / "console")
    assert codes == [0], console
    for words in ("4 sequences of 32 tokens", "4 sequences of 64 tokens"):
        assert console.count(f"for steps of {words} in ") == 1
    assert "for steps of 16 sequences of 16 tokens" not in console, "that length has its graphs"
    assert "torch.compile compiled" not in console


def test_a_step_of_another_size_has_the_patience_of_a_first_step(monkeypatch):
    limits: list[float] = []
    monkeypatch.setattr(timeouts, "set_timeouts", limits.append)
    monkeypatch.setattr(timeouts, "set_timeout", lambda time: limits.append(time.seconds))
    phases = Phases([DataPhase(step=3, seq_len=2, global_batch_size=4)], {}, 8, 8)
    watch: Any = HangWatchdog(Stall(), Comm(), end=None)
    every = [housekeeping.Watchdog(watch, entered=True), timeouts.Timeouts(300, 100)]
    trainer: Any = SimpleNamespace(parts=SimpleNamespace(course=phases.course()))
    patient = []
    for step in range(1, 6):
        trainer.step = step
        for phase in ("data", "forward", "log"):
            for callback in every:
                callback.on_phase(trainer, phase)
        patient.append(watch._first_step == step)
        limits.append(-step)
        every[1].on_step_end(trainer, None)
    assert patient == [True, False, True, False, False]
    assert limits == [-1, 100, -2, 300, -3, 100, -4, -5]


def test_the_routers_losses_are_divided_by_the_tokens_of_the_step_under_way():
    more = ["--model.name=mixtral", "--model.overrides.n_kv_heads=1", *EIGHT, LENGTHS]
    run = load_config("debug_model.toml", 1, [*TINY, *more])
    args = run.model_args(2304)
    model = run.spec.build_on_meta(args)
    layers = moe_layers_of(run.spec, args)
    assert layers is not None
    experts = [model.get_submodule(name) for name in layers.experts]
    parts: Any = SimpleNamespace(model=model, moe_layers=layers, runner=None, loss=None)
    resize = Resizer(run, parts, run.course.size(1))
    for step, tokens in ((3, 128), (6, 256)):
        resize(run.course.size(step))
        assert {expert.step_tokens for expert in experts} == {tokens}
