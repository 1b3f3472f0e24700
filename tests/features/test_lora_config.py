"""Keys of [lora]: what is refused and told, and what the plan knows."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from titanlite.cli.plan.memory_trace import trace
from titanlite.dist.dist_env import DistEnv
from titanlite.features.lora.digests import digest_of_tensor, digests_of
from titanlite.features.lora.settings import Adapters, adapters_of
from titanlite.plan.hardware import cluster_of
from titanlite.plan.memory import estimate
from titanlite.plan.plan import make_plan
from titanlite.resolve.load import check_config
from titanlite.run.config import RunConfig

NO_AC = "--activation_checkpoint.mode=none"
BASE = ("--checkpoint.enable_checkpoint", "--checkpoint.initial_load_path=somewhere")


def read(*flags: str, config: str = "llama3_1_8b", ranks: int = 8) -> RunConfig:
    words = [f"--job.config_file=train_configs/{config}.toml", *BASE, "--lora.rank=16", *flags]
    return check_config(words, ranks, training=False)[1]


@pytest.mark.parametrize(
    ("targets", "kinds"),
    [
        (["all-linear"], 7),
        (["wq", "wv"], 2),
        (["attention.wq", "mlp.down_proj"], 2),
    ],
)
def test_targets_are_ends_of_names(targets, kinds):
    run = read(f"--lora.targets={targets}".replace("'", '"'))
    found = adapters_of(run.lora, run.spec, run.model_args())
    assert len(found.kinds) == kinds and len(found.sizes) == 32 * kinds


def test_scales():
    assert Adapters(16, 32.0).scale == 2.0
    assert Adapters(16, 32.0, rslora=True).scale == 8.0


def test_experts_and_routers_stay():
    run = read(config="mixtral_8x7b", ranks=16)
    assert adapters_of(run.lora, run.spec, run.model_args()).kinds == [
        f"attention.{name}" for name in ("wq", "wk", "wv", "wo")
    ]


SMALL = ("--model.overrides.n_layers=3", "--training.loss_chunks=8")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (8, [NO_AC, "--training.loss_chunks=1", "--training.global_batch_size=-1"]),
        (8, ["--activation_checkpoint.mode=full", "--optimizer.ema_decay=0.9"]),
        (8, ["--activation_checkpoint.selective_ac_option=op"]),
        (1, ["--activation_checkpoint.mode=full", "--training.global_batch_size=-1"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_planned_memory_is_that_of_the_trace(ranks, flags):
    run = read(*SMALL, *flags, ranks=ranks)
    assert estimate(run, 0).peak.total == pytest.approx(trace(run, 0).peak.total, rel=0.002)


def test_planned_memory_of_experts_is_that_of_the_trace():
    run = read("--model.overrides.n_layers=3", NO_AC, config="mixtral_8x7b")
    assert estimate(run, 0).peak.total == pytest.approx(trace(run, 0).peak.total, rel=0.005)


def test_what_freezing_saves():
    frozen, whole = (
        make_plan(run, cluster_of(run, gpu="h100-80g")) for run in (read(), read("--lora.rank=0"))
    )
    trained = 41_943_040  # of 8.03 billion
    parts = frozen.memory.peak.parts
    assert parts["optimizer"] == 8 * trained / 8
    assert parts.get("gradients", 0) <= 4 * trained / 8
    # bfloat16 for the frozen weights, float32 for the others.
    tables = 4 * 128 * 8192
    assert parts["parameters"] == pytest.approx(
        (2 * 8_030_261_248 + 4 * trained) / 8 + tables, rel=1e-4
    )
    assert frozen.speed.parts["optimizer"] < 0.01 * whole.speed.parts["optimizer"]
    args = frozen.run.model_args()
    full = frozen.run.spec.flops_per_token(args, 0)
    assert frozen.run.flops_per_token(args, 0) == full - full // 3 + 6 * trained


def _shared_digests(world: DistEnv) -> dict[str, str]:
    mesh = world.build_mesh(dp_shard=world.size)["dp_shard"]
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape, placement in (
        ("rows", (10, 12), Shard(0)),
        ("odd rows", (7, 5), Shard(0)),
        ("columns", (6, 20), Shard(1)),
        ("odd columns", (6, 14), Shard(1)),
        ("stack", (3, 4, 8), Shard(0)),
        ("whole", (5,), Replicate()),
        ("line", (9,), Shard(0)),
    ):
        whole = torch.randn(shape, generator=generator)
        tensors[name] = distribute_tensor(whole, mesh, [placement])
    found = digests_of(tensors, sorted(tensors))
    for name, tensor in tensors.items():
        assert isinstance(tensor, DTensor)
        whole = tensor.full_tensor()
        assert found[name] == digest_of_tensor(whole) == digest_of_tensor(whole.bfloat16()), name
        changed = whole.clone()
        changed.view(-1)[-1] += 1
        assert found[name] != digest_of_tensor(changed), name
        assert found[name] != digest_of_tensor(whole.flip(0)), name
    return found


def test_hashes_do_not_depend_on_ranks(pool):
    one = pool(1).run(_shared_digests)[0]
    two = pool(2).run(_shared_digests)
    assert two[0] == two[1] == one
