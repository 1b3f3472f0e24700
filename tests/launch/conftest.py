"""A Slurm, and the run of the jobs without one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.slurm_cluster import Cluster, cluster, missing
from tests.launch.slurm_jobs import RUN
from tests.support import ranks as local_ranks


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if lacks := missing():
        message = (
            f"no Slurm here: {', '.join(lacks)} (apt-get install slurmctld slurmd slurm-client "
            "munge)"
        )
        warnings.warn(message, stacklevel=1)
        pytest.skip(message)
    with cluster(tmp_path_factory.mktemp("slurm"), patience=30) as one:
        yield one


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train the run of the jobs on two ranks without a launcher; return its folder."""
    folder = tmp_path_factory.mktemp("undisturbed")
    local_ranks.train([*RUN, f"--job.dump_folder={folder}"], 2, folder / "console")
    return folder
