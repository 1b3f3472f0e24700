"""Batches prepared ahead of the training thread.

One daemon thread cuts the next steps and pins their memory while the model works on this one. Packing copies numpy
arrays, mostly outside Python's lock. So a thread is enough: no loader processes with their start, copies and signals.
Prepared steps that were not handed out are not part of the state.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from titanlite.data import EndOfData
from titanlite.data.loader import Batch
from titanlite.utils import logger

#: Name of the threads, as `threading.enumerate` and a debugger show it.
THREAD = "titanlite-prefetch"

#: Seconds that `close` waits for a thread to finish its item.
_PATIENCE = 10.0
#: The same before another state is loaded: a source that fails for a while, or a file that is read again, takes longer.
_LONG_PATIENCE = 300.0

_T = TypeVar("_T")


class StepLoader(Protocol):
    """A source of steps for `Prefetcher`: `TrainLoader`, or one of your own."""

    @property
    def steps_left(self) -> int | None: ...

    def next_step(self) -> list[Batch]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class PassLoader(Protocol):
    """A source of passes for `ValidationPrefetcher`: `ValidationLoader`, or one of your own."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Batch]: ...


class _Producer(Generic[_T]):
    """A daemon thread that keeps up to `depth` results of `make` ready, until an error or `stop`."""

    def __init__(self, make: Callable[[], _T], depth: int, device: int | None) -> None:
        #: Results, the last one perhaps an error.
        self.items: deque[tuple[_T | None, BaseException | None]] = deque()
        self._free, self._closed, self._news = threading.Semaphore(depth), threading.Event(), threading.Condition()
        # The thread must not hold `self`.
        items, free, closed, news = self.items, self._free, self._closed, self._news

        def put(item: _T | None, error: BaseException | None) -> None:
            with news:
                items.append((item, error))
                news.notify()

        def fill() -> None:
            try:
                if device is not None:
                    # A new thread is on GPU 0, and pinning would open a context there for every rank.
                    torch.cuda.set_device(device)
                while free.acquire() and not closed.is_set():
                    put(make(), None)
            except BaseException as error:
                put(None, error)

        def stop() -> None:
            closed.set()
            free.release()
            thread.join(_PATIENCE)

        thread = self._thread = threading.Thread(target=fill, name=THREAD, daemon=True)
        thread.start()
        # Runs when the owner is collected, and before the interpreter ends: a thread that is still in a library then
        # would abort the process, and a thread that is no daemon would keep it from ending.
        self._finalizer = weakref.finalize(self, stop)

    def take(self, reserve: int = 0) -> _T:
        """Wait for the next item, and until `reserve` more are ready or none will come. Raises the error of `make` in
        its place."""
        with self._news:
            while not self._news.wait_for(lambda: len(self.items) > reserve or self.error is not None, timeout=1.0):
                if self._closed.is_set():
                    raise RuntimeError("the loader did not return when its thread was ended: it cannot be used again")
                if not self._thread.is_alive():
                    raise RuntimeError("the thread that prepares batches is gone: was the process forked?")
            if self._closed.is_set():
                raise RuntimeError("the loader did not return when its thread was ended: it cannot be used again")
            item, error = self.items.popleft()
        if error is not None:
            raise error
        self._free.release()
        return item  # type: ignore[return-value]

    @property
    def error(self) -> BaseException | None:
        """The error after which nothing comes any more."""
        return self.items[-1][1] if self.items else None

    def stop(self, patience: float = _PATIENCE) -> bool:
        """End the thread; return False if it does not end in `patience` seconds because `make` does not return."""
        self._finalizer()
        self._thread.join(max(patience - _PATIENCE, 0.0))
        return not self._thread.is_alive()


class _Step(NamedTuple):
    """A step's micro-batches, and the loader's state and steps left after it."""

    batches: list[Batch]
    state: dict[str, Any]
    steps_left: int | None


class Prefetcher:
    """A loader whose next steps are prepared by a thread.

        with Prefetcher(loader, depth=2, pin=True) as batches:
            micro_batches = batches.next_step()

    Steps, their order, errors and the state are those of `loader`, which must not be used meanwhile. After `close` the
    loader is at the last step handed out, and the prefetcher may be used again. The thread starts with the first step
    and ends on `close`, after an error, when the prefetcher is collected, and with the interpreter.

    Args:
        loader: the source of the steps.
        depth: steps kept ready; 0: no thread, each step is prepared when it is needed.
        pin: batches in page-locked memory, from which copies to a GPU do not wait. Without CUDA it has no effect.
        reserve: steps that are handed out only when no more can be prepared. `on_failure` is called before the first of
            them, with the error that comes after them: time to ask all ranks to stop, and to save.
    """

    def __init__(self, loader: StepLoader, depth: int = 2, pin: bool = False, reserve: int = 0) -> None:
        self.loader, self.depth, self.pin = loader, depth, pin and torch.cuda.is_available()
        self.reserve = reserve if depth else 0
        self.on_failure: Callable[[BaseException], object] = _ignore
        self._producer: _Producer[_Step] | None = None
        #: State and steps left after the last step handed out; None while nothing is prepared ahead.
        self._last: tuple[dict[str, Any], int | None] | None = None

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def steps_left(self) -> int | None:
        """Steps until EndOfData, counted from the last one handed out; None without an end."""
        return self.loader.steps_left if self._last is None else self._last[1]

    def next_step(self) -> list[Batch]:
        """Return the micro-batches of the next step, on the CPU. Raises the loader's error of this very step."""
        if self.depth == 0:
            return _pinned(self.loader.next_step(), self.pin)
        if self._producer is None:
            self._last = self.loader.state_dict(), self.loader.steps_left
            depth = self.depth + self.reserve
            self._producer = _Producer(_steps(self.loader, self.pin), depth, _current_device(self.pin))
        try:
            step = self._producer.take(self.reserve)
            error = self._producer.error
            if error is not None and not isinstance(error, EndOfData):
                self.on_failure(error)
        except Exception:
            self.close()
            raise
        self._last = step.state, step.steps_left
        return step.batches

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the last step handed out, however many are prepared."""
        return self.loader.state_dict() if self._last is None else dict(self._last[0])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state` and drop prepared steps. Raises the errors of `loader.load_state_dict`."""
        self.close(_LONG_PATIENCE)
        if self._producer is not None:
            raise RuntimeError("the loader is still busy with a step: it cannot be set to another state")
        self.loader.load_state_dict(state)

    def close(self, patience: float = _PATIENCE) -> None:
        """End the thread and set the loader to the last step handed out.

        A loader that does not return from a step within seconds is left alone, with a warning.
        """
        if self._producer is None:
            return
        if not self._producer.stop(patience):
            logger.warning(f"the loader has not returned from a step for {patience:.0f} s: its thread is left behind")
            return
        assert self._last is not None
        self.loader.load_state_dict(self._last[0])
        self._producer = self._last = None


class ValidationPrefetcher:
    """The passes of a validation loader, their batches prepared by a thread.

    Args:
        loader: the batches of a pass, the same every time.
        depth: batches kept ready; 0: no thread.
        pin: batches in page-locked memory, see `Prefetcher`.
        persistent: the thread stays between passes, with the first batches of the next one ready. Otherwise it ends
            with its pass.

    Raises ValueError for a pass without batches.
    """

    def __init__(self, loader: PassLoader, depth: int = 2, pin: bool = False, persistent: bool = False) -> None:
        if len(loader) == 0:  # a persistent thread would look for the first batch forever
            raise ValueError("loader: a pass has no batches; give it text for at least one, or disable validation")
        self.loader, self.depth, self.pin = loader, depth, pin and torch.cuda.is_available()
        self.persistent = persistent
        self._producer: _Producer[Batch] | None = None

    def __len__(self) -> int:
        """Batches per pass, the same on all ranks."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        if self.depth == 0:
            for batch in self.loader:
                yield _pinned([batch], self.pin)[0]
            return
        producer, self._producer = self._producer, None
        if producer is None:
            make = _passes(self.loader, self.pin, self.persistent)
            producer = _Producer(make, self.depth, _current_device(self.pin))
        whole = False
        try:
            for _ in range(len(self.loader)):
                yield producer.take()
            whole = True
        finally:
            # A pass that was broken off leaves batches of its middle behind.
            if whole and self.persistent and self._producer is None:
                self._producer = producer
            else:
                producer.stop()

    def close(self) -> None:
        """End the thread, if it stays between passes."""
        if self._producer is not None:
            self._producer.stop()
            self._producer = None


def _ignore(_: BaseException) -> None:
    """Leave it to the error itself."""


# Closures over the loader alone: a thread that held its owner would keep it from being collected.


def _steps(loader: StepLoader, pin: bool) -> Callable[[], _Step]:
    return lambda: _Step(_pinned(loader.next_step(), pin), loader.state_dict(), loader.steps_left)


def _passes(loader: PassLoader, pin: bool, endless: bool) -> Callable[[], Batch]:
    batches = itertools.chain.from_iterable(itertools.repeat(loader)) if endless else iter(loader)
    return lambda: _pinned([next(batches)], pin)[0]


def _pinned(batches: list[Batch], pin: bool) -> list[Batch]:
    return [batch.map(torch.Tensor.pin_memory) for batch in batches] if pin else batches


def _current_device(pin: bool) -> int | None:
    return torch.cuda.current_device() if pin else None
