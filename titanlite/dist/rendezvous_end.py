"""torchrun on several machines: rounds of its rendezvous, and its end. The one that serves the
rendezvous leaves last.

torchrun closes its rendezvous at the end. Where the store of another machine is gone by then, torch
prints C++ stacks, also after a good end.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from titanlite.exit_codes import ROUND

#: Seconds for which the machine that serves the store waits for the others. After a good end all of
#: them leave now.
GOOD_SECONDS = 60.0
#: After a failure another machine may be lost, and a new start must not meet this store.
BAD_SECONDS = 3.0
_POLL_SECONDS = 0.05
_KEY = "titanlite/left"
_RENDEZVOUS = "torch.distributed.elastic.rendezvous"


class Farewell:
    """Keeps the store of torchrun's rendezvous until all machines have left it.

    Create it before torchrun starts, and call `leave` when torchrun has ended.
    """

    def __init__(self) -> None:
        #: Machines of the run; 0: the number may change, or torchrun has not begun.
        self._machines = 0
        self._serves = False
        #: Whether torchrun closes the rendezvous after failures, too: only that of c10d.
        self._is_closed = False
        self._store: Any = None
        #: Whether the machines have met.
        self.has_met = False
        #: Whether another machine had ended the rendezvous: of an earlier start, unless `has_met`.
        self.was_closed = False
        self._watch_rendezvous()
        self._watch_stores()

    def _watch_rendezvous(self) -> None:
        registry: Any = import_module(f"{_RENDEZVOUS}.registry")
        make_handler = registry.get_rendezvous_handler

        def noted_handler(parameters: Any) -> Any:
            if parameters.min_nodes == parameters.max_nodes:
                self._machines = parameters.max_nodes
            handler = make_handler(parameters)
            handler.next_rendezvous = self._noted_meet(handler)
            return handler

        registry.get_rendezvous_handler = noted_handler

    def _noted_meet(self, handler: Any) -> Callable[[], Any]:
        """Return `next_rendezvous` that also tells the ranks the round of c10d's rendezvous.

        Restarts do not tell it: a machine that follows another's restart counts none.
        """
        closed: Any = import_module(f"{_RENDEZVOUS}.api")
        meet = handler.next_rendezvous
        os.environ.pop(ROUND, None)

        def noted_meet() -> Any:
            try:
                found = meet()
            except (closed.RendezvousClosedError, closed.RendezvousGracefulExitError):
                self.was_closed = True
                raise
            states = getattr(handler, "_state_holder", None)
            if states is not None:
                os.environ[ROUND] = str(states.state.round)
            self.has_met = True
            return found

        return noted_meet

    def _watch_stores(self) -> None:
        """A torch that opens the store in another way leaves as it likes."""
        for name in ("c10d_rendezvous_backend", "static_tcp_rendezvous"):
            module: Any = import_module(f"{_RENDEZVOUS}.{name}")
            if hasattr(module, "TCPStore"):
                module.TCPStore = self._noting(module.TCPStore, name == "c10d_rendezvous_backend")

    def _noting(self, make_store: Callable[..., Any], is_closed: bool) -> Callable[..., Any]:
        parameters = ("host_name", "port", "world_size", "is_master")

        def noted_store(*arguments: Any, **options: Any) -> Any:
            given = dict(zip(parameters, arguments, strict=False)) | options
            self._store = make_store(*arguments, **options)
            self._serves = bool(given.get("is_master"))
            self._is_closed = is_closed
            return self._store

        return noted_store

    def leave(self, good: bool) -> None:
        """Tell the machine that serves the store that this one does not need it any more.

        That machine waits for the others, `GOOD_SECONDS` at most if torchrun ended without an
        error, else `BAD_SECONDS`.
        """
        if self._machines < 2 or self._store is None:
            return
        if not good and not self._is_closed:
            return
        limit = GOOD_SECONDS if good else BAD_SECONDS
        # In a thread, because an operation of a store that cannot be reached may take minutes.
        thread = threading.Thread(
            target=self._say_goodbye, args=(limit,), name="farewell", daemon=True
        )
        thread.start()
        thread.join(limit)

    def _say_goodbye(self, limit: float) -> None:
        end = time.monotonic() + limit
        try:
            left = self._store.add(_KEY, 1)
            while self._serves and left < self._machines and time.monotonic() < end:
                time.sleep(_POLL_SECONDS)
                left = self._store.add(_KEY, 0)
        except RuntimeError:
            # torch's DistError: the other machine is gone, and there is nothing to wait for.
            return
