"""Float8 products: their types, what is gathered and reduced, scales, and that weights and names stay as they are."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile
from torch.utils._pytree import tree_leaves

from tests.parallel.float8_runs import (
    CONVERTED,
    EMULATED,
    GATHERED,
    LINEARS,
    PRECOMPUTED,
    RECIPES,
    RUN,
    TOTAL,
    gathered_types,
    watch_step,
)
from tests.parallel.test_activation_checkpoint import Shelf
from tests.pool import Pools
from tests.training.harness import TINY, Run, build_tiny, full, initial_weights, micro_batches, train
from titanlite.build import to_device
from titanlite.checkpoint.storage import gather
from titanlite.config.plans import ActivationCheckpointPlan, Float8Plan, ShardPlan
from titanlite.guard import FiniteGuard
from titanlite.models import get_spec, resolve_args
from titanlite.models.spec import Size
from titanlite.parallel.activation_checkpoint import trace_block
from titanlite.parallel.activation_offload import offload
from titanlite.parallel.float8 import ScalePrecompute, convert, float8_linears, forget_scales, is_float8, plain
from titanlite.parallel.float8_choice import Choice, choose, converted_names, too_small
from titanlite.parallel.world import World
from titanlite.prepare import load_plans
from titanlite.step import train_step

ROOT = Path(__file__).resolve().parents[2]
SPEC = get_spec("llama3")
FP32 = ShardPlan("float32")
FLOAT8 = replace(RUN, float8=EMULATED)


# Products


def test_inputs_and_weights_are_e4m3_and_gradients_e5m2(pool: Pools) -> None:
    seen = pool(1).run(watch_step, FLOAT8)[0]
    assert seen.products == {
        ("input e4m3fn", "weight e4m3fn"): LINEARS,
        ("grad_output e5m2", "weight e4m3fn"): LINEARS,
        ("grad_output e5m2", "input e4m3fn"): LINEARS,
        ("bfloat16", "bfloat16"): 3,  # the head's
    }


def test_rowwise_recipes_are_e4m3_alone_and_one_keeps_the_weights_gradient(pool: Pools) -> None:
    both = {("input e4m3fn", "weight e4m3fn"): LINEARS, ("grad_output e4m3fn", "weight e4m3fn"): LINEARS}
    seen = {r: pool(1).run(watch_step, replace(RUN, float8=replace(EMULATED, recipe=r)))[0] for r in RECIPES[1:]}
    assert seen["rowwise"].products == {
        **both,
        ("grad_output e4m3fn", "input e4m3fn"): LINEARS,
        ("bfloat16", "bfloat16"): 3,
    }
    assert seen["rowwise_with_gw_hp"].products == {**both, ("bfloat16", "bfloat16"): LINEARS + 3}


def test_without_float8_no_product_is_in_it(pool: Pools) -> None:
    assert pool(1).run(watch_step, RUN)[0].products == {("bfloat16", "bfloat16"): 3 * LINEARS + 3}


def _kernels(world: World, run: Run) -> Counter[str]:
    """Operators below the products of one step."""
    model, _, rank = build_tiny(world, run)
    batch = micro_batches(run, 0, rank, world.size)[0]
    model(batch.tokens).sum().backward()
    with profile() as prof:
        model(batch.tokens).sum().backward()
    return Counter(event.name for event in prof.events())


@pytest.mark.parametrize("recipe", RECIPES)
def test_without_emulation_products_run_as_scaled_mm(pool: Pools, recipe: Any) -> None:
    """torch has that operator for CPUs too: what a GPU runs is run here, if slowly."""
    plan = Float8Plan(enable=True, recipe=recipe)
    real, emulated = (pool(1).run(_kernels, replace(RUN, float8=p))[0] for p in (plan, replace(plan, emulate=True)))
    assert real["aten::_scaled_mm"] == LINEARS * (2 if recipe == "rowwise_with_gw_hp" else 3)
    assert emulated["aten::_scaled_mm"] == 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_emulation_computes_what_scaled_mm_does(pool: Pools, recipe: Any) -> None:
    run = replace(RUN, rates=RUN.rates[:3], float8=Float8Plan(enable=True, recipe=recipe))
    real, emulated = (pool(1).run(train, r)[0] for r in (run, replace(run, float8=replace(run.float8, emulate=True))))
    torch.testing.assert_close(torch.tensor(real.losses), torch.tensor(emulated.losses), rtol=0, atol=2e-3)
    assert real.losses != pool(1).run(train, replace(run, float8=Float8Plan()))[0].losses


def test_converting_again_or_a_name_that_is_not_there_changes_nothing() -> None:
    model = SPEC.build_on_meta(TINY)
    assert convert(model, ["layers.0.attention.wq", "layers.9.attention.wq"], EMULATED) == ["layers.0.attention.wq"]
    assert len(float8_linears(model)) == 1
    assert type(model.get_submodule("layers.0.attention.wk")) is nn.Linear


OLDER = """\
[model]
name = "llama3"
flavor = "8B"
converters = "float8"
[float8]
filter_fqns = "output,attention.wk,layers.1.,auto_filter_small_kn"
"""
LATER = """\
[model]
name = "llama3"
flavor = "8B"
converters = ["quantize.linear.float8"]
[quantize.linear.float8]
recipe_name = "rowwise"
filter_fqns = ["output", "layers.1", "w3", "auto_filter_small_kn"]
"""


@pytest.mark.parametrize(("text", "recipe"), [(OLDER, "tensorwise"), (LATER, "rowwise")], ids=["older", "later"])
def test_files_of_torchtitan_convert_what_they_do_there(text: str, recipe: Any, tmp_path: Path) -> None:
    """Against the filter that torchtitan takes from torchao, on twelve blocks as wide as Llama 3 8B's."""
    from torchao.float8 import Float8LinearConfig, _auto_filter_for_recipe, convert_to_float8_training

    (tmp_path / "run.toml").write_text(text)
    plan = load_plans(str(tmp_path / "run.toml"), 1).float8
    assert plan.enable and plan.recipe == recipe and plan.skip_small
    args = resolve_args("llama3", "8B", {"n_layers": 12})
    choices = choose(SPEC.linears(args), plan)
    ours, theirs = SPEC.build_on_meta(args), SPEC.build_on_meta(args)
    convert(ours, converted_names(choices), plan)
    filters = ["output", "attention.wk", "layers.1."] if text is OLDER else ["output", "layers.1", "w3"]
    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(theirs, config=config, module_filter_fn=_auto_filter_for_recipe(recipe, filters))
    names = [[name for name, m in model.named_modules() if is_float8(m)] for model in (ours, theirs)]
    assert names[0] == names[1] == converted_names_in_order(ours, choices)
    # Of seven linears wk and wv stay by size; of one block all do, or of three, whose numbers begin with 1.
    assert len(names[0]) == (11 * 5 if text is OLDER else 9 * 4)


def converted_names_in_order(model: nn.Module, choices: list[Choice]) -> list[str]:
    wanted = converted_names(choices)
    return [name for name, _ in model.named_modules() if name in wanted]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_sizes_too_small_to_gain_are_torchaos(recipe: Any) -> None:
    from torchao.float8 import _auto_filter_for_recipe

    wanted = _auto_filter_for_recipe(recipe, [])
    sides = [16, 1008, 1024, 1040, 2032, 2048, 2064, 4080, 4096, 4112, 16384]
    with torch.device("meta"):
        for size in (Size(k, n) for k in sides for n in sides):
            linear = nn.Linear(size.in_features, size.out_features)
            assert too_small(size, recipe) is not wanted(linear, "w"), size


# What is gathered


def test_converted_weights_are_gathered_as_half_the_bytes_of_bf16(pool: Pools) -> None:
    shard = ShardPlan(reshard_after_forward=False)
    run = replace(RUN, shard=shard)
    plain_bytes = pool(2).run(watch_step, run)[0].gathered
    assert plain_bytes == 2 * TOTAL
    assert pool(2).run(watch_step, replace(run, float8=EMULATED))[0].gathered == plain_bytes
    for seen in pool(2).run(watch_step, replace(run, float8=GATHERED)):
        assert seen.gathered == plain_bytes - CONVERTED, "half of theirs is one byte each"
        assert seen.products["input e4m3fn", "weight e4m3fn"] == LINEARS


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_gathered_is_e4m3(pool: Pools, ranks: int) -> None:
    rest = {"layers.0.attention_norm": "bfloat16", "output": "bfloat16"}
    for plan, dtype in ((EMULATED, "bfloat16"), (GATHERED, "float8_e4m3fn")):
        found = pool(ranks).run(gathered_types, replace(RUN, float8=plan))[0]
        assert found == {"layers.0.attention.wq": dtype, **rest}


def test_precomputing_sends_one_reduction_for_all_scales(pool: Pools) -> None:
    """Besides the step's own two. Without it, one for each weight and time it is gathered."""
    shard = ShardPlan(reshard_after_forward=False)
    without, with_it = (
        pool(2).run(watch_step, replace(RUN, shard=shard, float8=p))[0] for p in (GATHERED, PRECOMPUTED)
    )
    assert without.sent["all_reduce"] == LINEARS and without.sent["allreduce"] == 2
    assert with_it.sent["all_reduce"] == 0 and with_it.sent["allreduce"] == 2 + 1
    assert with_it.gathered == without.gathered


def _scales(world: World, run: Run) -> tuple[list[float], list[float]]:
    """Scales after a step: precomputed, and those that the next gathering would have found by itself."""
    model, optimizer, rank = build_tiny(world, run)
    mesh = world.build_mesh(run.mesh(world.size))
    data = to_device(micro_batches(run, 0, rank, world.size), world.device)
    train_step(model, optimizer, data, step=1, lr=1e-2, max_norm=1.0, guard=FiniteGuard(world.device))
    ScalePrecompute(model, mesh)()
    wrappers = [linear.weight._local_tensor for linear in float8_linears(model)]
    ours = [w._precomputed_scale.item() for w in wrappers]
    forget_scales(model)
    shards = mesh["dp_shard"]
    return ours, [w.fsdp_pre_all_gather(shards)[1][0].item() for w in wrappers]


def test_precomputed_scales_are_the_ones_found_weight_by_weight(pool: Pools) -> None:
    ranks = pool(2).run(_scales, replace(RUN, float8=GATHERED))
    assert all(ours == single and len(ours) == LINEARS for ours, single in ranks)
    assert ranks[0] == ranks[1] and len(set(ranks[0][0])) == LINEARS


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_precomputing_changes_no_weight(pool: Pools, replicas: int) -> None:
    run = replace(RUN, replicas=replicas)
    with_it, without = (pool(2).run(train, replace(run, float8=p))[0] for p in (PRECOMPUTED, GATHERED))
    assert with_it.losses == without.losses
    assert all(torch.equal(with_it.weights[name], weight) for name, weight in without.weights.items())


@pytest.mark.parametrize(
    ("shard", "tolerance"),
    [(FP32, 1e-5), pytest.param(ShardPlan(), 2e-2, marks=pytest.mark.slow)],
    ids=["float32", "bfloat16"],
)
def test_gathering_in_float8_agrees_with_gathering_in_high_precision(
    pool: Pools, shard: ShardPlan, tolerance: float
) -> None:
    """In fp32 there is nothing to lose between the weights and their rounding to float8."""
    run = replace(RUN, shard=shard)
    on, off = (pool(2).run(train, replace(run, float8=p))[0].losses for p in (GATHERED, EMULATED))
    torch.testing.assert_close(torch.tensor(on), torch.tensor(off), rtol=0, atol=tolerance)


# Weights and names


@pytest.mark.parametrize("plan", [EMULATED, GATHERED], ids=["", "all-gather"])
def test_initial_weights_are_those_without_float8(pool: Pools, plan: Float8Plan) -> None:
    expected = pool(2).run(initial_weights, RUN)[0]
    found = pool(2).run(initial_weights, replace(RUN, float8=plan))[0]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def _state(world: World, run: Run) -> dict[str, tuple[str, str, Tensor]]:
    """What a checkpoint would hold before the first step: types, inside and out, and values."""
    model, optimizer, _ = build_tiny(world, run)
    tensors = gather(model, optimizer)
    return {n: (type(t).__name__, type(getattr(t, "_local_tensor", t)).__name__, full(t)) for n, t in tensors.items()}


def test_checkpoints_hold_what_they_hold_without_float8(pool: Pools) -> None:
    expected = pool(2).run(_state, RUN)[0]
    for plan in (EMULATED, GATHERED):
        found = pool(2).run(_state, replace(RUN, float8=plan))[0]
        assert list(found) == list(expected)
        for name, (outside, inside, value) in expected.items():
            assert found[name][:2] == (outside, inside) == ("DTensor", "Tensor") or value.dim() == 0, name
            assert torch.equal(found[name][2], value)


def test_a_plain_weight_is_the_same_memory() -> None:
    model = SPEC.build_on_meta(TINY).to_empty(device="cpu")
    convert(model, ["layers.0.attention.wq"], GATHERED)
    weight = model.get_parameter("layers.0.attention.wq.weight")
    assert type(plain(weight)) is Tensor and type(weight.data) is not Tensor
    with torch.no_grad():
        plain(weight).fill_(3.0)
        assert weight.sum().item() == 3.0 * weight.numel()
    norm = model.get_parameter("norm.weight")
    assert plain(norm) is norm


# Activations


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("plan", [EMULATED, Float8Plan(enable=True)], ids=["emulated", "scaled_mm"])
def test_the_per_op_policy_sees_float8_products(plan: Float8Plan, recipe: Any) -> None:
    model = SPEC.build_on_meta(TINY)
    plan = replace(plan, recipe=recipe)
    convert(model, converted_names(choose(SPEC.linears(TINY), plan)), plan)
    activations = ActivationCheckpointPlan("op")
    kept = trace_block(model, SPEC.block_names(TINY), activations, (4, 32), torch.device("cpu"), torch.bfloat16)
    assert (kept.forward["matmul"], kept.saved["matmul"], kept.recomputed["matmul"]) == (7, 4, 3)
    assert 0 < kept.block_bytes < kept.plain_bytes


def test_what_waits_in_host_memory_is_no_float8_weight(pool: Pools) -> None:
    plain_losses, sent_losses, sent = pool(2).run(_offloaded, replace(RUN, float8=GATHERED))[0]
    assert sent_losses == plain_losses and sent


def _offloaded(world: World, run: Run) -> tuple[list[Tensor], list[Tensor], int]:
    found = []
    for away in (False, True):
        model, _, rank = build_tiny(world, run)
        shelf = Shelf()
        if away:
            for name in SPEC.block_names(TINY):
                offload(model.get_submodule(name), shelf, model, least_bytes=0)
        loss = model(micro_batches(run, 0, rank, world.size)[0].tokens).float().square().mean()
        loss.backward()
        norms = [p.grad.to_local().norm().item() for p in model.parameters()]
        found.append([loss.item(), *norms])
    assert not [p for p in shelf.parcels if any(hasattr(t, "_scale") for t in tree_leaves(p.tensor))]
    return found[0], found[1], len(shelf.parcels)


# torchao


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_torchao_is_imported_only_for_float8_and_quietly() -> None:
    code = """
import sys, torch
import titanlite.trainer, titanlite.app, titanlite.parallel.float8 as float8
from titanlite.config.plans import Float8Plan
assert not [name for name in sys.modules if name.startswith("torchao")]
float8.convert(torch.nn.Sequential(torch.nn.Linear(16, 16)), ["0"], Float8Plan(enable=True))
assert "torchao.float8" in sys.modules
import logging, warnings
assert logging.getLogger("torchao").level == logging.NOTSET
"""
    assert _python(code) == ""


@pytest.mark.soak
@pytest.mark.parametrize(("keep", "inputs"), [("", 4), ("wk", 2)])
def test_tensor_parallel_ranks_that_can_exchange_float8(keep: str, inputs: int) -> None:
    """What a block gathers is cast before, once for all products that take it; gradients too. gloo cannot send it."""
    code = f"""
from collections import Counter
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
import torch, torch.distributed as dist
from tests.training.harness import TINY
from titanlite.config.plans import Float8Plan
from titanlite.loss import cross_entropy_sum
from titanlite.models import get_spec
from titanlite.parallel.float8 import convert
from titanlite.parallel.float8_choice import choose, converted_names
from titanlite.parallel.tensor import split, tensor_loss
seen = Counter()
class Gathers(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "all_gather" in str(func):
            seen[str(getattr(args[0], "_data", args[0]).dtype)] += 1
        return func(*args, **(kwargs or {{}}))
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
mesh, spec = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), get_spec("llama3")
plan = Float8Plan(enable=True, emulate=True, keep=tuple("{keep}".split()))
model = spec.build_on_meta(TINY)
convert(model, converted_names(choose(spec.linears(TINY), plan, spec.tensor_plan(TINY), 2)), plan)
split(model, spec.tensor_plan(TINY), mesh)
model.to_empty(device="cpu")
with torch.no_grad():
    for parameter in model.parameters():
        parameter.to_local().fill_(0.01)
model.init_buffers()
tokens = torch.zeros(2, 32, dtype=torch.int64)
with Gathers():
    tensor_loss(cross_entropy_sum)(model(tokens), tokens).backward()
print(seen["torch.float8_e4m3fn"], seen["torch.float8_e5m2"])
"""
    assert _python(code).split()[-2:] == [str(inputs), "4"]
