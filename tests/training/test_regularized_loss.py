"""Label smoothing and z-loss: the gradients of the plain formulas on every layout, and the loss that is shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.pool import Pools
from tests.training.compare import LABELS, TOKENS, relative
from tests.training.harness import Run, full_precision, train, train_afresh
from titanlite.config.sections import Compile
from titanlite.loss import cross_entropy_sum, regularized

Z, SMOOTHING = 1e-2, 0.1
RUN = Run(TOKENS, LABELS, [3e-3] * 2, training=full_precision(z_loss=Z, label_smoothing=SMOOTHING))


@pytest.mark.parametrize(("z", "smoothing"), [(Z, 0.0), (0.0, SMOOTHING), (Z, SMOOTHING)])
def test_gradients_are_those_of_the_formulas_and_the_value_is_cross_entropy(z: float, smoothing: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(2, 9, 50, generator=generator)).requires_grad_()
    labels = torch.randint(0, 50, (2, 9), generator=generator)
    labels[0, 4:] = -100
    exact = logits.detach().double().requires_grad_()
    rows, targets = exact.flatten(0, 1), labels.flatten()
    objective = F.cross_entropy(rows, targets, label_smoothing=smoothing, reduction="sum")
    (objective + z * rows[targets != -100].logsumexp(-1).square().sum()).backward()
    loss = regularized(z, smoothing)(logits, labels)
    (3 * loss).backward()
    assert logits.grad is not None and exact.grad is not None
    torch.testing.assert_close(logits.grad.double(), 3 * exact.grad, rtol=1e-5, atol=1e-6)
    assert relative(logits.grad, torch.autograd.grad(3 * cross_entropy_sum(logits, labels), logits)[0]) > 1e-2
    with torch.no_grad():
        assert loss == regularized(z, smoothing)(logits, labels) == cross_entropy_sum(logits, labels)


@pytest.mark.parametrize(
    "layout",
    [
        {"loss_chunks": 3},
        {"tensor": 2},
        {"tensor": 2, "loss_chunks": 3},
        {"pipeline": 2, "loss_chunks": 2},
        pytest.param({"compile": Compile(components=["loss"])}, marks=pytest.mark.slow),
        pytest.param({"compile": Compile(components=["loss"]), "tensor": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_layout_trains_as_one_rank(pool: Pools, layout: dict[str, Any]) -> None:
    alone, plain = (pool(1).run(train, run)[0] for run in (RUN, replace(RUN, training=full_precision())))
    curve = pool(2).run(train_afresh, replace(RUN, **layout))[0]
    assert curve.losses == pytest.approx(alone.losses, rel=1e-5) and curve.norms == pytest.approx(alone.norms, rel=1e-5)
    assert plain.losses[0] == alone.losses[0] and plain.losses[1] != alone.losses[1]
    for name, gradient in alone.gradients.items():
        assert relative(curve.gradients[name], gradient) < 1e-5, name
