"""Batches prepared ahead of the training thread.

One daemon thread cuts the next steps and pins their memory while the model works on this one. Packing is copying of
numpy arrays, outside Python's lock for the most part: a thread does it, without the start, the copies between processes
and the signals of loader processes. What it has prepared but not handed out is not part of the state.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from titanlite.data.loader import Batch

logger = logging.getLogger("titanlite")

#: Name of the threads, as `threading.enumerate` and a debugger show it.
THREAD = "titanlite-prefetch"

#: Seconds that `close` waits for a thread to finish the item that it is at.
_PATIENCE = 10.0

_T = TypeVar("_T")


class StepLoader(Protocol):
    """What a `Prefetcher` reads from: `TrainLoader`, or one of your own."""

    @property
    def steps_left(self) -> int | None: ...

    def next_step(self) -> list[Batch]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class PassLoader(Protocol):
    """What a `ValidationPrefetcher` reads from: `ValidationLoader`, or one of your own."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Batch]: ...


class _Shelf(Generic[_T]):
    """Where the thread puts items. Apart from its owner, which can so be collected while the thread runs."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.changed = threading.Condition()
        self.items: deque[_T | BaseException] = deque()
        self.closed = False


def _fill(shelf: _Shelf[_T], make: Callable[[], _T], device: int | None) -> None:
    """The thread: items until `shelf` is closed, or up to an error, which takes its place among them."""
    try:
        if device is not None:
            # A new thread is on GPU 0, and pinning would open a context there for every rank.
            torch.cuda.set_device(device)
        while True:
            with shelf.changed:
                shelf.changed.wait_for(lambda: shelf.closed or len(shelf.items) < shelf.depth)
                if shelf.closed:
                    return
            item = make()
            with shelf.changed:
                shelf.items.append(item)
                shelf.changed.notify_all()
    except BaseException as error:
        with shelf.changed:
            shelf.items.append(error)
            shelf.changed.notify_all()


class _Ahead(Generic[_T]):
    """Up to `depth` results of `make`, called again and again by a thread of its own until an error or `stop`."""

    def __init__(self, make: Callable[[], _T], depth: int, device: int | None) -> None:
        self._shelf: _Shelf[_T] = _Shelf(depth)
        self._thread = threading.Thread(target=_fill, args=(self._shelf, make, device), name=THREAD, daemon=True)
        self._thread.start()
        # Runs when the owner is forgotten, and before the interpreter ends: a thread that is still in a library then
        # would abort the process, and one that is no daemon would keep it from ending.
        self._finalizer = weakref.finalize(self, _stop, self._shelf, self._thread)

    def take(self) -> _T:
        """The next item; waits for it. Raises what `make` raised in its place, and then again and again."""
        shelf = self._shelf
        with shelf.changed:
            if shelf.closed:
                raise RuntimeError("the loader did not come back when it was to be ended: it cannot be used again")
            while not shelf.items:
                if not self._thread.is_alive():
                    raise RuntimeError("the thread that prepares batches is gone: was the process forked?")
                shelf.changed.wait(timeout=1.0)
            item = shelf.items[0]
            if isinstance(item, BaseException):
                raise item
            shelf.items.popleft()
            shelf.changed.notify_all()
        return item

    def stop(self) -> bool:
        """End the thread; False if it does not end because `make` does not return."""
        self._finalizer()
        return not self._thread.is_alive()


def _stop(shelf: _Shelf[Any], thread: threading.Thread) -> None:
    with shelf.changed:
        shelf.closed = True
        shelf.changed.notify_all()
    thread.join(_PATIENCE)


class _Step(NamedTuple):
    """A step's micro-batches and what the loader says after it."""

    batches: list[Batch]
    state: dict[str, Any]
    steps_left: int | None


class Prefetcher:
    """A loader whose next steps are prepared by a thread.

        with Prefetcher(loader, depth=2, pin=True) as batches:
            micro_batches = batches.next_step()

    Steps, their order, errors and the state are those of `loader`, which must not be used meanwhile; after `close` it
    stands where the last step handed out left it, and the prefetcher may be used again. The thread starts with the
    first step and ends on `close`, after an error, when the prefetcher is forgotten, and with the interpreter.

    Args:
        loader: where the steps come from.
        depth: steps kept ready; 0: no thread, each step is prepared when it is asked for.
        pin: batches in page-locked memory, from which copies to a GPU do not wait. Without CUDA it has no effect.
    """

    def __init__(self, loader: StepLoader, depth: int = 2, pin: bool = False) -> None:
        _check_depth(depth)
        self.loader = loader
        self.depth = depth
        self.pin = pin and torch.cuda.is_available()
        self._ahead: _Ahead[_Step] | None = None
        #: What was handed out last; None while nothing is prepared ahead of it.
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
        """The micro-batches of the next step, on the CPU. Raises what `loader.next_step` raises for this very step."""
        if self.depth == 0:
            return _pinned(self.loader.next_step(), self.pin)
        if self._ahead is None:
            self._last = self.loader.state_dict(), self.loader.steps_left
            self._ahead = _Ahead(_steps(self.loader, self.pin), self.depth, _current_device(self.pin))
        try:
            step = self._ahead.take()
        except Exception:
            self.close()
            raise
        self._last = step.state, step.steps_left
        return step.batches

    def state_dict(self) -> dict[str, Any]:
        """The loader's state after the last step handed out, however many are prepared."""
        return self.loader.state_dict() if self._last is None else dict(self._last[0])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`; what was prepared is thrown away. Raises what `loader.load_state_dict` raises."""
        self.close()
        if self._ahead is not None:
            raise RuntimeError("the loader is still busy with a step: it cannot be set to another state")
        self.loader.load_state_dict(state)

    def close(self) -> None:
        """End the thread and set the loader to where the last step handed out left it.

        A loader that does not return from a step within seconds is left to itself, with a warning.
        """
        if self._ahead is None:
            return
        if not self._ahead.stop():
            logger.warning(f"the loader has not returned from a step for {_PATIENCE:.0f} s: its thread is left behind")
            return
        assert self._last is not None
        self.loader.load_state_dict(self._last[0])
        self._ahead = self._last = None


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
        _check_depth(depth)
        if len(loader) == 0:  # a thread that stays would look for the first batch forever
            raise ValueError("loader: a pass has no batches; give it text for one at least, or leave validation out")
        self.loader = loader
        self.depth = depth
        self.pin = pin and torch.cuda.is_available()
        self.persistent = persistent
        self._ahead: _Ahead[Batch] | None = None

    def __len__(self) -> int:
        """Batches per pass, the same on all ranks."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        if self.depth == 0:
            for batch in self.loader:
                yield _pinned([batch], self.pin)[0]
            return
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            ahead = _Ahead(_passes(self.loader, self.pin, self.persistent), self.depth, _current_device(self.pin))
        whole = False
        try:
            for _ in range(len(self.loader)):
                yield ahead.take()
            whole = True
        finally:
            # A pass that was broken off leaves batches of its middle behind.
            if whole and self.persistent and self._ahead is None:
                self._ahead = ahead
            else:
                ahead.stop()

    def close(self) -> None:
        """End the thread, if it stays between passes."""
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead = None


# Closures over the loader alone: a thread that held its owner would keep it from being collected.


def _steps(loader: StepLoader, pin: bool) -> Callable[[], _Step]:
    return lambda: _Step(_pinned(loader.next_step(), pin), loader.state_dict(), loader.steps_left)


def _passes(loader: PassLoader, pin: bool, endless: bool) -> Callable[[], Batch]:
    batches = itertools.chain.from_iterable(itertools.repeat(loader)) if endless else iter(loader)
    return lambda: _pinned([next(batches)], pin)[0]


def _pinned(batches: list[Batch], pin: bool) -> list[Batch]:
    return [Batch(b.tokens.pin_memory(), b.labels.pin_memory()) for b in batches] if pin else batches


def _current_device(pin: bool) -> int | None:
    return torch.cuda.current_device() if pin else None


def _check_depth(depth: int) -> None:
    if depth < 0:
        raise ValueError(f"depth: {depth} is not a number of steps; 0 prepares none ahead")
