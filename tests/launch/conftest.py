"""Two hosts for the tests of jobs on several machines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.launch.namespaces import Host, hosts


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Host]]:
    with hosts(2) as both:
        yield both
