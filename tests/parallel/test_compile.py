"""torch.compile: how many graphs, the same numbers as without it, and reports of further
compilations.
"""

from __future__ import annotations

import json
import logging
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import register_backend

from tests.support.compare import LABELS, SEQ, TOKENS
from tests.support.harness import (
    TINY,
    Run,
    build_tiny,
    full_precision,
    micro_batches,
    train,
    train_afresh,
)
from tests.support.processes import python
from tests.support.steps import train_step
from tests.support.words import listening
from titanlite import exit_codes, main
from titanlite.assembly.preflight import check_machine
from titanlite.config.errors import ConfigError
from titanlite.config.sections import Compile, Float8
from titanlite.data.loader import Batch
from titanlite.dist import ParallelismError
from titanlite.dist.dist_env import DistEnv
from titanlite.optim.guard import FiniteGuard
from titanlite.parallel.compile import (
    CACHE_VARIABLE,
    CompileWatch,
    check_backend,
    prepare_compile,
    use_cache_folder,
)
from titanlite.resolve.load import load_config
from titanlite.run.config import RunConfig
from titanlite.step import PlainRunner
from titanlite.validation import validate


class Counting:
    """A backend that runs graphs as they are, and counts them."""

    __name__ = "counting"

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1
        return module.forward


COUNTING = register_backend(Counting(), "counting", ("debug",))
COUNTED = Compile(backend="counting")


def _count(world: DistEnv, run: Run, lengths: list[int]) -> SimpleNamespace:
    """Train with a counting backend, a sequence length per step; validation, in larger batches,
    after even steps.

    Return graphs made so far after each step and each validation, and what was logged.
    """
    COUNTING.graphs = 0
    model, optimizer, rank = build_tiny(world, run)
    loss = run.builder(world).loss()
    assert run.compile is not None
    watch = CompileWatch(run.compile.backend)
    guard = FiniteGuard(world.device)
    with listening() as said, listening(logging.WARNING) as warned:
        counted = SimpleNamespace(steps=[], validations=[], logged=said, warned=warned)
        watch.start()
        for step, length in enumerate(lengths, start=1):
            data = micro_batches(run, step - 1, rank, world.size)
            parts = [Batch(b.tokens[:, :length], b.labels[:, :length]) for b in data]
            train_step(
                model,
                optimizer,
                parts,
                step=step,
                lr=1e-3,
                max_norm=1.0,
                guard=guard,
                loss_function=loss,
            )
            watch.after(step, "training")
            counted.steps.append(COUNTING.graphs)
            if step % 2 == 0:
                whole = [Batch(run.tokens[step, :5], run.labels[step, :5])] * 2
                validate(model, whole, world.device, PlainRunner(model, loss))
                watch.after(step, "validation")
                counted.validations.append(COUNTING.graphs)
    return counted


def test_all_blocks_share_one_graph_in_training_and_one_in_validation(pool):
    """With accumulation, an optimizer step and validation of another batch size in between, nothing
    is made again.
    """
    run = Run(TOKENS, LABELS, [], accumulation=2, compile=COUNTED)
    counted = pool(1).run(_count, run, [SEQ] * 5)[0]
    assert counted.steps == [2, 2, 4, 4, 4]  # block and loss, then both once more without gradients
    assert counted.validations == [4, 4]
    assert not counted.warned
    first, training, validation = counted.logged
    assert first == "the first step compiles with counting"
    assert "made 2 graphs for training in " in training
    assert "made 2 graphs for validation in " in validation


def test_recompilation_is_a_warning_with_what_was_compiled(pool):
    run = Run(TOKENS, LABELS, [], compile=COUNTED)
    counted = pool(2).run(_count, run, [SEQ, SEQ, 16, 16, SEQ, 16])
    _, second, third, *_, last = counted[0].steps
    assert third == second + 2 + 2, "validation after step 2, the new length in step 3"
    assert last == third
    (text,) = counted[0].warned
    assert re.fullmatch(
        r"step 3: torch\.compile compiled \S+/titanlite/loss\.py:\d+, "
        r"\S+/titanlite/models/layers\.py:\d+ again, in .* s; TORCH_LOGS=recompiles tells why",
        text,
    )
    assert counted[1].warned == [], "the second rank writes to its own log only"


_FAILURES = """
import json, torch
from torch import nn
from titanlite.parallel.compile import CompileError, apply_compile

class Breaks(nn.Module):
    def forward(self, x):
        torch._dynamo.graph_break()
        return x + 1

class Doubles(nn.Module):
    def forward(self, x):
        return x * 2

def fails(graph, inputs):
    raise ValueError("an input has no size\\nset the option to go without it")

said = []
for module, backend in ((Breaks(), "eager"), (Doubles(), fails)):
    model = nn.ModuleDict({"layers": nn.ModuleDict({"7": module})})
    apply_compile({"layers.7": module}, backend)
    try:
        module(torch.ones(2))
    except CompileError as error:
        said.append(str(error))
print(json.dumps(said))
"""


@pytest.mark.slow
def test_errors_of_a_compilation_name_the_module_and_the_whole_reason(tmp_path):
    """In a process of their own: torch hands arguments of functions over in another way after a
    failed compilation.
    """
    file = tmp_path / "failures.py"
    file.write_text(_FAILURES)
    graph_break, backend = json.loads(python(file).stdout)
    assert re.match(
        r"layers\.7 cannot be compiled as one graph: Call to .*graph_break", graph_break
    )
    assert f'File "{file}", line 8, in forward' in graph_break
    assert backend.startswith("the backend failed to compile layers.7: ")
    assert "ValueError: an input has no size\nset the option to go without it" in backend


def test_unknown_backend_ends_before_any_work_and_names_those_there_are(capsys):
    assert main.run(["--training.compile", "--compile.backend=inductr"]) == exit_codes.CONFIG
    error = capsys.readouterr().err
    assert 'compile.backend: torch has no backend "inductr"' in error
    assert "nearest: inductor" in error
    assert "there are cudagraphs, inductor" in error


def _compiled(cache_dir: str) -> RunConfig:
    flags = ["--training.compile=true", f"--compile.cache_dir={cache_dir}"]
    return load_config("debug_model.toml", 1, flags)


def test_a_missing_compiler_is_named_with_what_to_install(monkeypatch):
    check_backend("inductor", "cpu")
    monkeypatch.setenv("CXX", "/nowhere/g++")
    check_backend("aot_eager", "cpu")
    missing = r"no compiler /nowhere/g\+\+ \(environment variable CXX\).*install g\+\+"
    with pytest.raises(ParallelismError, match=missing):
        check_backend("inductor", "cpu")
    with pytest.raises(
        ConfigError, match=rf"compile\.backend.*{missing}[^$]*training\.compile = false"
    ):
        check_machine(_compiled("unused"))


def test_cache_folder_is_the_keys_or_the_environments(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "environment"))
    assert use_cache_folder(None) == str(tmp_path / "environment")
    prepare_compile("inductor", "cpu", str(tmp_path / "key"))
    assert os.environ[CACHE_VARIABLE] == str(tmp_path / "key")
    assert (tmp_path / "key").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="compile.cache_dir: cannot write to"):
        check_machine(_compiled(str(tmp_path / "file")))
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("LOGNAME", "me")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert Path(use_cache_folder(None)).parent == tmp_path
    monkeypatch.setattr(os, "getuid", lambda: -1)
    with pytest.raises(ParallelismError, match="it belongs to another user"):
        use_cache_folder(None)


def _train_with_cache(
    world: DistEnv, run: Run, folder: str
) -> tuple[list[float], list[float], int]:
    """Losses and gradient norms of a run whose compiled code goes to this folder, and the graphs
    found there.
    """
    counters = torch._dynamo.utils.counters
    counters.clear()
    # Kernels of torch in place of C++ code, which takes 20 s to compile. Graphs are cached as ever.
    with patch.dict(os.environ), torch._inductor.config.patch(fallback_by_default=True):
        use_cache_folder(folder)
        curve = train_afresh(world, run)
    return curve.losses, curve.norms, counters["aot_autograd"]["autograd_cache_hit"]


@pytest.mark.slow
def test_a_restart_runs_the_graphs_of_its_own_rank(pool, tmp_path):
    """torch alone gives both ranks of tensor parallelism the graph of one: the loss is then
    wrong.
    """
    args = replace(TINY, n_layers=1)
    run = Run(TOKENS, LABELS, [3e-3] * 2, args=args, training=full_precision())
    alone = pool(1).run(train, run)[0]
    sharded = replace(run, tensor=2, compile=Compile())
    for first in (True, False):
        losses, norms, hits = pool(2).run(_train_with_cache, sharded, str(tmp_path))[0]
        assert losses == pytest.approx(alone.losses, rel=1e-5)
        assert norms == pytest.approx(alone.norms, rel=1e-5)
        assert (hits == 0) == first


def _options(world: DistEnv, run: Run) -> list[Any]:
    """Options with which blocks are compiled."""
    with patch.object(nn.Module, "compile", autospec=True) as compiled:
        build_tiny(world, run)
    return [call.kwargs["options"] for call in compiled.call_args_list]


@pytest.mark.parametrize(
    ("recipe", "backend", "wanted"),
    [
        ("rowwise", "inductor", {"emulate_precision_casts": True}),
        ("rowwise", "aot_eager", None),
        ("tensorwise", "inductor", None),
    ],
)
def test_scales_per_row_need_the_casts_of_eager_code(pool, recipe, backend, wanted):
    float8 = Float8(enable_float8_linear=True, emulate=True, recipe_name=recipe)
    run = Run(TOKENS, LABELS, [], compile=Compile(backend=backend), float8=float8)
    (options,) = pool(1).run(_options, run)
    assert options
    assert all(one == wanted for one in options)
