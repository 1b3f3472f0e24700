from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pool import Pools


@pytest.fixture(scope="session")
def pool() -> Iterator[Pools]:
    """`pool(n)`: n real gloo ranks. See tests/pool.py."""
    pools = Pools()
    yield pools
    pools.close()
