"""Context parallelism: whether sequences can be shared by so many ranks."""

from __future__ import annotations

from titanlite.config.errors import Problem
from titanlite.config.loaded import LoadedConfig
from titanlite.config.plans import MeshPlan

_DEGREE = "experimental.context_parallel_degree"


def context_problems(config: LoadedConfig, mesh: MeshPlan) -> list[Problem]:
    """One for each length of sequence that cannot be cut into two equal chunks per rank."""
    if mesh.context == 1:
        return []
    d = config.sections
    lengths = {"training.seq_len": d.training.seq_len}
    if d.validation.enable and d.validation.seq_len is not None:
        lengths["validation.seq_len"] = d.validation.seq_len
    return [
        _problem(config, mesh.context, key, length) for key, length in lengths.items() if length % (2 * mesh.context)
    ]


def _problem(config: LoadedConfig, degree: int, key: str, length: int) -> Problem:
    chunks = 2 * degree
    near = [str(n) for n in (length // chunks * chunks, -(-length // chunks) * chunks) if n]
    fitting = [str(n) for n in range(1, 2 * degree) if n == 1 or length % (2 * n) == 0]
    return Problem(
        config.place(_DEGREE),
        _DEGREE,
        f"is {degree}, but {key} = {length} cannot be cut into {chunks} equal chunks, two for each of {degree} ranks",
        f"these work: {key} = {' or '.join(near)}; context_parallel_degree = {', '.join(fitting)}",
        (_DEGREE, key),
    )
