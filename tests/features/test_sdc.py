"""A flipped bit is found and named; a run whose steps run twice is the same."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import dropout

from tests.support.checkpoints import assert_equal
from tests.support.harness import W2, weights_of
from tests.support.tiny import EIGHT_STEPS, TWO_LAYERS
from tests.support.whole_runs import outcome_of
from titanlite import exit_codes
from titanlite.assembly.build import build
from titanlite.dist.dist_env import DistEnv
from titanlite.dist.local_parts import plain_local
from titanlite.optim.bad_step_errors import name_ranks
from titanlite.resolve.load import load_config
from titanlite.trainer import Trainer

FLAGS = [*EIGHT_STEPS, *TWO_LAYERS, "--training.steps=4", "--no-validation.enable"]
WO = "layers.1.attention.wo"
TP = "--training.tensor_parallel_degree=2"
PP = ["--experimental.pipeline_parallel_degree=2", "--training.batch_size=2"]
CP = "--experimental.context_parallel_degree=2"
DDP = "--training.data_parallel_type=ddp"
HSDP = "--training.data_parallel_replicate_degree=2"
MOE = [
    "--model.name=qwen3_moe",
    "--model.overrides.n_kv_heads=2",
    "--model.overrides.head_dim=16",
    "--model.overrides.ffn_dim=64",
    "--model.overrides.expert_width=32",
    "--model.overrides.n_experts=4",
    "--model.overrides.top_k=2",
    "--model.overrides.bias_update=0.01",
]
EP = [*MOE, "--parallelism.expert_parallel_degree=2"]


class Flip(NamedTuple):
    """A bit of what a module has, in one pass of a step on one rank."""

    #: reduced: the gradient after ranks have summed it.
    kind: Literal["gradient", "activation", "weight", "reduced"]
    rank: int
    #: 0: the first pass of the step, 1: the second, None: both.
    turn: int | None = 1
    step: int = 3
    module: str = W2


@torch.no_grad()
def _flipped(tensor: Tensor) -> Tensor:
    """Return a copy whose largest number has another bit."""
    copy = tensor.detach().clone()
    numbers = plain_local(copy).view(-1)
    place = numbers.abs().argmax()
    numbers.view(torch.int32)[place] ^= 1 << 20
    return copy


@contextlib.contextmanager
def _struck(trainer: Trainer, flip: Flip) -> Iterator[None]:
    """Let a bit flip in the next pass."""
    module = trainer.parts.model.get_submodule(flip.module)

    def before(module: Any, inputs: Any) -> None:
        weight = module.weight
        if flip.kind == "gradient":
            handles.append(weight.register_hook(_flipped))
        elif flip.kind == "weight":
            plain_local(weight.data).copy_(plain_local(_flipped(weight)))

    def after(module: Any, inputs: Any, out: Tensor) -> Tensor:
        return out + (_flipped(out) - out.detach()) if flip.kind == "activation" else out

    handles = [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    yield
    for handle in handles:
        handle.remove()
    if flip.kind == "reduced":
        gradient = plain_local(trainer.parts.model.get_parameter(f"{flip.module}.weight").grad)
        gradient.copy_(_flipped(gradient))


def _train(world: DistEnv, folder: str, flip: Flip | None, *flags: str) -> dict[str, Any]:
    words = [*FLAGS, *flags, f"--job.dump_folder={folder}"]
    trainer = Trainer(build(load_config("debug_model.toml", world.size, words), world))
    if TP not in flags:
        # A user of torch's generators.
        modules = dict(trainer.parts.model.named_modules())
        if WO in modules:
            modules[WO].register_forward_hook(lambda _, __, out: dropout(out, 0.1))
    runner: Any = trainer.parts.model_parts.runner
    run = runner.forward_backward
    done: list[int] = []

    def passing(*arguments: Any) -> Tensor:
        done.append(trainer.step)
        if flip is None or (world.rank, trainer.step) != (flip.rank, flip.step):
            return run(*arguments)
        if flip.turn not in (None, done.count(trainer.step) - 1):
            return run(*arguments)
        with _struck(trainer, flip):
            return run(*arguments)

    runner.forward_backward = passing
    found = outcome_of(trainer, folder)
    rows = [(row["step"], row["loss"], row["grad_norm"]) for row in found["rows"] if "loss" in row]
    weights = weights_of(trainer.parts.model)
    return {**found, "rows": rows, "weights": weights, "passes": done}


def _assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["rows"] == other["rows"]
    assert_equal(one["weights"], other["weights"])


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, MOE),
        (2, ["--training.gradient_sync=every"]),
        (2, [DDP]),
        (4, [HSDP]),
        (4, [*EP, HSDP]),
        (4, [*PP, HSDP]),
        (2, [CP]),
        (2, [TP]),
        (2, EP),
        (2, PP),
        (4, [*PP, TP]),
        (4, [*EP, TP]),
    ],
)
def test_a_run_whose_steps_all_run_twice_is_the_same(pool, tmp_path, ranks, flags):
    plain = pool(ranks).run(_train, str(tmp_path / "plain"), None, *flags)
    twice = pool(ranks).run(_train, str(tmp_path / "twice"), None, "--sdc.freq=1", *flags)
    assert len(plain[0]["rows"]) == 4
    assert twice[0]["error"] == ""
    assert twice[0]["passes"] == [1, 1, 2, 2, 3, 3, 4, 4]
    for pair in zip(plain, twice, strict=True):
        _assert_same(*pair)


@pytest.mark.slow_after(6)
@pytest.mark.parametrize(
    ("ranks", "flags", "flip", "named"),
    [
        (1, [], Flip("gradient", 0), [0]),
        (2, [], Flip("gradient", 1), [1]),
        (2, [], Flip("gradient", 0, turn=0), [0]),
        (2, [], Flip("activation", 1), [1]),
        (2, [], Flip("weight", 1), [1]),
        (2, [DDP], Flip("gradient", 1), [1]),
        (2, [TP], Flip("gradient", 1), [1]),
        (2, [TP], Flip("activation", 1), [0, 1]),
        (2, PP, Flip("gradient", 1), [1]),
        (2, EP, Flip("gradient", 1, module=WO), [1]),
        (4, [TP], Flip("activation", 2), [2, 3]),
        (4, [TP], Flip("weight", 1), [0, 1]),
        (2, [DDP], Flip("reduced", 1, None), [0, 1]),
        (4, [HSDP], Flip("reduced", 1, None), [1, 3]),
        (4, [DDP], Flip("reduced", 1, None), [1]),
        (4, [DDP], Flip("reduced", 1, None, step=1), [1]),
    ],
)
def test_a_flipped_bit_is_found_and_named(pool, tmp_path, ranks, flags, flip, named):
    found = pool(ranks).run(_train, str(tmp_path), flip, "--sdc.freq=3", *flags)
    assert {one["error"] for one in found} == {found[0]["error"]}
    assert found[0]["code"] == exit_codes.CORRUPTION
    error = found[0]["error"]
    where = f" on {name_ranks(named)} ({'; '.join([f'{socket.gethostname()}, cpu'] * len(named))})"
    how, what = "a second forward and backward pass gave", "the gradient"
    if flip.kind == "reduced":
        how, what = "the gradients of replicas have", "the summed gradient"
    assert error.startswith(f"step {flip.step}: {how} other bits{where}")
    assert "debug.deterministic" not in error
    if flip.kind in ("gradient", "reduced"):
        assert f"first in {what} of {flip.module}.weight. " in error
    (event,) = found[0]["events"]
    assert (event["kind"], event["ranks"], event["action"]) == ("corruption", named, "stop")
    assert event["hosts"] == [socket.gethostname()]


def test_a_run_goes_back_or_is_resumed_with_the_same_weights(pool, tmp_path):
    """The text of a step that was computed wrong is not skipped."""
    plain = pool(2).run(_train, str(tmp_path / "plain"), None)
    saves = ["--checkpoint.enable_checkpoint", "--checkpoint.interval=2"]
    back = ["--guard.policy=rollback", "--sdc.freq=2", *saves]
    flip = Flip("activation", 1, step=4)
    rolled = pool(2).run(_train, str(tmp_path / "rolled"), flip, *back)
    (event,) = rolled[0]["events"]
    assert (event["action"], event["back_to_step"], event["left_out"]) == ("rollback", 2, "")
    assert rolled[0]["passes"] == [1, 1, 2, 2, 3, 4, 4, 3, 4, 4]
    pool(2).run(_train, str(tmp_path / "resumed"), None, *back, "--training.steps=2")
    resumed = pool(2).run(_train, str(tmp_path / "resumed"), None, *back)
    assert resumed[0]["passes"] == [3, 3, 4, 4]
    for mine, *others in zip(plain, rolled, resumed, strict=True):
        for other in others:
            _assert_same(mine, other)


def test_a_first_step_that_differs_ends_the_run_with_advice(pool, tmp_path):
    flags = ["--guard.policy=rollback", "--checkpoint.enable_checkpoint", "--sdc.freq=100"]
    found = pool(1).run(_train, str(tmp_path), Flip("activation", 0, step=1), *flags)[0]
    assert (found["code"], found["passes"]) == (exit_codes.CORRUPTION, [1, 1])
    assert "debug.deterministic = true" in found["error"]
    (event,) = found["events"]
    assert (event["action"], event["hosts"]) == ("stop", [])
