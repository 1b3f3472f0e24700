"""Biases that balance the load of experts: by hand, on any layout, resumed, and held back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.checkpoints import assert_equal
from tests.support.pool import Pools
from tests.support.tiny import TWO_LAYERS
from tests.support.watch import Calls, Operations
from titanlite.assembly.build import build
from titanlite.cli.hub.compare_checkpoints import Contents
from titanlite.dist.dist_env import DistEnv
from titanlite.features.experts.balance import ExpertBalance
from titanlite.models.experts.layer import MoE
from titanlite.models.qwen3_moe import Qwen3MoeArgs
from titanlite.resolve.load import load_config
from titanlite.trainer import Trainer

#: Less than scores differ at the start: a larger one would turn all choices round.
STEP = 0.001
FLAGS = [
    *TWO_LAYERS,
    "--model.name=qwen3_moe",
    "--model.overrides.n_kv_heads=2",
    "--model.overrides.head_dim=16",
    "--model.overrides.ffn_dim=64",
    "--model.overrides.expert_width=32",
    "--model.overrides.n_experts=8",
    "--model.overrides.top_k=2",
    "--model.overrides.aux_loss=0.0",
    f"--model.overrides.bias_update={STEP}",
    "--training.batch_size=1",
    "--training.global_batch_size=4",
    "--training.steps=4",
    "--lr_scheduler.total_steps=4",
    "--metrics.log_freq=1",
    "--training.mixed_precision_param=float32",
    "--no-validation.enable",
]
NAN = float("nan")


def biases_of(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            found[name] = buffer.clone()
    return found


def _train(world: DistEnv, folder: str, nan_in: int, *flags: str) -> dict[str, Any]:
    """Train; biases, weights and losses. nan_in: a step whose loss is no number."""
    run = load_config(
        "debug_model.toml", world.size, [*FLAGS, *flags, f"--job.dump_folder={folder}"]
    )
    trainer = Trainer(build(run, world))
    model = trainer.parts.model
    steps: list[dict[str, Tensor]] = []
    losses: list[float] = []
    take = trainer.parts.train_step

    def spoil(module: Any, inputs: Any, out: Tensor) -> Tensor:
        return out * NAN if trainer.step == nan_in else out

    def watched(*args: Any, **more: Any) -> Any:
        result = take(*args, **more)
        losses.append(result.loss.item())
        steps.append(biases_of(model))
        return result

    if nan_in:
        model.register_forward_hook(spoil)
    trainer.parts.train_step = _Watched(take, watched)  # type: ignore[assignment]
    trainer.train()
    weights = {}
    for name, parameter in model.named_parameters():
        weights[name] = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return {
        "steps": steps,
        "losses": losses,
        "weights": {n: w.detach() for n, w in weights.items()},
    }


class _Watched:
    """A step whose calls go through a function."""

    def __init__(self, step: Any, call: Any) -> None:
        object.__setattr__(self, "_step", step)
        object.__setattr__(self, "_call", call)

    def __call__(self, *args: Any, **more: Any) -> Any:
        return self._call(*args, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._step, name, value)


@pytest.fixture(scope="module")
def alone(pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return pool(1).run(_train, str(tmp_path_factory.mktemp("alone")), 0)[0]


def _by_hand(world: DistEnv, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the biases of a run, and those that its logits give, one token after the other."""
    run = load_config("debug_model.toml", world.size, [*FLAGS, f"--job.dump_folder={folder}"])
    trainer = Trainer(build(run, world))
    model = trainer.parts.model
    mixtures = {name: m for name, m in model.named_modules() if isinstance(m, MoE)}
    expected = {name: torch.zeros(8) for name in mixtures}
    counts = {name: [0] * 8 for name in mixtures}
    take = trainer.parts.train_step

    def see(name: str, logits: Tensor) -> None:
        scores = logits.detach().softmax(-1) + expected[name]
        for row in scores.tolist():
            order = sorted(range(8), key=lambda index: -row[index])
            for index in order[:2]:
                counts[name][index] += 1

    for name, mixture in mixtures.items():
        mixture.gate.register_forward_hook(lambda _, __, out, name=name: see(name, out))

    def watched(*args: Any, **more: Any) -> Any:
        result = take(*args, **more)
        for name, rows in counts.items():
            signs = []
            for count in rows:
                mean = sum(rows) / 8
                signs.append(float((mean > count) - (mean < count)))
            mean_sign = sum(signs) / 8
            expected[name] += torch.tensor([STEP * (sign - mean_sign) for sign in signs])
            counts[name] = [0] * 8
        return result

    trainer.parts.train_step = _Watched(take, watched)  # type: ignore[assignment]
    trainer.train()
    return biases_of(model), expected


def test_four_steps_by_hand(pool: Pools, tmp_path: Path) -> None:
    found, expected = pool(1).run(_by_hand, str(tmp_path))[0]
    assert len(found) == 2
    for name, bias in expected.items():
        torch.testing.assert_close(found[f"{name}.expert_bias"], bias, rtol=0, atol=1e-7)
        assert bias.abs().max() > STEP / 2
        assert bias.sum().abs() < 1e-6


EP = "--parallelism.expert_parallel_degree=2"
CP = "--experimental.context_parallel_degree=2"
TP = "--training.tensor_parallel_degree=2"
PP = "--experimental.pipeline_parallel_degree=2"
FULL = "--activation_checkpoint.mode=full"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, [FULL]),
        (2, [EP]),
        (2, [PP, "--training.batch_size=4"]),
        pytest.param(4, [EP, PP, "--training.batch_size=2", FULL], marks=pytest.mark.slow),
        pytest.param(4, [CP, TP], marks=pytest.mark.slow),
    ],
)
def test_equal_however_the_work_is_divided(
    pool: Pools, alone: dict[str, Any], tmp_path: Path, ranks: int, flags: list[str]
) -> None:
    results = pool(ranks).run(_train, str(tmp_path), 0, *flags)
    for step, expected in enumerate(alone["steps"]):
        found: dict[str, Tensor] = {}
        for result in results:
            for name, bias in result["steps"][step].items():
                name = name.replace("_orig_mod.", "")
                assert torch.equal(found.setdefault(name, bias), bias), "ranks differ"
        assert_equal(found, expected)
    assert results[0]["losses"] == pytest.approx(alone["losses"], rel=1e-5)


@pytest.mark.slow
def test_a_step_that_the_guard_holds_back_moves_no_bias(pool: Pools, tmp_path: Path) -> None:
    found = pool(1).run(_train, str(tmp_path), 2, "--guard.policy=skip")[0]
    first, second, third, _ = found["steps"]
    assert_equal(first, second)
    assert any(not torch.equal(second[name], third[name]) for name in third)


@pytest.mark.slow
def test_a_resumed_run_goes_on_to_the_last_bit(
    pool: Pools, alone: dict[str, Any], tmp_path: Path
) -> None:
    save = [str(tmp_path), 0, "--checkpoint.enable_checkpoint"]
    first = pool(1).run(_train, *save, "--training.steps=2")[0]
    resumed = pool(1).run(_train, *save)[0]
    assert first["losses"] + resumed["losses"] == alone["losses"]
    assert_equal(resumed["steps"][-1], alone["steps"][-1])
    assert_equal(resumed["weights"], alone["weights"])
    saved = Contents(tmp_path / "checkpoint" / "step-4").manifest.tensors
    entry = saved["model.layers.0.feed_forward.expert_bias"]
    assert entry == ["float32", [8]]


class Mixtures(nn.Module):
    """Two mixtures, of which a pipeline stage might have one."""

    def __init__(self) -> None:
        super().__init__()
        args = Qwen3MoeArgs(
            16,
            2,
            2,
            ffn_dim=24,
            vocab_size=32,
            n_experts=4,
            expert_width=8,
            bias_update=1.0,
            top_k=2,
        )
        self.first = MoE(args)
        self.second = MoE(args)


def _update(world: DistEnv) -> tuple[Any, Any, dict[str, Tensor]]:
    model = Mixtures()
    balance = ExpertBalance(model, {"first": 4, "gone": 4, "second": 4}, 0.5, world.device)
    balance.begin()
    assert model.first.load is not None and model.second.load is not None
    model.first.load += torch.tensor([3, 1, 2, 2])
    model.second.load += torch.tensor([4, 0, 0, 0])
    with Operations() as operations, Calls() as calls:
        balance.update(torch.tensor(True))
    balance.begin()
    balance.update(torch.tensor(False))
    return operations.sent, calls.reads, biases_of(model)


def test_an_update_has_one_collective_and_no_read_of_the_host(pool: Pools) -> None:
    sent, reads, biases = pool(2).run(_update)[0]
    assert sent == {("allreduce_", "torch.int64"): 1}
    assert not reads
    # Two ranks with the same rows: only the sign counts.
    assert biases["first.expert_bias"].tolist() == [-0.5, 0.5, 0, 0]
    assert biases["second.expert_bias"].tolist() == [-0.75, 0.25, 0.25, 0.25]
