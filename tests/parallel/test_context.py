"""Ranks that share sequences train the same model, each on its part of the tokens."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pool import Pools
from tests.training.compare import LABELS, TOKENS, WARM, relative
from tests.training.harness import TINY, Run, build_tiny
from tests.training.test_run import _losses, _run
from titanlite.config.errors import ConfigError
from titanlite.config.load import load
from titanlite.data.loader import Batch
from titanlite.models import SHAPES as FLAVORS
from titanlite.models import get_spec
from titanlite.models.llama.model import SdpaAttention
from titanlite.models.rope import Rope
from titanlite.parallel.context import ContextAttention, split_batch
from titanlite.parallel.dist_env import DistEnv, set_timeouts
from titanlite.parallel.fsdp import fsdp_mesh

SPEC = get_spec("llama3")
CPU = torch.device("cpu")


def _shares(degree: int) -> list[Share]:
    """Every rank's place, without a group to communicate in."""
    return [Share(rank, degree, None) for rank in range(degree)]  # type: ignore[arg-type]


# Who has which tokens


def test_each_rank_takes_one_chunk_from_the_front_and_one_from_the_back() -> None:
    sequence = torch.arange(16).unsqueeze(0)
    parts = [share.part(sequence)[0].tolist() for share in _shares(4)]
    assert parts == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_all_ranks_have_the_same_number_of_pairs_of_query_and_key(degree: int) -> None:
    seq = 16 * degree
    pairs, computed = [], []
    for share in _shares(degree):
        share.seq_len = seq
        masks = [mask._materialize() for mask in ContextAttention(share).prepare(None)]  # type: ignore[attr-defined]
        pairs.append(sum(int(mask.sum()) for mask in masks))
        computed.append(sum(mask.numel() for mask in masks))
    assert pairs == [seq * (seq + 1) // 2 // degree] * degree
    assert computed == [8 * 8 * (2 * degree + 1)] * degree


def test_a_sequence_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ContextParallelError, match=r"18 tokens .* 2 equal chunks for each of 4 ranks.* multiple of 8"):
        _shares(4)[0].part(torch.zeros(1, 18))
    with pytest.raises(ContextParallelError, match="0 tokens"):
        _shares(2)[0].part(torch.zeros(1, 0))


class _Steps:
    """A loader of one's own."""

    steps_left = 3

    def __init__(self) -> None:
        self.position = 0

    def next_step(self) -> list[Batch]:
        self.position += 1
        tokens = torch.arange(16).reshape(2, 8)
        return [Batch(tokens, tokens + 1), Batch(tokens + 100, tokens + 101)]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Any:
        return iter(self.next_step())


def _parts(world: DistEnv) -> tuple[Any, ...]:
    mesh = world.build_mesh(MeshPlan(world.size, context=world.size))
    loader, passes = PartLoader(_Steps(), mesh), PartPasses(_Steps(), mesh)
    step = loader.next_step()
    state = loader.state_dict()
    loader.load_state_dict({"position": 7})
    alone = world.build_mesh(MeshPlan(world.size, dp_shard=world.size))
    whole = _Steps().next_step()[0]
    same = split_batch(whole, alone) is whole
    return step, list(passes), len(passes), state, loader.state_dict(), loader.steps_left, same


def test_loaders_give_each_rank_its_part_and_keep_their_state(pool: Pools) -> None:
    for rank, (step, passes, length, before, after, left, same) in enumerate(pool(2).run(_parts)):
        own = [[0, 1, 6, 7], [2, 3, 4, 5]][rank]
        for given in (step, passes):
            for batch, whole in zip(given, _Steps().next_step(), strict=True):
                assert torch.equal(batch.tokens, whole.tokens[:, own])
                assert torch.equal(batch.labels, whole.labels[:, own])
        assert (length, before, after, left, same) == (2, {"position": 1}, {"position": 7}, 3, True)


# Attention alone


def _attention(world: DistEnv, heads: int, kv_heads: int, documents: bool) -> list[float]:
    """Relative errors of the output and of the gradients of q, k and v against plain attention, over all ranks."""
    mesh = world.build_mesh(MeshPlan(world.size, context=world.size))
    generator = torch.Generator().manual_seed(3)
    q, k, v, upstream = (torch.randn(2, n, 64, 16, generator=generator) for n in (heads, kv_heads, kv_heads, heads))
    doc_ids = (torch.rand(2, 64, generator=generator) < 0.1).cumsum(1) if documents else None
    plain, whole = SdpaAttention(), [t.clone().requires_grad_() for t in (q, k, v)]
    expected = plain(*whole, plain.prepare(doc_ids))
    expected.backward(upstream)
    share = Share.of(mesh)
    share.seq_len = 64
    ours, parts = ContextAttention(share), [share.part(t, 2).requires_grad_() for t in (q, k, v)]
    output = ours(*parts, ours.prepare(None if doc_ids is None else share.part(doc_ids)))
    output.backward(share.part(upstream, 2))
    pairs = [(output, expected), *((part.grad, t.grad) for part, t in zip(parts, whole, strict=True))]
    return [relative(a, share.part(b, 2)) for a, b in pairs]


ATTENTION = [(2, 4, 4, False), (2, 4, 2, True), (4, 4, 1, False), (4, 4, 2, True)]


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads", "documents"),
    [pytest.param(*row, marks=[pytest.mark.soak] if row[0] == 4 else []) for row in ATTENTION],
)
def test_attention_alone_equals_plain_attention(
    pool: Pools, ranks: int, heads: int, kv_heads: int, documents: bool
) -> None:
    for errors in pool(ranks).run(_attention, heads, kv_heads, documents):
        assert max(errors) < 2e-6, errors


# In a model


class _Operators(TorchDispatchMode):
    """Collectives, and the query-key area of attention, as they happen."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.gathered: list[tuple[int, ...]] = []
        self.area = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
            self.calls[name] += 1
            self.gathered.append(tuple(out.shape))
        elif name == "_scaled_dot_product_flash_attention_for_cpu":
            self.area += args[0].size(2) * args[1].size(2)
        return out


def _model(world: DistEnv, mode: str = "none", compiled: bool = False, documents: bool = False) -> dict[str, Any]:
    """One forward and backward of a model without FSDP, against the plain model on the whole batch."""
    torch._dynamo.reset()
    mesh = world.build_mesh(MeshPlan(world.size, context=world.size))
    torch.manual_seed(0)
    plain, shared = SPEC.build(TINY), SPEC.build(TINY)
    shared.load_state_dict(plain.state_dict())
    apply_context_parallel(shared, mesh)
    if mode != "none":
        checkpoint_activations(shared, SPEC.block_names(TINY), ActivationCheckpointPlan(mode), CPU)  # type: ignore[arg-type]
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    if compiled:
        compile_units({name: shared.get_submodule(name) for name in SPEC.block_names(TINY)}, backend)
    tokens, labels = torch.randint(0, 192, (3, 32)), torch.randint(0, 192, (3, 32))
    labels[0, 5:] = -100
    labels[1, :20] = -100
    doc_ids = (torch.rand(3, 32) < 0.1).cumsum(1) if documents else None
    _loss(plain(tokens, doc_ids=doc_ids), labels).backward()
    batch = split_batch(Batch(tokens, labels), mesh)
    lengths: dict[str, set[int]] = {}

    def note(name: str) -> Any:
        return lambda module, args, out: lengths.setdefault(name, set()).add(out.size(1))

    if not compiled:
        for name, module in shared.named_modules():
            if not isinstance(module, (Rope, ContextAttention)):
                module.register_forward_hook(note(name))
    # A compiled module does not run under a mode that watches operators.
    with contextlib.nullcontext(_Operators()) if compiled else _Operators() as seen:
        logits = shared(batch.tokens, doc_ids=None if doc_ids is None else Share.of(mesh).part(doc_ids))
        _loss(logits, batch.labels).backward()
    errors = {}
    for (name, expected), ours in zip(plain.named_parameters(), shared.parameters(), strict=True):
        dist.all_reduce(ours.grad)
        errors[name] = relative(ours.grad, expected.grad)  # type: ignore[arg-type]
    return {
        "errors": errors,
        "calls": dict(seen.calls),
        "shapes": seen.gathered,
        "area": seen.area,
        "lengths": lengths,
        "graphs": [
            sum(
                "all_gather" in str(node.target)
                for m in graph.modules()
                for node in getattr(m, "graph", graph.graph).nodes
            )
            for graph in graphs
        ],
    }


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)


def test_gradients_equal_the_plain_models_and_work_and_activations_are_shared(pool: Pools) -> None:
    for found in pool(2).run(_model):
        assert max(found["errors"].values()) < 1e-6, found["errors"]
        # Keys and values of the two heads that there are, not of the four queries; once per block, and back once.
        assert found["calls"] == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
        assert found["shapes"][:2] == [(2, 2, 3, 2, 16, 16)] * 2
        # 2 blocks, chunks of 8: 5 of the 4 x 4 squares of 8 x 8 for each rank.
        assert found["area"] == 2 * 5 * 64
        assert len(found["lengths"]) > 20 and set.union(*found["lengths"].values()) == {16}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_documents_are_masked_across_ranks(pool: Pools, ranks: int) -> None:
    for found in pool(ranks).run(_model, documents=True):
        assert max(found["errors"].values()) < 1e-6, found["errors"]


@pytest.mark.soak
@pytest.mark.parametrize(("ranks", "compiled"), [(2, False), (2, True), (4, False)])
@pytest.mark.parametrize("mode", ["none", "full", "op"])
def test_gradients_are_right_when_blocks_are_recomputed_or_compiled(
    pool: Pools, mode: str, ranks: int, compiled: bool
) -> None:
    """A block that is recomputed gathers its keys and values once more."""
    gathers = 2 if mode == "none" else 4
    for found in pool(ranks).run(_model, mode, compiled):
        assert max(found["errors"].values()) < 1e-6, found["errors"]
        if compiled:
            assert found["graphs"] == [1]  # one graph for all blocks, with its gather
        else:
            assert found["calls"] == {"all_gather_into_tensor": gathers, "reduce_scatter_tensor": 2}


def _refusals(world: DistEnv) -> list[str]:
    mesh = world.build_mesh(MeshPlan(world.size, context=world.size))
    model = SPEC.build(TINY)
    apply_context_parallel(model, mesh)
    said = []
    for act in (
        lambda: model(torch.zeros(1, 64, dtype=torch.int64)),
        lambda: apply_context_parallel(nn.Linear(2, 2), mesh),
    ):
        try:
            act()
        except ContextParallelError as error:
            said.append(str(error))
    return said


def test_whole_sequences_and_models_without_such_attention_are_refused(pool: Pools) -> None:
    whole, without = pool(2).run(_refusals)[0]
    assert "a sequence of 128, but the model's RoPE tables have 64" in whole and "split_batch" in whole
    assert without == "context parallelism finds no 'inner_attention' in Linear"


# With FSDP


def _sharding(world: DistEnv, run: Run) -> tuple[Any, ...]:
    mesh = world.build_mesh(run.mesh(world.size))
    model, _, data_rank = build_tiny(world, run)
    weight: Any = model.get_parameter("layers.0.attention.wq.weight")
    assert isinstance(weight, DTensor)
    shard_group = fsdp_mesh(mesh).get_group("dp_shard_cp")
    set_timeouts(77)
    seconds = shard_group._get_backend(CPU).options._timeout.total_seconds()
    names = sorted(name for name, _ in model.named_parameters())
    return data_rank, tuple(weight.to_local().shape), fsdp_mesh(mesh).mesh.tolist(), seconds, names


@pytest.mark.parametrize(
    ("ranks", "replicas", "data_ranks", "rows", "mesh"),
    [
        (2, 1, [0, 0], 32, [0, 1]),
        pytest.param(4, 1, [0, 0, 1, 1], 16, [0, 1, 2, 3], marks=pytest.mark.soak),
        pytest.param(4, 2, [0, 0, 1, 1], 32, [[0, 1], [2, 3]], marks=pytest.mark.soak),
    ],
    ids=["cp 2", "cp 2 x fsdp 2", "cp 2 x hsdp 2"],
)
def test_weights_are_sharded_over_those_who_share_sequences(
    pool: Pools, ranks: int, replicas: int, data_ranks: list[int], rows: int, mesh: list[Any]
) -> None:
    run = Run(TOKENS, LABELS, WARM, context=2, replicas=replicas)
    plain = sorted(name for name, _ in SPEC.build(TINY).named_parameters())
    found = pool(ranks).run(_sharding, run)
    assert [rank for rank, *_ in found] == data_ranks
    for _, shape, layout, seconds, names in found:
        assert (shape, layout, seconds, names) == ((rows, 64), mesh, 77.0, plain)


def _kept(world: DistEnv, context: int, mode: str) -> int:
    mesh = world.build_mesh(MeshPlan(world.size, dp_shard=world.size // context, context=context))
    plans = Plans(
        mesh=MeshPlan(world.size, context=context),
        batch=BatchPlan(2, 1, 2, 64, 128),
        shard=ShardPlan(param_dtype="float32"),
        activations=ActivationCheckpointPlan(mode),  # type: ignore[arg-type]
    )
    return trace_activations(SPEC, TINY, plans, CPU, mesh).block_bytes


def test_each_rank_keeps_its_part_of_the_activations(pool: Pools) -> None:
    """The report's trace of a block: whole keys and values, and a mask on a CPU, beside half of all else."""
    alone, shared = (pool(2).run(_kept, context, "none")[0] for context in (1, 2))
    keys_and_values = 2 * 2 * 2 * 64 * 16 * 4
    masks = 4 * 16 * (64 + 16)
    assert alone / 2 < shared <= alone / 2 + keys_and_values + masks
    # A recomputed block keeps its input alone: [2, 64 / 2, 64] in fp32, and the tables of its positions.
    tables = 2 * 32 * 8 * 4
    assert pool(2).run(_kept, 2, "full")[0] - 2 * 32 * 64 * 4 in (0, tables)


# Whole runs


CP = "--experimental.context_parallel_degree=2"


@pytest.mark.soak
def test_a_run_on_two_ranks_equals_one_rank_and_goes_on_there(pool: Pools, tmp_path: Path) -> None:
    flags = ["--training.steps=20", "--validation.enable", "--metrics.layer_norms=1"]
    alone = pool(1).run(_run, str(tmp_path / "alone"), *flags)[0]["rows"]
    first = pool(2).run(_run, str(tmp_path / "shared"), CP, *flags[1:], "--training.steps=10")[0]
    assert any("cp 2 = 2 ranks" in line for line in first["said"])
    shared = pool(1).run(_run, str(tmp_path / "shared"), *flags)[0]["rows"]
    assert sorted(_losses(shared)) == list(range(1, 21))
    compared: Counter[str] = Counter()
    for ours, expected in zip(shared, alone, strict=True):
        for key, value in expected.items():
            if key in ("loss", "validation_loss"):
                assert abs(ours[key] - value) < 5e-6, (key, ours["step"])
            elif "norm" in key:
                assert ours[key] == pytest.approx(value, rel=1e-4), (key, ours["step"])
            elif key in ("step", "tokens_seen", "validation_tokens", "lr"):
                assert ours[key] == value, key
            else:
                continue
            compared[key.split("/")[0]] += 1
    assert {"step", "loss", "grad_norm", "tokens_seen", "validation_loss", "validation_tokens"} <= compared.keys()
    assert any("norm" in key and count > 20 for key, count in compared.items()), compared  # those by layer


@pytest.mark.slow
def test_a_run_shares_its_sequences(pool: Pools, tmp_path: Path) -> None:
    """The TOML's key alone: losses and counts of the run on one rank."""
    flags = ["--training.steps=3", "--validation.enable", "--validation.freq=3"]
    alone = pool(1).run(_run, str(tmp_path / "alone"), *flags)[0]["rows"]
    shared = pool(2).run(_run, str(tmp_path / "shared"), CP, *flags)[0]["rows"]
    losses, expected = _losses(shared), _losses(alone)
    assert sorted(losses) == [1, 2, 3]
    for step in losses:
        assert abs(losses[step][0] - expected[step][0]) < 5e-6
    (ours,), (theirs,) = ([row for row in rows if "validation_loss" in row] for rows in (shared, alone))
    assert ours["validation_tokens"] == theirs["validation_tokens"]
    assert abs(ours["validation_loss"] - theirs["validation_loss"]) < 5e-6
    assert [r["tokens_seen"] for r in shared if "loss" in r] == [256, 512, 768]


# The config


def _problems(*flags: str, ranks: int = 4) -> Any:
    with pytest.raises(ConfigError) as caught:
        resolve(load(flags), world_size=ranks, shapes=FLAVORS)
    return caught.value.problems


def test_lengths_that_cannot_be_cut_are_refused_with_numbers_that_work() -> None:
    (problem,) = _problems("--experimental.context_parallel_degree=4", "--training.seq_len=2052")
    assert problem.key == "experimental.context_parallel_degree"
    assert problem.message == (
        "is 4, but training.seq_len = 2052 cannot be cut into 8 equal chunks, two for each of 4 ranks"
    )
    assert problem.hint == "these work: training.seq_len = 2048 or 2056; context_parallel_degree = 1, 2, 3, 6"
    for length in (2048, 2056):
        assert resolve(load([CP, f"--training.seq_len={length}"]), world_size=4).mesh.context == 2
    (problem,) = _problems(CP, "--validation.enable", "--validation.seq_len=34")
    assert "validation.seq_len = 34 cannot be cut into 4 equal chunks" in problem.message
    resolve(load([CP, "--validation.seq_len=34"]), world_size=4)  # nothing is validated


def test_partial_reshard_counts_all_ranks_that_share_weights() -> None:
    plans = resolve(load([CP, "--training.reshard_after_forward=4", "--training.prefetch=1"]), world_size=4)
    assert (plans.mesh.weight_shards, plans.shard.reshard_after_forward, plans.warnings) == (4, 4, ())
    (problem,) = _problems(CP, "--training.reshard_after_forward=3")
    assert "3, which does not divide the 4 ranks that share one copy of the weights" in problem.message
    assert "(data_parallel_shard * context_parallel)" in problem.message
