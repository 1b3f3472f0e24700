"""Bytes that torch's allocator of the CPU hands out, as its profiler records each call: below every
operator.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity


def peak_bytes(work: Callable[[], object]) -> int:
    """Run `work`, and return the most bytes that were allocated at one moment beyond those from
    before.
    """
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    results = profile.profiler.kineto_results  # type: ignore[union-attr]
    records = [event for event in results.events() if event.name() == "[memory]"]
    held = most = 0
    for record in sorted(records, key=lambda event: event.start_ns()):
        held += record.nbytes()
        most = max(most, held)
    return most
