"""The TOML dialect: every section and key that a user can write, with type, default and meaning.

`Dialect` is the config as written; `titanlite.config.derive` turns it into a run.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from titanlite.config.sections.checkpoint import Checkpoint
from titanlite.config.sections.model import ActivationCheckpoint, Compile, Float8, LrScheduler, Model, Optimizer
from titanlite.config.sections.run import (
    Comm,
    Debug,
    Guard,
    Job,
    Launch,
    MemoryEstimation,
    Metrics,
    Profiling,
    Stall,
)
from titanlite.config.sections.training import Data, Experimental, Parallelism, Training, Validation


class Dialect(BaseModel):
    """All sections, in the order in which files and `explain` show them."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())

    job: Job = Job()
    model: Model = Model()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LrScheduler = LrScheduler()
    data: Data = Data()
    validation: Validation = Validation()
    checkpoint: Checkpoint = Checkpoint()
    metrics: Metrics = Metrics()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    float8: Float8 = Float8()
    experimental: Experimental = Experimental()
    parallelism: Parallelism = Parallelism()
    guard: Guard = Guard()
    comm: Comm = Comm()
    debug: Debug = Debug()
    profiling: Profiling = Profiling()
    memory_estimation: MemoryEstimation = MemoryEstimation()
    stall: Stall = Stall()
    launch: Launch = Launch()
