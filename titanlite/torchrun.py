"""torchrun that ends with its workers' exit code: python -m titanlite.torchrun [torchrun's arguments]

torchrun itself ends with 1 whatever the workers returned. They leave their codes in a file (`titanlite.app`).
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NoReturn

from torch.distributed.run import main as torchrun

from titanlite import exit_codes

VARIABLE = "TITANLITE_EXIT_CODES"


def worst(text: str) -> int | None:
    """One code of many: the lines are "restart code", and those of the last restart count. None where nothing is told.

    A rank that lost its peers tells less than one that has a reason of its own.
    """
    lines = [(int(restart), int(code)) for restart, code in (line.split() for line in text.splitlines())]
    last = max((restart for restart, _ in lines), default=0)
    codes = {code for restart, code in lines if restart == last and code != exit_codes.DONE}
    reasons = codes - {exit_codes.LOST_PEER, exit_codes.ERROR}
    return min(reasons or codes, default=None)


def main() -> NoReturn:
    """Run torchrun in this process. Never returns."""
    with tempfile.TemporaryDirectory(prefix="titanlite-codes-") as folder:
        told = Path(folder) / "codes"
        os.environ[VARIABLE] = str(told)
        failure: str | None = None
        code = exit_codes.DONE
        try:
            torchrun()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else exit_codes.ERROR * bool(end.code)
        except BaseException:  # its own for failed workers and for signals are of several kinds
            code, failure = exit_codes.ERROR, traceback.format_exc()
        if code and told.exists():
            code = worst(told.read_text()) or code
    # What the workers have explained needs no summary of the launcher's; a killed one explains nothing.
    if failure is not None and code in (exit_codes.ERROR, exit_codes.LOST_PEER):
        print(failure, file=sys.stderr, end="")
    sys.exit(code)


if __name__ == "__main__":
    main()
