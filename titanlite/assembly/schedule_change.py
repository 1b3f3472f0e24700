"""How a resumed run's learning rates differ from those of its checkpoint."""

from __future__ import annotations

from contextlib import suppress

from titanlite.checkpoint.loaded import LoadedState
from titanlite.optim.schedule import LearningRate

#: Values that the record of a schedule leaves out.
_PLAIN = {"phases": [], "peaks": [], "in_tokens": False}


def schedule_change(loaded: LoadedState, rate: LearningRate, steps: int) -> str | None:
    """Return how learning rates differ from the checkpoint's, if they do."""
    saved = loaded.train.get("schedule")
    if loaded.origin != "resume" or "lr_scheduler" in loaded.left_out or type(saved) is not dict:
        return None
    now = {**_PLAIN, **rate.record()}
    before = {**_PLAIN, **saved}
    changed = {}
    for name, value in now.items():
        if before.get(name, value) != value:
            changed[name] = before[name]
    first = loaded.step + 1
    coming = range(first, steps + 1)
    rates = ""
    # Another version may have schedules that are not known here.
    with suppress(TypeError, ValueError, KeyError, ArithmeticError):
        earlier = rate.with_record({**now, **changed})
        if all(earlier(step) == rate(step) for step in coming[:: max(len(coming) // 1000, 1)]):
            return None
        rates = f"; learning rate of step {first}: {earlier(first):.3g} -> {rate(first):.3g}"
    words = ", ".join(f"{name} {then} -> {now[name]}" for name, then in changed.items())
    total = changed.get("total_steps")
    keep = "" if total is None else f"; lr_scheduler.total_steps = {total} keeps the old length"
    return f"the learning-rate schedule changed since step {loaded.step}: {words}{rates}{keep}"
