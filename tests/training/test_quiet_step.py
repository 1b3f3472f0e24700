"""A step of the whole trainer between two logs: nothing waits for the device, nothing but the
step's own is sent.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.steps import train_rows
from tests.support.tiny import TWENTY_STEPS
from tests.support.watch import Calls, Operations
from titanlite.callbacks import Callback
from titanlite.dist.dist_env import DistEnv
from titanlite.trainer import Trainer

FLAGS = [
    *TWENTY_STEPS,
    "--training.batch_size=1",
    "--training.global_batch_size=2",
    "--training.steps=12",
    "--training.reshard_after_forward=always",
    # Fused as on a GPU. The other implementations read the guard's flag, and count their steps, on
    # the host.
    "--metrics.log_freq=4",
    "--optimizer.implementation=fused",
    "--training.gc_freq=1",
    "--no-validation.enable",
]
RECORDS = ["--metrics.enable_tensorboard", "--metrics.layer_norms=1"]
ROLLBACK = [
    "--guard.policy=rollback",
    "--guard.spike_sigmas=100",
    "--guard.window=4",
    "--guard.max_skips=1",
]

QUIET = 5
#: Not the first log after two steps, which looks for weights without a gradient.
LOGGED = 8


class TwoSteps(Callback):
    """Watches two steps from the fetching of their data to that of the next: all that the loop
    does.
    """

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, Any]] = {}
        self.modes: list[Any] = []

    def on_phase(self, trainer: Trainer, phase: str) -> None:
        if phase != "data":
            return
        if self.modes:
            operations, calls = self.modes
            calls.__exit__(None, None, None)
            operations.__exit__(None, None, None)
            self.modes.clear()
            figures = {"sent": operations.sent, "reads": operations.reads, "calls": calls.reads}
            self.seen[trainer.step - 1] = figures
        if trainer.step in (QUIET, LOGGED):
            self.modes.extend([Operations().__enter__(), Calls().__enter__()])


def _watch(world: DistEnv, folder: str, flags: list[str]) -> dict[int, dict[str, Any]]:
    watch = TwoSteps()
    train_rows(world, folder, *FLAGS, *flags, callbacks=[watch])
    return watch.seen


UNITS = 2 + 2  # blocks, embedding, norm with head
#: FSDP's, and the step's two: the token count, and the norm with the loss.
OWN = {
    ("_allgather_base_", "torch.float32"): 2 * UNITS,
    ("_reduce_scatter_base_", "torch.float32"): UNITS,
    ("allreduce_", "torch.int64"): 1,
    ("allreduce_", "torch.float32"): 1,
}


@pytest.mark.slow
@pytest.mark.parametrize("flags", [RECORDS, ROLLBACK], ids=["boards, norms by layer", "rollback"])
def test_a_step_between_two_logs_sends_and_reads_only_its_own(pool, tmp_path, flags):
    for seen in pool(2).run(_watch, str(tmp_path), flags):
        quiet = seen[QUIET]
        logged = seen[LOGGED]
        assert quiet["sent"] == OWN
        # The guard's record, by `FiniteGuard.poll`, is the one thing that is read: on a CPU at
        # once, on a GPU that of the step before, from a copy that went on beside the work.
        assert quiet["calls"] == {"tolist": 1}
        assert quiet["reads"] == 0
        # A log adds one collective and one read, gradient norms by layer or not.
        assert logged["sent"] == {**OWN, ("allreduce_", "torch.float64"): 1}
        assert logged["calls"] == {"tolist": 2}
