"""What linears with rounded products have in common, whatever their format."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn

from titanlite.parallel.own_linear import OwnLinear

if TYPE_CHECKING:
    from torch import Tensor


class RoundedLinear(nn.Linear, OwnLinear):
    """A linear that rounds both factors of its products, and can stop it for a while."""

    #: Returns the weight for a product in high precision; None: the product is of rounded numbers.
    exact: Callable[[], Tensor] | None = None
