"""What sharding does on the wire, when, and where the parameters end up."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pool import Pools
from tests.steps import forward_backward, train_step
from tests.training.harness import TINY, Run, batches, build_tiny, micro_batches, train
from titanlite.data.loader import to_device
from titanlite.guard import FiniteGuard
from titanlite.models import get_spec
from titanlite.parallel.dist_env import DistEnv
from titanlite.parallel.fsdp import offloads, set_gradient_sync
from titanlite.step import forward_backward

TOKENS, LABELS = batches(1, 8, 16, 192)
RUN = Run(TOKENS, LABELS, [1e-3])
TOTAL = 123_200  # parameters of TINY: embedding and head 12,288 each, two blocks of 49,280, final norm 64
EMBEDDING, BLOCK, HEAD = 12_288, 49_280, 12_288 + 64


@dataclass(frozen=True)
class Sent:
    """One collective: bytes that this rank puts in and gets out."""

    name: str
    dtype: torch.dtype
    bytes_in: int
    bytes_out: int


class Wire(TorchDispatchMode):
    """Hands every collective of c10d to `note`."""

    def __init__(self, note: Callable[[Sent], None]) -> None:
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "barrier" not in str(func):
            name = str(func).split(".")[1]
            out = _first(args[0])
            into = out if name == "allreduce_" else _first(args[1])
            self.note(Sent(name.strip("_"), into.dtype, into.nbytes, out.nbytes))
        return func(*args, **(kwargs or {}))


def _first(value: Any) -> torch.Tensor:
    while isinstance(value, (list, tuple)):
        value = value[0]
    return value


GATHER, REDUCE, SUM = "allgather_base", "reduce_scatter_base", "allreduce"


def _step(world: DistEnv, run: Run) -> list[Sent]:
    """The collectives of the second step, those of the counts and of loss and norm left out."""
    model, optimizer, rank = build_tiny(world, run)
    guard = FiniteGuard(world.device)
    data = to_device(micro_batches(run, 0, rank, world.size), world.device)
    seen: list[Sent] = []

    def take(step: int) -> None:
        sync_every = run.shard.gradient_sync == "every"
        train_step(model, optimizer, data, step=step, lr=1e-3, max_norm=1.0, guard=guard, sync_every=sync_every)

    take(1)  # FSDP sets itself up
    with Wire(seen.append):
        take(2)
    return [sent for sent in seen if sent.name != SUM or sent.bytes_in > 24]  # three counts; loss and norm


def _counts(seen: list[Sent]) -> dict[str, int]:
    return dict(Counter(sent.name for sent in seen))


def _bytes(seen: list[Sent], name: str, end: str) -> int:
    return sum(getattr(sent, f"bytes_{end}") for sent in seen if sent.name == name)


# units, number of groups that are gathered (the root is one if it holds parameters), and the sizes of the last two
KINDS: list[tuple[Any, int, int]] = [
    ("block", 4, BLOCK + HEAD),  # embedding, blocks, norm with head
    ("root", 1, TOTAL),
    ("size", 3, BLOCK + EMBEDDING + HEAD),  # blocks, root
    (("Attention", "FeedForward"), 5, TOTAL - 2 * 12_288 - 36_864),  # the last feed-forward, root
]


@pytest.mark.parametrize(("units", "groups", "last_two"), KINDS, ids=["block", "root", "size", "classes"])
def test_each_kind_of_unit_gathers_what_its_reshard_policy_says(
    pool: Pools, units: Any, groups: int, last_two: int
) -> None:
    plan = ShardPlan(param_dtype="float32", units=units, min_params=30_000)
    again = {None: max(groups - 2, 0), True: groups, False: 0}
    for reshard, gathered_again in again.items():
        seen = pool(2).run(_step, replace(RUN, shard=replace(plan, reshard_after_forward=reshard)))[0]
        assert _counts(seen) == {GATHER: groups + gathered_again, REDUCE: groups}
        whole = {None: 2 * TOTAL - last_two, True: 2 * TOTAL, False: TOTAL}[reshard]
        assert _bytes(seen, GATHER, "out") == 4 * whole
        assert _bytes(seen, REDUCE, "in") == 4 * TOTAL and _bytes(seen, REDUCE, "out") == 4 * TOTAL // 2


@pytest.mark.parametrize(("sync", "reductions"), [("last", 1), ("every", 3)])
def test_accumulation_gathers_with_every_micro_batch(pool: Pools, sync: Any, reductions: int) -> None:
    tokens, labels = batches(1, 6, 16, 192)
    plan = ShardPlan(param_dtype="float32", gradient_sync=sync, reshard_after_forward=True)
    seen = pool(2).run(_step, replace(RUN, tokens=tokens, labels=labels, shard=plan, accumulation=3))[0]
    assert _counts(seen) == {GATHER: 3 * 2 * 4, REDUCE: reductions * 4}
    assert _bytes(seen, REDUCE, "in") == reductions * 4 * TOTAL


def test_a_number_gathers_for_backward_within_groups_of_that_many_ranks(pool: Pools) -> None:
    plan = ShardPlan(param_dtype="float32", reshard_after_forward=2)
    for seen in pool(4).run(_step, replace(RUN, shard=plan)):
        groups = Counter(sent.bytes_out // sent.bytes_in for sent in seen if sent.name == GATHER)
        assert groups == {4: 4, 2: 4}, "forward over all four ranks, backward over two"
        assert _counts(seen) == {GATHER: 8, REDUCE: 4}


def test_replicas_add_one_all_reduce_of_a_shard_per_unit(pool: Pools) -> None:
    for seen in pool(4).run(_step, replace(RUN, replicas=2, shard=ShardPlan(param_dtype="float32"))):
        assert _counts(seen) == {GATHER: 6, REDUCE: 4, SUM: 4}
        assert _bytes(seen, SUM, "in") == 4 * TOTAL // 2
    for seen in pool(2).run(_step, replace(RUN, replicas=2, shard=ShardPlan(param_dtype="float32"))):
        assert _counts(seen) == {SUM: 4}, "whole weights are neither gathered nor scattered"
        assert _bytes(seen, SUM, "in") == 4 * TOTAL


@pytest.mark.parametrize("param", ["bfloat16", "float32"])
@pytest.mark.parametrize("reduce", ["bfloat16", "float32"])
def test_bytes_gathered_and_reduced_follow_the_precision(pool: Pools, param: Any, reduce: Any) -> None:
    width = {"bfloat16": 2, "float32": 4}
    plan = ShardPlan(param_dtype=param, reduce_dtype=reduce, reshard_after_forward=False)
    for seen in pool(2).run(_step, replace(RUN, shard=plan)):
        assert {sent.dtype for sent in seen if sent.name == REDUCE} == {getattr(torch, reduce)}
        assert _bytes(seen, REDUCE, "in") == width[reduce] * TOTAL
        assert {sent.dtype for sent in seen if sent.name == GATHER} == {getattr(torch, param)}
        assert _bytes(seen, GATHER, "out") == width[param] * TOTAL


def _order(world: DistEnv, run: Run) -> tuple[list[int], list[int]]:
    """All-gathers begun before the embedding and each block computes, and before each block does in backward."""
    model, _, rank = build_tiny(world, run)
    batch = micro_batches(run, 0, rank, world.size)[0]
    gathers = 0
    forward: dict[str, int] = {}
    backward: dict[str, int] = {}

    def note(sent: Sent) -> None:
        nonlocal gathers
        gathers += sent.name == GATHER

    def watch(name: str) -> None:
        def before(module: nn.Module, args: Any) -> None:
            forward[name] = gathers

        def after(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            def arrived(gradient: torch.Tensor) -> None:
                backward.setdefault(name, gathers)

            output.register_hook(arrived)

        model.get_submodule(name).register_forward_pre_hook(before)
        # The last product is the first in backward, and comes after what the unit around it does before its backward.
        model.get_submodule(f"{name}.feed_forward.w2").register_forward_hook(after)

    names = [f"layers.{i}" for i in range(run.args.n_layers)]
    for name in names:
        watch(name)
    model.get_submodule("tok_embeddings").register_forward_pre_hook(lambda *_: forward.update(first=gathers))
    model(batch.tokens).sum().backward()
    forward.clear()
    backward.clear()
    with Wire(note):
        loss = model(batch.tokens).sum()
        in_forward = gathers
        loss.backward()
    return [forward[name] for name in ("first", *names)], [backward[name] - in_forward for name in names]


DEEP = replace(TINY, n_layers=5)


@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
def test_prefetch_begins_gathers_before_the_unit_in_front_computes(pool: Pools, ahead: int) -> None:
    """Units are embedding, five blocks, norm with head: seven, all gathered again for backward."""
    plan = ShardPlan(param_dtype="float32", reshard_after_forward=True, prefetch=ahead)
    forward, backward = pool(2).run(_order, replace(RUN, args=DEEP, shard=plan))[0]
    # Before the embedding, itself; before block i, blocks 0 … i too; and those ahead.
    assert forward == [min(1 + i + ahead, 7) for i in range(6)]
    # Before block i in backward: the head, blocks 4 … i, and those ahead; torch by itself is one ahead there.
    assert backward == [min(6 - i + max(ahead, 1), 7) for i in range(5)]


def test_prefetch_goes_around_a_tied_unit_that_runs_first_and_last(pool: Pools) -> None:
    """Tied embedding and head stay gathered from the first to the last use: block 0 is what comes next."""
    plan = ShardPlan(param_dtype="float32", reshard_after_forward=True, prefetch=1)
    forward, backward = pool(2).run(_order, replace(RUN, args=replace(DEEP, tied=True), shard=plan))[0]
    assert forward == [min(2 + i, 6) for i in range(6)]
    assert backward == [min(7 - i, 6) for i in range(5)]


def _placements(world: DistEnv, run: Run) -> dict[str, tuple[Any, ...]]:
    model, _, _ = build_tiny(world, run)
    found = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        mesh = parameter.device_mesh
        found[name] = (tuple(parameter.placements), mesh.mesh_dim_names, tuple(mesh.shape), parameter.to_local().shape)
    return found


@pytest.mark.parametrize("units", ["block", "root", "size", ("Attention", "FeedForward")], ids=str)
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 1), (4, 2), (2, 2)], ids=["2", "4", "2x2", "ddp"])
def test_every_parameter_is_sharded_by_rows_over_the_shard_ranks(
    pool: Pools, units: Any, ranks: int, replicas: int
) -> None:
    plan = ShardPlan(units=units, min_params=30_000)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in get_spec("llama3").build(TINY).named_parameters()}
    sharded_over = ranks // replicas
    for found in pool(ranks).run(_placements, replace(RUN, shard=plan, replicas=replicas)):
        assert found.keys() == shapes.keys()
        for name, (placements, dims, mesh, local) in found.items():
            if replicas > 1:
                assert (placements, dims, mesh) == (
                    (Replicate(), Shard(0)),
                    ("dp_replicate", "dp_shard"),
                    (replicas, sharded_over),
                )
            else:
                assert (placements, dims, mesh) == ((Shard(0),), ("dp_shard",), (ranks,))
            assert local == (shapes[name][0] // sharded_over, *shapes[name][1:]), name


def _storages() -> dict[int, int]:
    """Bytes by storage of all tensors that are reachable, gradients among them. Memory in gloo's hands is not."""
    gc.collect()
    found = [item for item in gc.get_objects() if isinstance(item, torch.Tensor)]
    found += [item.grad for item in found if isinstance(item, nn.Parameter) and item.grad is not None]
    plain = [item.to_local() if isinstance(item, DTensor) else item for item in found]
    # By the storage itself: what earlier traces left in this process has no address.
    return {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in plain if t.device.type == "cpu")}


def _kept(world: DistEnv, run: Run, sync_every: bool) -> int:
    """Bytes that a step's first micro-batch leaves behind."""
    model, _, rank = build_tiny(world, run)
    data = micro_batches(run, 0, rank, world.size)
    tokens = torch.tensor(64)
    forward_backward(model, data, tokens, sync_every)  # FSDP sets itself up
    model.zero_grad()
    set_gradient_sync(model, sync_every)
    before = _storages()
    model(data[0].tokens).float().sum().backward()
    return sum(size for storage, size in _storages().items() if storage not in before)


@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
def test_waiting_for_the_last_micro_batch_keeps_whole_gradients(pool: Pools, reduce: Any) -> None:
    """Bytes of the precision of the reduction for every parameter, against 4 bytes for every one of the shard's."""
    run = replace(RUN, accumulation=2, shard=ShardPlan(reduce_dtype=reduce))
    width = {"bfloat16": 2, "float32": 4}[reduce]
    assert pool(2).run(_kept, run, False)[0] == width * TOTAL
    assert pool(2).run(_kept, run, True)[0] == 4 * TOTAL / 2


class Odd(nn.Module):
    """A model of one's own: units of its own classes, a tied head, rows that no two ranks divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(3))
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def _own_model(world: DistEnv, prefetch: int, average: bool = False, replicas: int = 1) -> tuple[float, int]:
    """Largest difference of a gradient from the plain model's, and the all-gathers of a step.

    average: the ranks' losses are means over their own tokens; the plain model's over all tokens.
    """
    torch.manual_seed(0)
    plain, ours = Odd(), Odd()
    ours.load_state_dict(plain.state_dict())
    units = units_by_class(ours, ["Sequential", "Embedding"])
    plan = ShardPlan(param_dtype="float32", reshard_after_forward=True, prefetch=prefetch)
    mesh = world.build_mesh(MeshPlan(world.size, replicas, world.size // replicas))
    shard(ours, units, mesh, plan, average)
    tokens = torch.arange(26).view(2, 13) % 13
    reduce = torch.mean if average else torch.sum
    reduce(plain(tokens).logsumexp(-1)).backward()
    seen: list[Sent] = []
    with Wire(seen.append):
        reduce(ours(tokens[world.rank :: world.size]).logsumexp(-1)).backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    worst = 0.0
    for name, parameter in ours.named_parameters():
        assert isinstance(parameter.grad, DTensor) and expected[name] is not None
        worst = max(worst, (parameter.grad.full_tensor() - expected[name]).abs().max().item())
    return worst, _counts(seen).get(GATHER, 0)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_model_of_ones_own_is_sharded_by_its_classes(pool: Pools, prefetch: int) -> None:
    for worst, gathers in pool(2).run(_own_model, prefetch):
        assert worst < 1e-5
        assert gathers == 2 * 4  # three layers, and embedding with head


@pytest.mark.parametrize("replicas", [1, 2], ids=["FSDP", "DDP"])
def test_averaged_gradients_are_those_of_one_process(pool: Pools, replicas: int) -> None:
    for worst, _ in pool(2).run(_own_model, 0, True, replicas):
        assert worst < 1e-6  # of gradients up to 0.1


def _curve(world: DistEnv, run: Run, dtype: torch.dtype) -> tuple[list[float], set[torch.dtype]]:
    """Losses of a run under a default dtype of torch, and the dtypes of its weights afterwards."""
    torch.set_default_dtype(dtype)
    try:
        curve = train(world, run)
    finally:
        torch.set_default_dtype(torch.float32)
    return curve.losses, {weight.dtype for weight in curve.weights.values()}


def test_weights_are_float32_whatever_torchs_default_is(pool: Pools) -> None:
    tokens, labels = batches(2, 8, 16, 192)
    run = Run(tokens, labels, [1e-3, 1e-3])
    (usual, _), (low, dtypes) = (pool(1).run(_curve, run, d)[0] for d in (torch.float32, torch.bfloat16))
    assert dtypes == {torch.float32}
    assert low == usual


def test_offload_is_for_accelerators() -> None:
    plan = ShardPlan(cpu_offload=True)
    assert offloads(plan, "cuda") and not offloads(plan, "cpu") and not offloads(ShardPlan(), "cuda")


def test_offload_changes_nothing_on_a_cpu(pool: Pools) -> None:
    seen = [pool(2).run(_step, replace(RUN, shard=ShardPlan(cpu_offload=on)))[0] for on in (False, True)]
    assert seen[0] == seen[1]
