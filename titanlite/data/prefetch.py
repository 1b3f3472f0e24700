"""Batches prepared ahead of the training thread.

One thread cuts the next steps and pins their memory while the model works on this one. Packing
copies numpy arrays, mostly outside Python's lock. So a thread is enough: no loader processes with
their start, copies and signals. Prepared steps that were not handed out are not part of the state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from titanlite.data import EndOfData
from titanlite.data.daemon_threads import Pool
from titanlite.data.loader import Batch
from titanlite.utils import logger

#: Names of the threads begin so, as `threading.enumerate` and a debugger show them.
THREAD = "titanlite-prefetch"

#: Seconds that `close` waits for a thread to finish its item.
_PATIENCE = 10.0
#: The same before another state is loaded. A source that fails for a while, or a file that is read
#: again, takes longer.
_LONG_PATIENCE = 300.0


class StepLoader(Protocol):
    """A source of steps for `Prefetcher`: `TrainLoader`, or one of your own."""

    @property
    def steps_left(self) -> int | None: ...

    def next_step(self) -> list[Batch]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class _Ahead:
    """Calls `make` in a thread, `depth` times ahead of `take`, until it raises.

    The thread ends with `stop`, this object, or the interpreter.
    """

    def __init__(self, make: Callable[[], _Step], depth: int, pin: bool) -> None:
        failed: list[BaseException] = []

        def once() -> _Step:
            if failed:
                raise failed[0]
            try:
                return make()
            except BaseException as error:
                failed.append(error)
                raise

        self._pool = pool = Pool(1, THREAD)
        if pin:
            # A new thread is on GPU 0, and pinning would open a context there for every rank.
            pool.submit(torch.cuda.set_device, torch.cuda.current_device())
        self._submit = lambda: pool.submit(once)
        self.items: deque[Future[_Step]] = deque(self._submit() for _ in range(depth))

    def error(self, number: int) -> BaseException | None:
        """Wait for item `number` of those ahead; return the error in its place or before."""
        return self.items[number].exception()

    def take(self) -> _Step:
        item = self.items[0].result()
        self.items.popleft()
        self.items.append(self._submit())
        return item

    def stop(self, patience: float) -> bool:
        """End the thread; return False if `make` does not return in `patience` seconds."""
        return self._pool.stop(patience)


class _Step(NamedTuple):
    batches: list[Batch]
    state: dict[str, Any]
    steps_left: int | None


class Prefetcher:
    """A loader whose next steps are prepared by a thread.

        with Prefetcher(loader, depth=2, pin=True) as batches:
            micro_batches = batches.next_step()

    Steps, their order, errors and the state are those of `loader`, which must not be used
    meanwhile. After `close` the loader is at the last step handed out, and the prefetcher may be
    used again.

    Args:
        depth: steps kept ready; 0 prepares each when it is needed.
        pin: uses page-locked memory, from which copies to a GPU do not wait.
        reserve: steps that are handed out only when no more can be prepared. `on_failure` gets the
            error before the first of them, when all ranks can be asked to stop and save.
    """

    def __init__(
        self, loader: StepLoader, depth: int = 2, pin: bool = False, reserve: int = 0
    ) -> None:
        self.loader = loader
        self.depth = depth
        self.pin = pin and torch.cuda.is_available()
        self.reserve = reserve if depth else 0
        self.on_failure: Callable[[BaseException], object] = lambda _: None
        self._ahead: _Ahead | None = None
        #: State and steps left after the last step handed out; None while nothing is prepared
        #: ahead.
        self._last: tuple[dict[str, Any], int | None] | None = None

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def steps_left(self) -> int | None:
        if self._last is None:
            return self.loader.steps_left
        return self._last[1]

    def next_step(self) -> list[Batch]:
        """Raises the loader's error of this very step."""
        if self.depth == 0:
            return _step(self.loader, self.pin).batches
        if self._ahead is None:
            self._last = self.loader.state_dict(), self.loader.steps_left
            make = partial(_step, self.loader, self.pin)
            self._ahead = _Ahead(make, self.depth + self.reserve, self.pin)
        try:
            error = self._ahead.error(self.reserve)
            step = self._ahead.take()
        except Exception:
            self.close()
            raise
        if error is not None and not isinstance(error, EndOfData):
            self.on_failure(error)
        self._last = step.state, step.steps_left
        return step.batches

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last step handed out, however many are prepared."""
        if self._last is None:
            return self.loader.state_dict()
        return dict(self._last[0])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state` and drop prepared steps. Raises the errors of the loader's."""
        self.close(_LONG_PATIENCE)
        if self._ahead is not None:
            raise RuntimeError(
                "the loader is still busy with a step: it cannot be set to another state"
            )
        self.loader.load_state_dict(state)

    def close(self, patience: float = _PATIENCE) -> None:
        """End the thread and set the loader to the last step handed out.

        A loader that does not return in `patience` seconds is left alone with a warning.
        """
        if self._ahead is None:
            return
        if not self._ahead.stop(patience):
            logger.warning(
                f"the loader has not returned from a step for {patience:.0f} s: its thread is "
                "left behind"
            )
            return
        assert self._last is not None
        self.loader.load_state_dict(self._last[0])
        self._ahead = self._last = None


def _step(loader: StepLoader, pin: bool) -> _Step:
    batches = loader.next_step()
    if pin:
        batches = [batch.map(torch.Tensor.pin_memory) for batch in batches]
    return _Step(batches, loader.state_dict(), loader.steps_left)
