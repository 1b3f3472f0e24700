"""Numbers of ranks that have experts, from the sizes of a mesh. No torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titanlite.run.config import MeshSizes


def most_ranks(mesh: MeshSizes) -> int:
    """Return how many ranks can share the experts: the tensor-parallel ones and those that share
    the weights.
    """
    return mesh.weight_shards * mesh.tensor


def in_words(mesh: MeshSizes) -> str:
    """Return the degrees whose product is `most_ranks`."""
    words = mesh.weight_shards_in_words
    return words if mesh.tensor == 1 else f"{words} * tensor_parallel"
