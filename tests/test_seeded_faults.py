from __future__ import annotations

from tests.seeded_faults import FAULTS, problems_of


def test_every_fault_can_be_seeded():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 40
    assert [problem for fault in FAULTS for problem in problems_of(fault)] == []
