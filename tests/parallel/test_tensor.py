"""Tensor parallelism: it trains as one process does, and weights, activations and traffic are divided."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pool import Pools, free_port
from tests.refusals import refusal
from tests.training.compare import LABELS, SEQ, TOKENS, WARM, relative
from tests.training.harness import TINY, Run, build_tiny, initial_weights, micro_batches, train
from tests.training.test_run import _losses, _run
from titanlite import exit_codes
from titanlite.app import run as run_app
from titanlite.config.errors import ConfigError
from titanlite.config.plans import ActivationCheckpointPlan, CompilePlan, MeshPlan
from titanlite.guard import FiniteGuard
from titanlite.loss import cross_entropy_sum
from titanlite.metrics.nan_finder import Finding, diagnose_nonfinite
from titanlite.models import get_spec
from titanlite.parallel.compile import compile_loss
from titanlite.parallel.tensor import TensorParallelError, check_async, enable_async, split, tensor_loss
from titanlite.parallel.world import World
from titanlite.step import Duplicates, train_step, validate

RUN = Run(TOKENS, LABELS, WARM, accumulation=2, tensor=2)
EAGER = CompilePlan(model=True, backend="aot_eager")


def _remade(mode: str) -> ActivationCheckpointPlan:
    return ActivationCheckpointPlan(mode)  # type: ignore[arg-type]


@pytest.mark.slow  # the grid's compiled cell of two ranks is quick
def test_compiled_halves_of_blocks_have_the_gradients_of_plain_ones(pool: Pools) -> None:
    """The embedding's above all, which a graph of a whole block gets wrong."""
    short = replace(RUN, rates=WARM[:2])
    plain = pool(1).run(train, short.alone())[0]
    compiled = pool(2).run(train, replace(short, compile=EAGER))[0]
    for name, gradient in plain.gradients.items():
        assert relative(compiled.gradients[name], gradient) < 1e-6, name
    torch.testing.assert_close(torch.tensor(compiled.losses), torch.tensor(plain.losses), rtol=0, atol=5e-6)


@pytest.mark.parametrize("norm", ["layernorm", "np_layernorm"])
@pytest.mark.soak
def test_other_norms_train_as_on_one_rank(pool: Pools, norm: str) -> None:
    short = replace(RUN, rates=WARM[:5], args=replace(TINY, norm_type=norm))
    plain, ours = (pool(run.tensor).run(train, run)[0] for run in (short.alone(), short))
    torch.testing.assert_close(torch.tensor(ours.losses), torch.tensor(plain.losses), rtol=0, atol=5e-6)


# Weights


@pytest.mark.parametrize(
    ("ranks", "replicas"),
    [(2, 1), (4, 1), pytest.param(4, 2, marks=pytest.mark.soak)],
    ids=["tp 2", "tp 2, fsdp 2", "tp 2, ddp 2"],
)
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_initial_weights_are_those_of_one_rank(pool: Pools, ranks: int, replicas: int, tied: bool) -> None:
    """Bit for bit; 386 rows over two ranks and then over two more leave shards of 97 and 96."""
    run = replace(RUN, args=replace(TINY, vocab_size=386, tied=tied), replicas=replicas)
    alone = pool(1).run(initial_weights, run.alone())[0]
    for weights in pool(ranks).run(initial_weights, run):
        assert weights.keys() == alone.keys()
        for name, weight in weights.items():
            assert torch.equal(weight, alone[name]), name


def _places(world: World, run: Run) -> dict[str, tuple[str, tuple[int, ...]]]:
    model, _, _ = build_tiny(world, run)
    return {
        name: ("".join(map(_letter, p.placements)), tuple(p.to_local().shape))
        for name, p in model.named_parameters()
        if isinstance(p, DTensor)
    }


def _letter(placement: Any) -> str:
    return (
        "R"
        if placement.is_replicate()
        else f"{'s' if type(placement).__name__ == '_StridedShard' else 'S'}{placement.dim}"
    )


def test_every_weight_is_where_it_should_be(pool: Pools) -> None:
    """Rows or columns by tensor parallelism, and what is left of the rows by FSDP: [FSDP, tensor] on 2 x 2 ranks."""
    block = {
        "attention.wq": ("s0S0", (16, 64)),
        "attention.wk": ("s0S0", (8, 64)),
        "attention.wv": ("s0S0", (8, 64)),
        "attention.wo": ("S0S1", (32, 32)),
        "feed_forward.w1": ("s0S0", (48, 64)),
        "feed_forward.w3": ("s0S0", (48, 64)),
        "feed_forward.w2": ("S0S1", (32, 96)),
        "attention_norm": ("S0R", (32,)),
        "ffn_norm": ("S0R", (32,)),
    }
    expected = {f"layers.{i}.{name}.weight": place for i in range(2) for name, place in block.items()}
    expected |= {"tok_embeddings.weight": ("s0S0", (48, 64)), "output.weight": ("s0S0", (48, 64))}
    expected |= {"norm.weight": ("S0R", (32,))}
    assert TINY.ffn_width == 192
    for places in pool(4).run(_places, RUN):
        assert places == expected


# Activations and traffic


def _loss(run: Run) -> Any:
    return tensor_loss(cross_entropy_sum) if run.tensor > 1 else cross_entropy_sum


def _shapes(world: World, run: Run) -> dict[str, Any]:
    """What comes into each block and into its halves, and the logits."""
    model, _, rank = build_tiny(world, run)
    (batch,) = micro_batches(replace(run, accumulation=1), 0, rank, run.mesh(world.size).dp_degree)
    seen: dict[str, Any] = {}

    def look(name: str) -> Any:
        def hook(module: torch.nn.Module, args: Any) -> None:
            seen[name] = (type(args[0]), tuple(getattr(args[0], "_local_tensor", args[0]).shape))

        return hook

    for name in ("layers.0", "layers.1", "layers.0.attention.inner_attention", "layers.0.feed_forward.w2", "norm"):
        model.get_submodule(name).register_forward_pre_hook(look(name))
    logits = model(batch.tokens)
    seen["logits"] = (type(logits), tuple(logits.to_local().shape))
    return seen


def test_activations_are_divided(pool: Pools) -> None:
    """Between the products by sequence, within them by heads or width, at the end by vocabulary."""
    for seen in pool(2).run(_shapes, RUN):
        assert seen["layers.0"] == seen["layers.1"] == (torch.Tensor, (8, SEQ // 2, 64))
        assert seen["layers.0.attention.inner_attention"] == (torch.Tensor, (8, 4 // 2, SEQ, 16))
        assert seen["layers.0.feed_forward.w2"] == (DTensor, (8, SEQ, 192 // 2))
        assert seen["norm"] == (DTensor, (8, SEQ // 2, 64))
        assert seen["logits"] == (DTensor, (8, SEQ, 192 // 2))
    assert pool(2).run(_shapes, replace(RUN, loss_parallel=False))[0]["logits"] == (DTensor, (8, SEQ, 192))


def _profile(world: World, run: Run) -> Counter[str]:
    """Operators of a forward and backward, the second one, so that nothing is compiled in it."""
    torch._dynamo.reset()
    model, _, rank = build_tiny(world, run)
    loss = compile_loss(cross_entropy_sum, run.compile.backend) if run.compile.loss else cross_entropy_sum
    for _ in range(2):
        with torch.profiler.profile() as profile:
            tensor_loss(loss)(model(run.tokens[0]), run.labels[0]).backward()
    counts = Counter(event.name for event in profile.events())
    graphs = len({entry.compile_id for entry in torch._dynamo.utils.get_compilation_metrics() if entry.co_name})
    torch._dynamo.reset()
    sent = {name: counts[f"_c10d_functional::{name}"] for name in _TRAFFIC}
    return Counter({**sent, "mm": counts["aten::mm"], "graphs": graphs, "attention": counts[_ATTENTION]})


_TRAFFIC = ("reduce_scatter_tensor", "all_gather_into_tensor", "all_reduce")
_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize(
    ("run", "gathers", "reductions"),
    [
        pytest.param(RUN, 0, 3, id="plain"),
        pytest.param(replace(RUN, loss_parallel=False), 1, 0, id="gathered logits"),
        pytest.param(replace(RUN, compile=EAGER), 0, 3, id="compiled", marks=pytest.mark.slow),
        pytest.param(replace(RUN, compile=replace(EAGER, loss=True)), 0, 3, id="loss too", marks=pytest.mark.soak),
    ],
)
def test_activations_are_gathered_and_scattered_and_not_reduced_as_a_whole(
    pool: Pools, run: Run, gathers: int, reductions: int
) -> None:
    """Four of each a block, one each for embedding and head; all-reduces for norms' weights and for the loss alone."""
    blocks, norms = 2, 5
    for counts in pool(2).run(_profile, run):
        assert counts["reduce_scatter_tensor"] == 4 * blocks + 2
        assert counts["all_gather_into_tensor"] == 4 * blocks + 2 + gathers
        # Largest logit, sum of exponentials and the label's logit: three numbers for each token.
        assert counts["all_reduce"] == norms + reductions


@pytest.mark.soak
def test_the_policy_by_operation_works_inside_the_graphs(pool: Pools) -> None:
    """Two of seven products are needed again and not saved: wk and w3. Attention is saved; full recomputes all."""
    none, full, op = (
        pool(2).run(_profile, replace(RUN, compile=EAGER, activations=_remade(mode)))[0]
        for mode in ("none", "full", "op")
    )
    assert full["mm"] - none["mm"] == 2 * 7 and full["attention"] - none["attention"] == 2
    assert op["mm"] - none["mm"] == 2 * 2 and op["attention"] == none["attention"]


class _Backward(TorchDispatchMode):
    """Counts operators; of those on DTensors the outer ones."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _remade_products(world: World, run: Run) -> Counter[str]:
    model, _, _ = build_tiny(world, run)
    loss = _loss(run)(model(run.tokens[0]), run.labels[0])
    with _Backward() as counting:
        loss.backward()
    return counting.counts


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["full", "op"])
def test_as_much_is_recomputed_as_on_one_rank(pool: Pools, mode: str) -> None:
    run = replace(RUN, activations=_remade(mode))
    one, none = (pool(1).run(_remade_products, replace(run.alone(), activations=a))[0] for a in (run.activations, None))
    two = pool(2).run(_remade_products, run)[0]
    assert two["aten.mm.default"] == one["aten.mm.default"] > none["aten.mm.default"]


def _graphs(world: World, run: Run) -> int:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, _, _ = build_tiny(world, run)
    for step in range(3):
        _loss(run)(model(run.tokens[step]), run.labels[step]).backward()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    return graphs


def test_all_blocks_share_one_graph_of_each_half(pool: Pools) -> None:
    run = replace(RUN, args=replace(TINY, n_layers=5), compile=EAGER)
    assert pool(2).run(_graphs, run) == [2, 2]


# Figures


def _figures(world: World, run: Run) -> dict[str, Any]:
    model, optimizer, rank = build_tiny(world, run)
    mesh = run.mesh(world.size)
    duplicates, loss = Duplicates(mesh.tensor, mesh.tensor), _loss(run)
    data = micro_batches(run, 0, rank, mesh.dp_degree)
    held_out, tokens = validate(model, data, world.device, loss, duplicates)
    assert all(p.grad is None for p in model.parameters())
    guard = FiniteGuard(world.device)
    result = train_step(
        model, optimizer, data, step=1, lr=0.0, max_norm=1e9, guard=guard, duplicates=duplicates,
        loss_function=loss, layer_norms=True,
    )  # fmt: skip
    assert result.layer_norms is not None
    norms = {name: norm.item() for name, norm in result.layer_norms.items()}
    return {"validation": held_out.item(), "tokens": tokens.item(), "loss": result.loss.item(), "norms": norms}


@pytest.mark.parametrize("run", [RUN, replace(RUN, loss_parallel=False)], ids=["sharded logits", "gathered"])
def test_validation_and_norms_by_layer_are_those_of_one_rank(pool: Pools, run: Run) -> None:
    alone = pool(1).run(_figures, run.alone())[0]
    assert alone["tokens"] == (LABELS[0] != -100).sum()
    for ranks in (2, 4):
        for ours in pool(ranks).run(_figures, run):
            assert ours["tokens"] == alone["tokens"]
            assert ours["validation"] == pytest.approx(alone["validation"], abs=5e-6)
            assert ours["validation"] == pytest.approx(ours["loss"], abs=5e-6)  # the same batches
            assert ours["norms"] == pytest.approx(alone["norms"], rel=1e-5)


def _origin(world: World, run: Run) -> Finding:
    model, _, rank = build_tiny(world, run)

    def spoil(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out * math.nan

    model.get_submodule("layers.1.feed_forward").register_forward_hook(spoil)
    return diagnose_nonfinite(model, micro_batches(run, 0, rank, 1), loss_function=_loss(run))


def test_the_origin_of_a_nan_is_named(pool: Pools) -> None:
    finding = pool(2).run(_origin, RUN)[1]
    assert (finding.stage, finding.module, finding.ranks) == ("forward", "layers.1.feed_forward", (0, 1))


def test_logits_that_are_all_padding_cost_nothing(pool: Pools) -> None:
    for loss, gradient in pool(2).run(_padding, RUN):
        assert loss == 0.0 and gradient == 0.0


def _padding(world: World, run: Run) -> tuple[float, float]:
    model, _, _ = build_tiny(world, run)
    loss = _loss(run)(model(run.tokens[0]), torch.full_like(run.labels[0], -100))
    loss.backward()
    gradient = model.get_parameter("output.weight").grad
    assert isinstance(gradient, DTensor)
    return loss.item(), gradient.to_local().abs().max().item()


# What does not fit


def _misfits(world: World) -> list[str]:
    mesh = world.build_mesh(MeshPlan(2, tensor=2))["tp"]
    spec, said = get_spec("llama3"), []
    plan = spec.tensor_plan(TINY)
    tied = replace(TINY, tied=True)
    for args, changed in [
        (TINY, plan | {"output": "diagonal"}),
        (TINY, {name: kind for name, kind in plan.items() if name != "layers.1.attention.wk"}),
        (tied, plan | {"output": "rowwise"}),
    ]:
        with torch.device("meta"):
            model = spec.build(args)
        try:
            split(model, changed, mesh)
        except TensorParallelError as error:
            said.append(str(error))
    try:
        tensor_loss(cross_entropy_sum)(torch.zeros(1, 2, 3), torch.zeros(1, 2, dtype=torch.int64))
    except TypeError as error:
        said.append(str(error))
    return said


def test_a_plan_that_does_not_fit_the_model_is_refused(pool: Pools) -> None:
    kind, left, tied, plain = pool(2).run(_misfits)[0]
    assert "'diagonal'" in kind and "colwise" in kind
    assert left.endswith("covers no module with layers.1.attention.wk.weight")
    assert tied.startswith("tok_embeddings.weight and output.weight are one parameter")
    assert "are a DTensor" in plain


def _refused(*flags: str, ranks: int = 6) -> str:
    return str(refusal(flags, ranks))


TENSOR = "--training.tensor_parallel_degree"


def test_what_the_ranks_cannot_share_is_refused_with_the_numbers() -> None:
    found = _refused(f"{TENSOR}=3", "--training.seq_len=2049")
    assert (
        "is 3, which does not divide n_heads = 16 nor n_kv_heads = 16 nor the feed-forward's width = 768" not in found
    )
    assert "is 3, which does not divide n_heads = 16 nor n_kv_heads = 16" in found
    assert "these work: 1, 2, 4, 8, 16" in found
    found = _refused(f"{TENSOR}=2", "--training.seq_len=2047")
    assert "training.seq_len: is 2047, and the sequence is divided over tensor_parallel 2 = 2 ranks" in found
    assert "these work: 2046 or 2048" in found
    flags = ["--validation.enable", "--validation.seq_len=2047"]
    found = _refused(f"{TENSOR}=2", *flags)
    assert "validation.seq_len: is 2047" in found
    found = _refused(f"{TENSOR}=16", "--model.flavor=8B", ranks=16)
    assert "does not divide n_kv_heads = 8" in found and "these work: 1, 2, 4, 8" in found
    found = _refused(f"{TENSOR}=2", "--model.vocab_size=2305")
    assert "the vocabulary = 2,305" in found and "model.vocab_size = 2306 leaves 1 entries unused" in found


def test_a_tokenizers_vocabulary_that_does_not_divide_ends_before_any_process_group(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """2,304 entries; the model's other numbers are divisible by five."""
    for name, value in {
        "WORLD_SIZE": "5",
        "RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }.items():
        monkeypatch.setenv(name, value)
    shape = ["dim=320", "n_heads=10", "ffn_dim=320", "n_layers=1"]
    flags = [f"--model.overrides.{change}" for change in shape]
    code = run_app([f"{TENSOR}=5", "--training.seq_len=40", f"--job.dump_folder={tmp_path}", *flags])
    assert code == exit_codes.CONFIG
    error = capsys.readouterr().err
    assert "is 5, which does not divide the vocabulary = 2,304" in error
    assert "model.vocab_size = 2305 leaves 1 entries unused" in error


def test_overlap_needs_inductor_and_gpus_that_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    overlap = [f"{TENSOR}=2", "--experimental.enable_async_tensor_parallel"]
    found = _refused(*overlap)
    assert "needs training.compile = true" in found
    found = _refused(*overlap, "--training.compile", '--compile.components=["loss"]')
    assert "needs model in compile.components" in found
    found = _refused(*overlap, "--training.compile", "--compile.backend=aot_eager")
    assert 'needs compile.backend = "inductor", not "aot_eager"' in found

    def said(*args: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            check_async(*args)
        return str(caught.value)

    assert "needs GPUs that reach each other's memory" in said(2, "cpu", 2)
    assert "needs the 4 ranks of tensor parallelism on one node, and there are 2 on each" in said(4, "cuda", 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: a // 2 == b // 2)
    check_async(2, "cuda", 4)
    assert "GPU 0 does not reach GPU 2" in said(4, "cuda", 4)


_OVERLAP = """
import sys
import torch
from torch import distributed as dist
from torch._inductor.fx_passes import micro_pipeline_tp
from torch.distributed._symmetric_memory import _test_mode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from titanlite.config.plans import Float8Plan
from titanlite.models import LlamaArgs, get_spec
from titanlite.parallel.compile import compile_units
from titanlite.parallel.float8 import convert
from titanlite.parallel.tensor import ASYNC_OPTIONS, split

dist.is_nccl_available = lambda: True  # inductor asks before it fuses
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
mesh = init_device_mesh("cpu", (2,))
args = LlamaArgs(dim=64, n_layers=1, n_heads=4, vocab_size=64)
spec = get_spec("llama3")
model = spec.build(args)
if sys.argv[2] == "float8":
    convert(model, [f"layers.0.feed_forward.{w}" for w in ("w1", "w2", "w3")], Float8Plan(enable=True))
split(model, spec.tensor_plan(args), mesh)
module = model.get_submodule("layers.0.feed_forward")
compile_units({"layers.0.feed_forward": module}, options=ASYNC_OPTIONS if sys.argv[1] == "on" else None)
fuse = micro_pipeline_tp.micro_pipeline_tp_pass

def listed(graph):
    fuse(graph)
    print(*{node.target for node in graph.nodes if node.op == "call_function"})

micro_pipeline_tp.micro_pipeline_tp_pass = listed
with _test_mode(), torch.no_grad():
    try:
        module(DTensor.from_local(torch.randn(2, 16, 64), mesh, [Shard(1)]))
    except NotImplementedError as error:
        print(error)  # there is no such operator for CPUs
"""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("switch", "products", "operators"),
    [
        ("on", "bf16", ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")),
        ("on", "float8", ("fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter")),
        ("off", "bf16", ()),
    ],
)
def test_products_are_fused_with_their_traffic_if_asked(switch: str, products: str, operators: tuple[str, ...]) -> None:
    """What inductor makes of a feed-forward, for a GPU; a fake rank beside it."""
    command = [sys.executable, "-c", _OVERLAP, switch, products]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = set(re.findall(r"symm_mem\.(fused_\w+)", done.stdout))
    assert found == set(operators), done.stdout
    assert "_c10d_functional.all_gather" not in done.stdout


def _enabled(world: World) -> tuple[bool, bool]:
    mesh = world.build_mesh(MeshPlan(2, tensor=2))["tp"]
    name = mesh.get_group().group_name
    before = is_symm_mem_enabled_for_group(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        enable_async(mesh)
    return before, is_symm_mem_enabled_for_group(name)


def test_ranks_that_share_products_get_memory_in_common_without_a_warning(pool: Pools) -> None:
    assert pool(2).run(_enabled) == [(False, True)] * 2


# Whole runs


@pytest.mark.soak
def test_a_run_and_its_checkpoints_go_on_with_any_degrees(pool: Pools, tmp_path: Path) -> None:
    """One rank, two tensor-parallel ones, and checkpoints carried from each kind to the others."""
    halves = ["--model.overrides.n_kv_heads=2", "--validation.enable"]

    def train_on(ranks: int, folder: str, steps: int, tensor: int) -> dict[str, Any]:
        flags = [*halves, f"--training.steps={steps}", f"{TENSOR}={tensor}"]
        return pool(ranks).run(_run, str(tmp_path / folder), *flags)[0]

    expected = train_on(1, "alone", 12, 1)["rows"]
    straight = train_on(2, "straight", 12, 2)
    mesh = "dp_replicate 1 x dp_shard 1 x tp 2 = 2 ranks; loss on sharded logits"
    assert any(mesh in line for line in straight["said"])
    held_out = [(r["validation_loss"], r["validation_tokens"]) for r in expected if "validation_loss" in r]
    ours = [(r["validation_loss"], r["validation_tokens"]) for r in straight["rows"] if "validation_loss" in r]
    assert len(held_out) == 2 and [tokens for _, tokens in ours] == [tokens for _, tokens in held_out]
    assert [loss for loss, _ in ours] == pytest.approx([loss for loss, _ in held_out], abs=5e-6)
    runs = {"straight": straight["rows"]}
    train_on(2, "tensor", 6, 2)
    train_on(2, "fsdp", 6, 1)
    for first, ranks, tensor in [
        ("tensor", 2, 2),
        ("tensor", 1, 1),
        ("tensor", 2, 1),
        ("tensor", 4, 2),
        ("fsdp", 2, 2),
    ]:
        name = f"{first} to {ranks} ranks, tensor {tensor}"
        shutil.copytree(tmp_path / first, tmp_path / name)
        runs[name] = train_on(ranks, name, 12, tensor)["rows"]
    for name, rows in runs.items():
        assert sorted(_losses(rows)) == list(range(1, 13)), name
        for step, (loss, _, _) in _losses(expected).items():
            assert abs(_losses(rows)[step][0] - loss) < 5e-6, (name, step)
    assert _losses(runs["tensor to 2 ranks, tensor 2"]) == _losses(runs["straight"])
