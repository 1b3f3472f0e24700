"""The step line. Other tools read it: fields keep their order and form, new ones go to the end."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from titanlite.utils import human_count, human_time


@dataclass(frozen=True)
class StepFigures:
    """What a step line shows."""

    step: int
    #: Mean loss in nats per valid token over all ranks.
    loss: float
    #: Gradient norm before clipping.
    norm: float
    lr: float
    memory_gib: float
    #: Percent of the device's memory; None where that is unknown.
    memory_percent: float | None
    #: Tokens per second and device.
    tps: float
    #: Model FLOPs utilisation in percent; None for a device whose peak is unknown.
    mfu: float | None
    #: Tokens trained on since the run began, over all ranks.
    tokens_seen: int
    seconds_left: float | None
    #: Sequences per second over all devices.
    samples_per_second: float


def titan_line(f: StepFigures) -> str:
    """`step: 1990  loss:  3.4370  memory: 68.57GiB(86.69%)  tps: 6,785  mfu: 39.73%`, then our own fields."""
    percent = "" if f.memory_percent is None else f"({f.memory_percent:.2f}%)"
    fields = [
        f"step: {f.step:2}",
        f"loss: {f.loss:7.4f}",
        f"memory: {f.memory_gib:5.2f}GiB{percent}",
        f"tps: {round(f.tps):,}",
    ]
    if f.mfu is not None:
        fields.append(f"mfu: {f.mfu:.2f}%")
    fields += [f"grad_norm: {f.norm:.4f}", f"lr: {f.lr:.2e}", f"tokens: {human_count(f.tokens_seen)}"]
    if f.seconds_left is not None:
        fields.append(f"left: {human_time(f.seconds_left)}")
    return "  ".join(fields)


def fsdp_line(f: StepFigures, now: datetime) -> str:
    """The line of the AWS FSDP samples, which HyperPod's monitors look for; whole, with its own time stamp.

    `train.py:103` is what those samples print; parsers of such logs expect a file and a line there.
    """
    return (
        f"{now:%Y-%m-%d %H:%M:%S} I [train.py:103] Batch {f.step} Loss: {f.loss:.5f}, "
        f"Speed: {f.samples_per_second:.2f} samples/sec, lr: {f.lr:.6f}"
    )
