"""torch.compile: how many graphs, the same numbers as without it, and what is said of a compilation too many."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.checkpoint import FileSystemReader

from tests.pool import Pools, RankPool
from tests.steps import train_step
from tests.training import test_run
from tests.training.harness import TINY, Run, batches, build_tiny, micro_batches, train
from tests.training.reference import Curve
from titanlite import exit_codes, main
from titanlite.config.errors import ConfigError
from titanlite.data.loader import Batch
from titanlite.guard import FiniteGuard
from titanlite.loss import cross_entropy_sum
from titanlite.models import get_spec
from titanlite.parallel.compile import (
    CACHE_VARIABLE,
    CompileError,
    check_backend,
    compile_loss,
    prepare_compile,
    use_cache_folder,
)
from titanlite.parallel.dist_env import DistEnv
from titanlite.step import PlainRunner, validate
from titanlite.utils import logger

STEPS, SEQ = 20, 32
TOKENS, LABELS = batches(STEPS, 8, SEQ, 192)
WARM = [3e-3 * min(1.0, (n + 1) / 5) for n in range(STEPS)]
BOTH = CompilePlan(model=True, loss=True, backend="aot_eager")
SPEC = get_spec("llama3")


class Counting:
    """A backend that runs graphs as they are, and counts them."""

    __name__ = "counting"

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1
        return module.forward


@dataclass
class Counted:
    """Graphs made so far after each step and each validation, and what was logged."""

    steps: list[int]
    validations: list[int]
    said: list[tuple[str, str]]


def _listen(said: list[tuple[str, str]]) -> logging.Handler:
    handler = logging.Handler()
    handler.emit = lambda record: said.append((record.levelname, record.getMessage()))  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return handler


def _count(world: DistEnv, run: Run, lengths: list[int]) -> Counted:
    """Train with a counting backend, a sequence length per step; validation, in larger batches, after even steps."""
    torch._dynamo.reset()
    backend = Counting()
    # Plans hold names of backends; the pieces below take functions as well.
    plan = replace(run.compile, backend=backend)  # type: ignore[arg-type]
    model, optimizer, rank = build_tiny(world, replace(run, compile=plan))
    loss = compile_loss(cross_entropy_sum, backend) if plan.loss else cross_entropy_sum
    watch = watch_compilation(SPEC, run.args, model, plan)
    assert watch is not None
    counted = Counted([], [], [])
    handler = _listen(counted.said)
    guard = FiniteGuard(world.device)
    try:
        for step, length in enumerate(lengths, start=1):
            parts = [
                Batch(b.tokens[:, :length], b.labels[:, :length])
                for b in micro_batches(run, step - 1, rank, world.size)
            ]
            train_step(model, optimizer, parts, step=step, lr=1e-3, max_norm=1.0, guard=guard, loss_function=loss)
            watch.after(step, "training")
            counted.steps.append(backend.graphs)
            if step % 2 == 0:
                whole = [Batch(run.tokens[step, :5], run.labels[step, :5])] * 2
                validate(model, whole, world.device, PlainRunner(model, loss))
                watch.after(step, "validation")
                counted.validations.append(backend.graphs)
    finally:
        logger.removeHandler(handler)
        torch._dynamo.reset()
    return counted


@pytest.mark.parametrize("blocks", [2, 4, 8])
def test_all_blocks_share_one_graph_in_training_and_one_in_validation(pool: Pools, blocks: int) -> None:
    """With accumulation, an optimizer step and validation of another batch size in between, nothing is made again."""
    run = Run(TOKENS, LABELS, [], args=replace(TINY, n_layers=blocks), accumulation=2, compile=BOTH)
    counted = pool(1).run(_count, run, [SEQ] * 5)[0]
    assert counted.steps == [2, 2, 4, 4, 4]  # block and loss, then both once more without gradients
    assert counted.validations == [4, 4]
    assert [level for level, _ in counted.said] == ["INFO", "INFO"]
    assert "made 2 graphs for training in " in counted.said[0][1]
    assert "made 2 graphs for validation in " in counted.said[1][1]


@pytest.mark.parametrize(("model", "loss"), [(True, False), (False, True)])
def test_each_component_is_compiled_alone(pool: Pools, model: bool, loss: bool) -> None:
    run = Run(TOKENS, LABELS, [], compile=CompilePlan(model=model, loss=loss))
    assert pool(1).run(_count, run, [SEQ] * 2)[0].steps == [1, 1]


def test_recompilation_is_reported_once_with_its_reason(pool: Pools) -> None:
    run = Run(TOKENS, LABELS, [], compile=BOTH)
    counted = pool(2).run(_count, run, [SEQ, SEQ, 16, 16, SEQ, 16])
    assert counted[0].steps[2] == counted[0].steps[1] + 2 + 2  # validation after step 2, the new length in step 3
    assert counted[0].steps[-1] == counted[0].steps[2]
    warnings = [text for level, text in counted[0].said if level == "WARNING"]
    assert len(warnings) == 2
    for text, name in zip(warnings, ("Block", "cross_entropy_sum"), strict=True):
        assert text.startswith(f"step 3: torch.compile compiled {name} again, in ")
        assert text.endswith("size mismatch at index 1. expected 32, actual 16")
    # The second rank tells its own log only.
    assert [level for level, _ in counted[1].said] == ["INFO"] * 4


@pytest.mark.parametrize(
    ("optimizer", "ranks", "accumulation"), [("AdamW", 1, 4), pytest.param("SGD", 2, 2, marks=pytest.mark.slow)]
)
def test_compiled_run_equals_eager_one(pool: Pools, optimizer: str, ranks: int, accumulation: int) -> None:
    rates = [0.1] * STEPS if optimizer == "SGD" else WARM
    run = Run(TOKENS, LABELS, rates, optimizer=optimizer, accumulation=accumulation)
    expected = pool(ranks).run(train, run)[0]
    graphs, curve = pool(ranks).run(_train_afresh, replace(run, compile=BOTH))[0]
    assert graphs == 2
    _assert_equal(curve, expected, 1e-6 if optimizer == "SGD" else 1e-4)


def _train_afresh(world: DistEnv, run: Run) -> tuple[int, Curve]:
    """Number of graphs made, and the run."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        curve = train(world, run)
        return torch._dynamo.utils.counters["stats"]["unique_graphs"], curve
    finally:
        torch._dynamo.reset()


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def _assert_equal(curve: Curve, expected: Curve, weights_within: float) -> None:
    assert curve.gradients.keys() == expected.gradients.keys() and curve.weights.keys() == expected.weights.keys()
    for name, gradient in expected.gradients.items():
        assert _relative(curve.gradients[name], gradient) < 1e-6, name
    torch.testing.assert_close(torch.tensor(curve.losses), torch.tensor(expected.losses), rtol=0, atol=5e-6)
    for name, weight in expected.weights.items():
        assert _relative(curve.weights[name], weight) < weights_within, name


def _in_parts(world: DistEnv, run: Run) -> tuple[int, float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Gradients of a model whose attentions and feed-forwards are compiled, and of a plain one."""
    torch._dynamo.reset()
    gradients: list[dict[str, torch.Tensor]] = []
    losses: list[float] = []
    backend = Counting()
    for compiled in (True, False):
        torch.manual_seed(0)
        model = SPEC.build(run.args)
        if compiled:
            parts = ("attention", "feed_forward")
            names = [f"{block}.{part}" for block in SPEC.block_names(run.args) for part in parts]
            compile_units({name: model.get_submodule(name) for name in names}, backend)
        loss = cross_entropy_sum(model(run.tokens[0]), run.labels[0])
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    torch._dynamo.reset()
    return backend.graphs, abs(losses[0] - losses[1]) / losses[1], *gradients


def test_units_smaller_than_a_block_are_one_graph_each(pool: Pools) -> None:
    """As tensor parallelism needs it."""
    graphs, off, compiled, plain = pool(1).run(_in_parts, Run(TOKENS, LABELS, [], args=replace(TINY, n_layers=4)))[0]
    assert graphs == 2 and off < 1e-6
    assert compiled.keys() == plain.keys()
    for name, gradient in plain.items():
        assert _relative(compiled[name], gradient) < 1e-6, name


@dataclass
class Traced:
    graphs: int
    #: Matrix products in the backward of one block.
    backward_matmuls: int
    loss: float
    gradients: dict[str, torch.Tensor]


def _checkpointed(_: DistEnv, plan: ActivationCheckpointPlan, compiled: bool) -> Traced:
    """Loss and gradients of four checkpointed blocks."""
    torch._dynamo.reset()
    backward: list[int] = []

    def count(module: torch.fx.GraphModule, inputs: Any) -> Any:
        backward.append(sum(node.target is torch.ops.aten.mm.default for node in module.graph.nodes))
        return make_boxed_func(module.forward)

    backend = aot_autograd(
        fw_compiler=lambda module, inputs: make_boxed_func(module.forward),
        bw_compiler=count,
        partition_fn=min_cut_rematerialization_partition,
    )
    args = replace(TINY, n_layers=4)
    torch.manual_seed(0)
    model = SPEC.build(args)
    checkpoint_activations(model, SPEC.block_names(args), plan, torch.device("cpu"))
    if compiled:
        compile_units({name: model.get_submodule(name) for name in SPEC.block_names(args)}, backend)
    loss = cross_entropy_sum(model(TOKENS[0]), LABELS[0])
    loss.backward()
    torch._dynamo.reset()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Traced(len(backward), max(backward, default=0), loss.item(), gradients)


@pytest.mark.parametrize(
    ("plan", "graphs", "matmuls"),
    [
        (ActivationCheckpointPlan(), 1, 14),  # two for each of seven
        (ActivationCheckpointPlan(mode="full"), 1, 14 + 6),  # no gradient needs the last one's result
        (ActivationCheckpointPlan(mode="op"), 1, 14 + 3),
        (ActivationCheckpointPlan(mode="every", every=2), 2, 14 + 6),
        (ActivationCheckpointPlan(mode="budget", memory_budget=1.0), 1, 14),
    ],
    ids=lambda value: getattr(value, "mode", None),
)
def test_checkpointing_is_a_part_of_the_graph(
    pool: Pools, plan: ActivationCheckpointPlan, graphs: int, matmuls: int
) -> None:
    plain = pool(1).run(_checkpointed, ActivationCheckpointPlan(), False)[0]
    traced = pool(1).run(_checkpointed, plan, True)[0]
    assert (traced.graphs, traced.backward_matmuls) == (graphs, matmuls)
    assert abs(traced.loss - plain.loss) / plain.loss < 1e-6
    for name, gradient in plain.gradients.items():
        assert _relative(traced.gradients[name], gradient) < 1e-6, name


class Breaks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1


def test_unit_that_is_no_single_graph_is_named() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleDict({"7": Breaks()})})
    compile_units({"layers.7": model.get_submodule("layers.7")}, "eager")
    with pytest.raises(CompileError, match=r"layers\.7 cannot be compiled as one graph: Call to .*graph_break"):
        model.get_submodule("layers.7")(torch.ones(2))
    torch._dynamo.reset()


def test_shapes_without_end_stop_with_advice() -> None:
    torch._dynamo.reset()
    loss = compile_loss(cross_entropy_sum, "eager")
    with pytest.raises(CompileError, match=r"the loss: this process has compiled it 8 times, .*dynamo\.reset\(\)"):
        for length in range(2, 20):
            loss(torch.zeros(1, length, 4), torch.zeros(1, length, dtype=torch.int64))
    torch._dynamo.reset()


# Whole runs of the trainer

COMPILED = ("--training.compile", "--compile.backend=eager", "--validation.enable", "--validation.freq=2")


def _whole(world: DistEnv, folder: str, *flags: str) -> dict[str, Any]:
    torch._dynamo.reset()
    try:
        return test_run._run(world, folder, *flags)
    finally:
        torch._dynamo.reset()


def _tensors(checkpoint: Path) -> dict[str, Any]:
    (metadata,) = checkpoint.rglob(".metadata")
    return {
        name: getattr(value, "size", None)
        for name, value in FileSystemReader(metadata.parent).read_metadata().state_dict_metadata.items()
    }


@pytest.mark.soak
def test_run_resumes_with_and_without_compiling(pool: Pools, tmp_path: Path) -> None:
    plain = [flag for flag in COMPILED if "compile" not in flag]
    eager = pool(1).run(_whole, str(tmp_path / "eager"), "--training.steps=6", *plain)[0]
    on, off = str(tmp_path / "on"), str(tmp_path / "off")
    first = pool(1).run(_whole, on, "--training.steps=4", *COMPILED)[0]
    said = "\n".join(first["said"])
    assert "compile          each block and the loss, backend eager" in said
    assert "the first step compiles Block and cross_entropy_sum with eager" in said
    assert said.index("made 2 graphs for training") < said.index("step:  1") < said.index("2 graphs for validation")
    assert "again" not in said
    pool(1).run(_whole, off, "--training.steps=4", *plain)
    assert _tensors(Path(on) / "checkpoint/step-4") == _tensors(Path(off) / "checkpoint/step-4")
    assert not [name for name in _tensors(Path(on) / "checkpoint/step-4") if "_orig_mod" in name]
    resumed = [
        pool(1).run(_whole, on, "--training.steps=6", *plain)[0],
        pool(1).run(_whole, off, "--training.steps=6", *COMPILED)[0],
    ]
    for run in resumed:
        assert run["step"] == 6 and any("resumed from step 4" in line for line in run["said"])
        for kind in ("loss", "validation_loss"):
            ours = torch.tensor([row[kind] for row in run["rows"] if kind in row])
            theirs = torch.tensor([row[kind] for row in eager["rows"] if kind in row])
            torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-6)


# What a config or a machine may lack


def test_unknown_backend_ends_before_any_work_and_names_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    level, handlers = logger.level, list(logger.handlers)
    try:
        assert main.run(["--training.compile", "--compile.backend=inductr"]) == exit_codes.CONFIG
    finally:
        logger.setLevel(level)
        logger.handlers[:] = handlers
    error = capsys.readouterr().err
    assert 'compile.backend: torch has no backend "inductr"' in error
    assert "nearest: inductor" in error and "there are cudagraphs, inductor" in error


def test_machine_that_cannot_build_code_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    check_backend("inductor", "cpu")
    monkeypatch.setenv("CXX", "/nowhere/g++")
    check_backend("aot_eager", "cpu")
    with pytest.raises(ConfigError, match=r"no compiler /nowhere/g\+\+ \(environment variable CXX\)\s.*install g\+\+"):
        check_backend("inductor", "cpu")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"no compiler g\+\+\s.*name yours in CXX, or set training.compile = false"):
        check_backend("inductor", "cpu")
    monkeypatch.undo()
    monkeypatch.setattr(sysconfig, "get_path", lambda _: "/nowhere")
    with pytest.raises(ConfigError, match=r"no /nowhere/Python.h\s.*python3-dev"):
        check_backend("inductor", "cpu")


def test_cache_folder_is_the_keys_the_environments_or_the_users(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    assert use_cache_folder(None) == str(tmp_path / "user/titanlite/inductor") == os.environ[CACHE_VARIABLE]
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "environment"))
    assert use_cache_folder(None) == str(tmp_path / "environment")
    prepare_compile(CompilePlan(loss=True, cache_dir=str(tmp_path / "key")), "cpu")
    assert os.environ[CACHE_VARIABLE] == str(tmp_path / "key") and (tmp_path / "key").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="compile.cache_dir: cannot write to"):
        use_cache_folder(str(tmp_path / "file"))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match=f"{CACHE_VARIABLE}: cannot write to"):
        use_cache_folder(None)
    # A user without a cache folder: torch's own stays.
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert Path(use_cache_folder(None)).parent == tmp_path


@pytest.mark.slow
def test_new_process_keeps_its_code_in_the_users_cache(tmp_path: Path) -> None:
    """Torch puts a folder of its own into the variable as soon as it is told to load its compiler."""
    program = (
        "import os; import torch._dynamo; from titanlite.config.plans import CompilePlan\n"
        "from titanlite.parallel.compile import prepare_compile\n"
        f"prepare_compile(CompilePlan(loss=True)); print(os.environ['{CACHE_VARIABLE}'])"
    )
    environment = {name: value for name, value in os.environ.items() if name != CACHE_VARIABLE}
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "titanlite/inductor")


def test_compiling_nothing_is_a_contradiction() -> None:
    with pytest.raises(ConfigError, match="compile.components: is empty, but training.compile = true"):
        checked_plans(["--training.compile", "--compile.components="], 1, training=True)


# With code generation: the same, by the compiler that users have


def _generate(world: DistEnv, folder: str, run: Run) -> dict[str, Any]:
    prepare_compile(replace(run.compile, cache_dir=folder), "cpu")
    graphs, curve = _train_afresh(world, run)
    counters = torch._dynamo.utils.counters["inductor"]
    metrics = torch._dynamo.utils.get_compilation_metrics()
    seconds = sum(m.duration_us or 0 for m in metrics) / 1e6
    return {"graphs": graphs, "curve": curve, "seconds": seconds, "hits": counters["fxgraph_cache_hit"]}


def _in_new_processes(ranks: int, folder: str, run: Run) -> dict[str, Any]:
    fresh = RankPool(ranks)
    try:
        return fresh.run(_generate, folder, run, timeout=400)[0]
    finally:
        fresh.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("inductor"))


INDUCTOR = CompilePlan(model=True, loss=True, backend="inductor")


@pytest.mark.soak
def test_generated_code_equals_eager_and_outlives_its_process(pool: Pools, folder: str) -> None:
    run = Run(TOKENS, LABELS, [0.1] * STEPS, optimizer="SGD", accumulation=2, compile=INDUCTOR)
    expected = pool(2).run(train, replace(run, compile=CompilePlan()))[0]
    cold = _in_new_processes(2, folder, run)
    assert cold["graphs"] == 2
    _assert_equal(cold["curve"], expected, 1e-6)
    warm = _in_new_processes(2, folder, run)
    assert warm["hits"] == 4  # forward and backward of block and loss
    assert warm["seconds"] < cold["seconds"] / 2
    assert warm["curve"].losses == cold["curve"].losses


@pytest.mark.soak
def test_generated_code_in_bf16_stays_within_the_spread_of_seeds(pool: Pools, folder: str) -> None:
    run = Run(TOKENS, LABELS, WARM, shard=ShardPlan(), accumulation=4)
    eager = torch.tensor(pool(1).run(train, run)[0].losses)
    others = [torch.tensor(pool(1).run(train, replace(run, seed=seed))[0].losses) for seed in (8, 9)]
    spread = torch.stack([(eager - other).abs().mean() for other in others]).mean()
    compiled = torch.tensor(_in_new_processes(1, folder, replace(run, compile=INDUCTOR))["curve"].losses)
    difference = (compiled - eager).abs().mean()
    assert difference < min(2 * spread, 1e-3)
