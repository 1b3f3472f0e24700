"""Lines as the AWS FSDP samples print them, which HyperPod's monitors look for."""

from __future__ import annotations

import contextlib
from datetime import datetime

from titanlite.metrics.step_line import Figures


def aws_fsdp_step(f: Figures) -> str:
    """Return the text of the AWS FSDP samples for a step."""
    return (
        f"Batch {f['step']} Loss: {f['loss']:.5f}, "
        f"Speed: {f['samples_per_second']:.2f} samples/sec, lr: {f['lr']:.6f}"
    )


def aws_fsdp_line(place: int, text: str, now: datetime) -> str:
    """Return a line of the AWS FSDP samples. place: the line of their train.py that prints it."""
    return f"{now:%Y-%m-%d %H:%M:%S} I [train.py:{place}] {text}"


def print_line(place: int, text: str) -> None:
    """Print a line, bare as its readers expect it."""
    with contextlib.suppress(OSError):  # a terminal that was closed
        print(aws_fsdp_line(place, text, datetime.now()), flush=True)
