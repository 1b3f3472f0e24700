"""Whole runs in phases: the batch and the learning rate change at a border, and nothing else does.

A straight run of steps of four sequences tells the order of the text. The hash of a step is a sum
over its sequences, so the hash of a larger step is the sum over several of the small ones.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.train_runs import TINY, flags, global_batches, rows, train, unequal
from titanlite.assembly.datasets import read_datasets
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


@pytest.mark.slow
def test_a_ramp_of_batches_serves_each_sequence_once_on_any_number_of_ranks(
    tmp_path: Path,
) -> None:
    """The straight run has one rank."""
    more = mixture(tmp_path / "lines")
    wanted = cut(straight(tmp_path / "straight", *more), SIZES)
    folder = tmp_path / "run"
    codes, console = train(flags(folder, *more, PHASES), 4, tmp_path / "console")
    assert codes == [0] * 4, console
    assert global_batches(folder, 4) == wanted
    assert tokens(folder) == [sum(SIZES[:step]) * SEQ_LEN for step in range(1, 9)]
    assert "from here on a step has 8 sequences of 16 tokens, 128 in all; it had 4" in console


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


#: Steps of 8 sequences of 16 tokens, from step 3 on 4 of 32, from step 6 on 4 of 64, then 16 of 16.
LENGTHS = (
    "--data.phase=[{step=3,seq_len=32,global_batch_size=4,lr=0.002},{tokens=640,seq_len=64},"
    "{step=8,seq_len=16,global_batch_size=16}]"
)
#: Sequences and tokens of each.
SHAPES = [(8, 16), (8, 16), (4, 32), (4, 32), (4, 32), (4, 64), (4, 64), (16, 16)]
EIGHT = ["--training.global_batch_size=8"]


def hash_of(parts: list[Any], shape: tuple[int, int]) -> str:
    """Return the hash of sequences. parts: tokens and labels, perhaps documents, cut into this
    shape.
    """
    total = 0
    for sequence in zip(*(part.reshape(shape) for part in parts), strict=True):
        own = [*sequence[:2], *(documents - documents[0] for documents in sequence[2:])]
        content = np.stack(own).astype("<i8").tobytes()
        total += int.from_bytes(hashlib.blake2b(content, digest_size=16).digest(), "little")
    return f"{total % (1 << 128):032x}"


def oracle(rows: list[Any], shapes: list[tuple[int, int]]) -> dict[int, str]:
    """Cut a stream of rows, (tokens, labels) each, into steps of these shapes."""
    streams = [np.concatenate(parts) for parts in zip(*rows, strict=True) if parts[0] is not None]
    found = {}
    place = 0
    for step, (sequences, seq_len) in enumerate(shapes, 1):
        end = place + sequences * seq_len
        found[step] = hash_of([stream[place:end] for stream in streams], (sequences, seq_len))
        place = end
    return found


def rows_of(*more: str) -> list[Any]:
    """Return the rows of 64 tokens of a run without phases."""
    run = load_config("debug_model.toml", 1, [*TINY, *more, "--training.seq_len=64"])
    data = read_datasets(run).train
    return [data.sequence(number) for number in range(sum(n * s for n, s in SHAPES) // 64)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixture", "masks"])
def test_sequences_of_other_lengths_go_on_in_one_stream_of_tokens(
    tmp_path: Path, kind: str
) -> None:
    more = [*EIGHT, "--data.mask_documents"]
    if kind == "mixture":
        more = [*EIGHT, *mixture(tmp_path / "lines")]
    seen = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        codes, console = train(flags(folder, *more, LENGTHS), ranks, tmp_path / "console")
        assert codes == [0] * ranks, console
        seen.append(global_batches(folder, ranks))
        wanted = [sum(n * s for n, s in SHAPES[:step]) for step in range(1, 9)]
        assert tokens(folder) == wanted
    assert seen[0] == seen[1]
    assert seen[0] == oracle(rows_of(*more), SHAPES)
    losses = [[row[1] for row in rows(tmp_path / str(ranks))] for ranks in (1, 2)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
def test_a_resume_around_a_border_of_lengths_is_exact_also_on_other_ranks(tmp_path: Path) -> None:
    more = [*EIGHT, LENGTHS]
    whole = tmp_path / "whole"
    assert train(flags(whole, *more), 2, tmp_path / "console")[0] == [0, 0]
    wanted = global_batches(whole, 2)
    # Borders are after steps 2, 5 and 7.
    for stopped in (2, 6):
        first = tmp_path / f"to-{stopped}"
        codes, console = train(
            flags(first, *more, f"--training.steps={stopped}"), 2, tmp_path / "console"
        )
        assert codes == [0, 0], console
        for ranks in (1, 2):
            again = tmp_path / f"{stopped}-{ranks}"
            shutil.copytree(first, again, ignore=shutil.ignore_patterns("batches.*"))
            codes, console = train(flags(again, *more), ranks, tmp_path / "console")
            assert codes == [0] * ranks, console
            found = global_batches(again, ranks)
            assert found == {step: wanted[step] for step in range(stopped + 1, 9)}
            assert tokens(again) == tokens(whole)
        assert rows(tmp_path / f"{stopped}-2") == rows(whole)
        assert unequal(whole, tmp_path / f"{stopped}-2") == []


#: Flags of runs that are divided over ranks.
TWO_LAYERS = [*EIGHT, "--model.overrides.n_layers=2", "--training.batch_size=2", LENGTHS]
TWO_LAYERS.append("--no-checkpoint.enable_checkpoint")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("plain")
    assert train(flags(folder / "run", *TWO_LAYERS), 1, folder / "console")[0] == [0]
    return rows(folder / "run")


@pytest.mark.slow
@pytest.mark.parametrize("divided", ["context", "pipeline", "tensor"])
def test_ranks_that_share_the_work_follow_the_length(
    plain: list[Any], tmp_path: Path, divided: str
) -> None:
    more = {
        "context": ["--experimental.context_parallel_degree=2", "--data.mask_documents=false"],
        "pipeline": [
            "--experimental.pipeline_parallel_degree=2",
            "--experimental.pipeline_parallel_schedule=1F1B",
        ],
        "tensor": ["--training.tensor_parallel_degree=2"],
    }[divided]
    other = tmp_path / "other"
    codes, console = train(flags(other, *TWO_LAYERS, *more), 2, tmp_path / "console")
    assert codes == [0, 0], console
    for one, shared in zip(plain, rows(other), strict=True):
        assert one[1:3] == pytest.approx(shared[1:3], rel=2e-5)
        assert one[3:] == shared[3:]


@pytest.mark.slow
def test_a_compiled_model_compiles_each_length_once_and_says_so(tmp_path: Path) -> None:
    more = [*EIGHT, LENGTHS, "--training.compile", "--compile.backend=aot_eager"]
    codes, console = train(flags(tmp_path / "run", *more), 1, tmp_path / "console")
    assert codes == [0], console
    for words in ("4 sequences of 32 tokens", "4 sequences of 64 tokens"):
        assert console.count(f"for steps of {words} in ") == 1
    assert "for steps of 16 sequences of 16 tokens" not in console, "that length has its graphs"
    assert "torch.compile compiled" not in console


def test_a_step_of_another_size_has_the_patience_of_a_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_the_routers_losses_are_divided_by_the_tokens_of_the_step_under_way() -> None:
    more = ["--model.name=mixtral", "--model.overrides.n_kv_heads=1", *EIGHT, LENGTHS]
    run = load_config("debug_model.toml", 1, [*TINY, *more])
    args = run.model_args(2304)
    model = run.spec.build_on_meta(args)
    layers = moe_layers_of(run.spec, args)
    assert layers is not None
    experts = [model.get_submodule(name) for name in layers.experts]
    parts: Any = SimpleNamespace(model=model, moe_layers=layers, runner=None, loss=None)
    resize = Resizer(run, parts, run.course.size(1))
    for step, (sequences, seq_len) in enumerate(SHAPES, 1):
        resize(run.course.size(step))
        if step >= 3:
            assert {expert.step_tokens for expert in experts} == {sequences * seq_len}
