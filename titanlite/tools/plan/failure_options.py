"""Options of `titanlite plan` on failures of nodes, and their values."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass
from pathlib import Path

_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_BYTES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BYTES |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_NUMBER = r"([0-9][0-9_,]*(?:\.[0-9]+)?)"
#: Options that only have a meaning with --mtbf, without the dashes.
NEED_MTBF = (
    "restart-time",
    "notice-time",
    "save-time",
    "save-slowdown",
    "local-save-time",
    "lost-nodes",
)


@dataclass(frozen=True)
class SaveTime:
    """How long a save takes: `seconds`, or as its bytes need at `rate` bytes per second."""

    seconds: float | None = None
    rate: float | None = None

    def of(self, size: float) -> float:
        """Return the seconds of a save of so many bytes."""
        if self.seconds is not None:
            return self.seconds
        assert self.rate is not None
        return size / self.rate


def add_failures(parser: argparse.ArgumentParser) -> None:
    """Add the options to argparse."""
    add = parser.add_argument
    add(
        "--mtbf",
        type=mtbf,
        metavar="TIME",
        help="mean time between failures of one node, as 1000h, or the folder of a run that had "
        "some: predict the share of useful time and the best save interval",
    )
    add(
        "--restart-time",
        type=duration,
        metavar="TIME",
        help="--mtbf: from the notice of a failure to the first step after it, as 5m",
    )
    add(
        "--notice-time",
        type=duration,
        metavar="TIME",
        help="--mtbf: from a failure until it is noticed (default: comm.train_timeout_seconds)",
    )
    add(
        "--save-time",
        type=save_time,
        metavar="TIME",
        help="--mtbf: of a save, as 40s, or the rate of all ranks together, as 5GB/s",
    )
    add(
        "--save-slowdown",
        type=slowdown,
        metavar="X",
        help="--mtbf: steps take X times as long while a save is written beside them "
        "(default: 1.6)",
    )
    add(
        "--local-save-time",
        type=save_time,
        metavar="TIME",
        help="--mtbf: of a save to the nodes themselves, which the loss of a node loses; or the "
        "rate of one node",
    )
    add(
        "--lost-nodes",
        type=share,
        metavar="SHARE",
        help="--local-save-time: share of failures that lose a node, as 0.5",
    )


def mtbf(text: str) -> float | Path:
    """Read a time in seconds, or the folder of a run."""
    if re.fullmatch(rf"{_NUMBER}[a-z]+", text):
        return duration(text)
    folder = Path(text)
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(
            f"expected a time as 1000h or 30d, or the folder of a run, got {text!r}"
        )
    return folder


def duration(text: str) -> float:
    """Read a time as 40s, 5m, 1.5h or 30d. Return seconds."""
    match = re.fullmatch(rf"{_NUMBER}({'|'.join(_SECONDS)})", text)
    seconds = _positive(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected a time as 40s, 5m or 1000h, got {text!r}")
    return seconds


def save_time(text: str) -> SaveTime:
    """Read a time as 40s, or bytes per second as 5GB/s."""
    prefixes = "|".join(_BYTES)
    match = re.fullmatch(rf"{_NUMBER}({prefixes})B/s", text)
    if match is None:
        try:
            return SaveTime(seconds=duration(text))
        except argparse.ArgumentTypeError:
            message = f"expected a time as 40s, or a rate as 5GB/s, got {text!r}"
            raise argparse.ArgumentTypeError(message) from None
    rate = _positive(match[1]) * _BYTES[match[2]]
    if not 0 < rate < math.inf:
        raise argparse.ArgumentTypeError(f"expected a rate as 5GB/s, got {text!r}")
    return SaveTime(rate=rate)


def slowdown(text: str) -> float:
    """Read a factor of at least 1."""
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 1 <= factor < math.inf:
        raise argparse.ArgumentTypeError(f"expected a factor of at least 1, got {text!r}")
    return factor


def share(text: str) -> float:
    """Read a share between 0 and 1. At both one of two tiers would have no use."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"expected a share between 0 and 1, got {text!r}")
    return number


def _positive(text: str) -> float:
    return float(re.sub("[_,]", "", text))
