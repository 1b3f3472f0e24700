"""`train.py` whose copies of local saves go over their own link, named by the variable LINK.

Only the first group of the local saves uses it: one that is made after a failure takes the same way
as all else. The file `copying` of the run folder has the steps whose copies have begun.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

from tests.support import logged
from titanlite.checkpoint.async_save import AsyncSave
from titanlite.contrib.resilience import copies, manager


def main() -> NoReturn:
    make = manager.async_save
    exchange = copies.Copies.exchange

    def over_link(*arguments: Any) -> AsyncSave | None:
        usual = os.environ["GLOO_SOCKET_IFNAME"]
        try:
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["LINK"]
            return make(*arguments)
        finally:
            os.environ["GLOO_SOCKET_IFNAME"] = usual

    def noting(self: copies.Copies, part: Path, written: Any, step: int, *more: Any) -> list[Path]:
        with open(f"{os.environ['RUN']}/copying", "a") as file:
            file.write(f"{step}\n")
        return exchange(self, part, written, step, *more)

    patience = timedelta(seconds=float(os.environ["PATIENCE"]))
    with (
        patch.object(manager, "async_save", over_link),
        patch.object(copies.Copies, "exchange", noting),
        patch.object(copies, "PATIENCE", patience),
        patch.object(copies, "BLOCK", 1 << 18),
    ):
        logged.main()


if __name__ == "__main__":
    main()
