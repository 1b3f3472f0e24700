"""On a GPU the guard's record is read one step later, and the update is held back there by itself."""

from __future__ import annotations

import pytest

from tests.training.harness import Run, batches, stepper
from tests.training.test_guard import _equal, _state
from titanlite.guard import BadStepError, FiniteGuard
from titanlite.parallel.dist_env import DistEnv

TOKENS, LABELS = batches(5, 4, 16, 192)
RUN = Run(TOKENS, LABELS, [3e-3] * 5)
BAD = 3


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_the_record_is_read_a_step_later(world: DistEnv, policy: str) -> None:
    guard = FiniteGuard(world.device, policy, spike_sigmas=100.0, window=20)  # type: ignore[arg-type]
    model, optimizer, take = stepper(world, RUN, guard=guard)
    poison = False
    model.register_forward_hook(lambda module, inputs, out: out * float("nan") if poison else out)
    states, told, stopped = [], [], []
    for step in range(1, 6):
        poison = step == BAD
        take(step, 3e-3, step - 1)
        try:
            guard.poll()
        except BadStepError as error:
            stopped.append((step, error.step))
        told += [(step, bad.step) for bad in guard.skipped()]
        states.append(_state(model, optimizer))
    assert _equal(states[BAD - 1], states[BAD - 2])
    if policy == "skip":
        assert told == [(BAD + 1, BAD)] and not stopped
        assert not _equal(states[BAD], states[BAD - 1])
        guard.sync()
        assert len(guard.state_dict()["losses"]) == 4
    else:
        assert stopped[0] == (BAD + 1, BAD) and _equal(states[4], states[BAD - 1])
