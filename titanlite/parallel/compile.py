"""`torch.compile` of a model's modules and of the loss: each one graph, and equal modules one
compilation.

prepare_compile("inductor", "cuda")     # before anything is compiled, best before any process group
apply_compile(blocks, "inductor")       # after activation checkpointing, before `fully_shard`
loss = compile_loss(cross_entropy_sum, "inductor")
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite import exit_codes
from titanlite.config.errors import nearest
from titanlite.dist import ParallelismError
from titanlite.loss import LossFunction
from titanlite.utils import counted, logger

#: A name that torch knows, or a function (graph module, example inputs) → callable.
Backend = str | Callable[..., Any]

#: Names inductor's folder of compiled code; each process reads it from its environment.
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


#: Lines of torch's reason that an error shows.
_MOST_LINES = 24


class CompileError(RuntimeError):
    """A module or function cannot be compiled as one graph; the message names it."""

    exit_code = exit_codes.CONFIG


def prepare_compile(
    backend: str, device_type: str | None = None, cache_dir: str | None = None
) -> None:
    """Check that the backend can work on this machine; see `use_cache_folder`. Raises
    ParallelismError.

    device_type: by default "cuda" where this machine has it.
    """
    check_backend(backend, device_type)
    if backend == "inductor":
        use_cache_folder(cache_dir)


def check_backend(backend: str, device_type: str | None = None) -> None:
    """Raise ParallelismError unless torch knows `backend` and this machine has its tools for the
    device.
    """
    known = torch._dynamo.list_backends(exclude_tags=())
    if backend not in known:
        found = nearest(backend, known, 3)
        close = f"nearest: {', '.join(found)}; " if found else ""
        usual = ", ".join(torch._dynamo.list_backends())
        raise ParallelismError(
            f'torch has no backend "{backend}"; {close}there are {usual}; for debugging eager and '
            "aot_eager"
        )
    cuda = device_type == "cuda" if device_type else torch.cuda.is_available()
    missing = _missing_tool(cuda) if backend == "inductor" else None
    if missing is not None:
        raise ParallelismError(
            f'"inductor" makes code that has to be built on this machine, and {missing}'
        )


def _missing_tool(cuda: bool) -> str | None:
    if cuda and importlib.util.find_spec("triton") is None:
        return "the package triton, which builds it for GPUs, is not installed: install triton"
    variable = "CC" if cuda else "CXX"
    names = ["gcc", "clang"] if cuda else ["g++"]
    given = ""
    if variable in os.environ:
        names = [os.environ[variable]]
        given = f" (environment variable {variable})"
    if not any(map(shutil.which, names)):
        advice = f"install one (Debian and Ubuntu: apt-get install g++) or name yours in {variable}"
        return f"there is no compiler {' or '.join(names)}{given}: {advice}"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        return (
            f"there is no {header}: install Python's headers (Debian and Ubuntu: apt-get install "
            "python3-dev)"
        )
    return None


def use_cache_folder(cache_dir: str | None) -> str:
    """Choose the folder of compiled code before anything is compiled; return it.

    None: TORCHINDUCTOR_CACHE_DIR of the environment, else torch's own. Raises ParallelismError
    when it cannot be written to.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    named = cache_dir or os.environ.get(CACHE_VARIABLE) or default_cache_dir()
    folder = Path(named).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(None, "no permission")
        # In /tmp anybody may have made the folder, and torch runs the code in it.
        if named == default_cache_dir() and folder.stat().st_uid != os.getuid():
            raise PermissionError(None, "it belongs to another user")
    except OSError as error:
        message = f'cannot write to "{folder}": {error.strerror}'
        raise ParallelismError(f"{message}; name a folder that you may write to") from None
    os.environ[CACHE_VARIABLE] = str(folder)
    return str(folder)


def separate_cache(mesh: DeviceMesh, device: torch.device) -> None:
    """Let this rank find only cached graphs of ranks with the same shards and device.

    torch 2.13 names a graph of DTensors by mesh and global shapes alone (pytorch issue 188390).
    After a restart a tensor-parallel rank would silently run another's graph.
    """
    tag = os.environ.get("TORCH_COMPILE_CACHE_KEY_TAG", "")
    if mesh["tp"].size() > 1:
        tag = f"{tag} {device} of tp {mesh.get_local_rank('tp')}"
    torch.compiler.config.cache_key_tag = tag


def apply_compile(
    modules: Mapping[str, nn.Module],
    backend: Backend = "inductor",
    options: Mapping[str, Any] | None = None,
) -> None:
    """Compile each module in place, as one graph, when it first runs.

    modules: by name in the model. Those of one class, with the same shapes and settings, share one
    compilation. Under tensor parallelism some whole blocks get wrong gradients without an error:
    see `ModelBuilder.compiled_names`. options: settings of inductor for these modules alone.

    Call it after activation checkpointing, which becomes a part of the graph, and before
    `fully_shard`, whose collectives do not. A module that is no single graph raises CompileError.
    """
    for name, module in modules.items():
        # Shapes are constants of a run. With symbolic shapes one new shape would make slower code
        # for all.
        module.compile(
            backend=backend,
            fullgraph=True,
            dynamic=False,
            options=dict(options) if options else None,
        )
        module._compiled_call_impl = _with_name(name, module._compiled_call_impl)


def compile_loss(loss: LossFunction, backend: Backend = "inductor") -> LossFunction:
    """Return `loss` as one graph, made when it first runs."""
    compiled = torch.compile(loss, backend=backend, fullgraph=True, dynamic=False)
    named: LossFunction = _with_name("the loss", compiled)
    return named


def _with_name(name: str, compiled: Any) -> Any:
    exc = torch._dynamo.exc

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except exc.TorchDynamoException as error:
            what = f"{name} cannot be compiled as one graph"
            if isinstance(error, exc.BackendCompilerFailed):
                what = f"the backend failed to compile {name}"
            # A C++ compiler may write thousands of lines.
            reason = "\n".join(str(error).splitlines()[:_MOST_LINES])
            raise CompileError(f"{what}: {reason}") from error

    return call


class CompileWatch:
    """Logs what is compiled and for how long, and what is compiled *again* after the warm-up.

    The warm-up is the first step and the first validation, which needs graphs without gradients.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._warm: set[str] = set()
        #: In microseconds, as torch's records of compilation.
        self._since = time.time_ns() // 1000

    def start(self) -> None:
        patience = ""
        if self._backend == "inductor":
            patience = (
                f": up to minutes, seconds where {os.environ[CACHE_VARIABLE]} has the code already"
            )
        logger.info(f"the first step compiles with {self._backend}{patience}")

    def after(self, step: int, phase: str) -> None:
        """Warn of recompilations; call it after every step and every validation.

        phase: "training", "validation", or another for steps of another size, which need their own
        graphs.
        """
        entries = []
        for entry in torch._dynamo.utils.get_compilation_metrics():
            if (entry.start_time_us or 0) >= self._since:
                entries.append(entry)
        self._since = time.time_ns() // 1000
        # Entries without a function are backward passes, which are compiled later; their time
        # counts.
        graphs = [entry for entry in entries if entry.co_name is not None]
        seconds = sum(entry.duration_us or 0 for entry in entries) / 1e6
        if phase in self._warm:
            if graphs:
                places = {f"{one.co_filename}:{one.co_firstlineno}" for one in graphs}
                # All ranks compile the same: the others write to their own log only.
                first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
                log = logger.warning if first else logger.info
                log(
                    f"step {step}: torch.compile compiled {', '.join(sorted(places))} again, in "
                    f"{seconds:.1f} s; TORCH_LOGS=recompiles tells why"
                )
            return
        self._warm.add(phase)
        if not graphs and phase not in ("training", "validation"):
            return
        found = ""
        if self._backend == "inductor":
            cached = sum(bool(graph.inductor_fx_local_cache_hit_count) for graph in graphs)
            found = f", {cached} of them found in the cache"
        count = counted(len(graphs), "graphs")
        logger.info(f"torch.compile made {count} for {phase} in {seconds:.1f} s{found}")
