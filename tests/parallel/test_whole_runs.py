"""Whole runs with each feature, and runs that move between it and one plain rank: the same numbers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pool import Pools
from tests.training.test_run import _run
from titanlite.checkpoint.manifest import read_manifest
from titanlite.parallel.dist_env import DistEnv

FLAGS = [
    *("--model.overrides.n_layers=4", "--model.overrides.n_kv_heads=2", "--training.batch_size=2"),
    *("--training.steps=6", "--validation.enable", "--validation.freq=3", "--validation.batch_size=4"),
    *("--validation.seq_len=24", "--checkpoint.interval=2", "--metrics.layer_norms=1", "--training.prefetch=0"),
    "--activation_checkpoint.mode=none",
]
TP, CP = "--training.tensor_parallel_degree=2", "--experimental.context_parallel_degree=2"
PP, SCHEDULE = "--experimental.pipeline_parallel_degree=2", "--experimental.pipeline_parallel_schedule="
AC = "--activation_checkpoint."
COMPILED = ["--training.compile", "--compile.backend=eager"]
#: name: ranks, flags, ranks of the plain run (the same ranks: equal bit for bit), texts in the log
CASES: dict[str, tuple[int, list[str], int, list[str]]] = {
    # Half as large a batch on twice as many data-parallel ranks: the same validation.
    "tp, fsdp": (4, [TP, "--validation.batch_size=2"], 1, ["dp_shard 2 x tp 2 = 4 ranks"]),
    "cp": (2, [CP], 1, ["cp 2 = 2 ranks"]),
    "pp, zero bubble": (2, [PP, f"{SCHEDULE}ZBVZeroBubble"], 1, ["ZBVZeroBubble, 4 stages"]),
    "op": (2, [f"{AC}mode=selective", f"{AC}selective_ac_option=op"], 2, ["by operation: each block saves"]),
    "compiled": (
        1,
        COMPILED,
        1,
        ["the first step compiles Block and cross_entropy_sum with eager"],
    ),
}


def whole(world: DistEnv, folder: str, *flags: str) -> dict[str, Any]:
    """A run with nothing left of earlier compilations of this process, nor anything for later ones."""
    torch._dynamo.reset()
    try:
        return _run(world, folder, *flags)
    finally:
        torch._dynamo.reset()


def numbers(rows: list[dict[str, Any]]) -> dict[tuple[int, str], float]:
    """Every loss, norm and count of a run, by step and name."""
    names = ("loss", "validation_loss", "tokens_seen", "validation_tokens", "lr")
    return {(row["step"], k): v for row in rows for k, v in row.items() if k in names or "norm" in k}


def assert_close(ours: dict[tuple[int, str], float], expected: dict[tuple[int, str], float], exact: bool) -> None:
    assert ours.keys() == expected.keys()
    assert sum("norm" in name for _, name in expected) > 6 * 5, "those by layer too"
    assert len({value for (_, name), value in expected.items() if name.endswith("loss")}) == 6 + 2
    for (step, name), value in expected.items():
        within: dict[str, float] = {"rel": 1e-4} if "norm" in name else {"abs": 5e-6 if name.endswith("loss") else 0}
        close = value if exact else pytest.approx(value, **within)  # type: ignore[arg-type]
        assert ours[step, name] == close, (step, name)


@pytest.mark.parametrize(
    "case", [name if name == "cp" else pytest.param(name, marks=pytest.mark.soak) for name in CASES]
)
@pytest.mark.slow
def test_a_run_equals_the_plain_one_and_moves_between_both(pool: Pools, tmp_path: Path, case: str) -> None:
    """Weights, moments, positions and names of tensors go through checkpoints of both kinds."""
    ranks, flags, plain_ranks, texts = CASES[case]
    plain = pool(plain_ranks).run(whole, str(tmp_path / "plain"), *FLAGS)[0]
    straight = pool(ranks).run(whole, str(tmp_path / "straight"), *FLAGS, *flags)[0]
    expected, exact = numbers(plain["rows"]), ranks == plain_ranks and case != "compiled"
    assert_close(numbers(straight["rows"]), expected, exact)
    log = "\n".join(straight["said"])
    assert all(text in log for text in texts), log
    assert [line for line in plain["said"] if line.startswith("parameters")][0] in log, "it counts the whole model"
    assert "again" not in log

    def train(at: int, to: int, featured: bool) -> dict[str, Any]:
        chosen = (ranks, flags) if featured else (plain_ranks, [])
        run: dict[str, Any] = pool(chosen[0]).run(
            whole, str(tmp_path / "moving"), *FLAGS, *chosen[1], f"--training.steps={to}", "--validation.freq=3"
        )[0]
        assert any(f"resumed from step {at}" in line for line in run["said"]) is (at > 0)
        return run

    train(0, 2, featured=True)
    train(2, 4, featured=False)
    last = train(4, 6, featured=True)
    trained = {key: value for key, value in expected.items() if key[1] in ("loss", "grad_norm", "lr", "tokens_seen")}
    moved = numbers(last["rows"])
    for key, value in trained.items():
        assert moved[key] == (value if exact else pytest.approx(value, rel=1e-4, abs=5e-6)), key
    ours, theirs = (read_manifest(tmp_path / name / "checkpoint" / "step-6").tensors for name in ("plain", "moving"))
    assert {**ours, "rng.torch": None} == {**theirs, "rng.torch": None}  # a generator for each rank


# Float8

SMALL = ["--training.mixed_precision_param=bfloat16", "--float8.emulate", "--validation.enable=false"]
ON = ["--float8.enable_float8_linear", "--float8.enable_fsdp_float8_all_gather"]
ON += ["--float8.precompute_float8_dynamic_scale_for_fsdp"]


def float8_flags(on: bool) -> list[str]:
    return [*SMALL, *ON] if on else [flag for flag in SMALL if "float8" not in flag]


@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True], ids=["bf16 to float8", "float8 to bf16"])
def test_float8_can_be_switched_at_a_resume(pool: Pools, tmp_path: Path, first: bool) -> None:
    """The same weights: the next losses are those of a resume without a switch, but for rounding."""
    pool(2).run(_run, str(tmp_path / "same"), *float8_flags(first), "--training.steps=2")
    shutil.copytree(tmp_path / "same", tmp_path / "switched")
    switched, same = (
        pool(2).run(_run, str(tmp_path / name), *float8_flags(float8), "--training.steps=4")[0]
        for name, float8 in (("switched", not first), ("same", first))
    )
    assert all(any("resumed from step 2" in line for line in run["said"]) for run in (switched, same))
    rows = (run["rows"] for run in (switched, same))
    ours, theirs = ({row["step"]: row["loss"] for row in some if "loss" in row} for some in rows)
    assert sorted(ours) == [1, 2, 3, 4] and all(ours[step] == theirs[step] for step in (1, 2))
    for step in (3, 4):
        assert 0 < abs(ours[step] - theirs[step]) < 0.03, step
    tables = [any(line.startswith("float8 ") for line in run["said"]) for run in (switched, same)]
    assert tables == [not first, first]
