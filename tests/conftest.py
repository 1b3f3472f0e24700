from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.golden_run import GoldenRun, golden_run
from tests.support.pool import Pools
from tests.support.preload import preload_more

if TYPE_CHECKING:  # torch is slow to import, and many tests do without
    from tests.support.compare import References


# A shell ignores SIGINT for jobs in its background, and programs that tests start would inherit
# that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Many ranks share few cores. One that wakes up lets the others go on: steps take an eighth less.
if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

preload_more()


def pytest_configure(config: pytest.Config) -> None:
    """Leave out the null GPU's tests, and with a choice like "not slow" those of `soak`, unless
    they are asked for.
    """
    chosen = config.option.markexpr
    left_out = ["not soak"] * (bool(chosen) and "soak" not in chosen) + ["not nullgpu"] * (
        "nullgpu" not in chosen
    )
    config.option.markexpr = " and ".join(filter(None, [chosen and f"({chosen})", *left_out]))
    gc.disable()  # until all is imported


#: What titanlite, or torch itself, says of a torch that is too old for something.
_TOO_OLD = re.compile(
    r"[^\n:]* needs torch [\d.]+ or later|_scaled_mm only supports per-tensor scaling for CPU"
)
_IS_NEW = tuple(map(int, version("torch").split(".")[:2])) >= (2, 13)


def pytest_report_teststatus(report: Any) -> tuple[str, str, str] | None:
    """Name what fails at once, and not at the end alone."""
    if not report.failed:
        return None
    kind = "failed" if report.when == "call" else "error"
    return kind, f"{kind[0].upper()}\n{report.nodeid}\n", kind.upper()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Any:
    """With an older torch, skip a test of something that needs a newer one."""
    try:
        return (yield)
    except Exception as error:
        reason = _TOO_OLD.search(str(error))
        if _IS_NEW or reason is None:
            raise
        pytest.skip(reason[0].strip())


@pytest.fixture(autouse=True)
def _keep_logger() -> Iterator[None]:
    """Put the logger back: a command that runs in a test's process lets it write to the standard
    error of that test, which is closed afterwards.
    """
    logger = logging.getLogger("titanlite")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], level, logger.propagate = before
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def _forget_stores() -> Iterator[None]:
    """Let a test meet no store of an earlier one: fsspec keeps file systems by their arguments, and
    the addresses of their servers come from the environment.
    """
    yield
    spec = sys.modules.get("fsspec.spec")
    if spec is None:
        return
    kinds = [spec.AbstractFileSystem]
    for kind in kinds:
        kinds += kind.__subclasses__()
        if not kind.__module__.startswith("fsspec."):
            kind.clear_instance_cache()


def pytest_collection_finish() -> None:
    """A collection of garbage would look through all that is imported, which takes half a second
    each time.
    """
    gc.enable()
    gc.freeze()


def _mark_slow(items: list[pytest.Item]) -> None:
    """Do what `slow_after` says, which counts the cases that are not slow anyway."""
    cases: Counter[str] = Counter()
    for item in items:
        after = item.get_closest_marker("slow_after")
        if after is None or item.get_closest_marker("slow") or item.get_closest_marker("soak"):
            continue
        test = item.nodeid.partition("[")[0]
        cases[test] += 1
        if cases[test] > after.args[0]:
            item.add_marker("slow")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long go first: the processes that share the files end together then.

    Tests that use ranks compute. Of the others, slow ones often wait: for time limits, or for
    programs that start. Files of both kinds take turns, so that some wait while others compute.
    The rest goes backwards: tests of the commands start programs, those of the config do not.
    """
    ranked = {item.path for item in items if "pool" in getattr(item, "fixturenames", ())}
    _mark_slow(items)
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    files = sorted({item.path: None for item in items}, key=lambda path: -slow[path])
    rest = {path: number for number, path in enumerate(reversed(files))}
    computing = [path for path in files if path in ranked]
    waiting = [path for path in files if path not in ranked and slow[path]]
    place = {
        path: number / len(kind)
        for kind in (waiting, computing)
        for number, path in enumerate(kind)
    }
    items.sort(key=lambda item: place.get(item.path, 1.0 + rest[item.path]))


#: No fixture, so that `_free_memory` can use it: with `pool` every file would count as computing.
_POOLS = Pools()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pools]:
    """`pool(n)`: n real gloo ranks. See tests/support/pool.py."""
    yield _POOLS
    _POOLS.close()


@pytest.fixture(scope="module", autouse=True)
def _free_memory() -> Iterator[None]:
    """End many ranks with their file: they keep memory that other processes of pytest need."""
    yield
    _POOLS.close(least=4)


@pytest.fixture(scope="session")
def references(pool: Pools) -> References:
    """Plain single-process runs, and the comparison with them."""
    from tests.support.compare import References

    return References(pool)


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> GoldenRun:
    """A finished run to read; `golden.copy(folder)` may be changed."""
    base = tmp_path_factory.getbasetemp()
    return golden_run(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base)
