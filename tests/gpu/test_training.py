"""A step on a GPU: the numbers of the plain model, no wait for the device, no bad update, an exact
resume.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu.conftest import without_waits
from tests.support.checkpoints import RUN as SAVED
from tests.support.checkpoints import train as train_and_save
from tests.support.checkpoints import unequal
from tests.support.compare import LABELS, TOKENS, WARM, distance, spread
from tests.support.harness import (
    Run,
    batches,
    build_tiny,
    equal_states,
    full_precision,
    initial_weights,
    micro_batches,
    state_of,
    stepper,
    train,
)
from tests.support.llamas import relative
from tests.support.reference import model_of, train_reference
from tests.support.steps import train_step
from titanlite.config.sections import Training
from titanlite.data.loader import to_device
from titanlite.models import get_spec
from titanlite.models.spec import Init
from titanlite.optim.bad_step_errors import BadStepError
from titanlite.optim.guard import FiniteGuard
from titanlite.parallel.init import ROWS, fill

SHAPE = (2 * ROWS + 5, 1000)
KINDS = ("normal", "trunc_normal", "uniform")


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_drawn_without_a_wait_in_pieces_that_any_gpu_holds(world, kind):
    sizes: list[int] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket.__name__ in ("normal_", "uniform_"):
                sizes.append(args[0].numel())
            return func(*args, **(kwargs or {}))

    whole = torch.empty(SHAPE, device=world.device)
    with without_waits(), Seen():
        fill(whole, (0, 0), SHAPE, "w", Init(kind, std=0.02, bound=0.06), seed=3)
    assert sum(sizes) == whole.numel()
    assert max(sizes) <= 2**15


@pytest.mark.numbers
@pytest.mark.parametrize(("kind", "std"), list(zip(KINDS, (0.02, 0.0197, 0.0346), strict=True)))
def test_a_part_is_a_cut_of_the_whole(world, kind, std):
    init = Init(kind, std=0.02, bound=0.06)
    whole = torch.empty(SHAPE, device=world.device)
    part = torch.empty(80, 400, device=world.device)
    fill(whole, (0, 0), SHAPE, "w", init, seed=3)
    fill(part, (100, 50), SHAPE, "w", init, seed=3)
    assert torch.equal(part, whole[100:180, 50:450])
    assert whole.std().item() == pytest.approx(std, rel=0.01)
    assert abs(whole.mean().item()) < 2e-4
    assert (whole.abs().max() <= 0.06) == (kind != "normal")


RUN = Run(TOKENS, LABELS, WARM, accumulation=2)
BF16 = replace(RUN, training=Training())


@pytest.mark.numbers
@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_fp32_training_is_that_of_transformers_on_a_cpu(world, implementation):
    run = replace(RUN, implementation=implementation)
    spec = get_spec("llama3")
    start = {
        name: weight.cpu()
        for name, weight in spec.to_hf(initial_weights(world, run), run.args).items()
    }
    expected = train_reference(
        model_of(spec.hf_config(run.args), start),
        TOKENS,
        LABELS,
        optimizer="AdamW",
        rates=WARM,
        max_norm=run.max_norm,
    )
    ours = train(world, run)
    assert ours.gradients, "no update"
    gradients = spec.to_hf(ours.gradients, run.args)
    clip = min(1.0, run.max_norm / (expected.norms[0] + 1e-6))
    for name, gradient in expected.gradients.items():
        assert relative(gradients[name].cpu(), gradient * clip) < 1e-5, name
    torch.testing.assert_close(
        torch.tensor(ours.losses), torch.tensor(expected.losses), rtol=0, atol=5e-5
    )


@pytest.mark.numbers
def test_bf16_training_stays_within_the_spread_of_seeds(world):
    """Mean distance of its losses from those of fp32: at most twice what another seed makes of
    them.
    """
    plain, *others = (train(world, replace(RUN, seed=seed)).losses for seed in (7, 8, 9))
    assert 0 < distance(train(world, BF16).losses, plain) < 2 * spread(plain, others)


def test_a_step_never_waits_for_the_device(world):
    """torch raises at what waits, from the second step on; the guard's own look at the step before
    is left out.
    """
    model, optimizer, rank = build_tiny(world, BF16)
    guard = FiniteGuard(world.device)
    for step in range(1, 5):
        data = to_device(
            micro_batches(BF16, step, rank, world.size), world.device
        )  # before: a copy may wait
        with without_waits() if step > 1 else nullcontext():
            train_step(model, optimizer, data, step=step, lr=1e-3, max_norm=1.0, guard=guard)
        guard.poll()


@pytest.mark.numbers
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_a_resume_is_exact(world, tmp_path, mode):
    """6 steps, saved at the third and gone on with, are the same bits; a save in the background
    copies in time.
    """

    def saved(name, first, last, async_mode=mode):
        folder = str(tmp_path / name)
        return train_and_save(world, SAVED, folder, first, last, every=3, async_mode=async_mode)

    straight = saved("straight", 1, 6, "disabled")
    first, rest = saved("parts", 1, 3), saved("parts", 4, 6)
    saved("on", 1, 6)  # steps beside a copy
    assert [*first["losses"], *rest["losses"]] == straight["losses"]
    for name, step in (("parts", 3), ("parts", 6), ("on", 3)):
        pair = (tmp_path / folder / f"step-{step}" for folder in (name, "straight"))
        assert unequal(*pair) == []


OFFLOADED = replace(RUN, training=full_precision(enable_cpu_offload=True))


def _locals(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


@pytest.mark.numbers
@pytest.mark.parametrize("implementation", [None, "foreach"])
def test_offloaded_training_is_the_same(world, implementation):
    on_device = train(world, RUN)
    offloaded = train(world, replace(OFFLOADED, implementation=implementation))
    assert offloaded.losses == pytest.approx(on_device.losses, abs=5e-6)
    assert offloaded.norms == pytest.approx(on_device.norms, rel=1e-4)
    for name, weight in on_device.weights.items():
        difference = offloaded.weights[name].cpu() - weight.cpu()
        assert (difference.norm() / weight.cpu().norm()).item() < 1e-4, name


def test_state_is_on_the_host_and_computation_on_the_device(world):
    model, optimizer, take = stepper(world, OFFLOADED)
    assert model(TOKENS[0].to(world.device)).device.type == "cuda"
    gradients: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.extend(p.grad for p in model.parameters())
    )
    take(1)
    parameters = _locals(list(model.parameters()))
    state = [t for entry in optimizer.state.values() for t in entry.values()]
    assert len(gradients) == len(parameters)
    assert len(state) == 3 * len(parameters)
    assert {t.device.type for t in (*parameters, *_locals(gradients), *_locals(state))} == {"cpu"}
    assert all(t.is_pinned() for t in parameters)
    assert {b.device.type for b in model.buffers()} == {"cuda"}


GUARDED = Run(*batches(5, 4, 16, 192), [3e-3] * 5)
BAD = 3


@pytest.mark.numbers
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_the_record_is_read_a_step_later(world, policy):
    guard = FiniteGuard(world.device, policy, spike_sigmas=100.0, window=20)  # type: ignore[arg-type]
    model, optimizer, take = stepper(world, GUARDED, guard=guard)
    poison = False
    model.register_forward_hook(lambda module, inputs, out: out * float("nan") if poison else out)
    states = []
    told = []
    stopped = []
    for step in range(1, 6):
        poison = step == BAD
        take(step, 3e-3, step - 1)
        try:
            guard.poll()
        except BadStepError as error:
            stopped.append((step, error.step))
        told += [(step, bad.step) for bad in guard.skipped()]
        states.append(state_of(model, optimizer))
    assert equal_states(states[BAD - 1], states[BAD - 2])
    if policy == "skip":
        assert told == [(BAD + 1, BAD)]
        assert not stopped
        assert not equal_states(states[BAD], states[BAD - 1])
        guard.sync()
        assert len(guard.state_dict()["losses"]) == 4
    else:
        assert stopped[0] == (BAD + 1, BAD)
        assert equal_states(states[4], states[BAD - 1])
