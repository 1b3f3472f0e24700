"""The processes of `restarts.py`: torchrun, or one of its ranks, with the times of their phases.

    python benchmarks/restart_marks.py launcher FILE [torchrun's arguments]
    python benchmarks/restart_marks.py rank FILE [words of the titanlite command]

Each wraps functions of the program that it then runs, and appends JSON lines to FILE. A rank writes
one line, when its first step is done. This file imports nothing slow.
"""

import time

BEGAN = time.time()

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from typing import Any  # noqa: E402


def nothing() -> None:
    pass


def around(
    owner: Any, name: str, before: Callable[[], Any] = nothing, after: Callable[[], Any] = nothing
) -> None:
    """Replace a function of a module or class by one that also calls `before` and `after`."""
    original = getattr(owner, name)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        before()
        result = original(*arguments, **options)
        after()
        return result

    setattr(owner, name, wrapped)


def append(file: str, line: dict[str, Any]) -> None:
    """Append a line in one write, so that lines of several processes do not mix."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(descriptor, (json.dumps(line) + "\n").encode())
    os.close(descriptor)


def launcher(file: str) -> None:
    """Be `titanlite.torchrun` that notes when it begins to end its ranks, and when they are
    gone.
    """
    from torch.distributed.elastic.multiprocessing.api import PContext

    from titanlite.torchrun import main

    def note(mark: str) -> Callable[[], None]:
        return lambda: append(file, {"launcher": mark, "time": time.time()})

    around(PContext, "close", note("noticed"), note("ended"))
    main()


class RankMarks:
    """The times of one rank, by name; only the first call of a function counts."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.times = {"code": BEGAN}

    def note(self, mark: str) -> Callable[[], None]:
        """Return a function that notes the time."""

        def now() -> None:
            self.times.setdefault(mark, time.time())

        return now

    def watch(self) -> None:
        """Wrap what is there before torch is imported."""
        from titanlite import main

        around(main, "check_config", after=self.note("checked"))
        around(main._Rank, "load_code", before=self.imported)
        around(main._Rank, "prepare", self.note("compiler"), self.note("prepared"))
        opened = main._Rank.opened

        @contextmanager
        def noted(rank: Any) -> Iterator[Any]:
            with opened(rank) as world:
                self.note("grouped")()
                yield world

        main._Rank.opened = noted  # type: ignore[method-assign, assignment]

    def imported(self) -> None:
        """Wrap what has come with torch."""
        self.note("imported")()
        from titanlite import trainer
        from titanlite.dist import run_store

        around(run_store, "register", after=self.note("connected"))
        around(trainer.Trainer, "train", before=self.built)
        around(trainer.Trainer, "fetch", after=self.note("fetched"))
        around(trainer.Trainer, "check_step", after=self.stepped)

    def built(self) -> None:
        """Wrap what a run with checkpoints has imported."""
        self.note("built")()
        from titanlite.checkpoint import manager

        around(manager.Checkpointer, "load", after=self.note("loaded"))

    def stepped(self) -> None:
        """Write all times, after the first step."""
        if "stepped" in self.times:
            return
        self.note("stepped")()
        from titanlite.runs.provenance import launched

        began = launched()
        if began is None:
            raise SystemExit("restarts.py needs the /proc of Linux")
        line = {
            "attempt": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
            "rank": int(os.environ["RANK"]),
            "pid": os.getpid(),
            "times": {"launched": began, **self.times},
        }
        append(self.file, line)


def main() -> None:
    role, file = sys.argv[1:3]
    # The folder of this file has modules with common names.
    del sys.path[0]
    sys.argv = ["titanlite", *sys.argv[3:]]
    if role == "launcher":
        launcher(file)
    RankMarks(file).watch()
    from titanlite.cli.main import main as titanlite

    sys.exit(titanlite())


if __name__ == "__main__":
    main()
