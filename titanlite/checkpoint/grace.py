"""How long a process that is asked to stop has for its last save, as far as it can know."""

from __future__ import annotations

from collections.abc import Mapping

from titanlite.utils import human_time

#: Names the seconds that torchrun waits for its workers after SIGTERM.
VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
#: What torchrun waits by itself, in seconds (torch.distributed.elastic.multiprocessing.api).
_TORCHRUN_SECONDS = 30.0
#: A stop needs more than the save: the step under way, and a disk that others write to at that moment.
_MARGIN = 1.5


def grace_seconds(environment: Mapping[str, str]) -> float | None:
    """Seconds between SIGTERM and the end by force under torchrun; None where nobody has told this process.

    Schedulers (Slurm, Kubernetes) have a grace period of their own, of which a process cannot know.
    """
    text = environment.get(VARIABLE)
    if text is not None:
        try:
            return float(text)
        except ValueError:
            return _TORCHRUN_SECONDS
    return _TORCHRUN_SECONDS if "TORCHELASTIC_RUN_ID" in environment else None


def grace_warning(seconds: float, what: str, environment: Mapping[str, str]) -> str:
    """What to tell when a save of `seconds` is likely to outlast the grace period; "" when it is not.

    what: which save took so long.
    """
    grace = grace_seconds(environment)
    if grace is None or seconds * _MARGIN <= grace:
        return ""
    return (
        f"{what} took {human_time(seconds)}, and torchrun kills its workers {human_time(grace)} after a SIGTERM: a run "
        f"that is stopped so is likely to lose its last save. Start it with {VARIABLE}={int(seconds * 3) + 30}, and "
        "ask the scheduler for as much"
    )
