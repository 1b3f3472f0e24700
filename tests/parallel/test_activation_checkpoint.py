"""Activation checkpointing: the same numbers in every mode, what runs again, what stays in memory, what is refused."""

from __future__ import annotations

import gc
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.pool import Pools
from tests.refusals import refusal
from tests.training.harness import TINY, Run, batches, build_tiny, full, micro_batches, train
from tests.training.test_run import TINY as TINY_RUN
from tests.training.test_run import _losses, _run
from tests.training.test_step_effects import Collectives
from titanlite.build import to_device
from titanlite.checkpoint.manifest import read_manifest
from titanlite.config.errors import ConfigError
from titanlite.config.load import load
from titanlite.config.plans import ActivationCheckpointPlan, ShardPlan
from titanlite.config.resolve import resolve
from titanlite.guard import FiniteGuard
from titanlite.models import SHAPES, get_spec
from titanlite.parallel.activation_checkpoint import (
    ATTENTION,
    MATMULS,
    OTHERS,
    Kept,
    _checkpointed,
    checkpoint_activations,
    kind_of,
    trace_block,
)
from titanlite.parallel.activation_offload import CudaHost, offload
from titanlite.parallel.world import World
from titanlite.prepare import checked_plans
from titanlite.step import train_step

CPU = torch.device("cpu")
SPEC = get_spec("llama3")
FOUR = replace(TINY, n_layers=4)
TOKENS, LABELS = batches(2, 8, 32, 192)
NONE, FULL = ActivationCheckpointPlan("none"), ActivationCheckpointPlan("full")
EVERY_2, OP = ActivationCheckpointPlan("every", every=2), ActivationCheckpointPlan("op")
RECOMPUTING = pytest.mark.parametrize("plan", [FULL, EVERY_2, OP], ids=lambda plan: plan.mode)


def build(plan: ActivationCheckpointPlan, args: Any = FOUR) -> nn.Module:
    torch.manual_seed(3)
    model = SPEC.build(args)
    checkpoint_activations(model, SPEC.block_names(args), plan, CPU)
    return model


def on_meta(args: Any = FOUR) -> nn.Module:
    with torch.device("meta"):
        return SPEC.build(args)


def traced(plan: ActivationCheckpointPlan, dtype: torch.dtype = torch.float32) -> Kept:
    return trace_block(on_meta(), SPEC.block_names(FOUR), plan, (4, 32), CPU, dtype)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model(TOKENS[0]).logsumexp(-1).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def plain_gradients() -> dict[str, Tensor]:
    return gradients(build(NONE))


def assert_equal(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert ours.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(ours[name], expected[name])] == []


# The same numbers and names


@RECOMPUTING
@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 1), (1, 2), (2, 2)])
def test_training_is_bit_for_bit_that_of_mode_none(
    pool: Pools, plan: ActivationCheckpointPlan, ranks: int, accumulation: int
) -> None:
    run = Run(TOKENS, LABELS, [1e-3, 1e-3], args=FOUR, accumulation=accumulation)
    expected = pool(ranks).run(train, run)[0]
    curve = pool(ranks).run(train, replace(run, activations=plan))[0]
    assert (curve.losses, curve.norms) == (expected.losses, expected.norms)
    assert_equal(curve.gradients, expected.gradients)
    assert_equal(curve.weights, expected.weights)


def test_bf16_is_bit_for_bit_the_same_too(pool: Pools) -> None:
    run = Run(TOKENS, LABELS, [1e-3], args=FOUR, shard=ShardPlan("bfloat16"))
    expected = pool(2).run(train, run)[0]
    for plan in (FULL, OP):
        assert_equal(pool(2).run(train, replace(run, activations=plan))[0].gradients, expected.gradients)


@RECOMPUTING
def test_names_do_not_change(plan: ActivationCheckpointPlan) -> None:
    plain, model = build(NONE), build(plan)
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict())


class Dropping(nn.Module):
    """One block with dropout, as a model of a user's own may have."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(16, 16), nn.Dropout(p), nn.Linear(16, 16), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


def test_dropout_draws_the_same_numbers_again() -> None:
    found = []
    for plan in (NONE, FULL):
        torch.manual_seed(0)
        model = Dropping(0.5)
        checkpoint_activations(model, ["block"], plan, CPU)
        model(torch.ones(8, 16)).sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert_equal(*found)


# What runs again


class Ops(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("plan", "matmuls_again", "attention_again"),
    [(NONE, 0, 0), (EVERY_2, 2 * 6, 2), (OP, 4 * 3, 0), (FULL, 4 * 6, 4)],
    ids=lambda value: getattr(value, "mode", ""),
)
def test_operators_run_again_in_backward(
    plan: ActivationCheckpointPlan, matmuls_again: int, attention_again: int
) -> None:
    """Of a block's seven products w2 runs once in every mode: nothing in the backward needs its output."""
    model = build(plan)
    with Ops() as forward:
        loss = model(TOKENS[0]).sum()
    with Ops() as backward:
        loss.backward()
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    products = 4 * 7 + 1
    assert (forward.seen["aten.mm.default"], forward.seen[attention]) == (products, 4)
    assert backward.seen["aten.mm.default"] == 2 * products + matmuls_again
    assert backward.seen[attention] == attention_again


def test_every_second_block_is_the_second_the_fourth_and_so_on() -> None:
    names = SPEC.block_names(FOUR)
    assert checkpoint_activations(build(NONE), names, EVERY_2, CPU) == ["layers.1", "layers.3"]
    three = ActivationCheckpointPlan("every", every=3)
    assert checkpoint_activations(build(NONE), names, three, CPU) == ["layers.2"]


def test_a_part_of_the_model_recomputes_the_same_blocks_as_the_whole() -> None:
    stage = build(NONE)
    del stage.layers["0"], stage.layers["1"]
    assert checkpoint_activations(stage, SPEC.block_names(FOUR), EVERY_2, CPU) == ["layers.3"]


def _collectives(world: World, run: Run) -> Counter[tuple[str, torch.dtype]]:
    model, optimizer, rank = build_tiny(world, run)
    guard = FiniteGuard(world.device)
    data = to_device(micro_batches(run, 0, rank, world.size), world.device)
    train_step(model, optimizer, data, step=1, lr=1e-3, max_norm=1.0, guard=guard)
    with Collectives() as counter:
        train_step(model, optimizer, data, step=2, lr=1e-3, max_norm=1.0, guard=guard)
    return counter.seen


@pytest.mark.parametrize("reshard", [True, False])
def test_weights_are_gathered_no_more_often(pool: Pools, reshard: bool) -> None:
    """A block is gathered once for the backward, in which its recomputation lies."""
    run = Run(TOKENS, LABELS, [], args=FOUR, shard=ShardPlan("float32", reshard_after_forward=reshard))
    plain = pool(2).run(_collectives, run)[0]
    units = FOUR.n_layers + 2
    assert plain["_allgather_base_", torch.float32] == (2 if reshard else 1) * units
    for plan in (FULL, EVERY_2, OP):
        assert pool(2).run(_collectives, replace(run, activations=plan))[0] == plain


# What stays in memory


class Storages(TorchDispatchMode):
    """Remembers every storage that an operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.made[StorageWeakRef(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
        return out


def bytes_kept(plan: ActivationCheckpointPlan) -> int:
    """Bytes of all storages that live after a forward; those of weights, the same in all modes, are among them."""
    model = build(plan)
    with Storages() as storages:
        output = model(TOKENS[0, :4])
    gc.collect()
    total = sum(size for ref, size in storages.made.items() if not ref.expired())
    del output
    return total


def test_each_mode_keeps_less_than_the_one_before() -> None:
    kept = {plan.mode: bytes_kept(plan) for plan in (NONE, EVERY_2, OP, FULL)}
    trace = {plan.mode: traced(plan).total_bytes for plan in (NONE, EVERY_2, OP, FULL)}
    # [batch, seq] = 128 tokens of fp32: a block keeps its input alone, or with wq, wv, w1, w2, attention and its lse.
    tokens, ffn, heads = 4 * 32 * 4, FOUR.ffn_width, FOUR.n_heads
    assert trace["full"] == 4 * tokens * FOUR.dim
    assert trace["op"] == 4 * tokens * (FOUR.dim * 4 + FOUR.kv_heads * FOUR.head_dim + ffn + heads)
    assert trace["every"] == (trace["none"] + trace["full"]) // 2
    assert trace["none"] > trace["every"] > trace["op"] > trace["full"]
    # The whole model on real tensors saves what the trace of one block says.
    for mode in ("every", "op", "full"):
        assert kept["none"] - kept[mode] == trace["none"] - trace[mode], mode


def test_the_trace_counts_what_runs_again() -> None:
    nothing, one_block = {"matmul": 0, "attention": 0}, {"matmul": 7, "attention": 1}
    none, full, op = traced(NONE), traced(FULL), traced(OP, torch.bfloat16)
    assert (none.recomputing, none.recomputed, none.forward) == (0, nothing, one_block)
    assert (full.recomputing, full.recomputed, full.saved) == (4, {"matmul": 6, "attention": 1}, nothing)
    assert (op.recomputed, op.saved) == ({"matmul": 3, "attention": 0}, {"matmul": 4, "attention": 1})
    assert traced(EVERY_2).recomputing == 2


def test_a_trace_leaves_no_class_behind() -> None:
    traced(OP)
    before = _checkpointed.cache_info().currsize
    traced(OP)
    assert _checkpointed.cache_info().currsize == before


def _copied(world: World, run: Run) -> float:
    """Share of the weights of which a copy to compute with lives after a forward."""
    model, _, rank = build_tiny(world, run)
    output = model(micro_batches(run, 0, rank, world.size)[0].tokens)
    groups = {m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)}
    copies = [copy for group in groups if group for p in group.fsdp_params for copy in p.all_gather_outputs]
    del output
    elements = sum(copy.untyped_storage().nbytes() // copy.itemsize for copy in copies)
    return elements / sum(p.numel() for p in model.parameters())


def test_one_rank_keeps_or_frees_copies_of_its_weights_too(pool: Pools) -> None:
    run = Run(TOKENS, LABELS, [], args=FOUR)
    found = [
        pool(1).run(_copied, replace(run, shard=ShardPlan("bfloat16", reshard_after_forward=again)))[0]
        for again in (True, False)
    ]
    assert found == [0, 1]


# The policy


def test_the_policy_names_operators_that_exist() -> None:
    import torch.nn.attention.varlen  # noqa: F401  registers its operator

    later = {"aten._scaled_mm_v2.default"}
    for name in (*MATMULS, *ATTENTION, *OTHERS):
        space, operator, *overload = name.split(".")
        if name not in later:
            found = getattr(getattr(torch.ops, space), operator)
            assert kind_of(getattr(found, overload[0]) if overload else found), name
    assert kind_of(torch.ops.aten.bmm.default) == kind_of(torch.ops.aten.abs.default) == ""


def test_a_policy_that_saves_nothing_is_an_error() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.LayerNorm(8)
            self.embed = nn.Embedding(10, 8)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.block(self.embed(tokens))

    with torch.device("meta"):
        model = Shift()
    with pytest.raises(ConfigError, match=r'"op" saves nothing in block.*native_layer_norm'):
        trace_block(model, ["block"], OP, (2, 4), CPU, torch.float32)


@pytest.mark.soak
def test_float8_products_are_products() -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = on_meta(replace(FOUR, dim=64))
    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name("tensorwise"))
    kept = trace_block(model, SPEC.block_names(FOUR), OP, (4, 32), CPU, torch.bfloat16)
    assert (kept.forward["matmul"], kept.saved["matmul"], kept.recomputed["matmul"]) == (7, 4, 3)


# Offload


class Shelf:
    """Stands for host memory: keeps what it is sent."""

    device = CPU

    def __init__(self) -> None:
        self.parcels: list[Parcel] = []

    def send(self, tensor: Tensor) -> Parcel:
        self.parcels.append(Parcel(tensor.clone()))
        return self.parcels[-1]

    @property
    def nbytes(self) -> int:
        return sum(parcel.tensor.nbytes for parcel in self.parcels)


class Parcel:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.fetched = tensor, 0

    def fetch(self) -> Tensor:
        self.fetched += 1
        return self.tensor


@pytest.mark.parametrize("plan", [NONE, EVERY_2, FULL], ids=lambda plan: plan.mode)
def test_what_blocks_keep_is_sent_away_and_nothing_else(
    plan: ActivationCheckpointPlan, plain_gradients: dict[str, Tensor]
) -> None:
    model, shelf = build(plan), Shelf()
    for block in model.layers.values():
        offload(block, shelf, model, least_bytes=0)
    assert_equal(gradients(model), plain_gradients)
    sent = [parcel.tensor for parcel in shelf.parcels]
    # 8 sequences, where the trace has 4. What is sent once may be fetched more often, by each operator that saved it.
    assert shelf.nbytes == 2 * traced(plan).total_bytes
    assert all(parcel.fetched for parcel in shelf.parcels)
    weights = {p.detach().sum().item() for p in model.parameters()}
    assert not [t.shape for t in sent if t.sum().item() in weights], "a weight was sent"
    assert list(model.state_dict()) == list(build(NONE).state_dict())


@pytest.mark.parametrize("plan", [NONE, FULL], ids=lambda plan: plan.mode)
def test_the_input_of_a_block_that_is_away_is_free(plan: ActivationCheckpointPlan) -> None:
    model, shelf, inputs = build(plan), Shelf(), []
    for block in model.layers.values():
        offload(block, shelf, model, least_bytes=0)
        block.register_forward_pre_hook(lambda _, args: inputs.append(StorageWeakRef(args[0].untyped_storage())))
    output = model(TOKENS[0])
    gc.collect()
    assert [ref.expired() for ref in inputs] == [True] * 4
    output.sum().backward()


class Views(nn.Module):
    """Saves parts of what one memory holds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(16, 32), kind

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.kind == "chunk":
            a, b = y.chunk(2, -1)
            return a * b
        # The last has as many elements as its memory, but only repeats one column.
        part = y.unfold(-1, 4, 2) if self.kind == "unfold" else y[:, 1:2].expand(8, 32)
        return part * part


@pytest.mark.parametrize("kind", ["chunk", "unfold", "expand"])
def test_views_come_back_as_they_were(kind: str) -> None:
    found = []
    for away in (False, True):
        torch.manual_seed(0)
        block, shelf = Views(kind), Shelf()
        if away:
            offload(block, shelf, block, least_bytes=0)
        x = torch.randn(8, 16, requires_grad=True)
        block(x).sum().backward()
        found.append({"x": x.grad, **{name: p.grad for name, p in block.named_parameters()}})
    assert len(shelf.parcels) == (3 if kind == "chunk" else 2)
    assert_equal(*found)


class Stream:
    """Stands for a CUDA stream: writes down what it is told."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.events = name, log, 0

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.events += 1
        self.log.append(f"{self.name} {self.events}")
        return self.log[-1]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of streams, where `CudaHost` takes the CPU for its device."""
    seen: list[str] = []
    compute, empty_like = Stream("compute", seen), torch.empty_like
    cuda = SimpleNamespace(
        Stream=lambda _: Stream("copy", seen), current_stream=lambda _: compute, stream=lambda _: nullcontext()
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch, "empty_like", lambda t, *, device, pin_memory=False: empty_like(t, device=device))
    return seen


def test_two_tensors_at_most_are_on_their_way_to_the_host(log: list[str]) -> None:
    host, parcels, refs = CudaHost(CPU), [], []
    for value in range(4):
        tensor = torch.full((4,), float(value))
        refs.append(StorageWeakRef(tensor.untyped_storage()))
        parcels.append(host.send(tensor))
        del tensor
    assert [ref.expired() for ref in refs] == [True, True, False, False]
    send = ["copy waits for compute", "copy {}"]
    waits = [[], [], ["compute waits for copy 1"], ["compute waits for copy 2"]]
    assert log == [line.format(n + 1) for n in range(4) for line in (*send, *waits[n])]
    log.clear()
    last = parcels[3].fetch()
    assert last.tolist() == [3.0] * 4 and all(ref.expired() for ref in refs)
    assert log == [
        *("compute waits for copy 3", "compute waits for copy 4"),
        *("copy waits for compute", "copy 5", "compute waits for copy 5"),
        *("copy waits for compute", "copy 6"),  # the one before, ahead of time
    ]
    log.clear()
    assert parcels[3].fetch() is last and log == []
    del parcels[2]
    assert log == ["compute waits for copy 6"], "memory of a copy that nobody fetched is in use until it is done"


def test_small_tensors_stay() -> None:
    model, shelf = build(FULL), Shelf()
    for block in model.layers.values():
        offload(block, shelf, model, least_bytes=8 * 32 * FOUR.dim * 4 + 1)
    gradients(model)
    assert shelf.parcels == []


def _sent(world: World, run: Run) -> tuple[int, list[int]]:
    model, _, rank = build_tiny(world, run)
    shelf = Shelf()
    for block in model.layers.values():
        offload(block, shelf, model, least_bytes=0)
    for batch in micro_batches(run, 0, rank, world.size):
        model(batch.tokens).sum().backward()
    return shelf.nbytes, [p.grad is not None for p in model.parameters()].count(False)


def test_gathered_weights_of_a_sharded_block_stay(pool: Pools) -> None:
    run = Run(TOKENS, LABELS, [], args=FOUR, shard=ShardPlan("float32", reshard_after_forward=True))
    assert pool(2).run(_sent, run) == [(traced(NONE).total_bytes, 0)] * 2


def _sent_in_parallel(world: World) -> tuple[list[torch.Size], list[bool]]:
    torch.manual_seed(0)
    found = []
    shelf = Shelf()
    block = nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 16, bias=False))
    mesh = init_device_mesh("cpu", (world.size,))
    parts = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
    parallelize_module(block, mesh, parts)
    for away in (False, True):
        if away:
            offload(block, shelf, block, least_bytes=0)
        block.zero_grad()
        block(torch.ones(8, 16)).sum().backward()
        found.append([full(p.grad) for p in block.parameters() if p.grad is not None])
    return [p.tensor.shape for p in shelf.parcels], [torch.equal(a, b) for a, b in zip(*found, strict=True)]


def test_a_rank_sends_its_own_part_of_tensor_parallel_activations(pool: Pools) -> None:
    """ReLU's output, 8 x 32 over 2 ranks, sent once for ReLU and the next product."""
    for shapes, same in pool(2).run(_sent_in_parallel):
        assert [shape.numel() for shape in shapes] == [8 * 16] and same == [True, True]


def test_offload_leaves_a_cpus_model_alone() -> None:
    model = build(ActivationCheckpointPlan("none", offload=True))
    assert {type(block) for block in model.layers.values()} == {type(block) for block in build(NONE).layers.values()}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="moves tensors between a GPU and its host")
def test_offload_frees_a_gpus_memory() -> None:
    """Nothing waits for the device in between: what the host has run ahead of it is in the peaks."""
    found, forward, whole = [], [], []
    args = replace(FOUR, n_layers=16, dim=512, n_heads=8, n_kv_heads=8, max_seq_len=512, multiple_of=256)
    device = torch.device("cuda")
    tokens = torch.randint(0, 192, (8, 512), device=device)
    one_input = tokens.numel() * args.dim * 4
    for plan in (NONE, replace(NONE, offload=True), FULL, replace(FULL, offload=True)):
        torch.manual_seed(3)
        model = SPEC.build(args).to(device)
        checkpoint_activations(model, SPEC.block_names(args), plan, device)
        for _ in range(2):
            model.zero_grad()
            before = torch.cuda.memory_stats()["active_bytes.all.current"]
            torch.cuda.reset_peak_memory_stats()
            output = model(tokens)
            forward.append(torch.cuda.memory_stats()["active_bytes.all.peak"] - before)
            output.float().logsumexp(-1).sum().backward()
            whole.append(torch.cuda.memory_stats()["active_bytes.all.peak"] - before)
            del output
        found.append({name: p.grad for name, p in model.named_parameters()})
    for other in found[1:]:
        for name, gradient in found[0].items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-5, atol=1e-5)
    for none, none_away, full_kept, full_away in (forward[1::2], whole[1::2]):
        assert none_away < none / 2
        assert full_away < full_kept - args.n_layers / 2 * one_input


# With torch.compile


def _compiled(plan: ActivationCheckpointPlan, shelf: Shelf | None = None) -> tuple[dict[str, Tensor], int]:
    """Gradients, and how many graphs four blocks took."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = build(plan)
    for block in model.layers.values():
        block.compile(backend="aot_eager", fullgraph=True)
        if shelf is not None:
            offload(block, shelf, model, least_bytes=0)
    return gradients(model), counters["stats"]["unique_graphs"]


@pytest.mark.soak
@RECOMPUTING
def test_compiled_blocks_recompute_too(plan: ActivationCheckpointPlan, plain_gradients: dict[str, Tensor]) -> None:
    found, graphs = _compiled(plan)
    assert_equal(found, plain_gradients)
    assert graphs == (2 if plan == EVERY_2 else 1)


@pytest.mark.soak
def test_a_budget_is_a_share_of_what_the_compiler_would_keep(plain_gradients: dict[str, Tensor]) -> None:
    from torch._functorch import config

    sizes = []
    for budget in (0.0, 0.3, 0.6, 1.0):
        shelf = Shelf()
        found, _ = _compiled(ActivationCheckpointPlan("budget", memory_budget=budget), shelf)
        assert_equal(found, plain_gradients)
        sizes.append(shelf.nbytes)
    assert sizes[0] == 4 * 8 * 32 * 4 * FOUR.dim, "a budget of 0 keeps the blocks' inputs"
    assert sizes == sorted(sizes) and len(set(sizes)) == 4
    assert all(size <= (budget + 0.05) * sizes[3] for budget, size in zip((0.3, 0.6), sizes[1:3], strict=True))
    assert config.activation_memory_budget == 1.0, "the setting of others is as it was"


# The config, the report, whole runs

AC = "activation_checkpoint."


def activations(*flags: str) -> ActivationCheckpointPlan:
    return resolve(load([f"--{AC}{flag}" for flag in flags]), world_size=1, shapes=SHAPES).activations


def test_keys_reach_the_plan() -> None:
    assert activations() == EVERY_2, "the dialect's default"
    assert activations("selective_ac_option=3") == ActivationCheckpointPlan("every", every=3)
    assert activations("selective_ac_option=op") == OP
    assert activations("mode=none") == NONE
    assert activations("mode=full", "offload") == ActivationCheckpointPlan("full", offload=True)
    compiled = load(["--training.compile", f"--{AC}mode=budget", f"--{AC}memory_budget=0.25"])
    budget = resolve(compiled, world_size=1, shapes=SHAPES).activations
    assert budget == ActivationCheckpointPlan("budget", memory_budget=0.25)


@pytest.mark.parametrize(
    ("flags", "key", "message"),
    [
        (["mode=budget"], "mode", "needs training.compile = true"),
        (
            ["mode=selective", "selective_ac_option=9"],
            "selective_ac_option",
            "one block of each 9, but the model has 8",
        ),
        (["mode=selective", "selective_ac_option=op", "offload"], "offload", "held elsewhere"),
        (["mode=selective", "selective_ac_option=0"], "selective_ac_option", 'expected "op" or a number as "2", got'),
        (["mode=some"], "mode", 'expected one of "none"'),
        (["memory_budget=1.5"], "memory_budget", "<= 1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(flags: list[str], key: str, message: str) -> None:
    problem = refusal([f"--{AC}{flag}" for flag in flags])
    assert problem.key == AC + key and message in problem.message


def test_a_budget_needs_the_model_to_be_compiled() -> None:
    flags = ["--activation_checkpoint.mode=budget", "--training.compile"]
    assert "needs model in compile.components" in refusal([*flags, "--compile.components=loss"]).message
    assert checked_plans(flags, 1, training=False)[1].activations.mode == "budget"


def test_the_default_passes_over_a_model_of_one_block() -> None:
    one = "--model.overrides.n_layers=1"
    plans = resolve(load([one]), world_size=1, shapes=SHAPES)
    assert plans.activations == NONE
    assert any(note.endswith("but the model has 1: all activations are kept") for note in plans.notes)
    with pytest.raises(ConfigError, match="but the model has 1"):
        resolve(load([one, "--activation_checkpoint.mode=selective"]), world_size=1, shapes=SHAPES)


MODES = {
    "full": ["--activation_checkpoint.mode=full"],
    "op": ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"],
    "every": ["--activation_checkpoint.mode=selective"],
    "none": ["--activation_checkpoint.mode=none"],
}


@pytest.mark.soak
def test_units_within_a_block_are_gathered_no_more_often(pool: Pools) -> None:
    """Hooks of units smaller than a block lie inside of what is recomputed."""
    shard = ShardPlan("float32", reshard_after_forward=True, units="size", min_params=3000)
    run = Run(TOKENS, LABELS, [1e-3], args=FOUR, shard=shard)
    expected, plain = pool(2).run(train, run)[0], pool(2).run(_collectives, run)[0]
    assert plain["_allgather_base_", torch.float32] > 2 * (FOUR.n_layers + 2)
    for plan in (FULL, OP):
        assert_equal(pool(2).run(train, replace(run, activations=plan))[0].gradients, expected.gradients)
        assert pool(2).run(_collectives, replace(run, activations=plan))[0] == plain


@pytest.mark.soak
def test_whole_runs_agree_and_checkpoints_fit_every_mode(pool: Pools, tmp_path: Path) -> None:
    """Five steps in one mode, five more in the next, from the checkpoint of the first, are ten steps of mode none."""
    assert "--checkpoint.enable_checkpoint" in TINY_RUN
    straight = pool(2).run(_run, str(tmp_path / "none"), "--training.steps=10", *MODES["none"])[0]
    expected = _losses(straight["rows"])
    first = list(MODES)
    for mode, later in zip(first, [*first[1:], first[0]], strict=True):
        folder = str(tmp_path / f"{mode}-{later}")
        pool(2).run(_run, folder, "--training.steps=5", *MODES[mode])
        run = pool(2).run(_run, folder, "--training.steps=10", *MODES[later])[0]
        assert any("resumed from step 5" in line for line in run["said"])
        rows = _losses(run["rows"])
        assert {step: rows[step] for step in range(1, 11)} == {step: expected[step] for step in range(1, 11)}
        names = [read_manifest(Path(f) / "checkpoint" / "step-10").tensors for f in (folder, tmp_path / "none")]
        assert names[0] == names[1]
