"""The load of experts is evened out by a loss or by biases, on any layout and over a resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.checkpoints import assert_equal
from tests.support.harness import weights_of
from tests.support.pool import Pools
from tests.support.steps import written_rows
from tests.support.tiny import EIGHT_STEPS, TWO_LAYERS
from tests.support.watch import Calls, Operations
from titanlite.assembly.build import build
from titanlite.callbacks import Callback
from titanlite.cli.hub.compare_checkpoints import Contents
from titanlite.dist.dist_env import DistEnv
from titanlite.dist.local_parts import local
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


def biases_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: buffer.clone()
        for name, buffer in model.named_buffers()
        if name.endswith("expert_bias")
    }


class _Kept(Callback):
    """Keeps biases and losses of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []
        self.losses: list[float] = []

    def on_step_end(self, trainer: Trainer, result: Any) -> None:
        self.losses.append(result.loss.item())
        self.steps.append(biases_of(trainer.parts.model))


def _trainer(world: DistEnv, folder: str, *flags: str) -> Trainer:
    words = [*flags, f"--job.dump_folder={folder}"]
    return Trainer(build(load_config("debug_model.toml", world.size, words), world))


def _train(world: DistEnv, folder: str, nan_in: int, *flags: str) -> dict[str, Any]:
    """Train; biases, weights and losses. nan_in: a step whose loss is no number."""
    trainer = _trainer(world, folder, *FLAGS, *flags)
    model = trainer.parts.model

    def spoil(module: Any, inputs: Any, out: Tensor) -> Tensor:
        return out * float("nan") if trainer.step == nan_in else out

    if nan_in:
        model.register_forward_hook(spoil)
    kept = _Kept()
    trainer.callbacks = type(trainer.callbacks)([*trainer.callbacks.all, kept])
    trainer.train()
    return {"steps": kept.steps, "losses": kept.losses, "weights": weights_of(model)}


@pytest.fixture(scope="module")
def alone(pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return pool(1).run(_train, str(tmp_path_factory.mktemp("alone")), 0)[0]


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
        (4, [EP, PP, "--training.batch_size=2", FULL]),
        (4, [CP, TP]),
    ],
)
def test_equal_however_the_work_is_divided(pool, alone, tmp_path, ranks, flags):
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
def test_a_step_that_the_guard_holds_back_moves_no_bias(pool, tmp_path):
    found = pool(1).run(_train, str(tmp_path), 2, "--guard.policy=skip")[0]
    first, second, third, _ = found["steps"]
    assert_equal(first, second)
    assert any(not torch.equal(second[name], third[name]) for name in third)


@pytest.mark.slow
def test_a_resumed_run_goes_on_to_the_last_bit(pool, alone, tmp_path):
    save = [str(tmp_path), 0, "--checkpoint.enable_checkpoint"]
    first = pool(1).run(_train, *save, "--training.steps=2")[0]
    resumed = pool(1).run(_train, *save)[0]
    assert first["losses"] + resumed["losses"] == alone["losses"]
    assert_equal(resumed["steps"][-1], alone["steps"][-1])
    assert_equal(resumed["weights"], alone["weights"])
    saved = Contents(tmp_path / "checkpoint" / "step-4").manifest.tensors
    assert saved["model.layers.0.feed_forward.expert_bias"] == ["float32", [8]]


#: A GPT-OSS of one layer, whose experts two ranks share.
UNEVEN = [
    *EIGHT_STEPS,
    "--model.name=gpt_oss",
    *(f"--model.overrides.{size}" for size in ("n_kv_heads=2", "head_dim=16", "ffn_dim=32")),
    *("--model.overrides.n_experts=8", "--model.overrides.top_k=2", EP),
    *("--training.batch_size=4", "--training.global_batch_size=8", "--training.steps=20"),
    *("--lr_scheduler.decay_type=constant", "--optimizer.lr=3e-3"),
]


def _uneven(world: DistEnv, folder: str, *flags: str) -> list[dict[str, Any]]:
    """Train a router that prefers one expert, and tells tokens apart; return the last logs."""
    trainer = _trainer(world, folder, *UNEVEN, *flags)
    with torch.no_grad():
        trainer.parts.model.get_parameter("layers.0.feed_forward.gate.weight").mul_(10)
        if world.rank == 0:
            local(trainer.parts.model.get_parameter("layers.0.feed_forward.gate.bias"))[0] = 2.0
    trainer.train()
    return [row for row in written_rows(world, folder) if "loss" in row][-5:]


@pytest.mark.slow
def test_each_way_evens_out_an_uneven_load_and_nothing_else_does(pool, tmp_path):
    """The largest of 8 shares, of which a token has two: 0.125 is even, and 0.5 is all tokens."""
    shares, losses = {}, {}
    for way in ("aux_loss=0", "aux_loss=0.5", "bias_update=0.02"):
        flags = [f"--model.overrides.{one}" for one in ("aux_loss=0", "bias_update=0", way)]
        rows = pool(2).run(_uneven, str(tmp_path / way), *flags)[0]
        shares[way], losses[way] = (
            sum(row[name] for row in rows) / 5 for name in ("experts/max_share", "loss")
        )
    assert shares.pop("aux_loss=0") > 0.38
    assert max(shares.values()) < 0.31
    assert max(losses.values()) < min(losses.values()) + 0.2


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


def test_an_update_has_one_collective_and_no_read_of_the_host(pool):
    sent, reads, biases = pool(2).run(_update)[0]
    assert sent == {("allreduce_", "torch.int64"): 1}
    assert not reads
    # Two ranks with the same rows: only the sign counts.
    assert biases["first.expert_bias"].tolist() == [-0.5, 0.5, 0, 0]
    assert biases["second.expert_bias"].tolist() == [-0.75, 0.25, 0.25, 0.25]
