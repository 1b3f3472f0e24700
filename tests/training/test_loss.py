"""The loss in chunks, with the numbers and collectives of the whole one; label smoothing and
z-loss.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.compare import LABELS, TOKENS
from tests.support.harness import TINY, Run, full_precision, train, train_afresh
from tests.support.llamas import relative
from titanlite.config.sections import Compile
from titanlite.features.loss_chunks.head import ChunkedHead, chunk_head
from titanlite.loss import batch_loss, cross_entropy_sum
from titanlite.models.layers import Llama
from titanlite.regularized_loss import regularized

IGNORE = -100
BATCH = 4
SEQ = 32


def _model(tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Llama(replace(TINY, tied=tied))


def _batch() -> tuple[Tensor, Tensor]:
    """The last half has no target at all: of two chunks or more, one is nothing but padding."""
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(0, TINY.n_vocab, (2, BATCH, SEQ), generator=generator)
    labels[BATCH // 2 :] = IGNORE
    labels[0, 3:7] = IGNORE
    return tokens, labels


def _chunked(model: nn.Module, chunks: int) -> nn.Module:
    model = copy.deepcopy(model)
    chunk_head(model, chunks)
    return model


def _gradients(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[float, dict[str, Tensor]]:
    loss = batch_loss(model, *batch, cross_entropy_sum) / 37
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# One process, no sharding


@pytest.mark.parametrize("chunks", [2, 7, 1000])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_loss_and_every_gradient_are_those_of_the_whole(chunks, tied):
    whole = _model(tied)
    batch = _batch()
    parts = _chunked(whole, chunks)
    assert isinstance(parts.get_submodule("output"), ChunkedHead)
    assert list(parts.state_dict()) == list(whole.state_dict())
    expected, gradients = _gradients(whole, batch)
    loss, ours = _gradients(parts, batch)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert ours.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert relative(ours[name], gradient) < 1e-6, name


def test_without_gradients_it_is_the_loss_alone_and_without_labels_the_logits():
    whole, (tokens, labels) = _model(), _batch()
    parts = _chunked(whole, 3)
    with torch.no_grad():
        loss = batch_loss(parts, tokens, labels, cross_entropy_sum)
        logits = parts(tokens)
    assert not loss.requires_grad
    torch.testing.assert_close(logits, whole(tokens))
    torch.testing.assert_close(loss, cross_entropy_sum(logits, labels))


def test_a_head_that_cannot_do_it_is_refused():
    model = _model()
    model.output = nn.Linear(TINY.dim, TINY.n_vocab)
    with pytest.raises(ValueError, match=r"without bias, and this is Linear.*before fully_shard"):
        chunk_head(model, 2)


# Label smoothing and z-loss: the gradients of the plain formulas on every layout, and the loss that
# is shown

Z = 1e-2
SMOOTHING = 0.1
PENALIZED = Run(
    TOKENS, LABELS, [3e-3] * 2, training=full_precision(z_loss=Z, label_smoothing=SMOOTHING)
)


@pytest.mark.parametrize(("z", "smoothing"), [(Z, 0.0), (0.0, SMOOTHING), (Z, SMOOTHING)])
def test_gradients_are_those_of_the_formulas_and_the_value_is_cross_entropy(z, smoothing):
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(2, 9, 50, generator=generator)).requires_grad_()
    labels = torch.randint(0, 50, (2, 9), generator=generator)
    labels[0, 4:] = IGNORE
    exact = logits.detach().double().requires_grad_()
    rows = exact.flatten(0, 1)
    targets = labels.flatten()
    objective = F.cross_entropy(rows, targets, label_smoothing=smoothing, reduction="sum")
    (objective + z * rows[targets != IGNORE].logsumexp(-1).square().sum()).backward()
    loss = regularized(z, smoothing)(logits, labels)
    (3 * loss).backward()
    assert logits.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(logits.grad.double(), 3 * exact.grad, rtol=1e-5, atol=1e-6)
    plain = cross_entropy_sum(logits, labels)
    assert relative(logits.grad, torch.autograd.grad(3 * plain, logits)[0]) > 1e-2
    with torch.no_grad():
        assert loss == plain == regularized(z, smoothing)(logits, labels)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "layout",
    [
        {"tensor": 2, "loss_chunks": 3},
        {"pipeline": 2, "loss_chunks": 2},
        {"compile": Compile(components=["loss"]), "tensor": 2},
    ],
    ids=str,
)
def test_every_layout_trains_as_one_rank(pool, layout):
    alone = pool(1).run(train, PENALIZED)[0]
    plain = pool(1).run(train, replace(PENALIZED, training=full_precision()))[0]
    curve = pool(2).run(train_afresh, replace(PENALIZED, **layout))[0]
    assert curve.losses == pytest.approx(alone.losses, rel=1e-5)
    assert curve.norms == pytest.approx(alone.norms, rel=1e-5)
    assert plain.losses[0] == alone.losses[0]
    assert plain.losses[1] != alone.losses[1]
    for name, gradient in alone.gradients.items():
        assert relative(curve.gradients[name], gradient) < 1e-5, name
