"""One training run divided over ranks and over memory. Nothing here knows a TOML key.

`parallelize` is the recipe. Its steps: `tensor` (tensor and sequence parallelism),
`activation_checkpoint` and `offload_blocks`, `compile`, `fsdp` with `fsdp_groups`, `init` (weights
that do not depend on the mesh). `divided_loss` is the loss over logits that ranks divide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from titanlite.dist import ParallelismError

if TYPE_CHECKING:
    from titanlite.models.spec import ModelSpec


def needs_torch(version: str, what: str) -> None:
    """Raise ParallelismError where torch is older than `version`, which `what` needs."""
    import torch

    if torch.__version__ < version:
        raise ParallelismError(
            f"{what} needs torch {version} or later; this is torch {torch.__version__}"
        )


def offered(spec: ModelSpec, field: str) -> Callable[..., Any]:
    """Return a function of a model's spec, by its field. Raises ParallelismError if there is
    none.
    """
    found = getattr(spec, field)
    if found is None:
        raise ParallelismError(
            f"the model {spec.name} does not offer this: its ModelSpec has no {field}"
        )
    return cast("Callable[..., Any]", found)
