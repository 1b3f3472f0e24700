"""A run's loaders on this rank: its part of the training text and of the held-out texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh

from titanlite.assembly.datasets import Datasets, phases_of
from titanlite.data.loader import TrainLoader
from titanlite.data.prefetch import Prefetcher
from titanlite.data.rows import Rows
from titanlite.data.skip_ranges import Range, ranges_of_steps
from titanlite.data.step_sizes import Course
from titanlite.run.config import RunConfig
from titanlite.validation import ValidationSet

if TYPE_CHECKING:
    from titanlite.data.phases import Phases
    from titanlite.data.validation_loader import PassLoader
    from titanlite.features.ema.average import WeightAverage

#: Steps kept back for the case that a stream ends: on a GPU all ranks stop within two steps.
_RESERVE = 2


@dataclass(frozen=True)
class LoaderParts:
    """Loaders that serve the data on this rank."""

    train: Prefetcher
    validation: ValidationSet | None
    #: The `[[data.phase]]` tables; None: there are none, and no mixture.
    phases: Phases | None
    #: The sizes of the steps of a run that begins.
    course: Course
    #: Ranges of sequences that are not served.
    skip: tuple[Range, ...]
    #: This rank's place among those that read different data, and their number.
    share: tuple[int, int]


def build_loaders(
    run: RunConfig, mesh: DeviceMesh, datasets: Datasets, average: WeightAverage | None
) -> LoaderParts:
    """Build this rank's loaders; validation takes the weights' average."""
    share = data_parallel_rank(mesh), run.mesh.dp_degree
    batch = run.batch
    skip = ranges_of_steps(run.data.skip_steps, run.course)
    phases = phases_of(run)
    course = run.course if phases is None else phases.course()
    steps = TrainLoader(
        datasets.train, batch.global_batch_size, batch.micro_batch_size, *share, skip
    )
    steps.follow(course)
    # Only a stream has a state.
    reserve = _RESERVE if datasets.train.state_dict() else 0
    pin = run.data.pin_memory and mesh.device_type == "cuda"
    train = Prefetcher(_divided(run, mesh, steps), run.data.prefetch, pin, reserve)
    validation = None
    if datasets.validation:
        validation = build_validation(run, mesh, datasets.validation)
        if average is not None and run.validation.ema:
            validation = replace(validation, weights=average.applied)
    return LoaderParts(train, validation, phases, course, skip, share)


def build_validation(run: RunConfig, mesh: DeviceMesh, texts: Mapping[str, Rows]) -> ValidationSet:
    """Build this rank's part of the held-out texts, see `read_held_out`."""
    from titanlite.data.validation_loader import ValidationLoader

    section = run.validation
    rank, ranks = data_parallel_rank(mesh), run.mesh.dp_degree
    size = section.batch_size or run.batch.micro_batch_size
    loaders = {}
    for name, rows in texts.items():
        passes: PassLoader = ValidationLoader(rows, size, section.steps, rank, ranks)
        loaders[name] = _divided(run, mesh, passes)
    return ValidationSet(loaders, section.freq, section.first)


def data_parallel_rank(mesh: DeviceMesh) -> int:
    """Return this rank's place among those that read different data."""
    replicate, shard_rank = mesh.get_local_rank("dp_replicate"), mesh.get_local_rank("dp_shard")
    return replicate * mesh["dp_shard"].size() + shard_rank


def _divided(run: RunConfig, mesh: DeviceMesh, loader: Any) -> Any:
    context = run.features.context
    return loader if context is None else context.loader(loader, mesh)
