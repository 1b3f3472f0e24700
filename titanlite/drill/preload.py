"""What the fork server imports once for all ranks.

It lives as long as they do and is never garbage, so their collectors need not look through it: a collection takes a
few milliseconds instead of a few hundred.
"""

from __future__ import annotations

import gc

import titanlite.build
import titanlite.drill.strike  # noqa: F401 (imported to be there)

gc.collect()
gc.freeze()
