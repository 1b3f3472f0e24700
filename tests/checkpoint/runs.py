"""A tiny run that saves and resumes, for the ranks of a pool."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.steps import train_step
from tests.training.harness import Run, batches, build_tiny, full, micro_batches
from titanlite.checkpoint import Checkpointer, CheckpointError
from titanlite.data.loader import to_device
from titanlite.guard import FiniteGuard
from titanlite.parallel.dist_env import DistEnv
from titanlite.parallel.float8 import ScalePrecompute

STEPS = 20
TOKENS, LABELS = batches(STEPS, 8, 16, 192)
RUN = Run(TOKENS, LABELS, [3e-3] * STEPS)
PRINTS = {"model": "m", "tokenizer": "t", "data": "d"}


def train(
    world: DistEnv,
    run: Run,
    folder: str,
    first: int,
    last: int,
    start: str = "resume-or-fresh",
    prints: dict[str, str] = PRINTS,
    load_step: int | None = None,
    draw: bool = False,
    every: int = 0,
    plan: CheckpointPlan | None = None,
    state: dict[str, Any] | None = None,
    expected: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Steps first … last of `run`, resumed from `folder` when first > 1, saved there at the end.

    every: also save after so many steps. plan: other settings than the defaults. state: also in the train state.
    """
    model, optimizer, rank = build_tiny(world, run)
    precompute = run.float8.precompute_float8_dynamic_scale_for_fsdp
    after_update = ScalePrecompute(model, run.mesh(world.size).build(world)) if precompute else None
    torch.manual_seed(100 + world.rank)
    plan = replace(plan or CheckpointPlan(), enable=True, folder=folder, start=start, load_step=load_step)  # type: ignore[arg-type]
    checkpointer = Checkpointer(plan, world, prints)
    try:
        loaded = checkpointer.load(model, optimizer, expected)
        assert (loaded.step if loaded else 0) == first - 1
        guard = FiniteGuard(world.device)
        losses, draws, outcomes = [], [], []
        for step in range(first, last + 1):
            data = to_device(micro_batches(run, step - 1, rank, world.size), world.device)
            result = train_step(
                model,
                optimizer,
                data,
                step=step,
                lr=run.rates[step - 1],
                max_norm=1.0,
                guard=guard,
                before_update=checkpointer.await_copy,
                after_update=after_update,
            )
            losses.append(result.loss.item())
            if draw:
                draws.append(torch.rand(()).item())
            if step == last or (every and step % every == 0):
                checkpointer.save(step, model, optimizer, {"next_sequence": 8 * step, **(state or {})})
            while outcome := checkpointer.poll():
                outcomes.append(outcome)
        checkpointer.wait()
        while outcome := checkpointer.poll():
            outcomes.append(outcome)
    finally:
        checkpointer.close()
    weights = {n: full(p) for n, p in model.named_parameters()}
    state = {f"{n}.{k}": full(v) for n, p in model.named_parameters() for k, v in optimizer.state[p].items()}
    return {
        "losses": losses,
        "weights": weights,
        "state": state,
        "draws": draws,
        "loaded": loaded,
        "outcomes": outcomes,
    }


def refusal(world: DistEnv, *args: Any, **kwargs: Any) -> str:
    """The error that `train` ends with."""
    try:
        train(world, *args, **kwargs)
    except CheckpointError as error:
        return str(error)
    raise AssertionError("it was not refused")


def flip(path: Path, where: float = 0.5) -> None:
    """Change one bit of a file, at a fraction of its length."""
    content = bytearray(path.read_bytes())
    content[int(where * len(content))] ^= 1
    path.write_bytes(content)
