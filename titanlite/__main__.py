"""`python -m titanlite`: the `titanlite` command, also where it is not on PATH."""

import sys

from titanlite.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
