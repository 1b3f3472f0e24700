"""Cross-entropy whose gradient has label smoothing and the z-loss, too."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.data.rows import IGNORE
from titanlite.loss import LossFunction, cross_entropy_sum


class Objective(NamedTuple):
    """Terms beside the gradient of cross-entropy, see `regularized`."""

    z_loss: float = 0.0
    label_smoothing: float = 0.0


def objective_of(loss: LossFunction) -> Objective | None:
    """Return the objective of `cross_entropy_sum` or of a result of `regularized`; None: of another
    function.
    """
    if loss is cross_entropy_sum:
        return Objective()
    found = getattr(loss, "objective", None)
    # A function of the user may have an attribute of that name.
    return found if isinstance(found, Objective) else None


def regularized(z_loss: float, label_smoothing: float) -> LossFunction:
    """Return cross-entropy whose gradient has label smoothing and the z-loss too; its value is the
    pure cross-entropy.

    The objective of a token is (1 - s) * -log p(label) + s * (mean over the vocabulary of -log p) +
    z * log(Z)^2, with Z the sum of the exponentials of its logits (arXiv:1512.00567, section 7;
    arXiv:2204.02311, section 5).
    """

    def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
        logits, labels = logits.flatten(0, 1).float(), labels.flatten()
        entropy = _whole(F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum"))
        if not torch.is_grad_enabled():
            return entropy
        # Sums over the vocabulary, which may be divided over ranks: `logsumexp` would gather it.
        largest = logits.detach().amax(-1, keepdim=True)
        log_z = _whole((logits - largest).exp().sum(-1)).log() + _whole(largest).squeeze(-1)
        more = z_loss * log_z.square() + label_smoothing * (
            log_z - _whole(logits.sum(-1)) / logits.size(-1)
        )
        objective = (1 - label_smoothing) * entropy + more.where(labels != IGNORE, 0.0).sum()
        return entropy.detach() + (objective - objective.detach())

    cross_entropy.objective = Objective(z_loss, label_smoothing)  # type: ignore[attr-defined]
    return cross_entropy


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
