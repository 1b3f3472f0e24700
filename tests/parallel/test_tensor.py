"""Tensor parallelism: it trains as one process does, and weights, activations and collectives are divided."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.pool import Pools
from tests.processes import python
from tests.training.compare import LABELS, SEQ, TOKENS, WARM, relative
from tests.training.harness import TINY, Run, build_tiny, initial_weights, micro_batches, stepper, train
from titanlite.config.sections import Compile
from titanlite.loss import cross_entropy_sum
from titanlite.models import get_spec
from titanlite.parallel import ParallelismError
from titanlite.parallel.dist_env import DistEnv
from titanlite.parallel.tensor import apply_tp, check_async, tensor_loss
from titanlite.step import PlainRunner, ReplicationFactors
from titanlite.validation import validate

RUN = Run(TOKENS, LABELS, WARM, accumulation=2, tensor=2)
EAGER = Compile(components=["model"], backend="aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"args": replace(TINY, norm_type="layernorm"), "rates": WARM[:5]},
        {"args": replace(TINY, norm_type="np_layernorm"), "rates": WARM[:5]},
    ],
    ids=["layernorm", "np_layernorm"],
)
def test_it_trains_as_one_rank_does(pool: Pools, changes: dict[str, Any]) -> None:
    run = replace(RUN, **changes)
    plain = pool(1).run(train, replace(run.alone(), compile=None))[0]
    ours = pool(2).run(train, run)[0]
    for name, gradient in plain.gradients.items():
        assert relative(ours.gradients[name], gradient) < 1e-6, name
    torch.testing.assert_close(torch.tensor(ours.losses), torch.tensor(plain.losses), rtol=0, atol=5e-6)


# Weights


@pytest.mark.parametrize(
    ("ranks", "replicas", "tied"),
    [(2, 1, True), (4, 1, False), (4, 2, True)],
    ids=["tp 2, tied", "tp 2, fsdp 2", "tp 2, ddp 2, tied"],
)
def test_initial_weights_are_those_of_one_rank(pool: Pools, ranks: int, replicas: int, tied: bool) -> None:
    """Bit for bit; 386 rows over two ranks and then over two more leave shards of 97 and 96."""
    run = replace(RUN, args=replace(TINY, vocab_size=386, tied=tied), replicas=replicas)
    alone = pool(1).run(initial_weights, run.alone())[0]
    for weights in pool(ranks).run(initial_weights, run):
        assert weights.keys() == alone.keys()
        for name, weight in weights.items():
            assert torch.equal(weight, alone[name]), name


def _places(world: DistEnv, run: Run) -> dict[str, tuple[str, tuple[int, ...]]]:
    model, _, _ = build_tiny(world, run)

    def letter(placement: Any) -> str:
        kind = "s" if type(placement).__name__ == "_StridedShard" else "S"
        return "R" if placement.is_replicate() else f"{kind}{placement.dim}"

    parameters: Any = model.named_parameters()
    return {name: ("".join(map(letter, p.placements)), tuple(p.to_local().shape)) for name, p in parameters}


def test_every_weight_is_where_it_should_be(pool: Pools) -> None:
    """Rows or columns by tensor parallelism, then rows by FSDP: [FSDP, tensor] on 2 x 2 ranks."""
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
    assert pool(4).run(_places, RUN) == [expected] * 4


# Activations and collectives


def _loss(run: Run) -> Any:
    return tensor_loss(cross_entropy_sum) if run.tensor > 1 else cross_entropy_sum


def _shapes(world: DistEnv, run: Run) -> dict[str, Any]:
    """The inputs of each block and of its halves, and the logits."""
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


def _profile(world: DistEnv, run: Run) -> Counter[str]:
    """Operators of three forward and backward passes: the last one's, and the graphs of all."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, _, _ = build_tiny(world, run)
    loss = run.builder(world).loss()
    for step in range(3):
        with torch.profiler.profile() as profile:
            loss(model(run.tokens[step]), run.labels[step]).backward()
    counts = Counter(event.name.removeprefix("_c10d_functional::") for event in profile.events())
    counts["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    return counts


@pytest.mark.parametrize(
    ("changes", "gathers", "reductions", "graphs"),
    [
        pytest.param({}, 0, 3, 0, id="plain"),
        pytest.param({"loss_parallel": False}, 1, 0, 0, id="gathered logits"),
        # All blocks share one graph of each half.
        pytest.param({"compile": EAGER}, 0, 3, 2, id="compiled", marks=pytest.mark.slow),
        pytest.param({"compile": Compile(backend="aot_eager")}, 0, 3, 3, id="loss too", marks=pytest.mark.soak),
    ],
)
def test_activations_are_gathered_and_scattered_and_not_reduced_as_a_whole(
    pool: Pools, changes: dict[str, Any], gathers: int, reductions: int, graphs: int
) -> None:
    """Four of each a block, one each for embedding and head; all-reduces for norms' weights and for the loss alone."""
    blocks, norms = 2, 5
    for counts in pool(2).run(_profile, replace(RUN, **changes)):
        assert counts["reduce_scatter_tensor"] == 4 * blocks + 2
        assert counts["all_gather_into_tensor"] == 4 * blocks + 2 + gathers
        # Largest logit, sum of exponentials and the label's logit: three numbers for each token.
        assert counts["all_reduce"] == norms + reductions
        assert counts["graphs"] == graphs


# Losses and norms


def _figures(world: DistEnv, run: Run) -> dict[str, Any]:
    mesh, loss = run.mesh(world.size), _loss(run)
    model, _, take = stepper(world, run, max_norm=1e9, layer_norms=True, loss_function=loss)
    data = micro_batches(run, 0, world.rank // mesh.tensor, mesh.dp_degree)
    duplicates = ReplicationFactors(mesh.tensor, mesh.tensor)
    held_out, tokens = validate(model, data, world.device, PlainRunner(model, loss), duplicates)
    assert all(p.grad is None for p in model.parameters())
    result = take(1, lr=0.0)
    assert result.layer_norms is not None
    padding = loss(model(run.tokens[0]), torch.full_like(run.labels[0], -100))
    padding.backward()
    head: Any = model.get_parameter("output.weight").grad
    norms = {name: norm.item() for name, norm in result.layer_norms.items()}
    found = {"validation": held_out.item(), "tokens": tokens.item(), "loss": result.loss.item(), "norms": norms}
    return {**found, "padding": (padding.item(), head.to_local().abs().max().item())}


@pytest.mark.parametrize(
    ("ranks", "loss_parallel"),
    [(2, True), pytest.param(4, False, marks=pytest.mark.slow), pytest.param(4, True, marks=pytest.mark.slow)],
    ids=["tp 2", "tp 2, fsdp 2, whole logits", "tp 2, fsdp 2"],
)
def test_validation_and_norms_by_layer_are_those_of_one_rank(pool: Pools, ranks: int, loss_parallel: bool) -> None:
    run = replace(RUN, loss_parallel=loss_parallel)
    alone = pool(1).run(_figures, run.alone())[0]
    assert alone["tokens"] == (LABELS[0] != -100).sum()
    for ours in pool(ranks).run(_figures, run):
        assert ours["tokens"] == alone["tokens"]
        assert ours["validation"] == pytest.approx(alone["validation"], abs=5e-6)
        assert ours["validation"] == pytest.approx(ours["loss"], abs=5e-6)  # the same batches
        assert ours["norms"] == pytest.approx(alone["norms"], rel=1e-5)
        assert ours["padding"] == (0.0, 0.0)


# Errors


def _misfits(world: DistEnv) -> list[str]:
    mesh = world.build_mesh(tp=2)["tp"]
    spec, said = get_spec("llama3"), []
    plan = spec.tensor_plan(TINY)
    for args, changed in [
        (TINY, plan | {"output": "diagonal"}),
        (TINY, {name: kind for name, kind in plan.items() if name != "layers.1.attention.wk"}),
        (replace(TINY, tied=True), plan | {"output": "rowwise"}),
    ]:
        with pytest.raises(ParallelismError) as error:
            apply_tp(spec.build_on_meta(args), changed, mesh)
        said.append(str(error.value))
    with pytest.raises(TypeError, match="are a DTensor"):
        tensor_loss(cross_entropy_sum)(torch.zeros(1, 2, 3), torch.zeros(1, 2, dtype=torch.int64))
    return said


def test_a_plan_that_does_not_fit_the_model_is_refused(pool: Pools) -> None:
    kind, left, tied = pool(2).run(_misfits)[0]
    assert "'diagonal'" in kind and "colwise" in kind
    assert left.endswith("covers no module with layers.1.attention.wk.weight")
    assert tied.startswith("tok_embeddings.weight and output.weight are one parameter")


# Overlap


def test_overlap_needs_gpus_of_one_node_that_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: a // 2 == b // 2)
    check_async(2, "cuda", 4)
    for arguments, message in [
        ((2, "cpu", 2), "needs GPUs that reach each other's memory"),
        ((4, "cuda", 2), "4 ranks of tensor parallelism on one node, and there are 2 on each"),
        ((4, "cuda", 4), "GPU 0 does not reach GPU 2"),
    ]:
        with pytest.raises(ParallelismError, match=message):
            check_async(*arguments)


_OVERLAP = """
import sys
import torch
from torch import distributed as dist
from torch._inductor.fx_passes import micro_pipeline_tp
from torch.distributed._symmetric_memory import _test_mode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from titanlite.models import LlamaArgs, get_spec
from titanlite.parallel.compile import apply_compile
from titanlite.parallel.float8 import apply_float8
from titanlite.parallel.tensor import ASYNC_OPTIONS, apply_tp

dist.is_nccl_available = lambda: True  # inductor asks before it fuses
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
mesh = init_device_mesh("cpu", (2,))
args = LlamaArgs(dim=64, n_layers=1, n_heads=4, vocab_size=64)
spec = get_spec("llama3")
model = spec.build(args)
if sys.argv[2] == "float8":
    apply_float8(model, [f"layers.0.feed_forward.{w}" for w in ("w1", "w2", "w3")], "tensorwise")
apply_tp(model, spec.tensor_plan(args), mesh)
module = model.get_submodule("layers.0.feed_forward")
apply_compile({"layers.0.feed_forward": module}, options=ASYNC_OPTIONS if sys.argv[1] == "on" else None)
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
        ("on", "bf16", {"fused_all_gather_matmul", "fused_matmul_reduce_scatter"}),
        ("on", "float8", {"fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter"}),
        ("off", "bf16", set()),
    ],
)
def test_products_are_fused_with_their_collectives_if_asked(switch: str, products: str, operators: set[str]) -> None:
    """Inductor's operators for a feed-forward on a GPU; a fake rank beside it."""
    done = python("-c", _OVERLAP, switch, products)
    assert done.returncode == 0, done.stderr
    assert set(re.findall(r"symm_mem\.(fused_\w+)", done.stdout)) == operators, done.stdout
    assert "_c10d_functional.all_gather" not in done.stdout
