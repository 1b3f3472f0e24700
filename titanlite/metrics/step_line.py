"""The line of the log for a step, from its figures."""

from __future__ import annotations

from collections.abc import Mapping

from titanlite.utils import human_count, human_time

#: Percent of waiting for data above which the step line shows it.
SLOW_DATA = 5.0
#: A row of metrics.jsonl with training figures. Beside them `samples_per_second` (over all
#: devices), `seconds_left` (if known), and `waits_percent`. That is the share of the time in which
#: the slowest rank waited for data. `plan_percent` is `tps` over that of a kept plan.
Figures = Mapping[str, float]


def shown_memory(f: Figures) -> tuple[float, float]:
    """Return GiB and percent, with an allocator of what it has reserved."""
    kind = "reserved" if "reserved_gib" in f else "memory"
    return f[f"{kind}_gib"], f[f"{kind}_percent"]


def titan_line(f: Figures) -> str:
    """Return `step: 1990  loss:  3.4370  memory: 68.57GiB(86.69%)  tps: 6,785  mfu: 39.73%`, then
    our own fields.

    Other tools read this line: fields keep their order and form, new ones go to the end.
    """
    fields = [
        f"step: {f['step']:2}",
        f"loss: {f['loss']:7.4f}",
        "memory: {:5.2f}GiB({:.2f}%)".format(*shown_memory(f)),
        f"tps: {round(f['tps']):,}",
    ]
    if "mfu" in f:
        fields.append(f"mfu: {f['mfu']:.2f}%")
    fields += [
        f"grad_norm: {f['grad_norm']:.4f}",
        f"lr: {f['lr']:.2e}",
        f"tokens: {human_count(f['tokens_seen'])}",
    ]
    if "seconds_left" in f:
        fields.append(f"left: {human_time(f['seconds_left'])}")
    if f["waits_percent"] > SLOW_DATA:
        fields.append(f"data: {f['waits_percent']:.0f}%")
    if "plan_percent" in f:
        fields.append(f"plan: {f['plan_percent']:.0f}%")
    return "  ".join(fields)
