"""Numbers of ranks that have experts, from the sizes of a mesh. No torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titanlite.run.config import MeshSizes


def most_ranks(mesh: MeshSizes) -> int:
    """Return how many ranks can share the experts: those that share the weights, and their
    tensor-parallel ranks, which divide the sequence.
    """
    return mesh.weight_shards * mesh.tensor


def in_words(mesh: MeshSizes) -> str:
    """Return the degrees whose product that is."""
    words = mesh.weight_shards_in_words
    return words if mesh.tensor == 1 else f"{words} * tensor_parallel"


def expert_shards(mesh: MeshSizes) -> int:
    """Return over how many ranks `fully_shard` divides each expert.

    Tensor-parallel ranks have copies of experts that no ranks share.
    """
    return mesh.weight_shards if mesh.expert == 1 else most_ranks(mesh) // mesh.expert
