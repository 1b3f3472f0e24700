"""Runs that a test does not start: from sections alone, or from a file, as the plan reads them."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from titanlite.config.model_sections import Model
from titanlite.config.sections import ActivationCheckpoint, Experimental, Parallelism, Training
from titanlite.resolve.load import check_config, load_config
from titanlite.run.config import MeshSizes, RunConfig


def run_of(family: str, mesh: MeshSizes, **sections: Any) -> RunConfig:
    """Return the run of a family on a mesh, with these sections and the defaults of others."""
    degrees = {
        "context_parallel_degree": mesh.context,
        "pipeline_parallel_degree": mesh.pipeline,
    }
    sections["experimental"] = replace(sections.get("experimental", Experimental()), **degrees)
    sections.setdefault("activation_checkpoint", ActivationCheckpoint(mode="none"))
    training = sections.setdefault("training", Training())
    if mesh.pipeline > 1 and training.reshard_after_forward == "default":
        sections["training"] = replace(training, reshard_after_forward="never")
    return replace(
        load_config("debug_model.toml", 1),
        model=Model(name=family),
        mesh=mesh,
        parallelism=Parallelism(expert_parallel_degree=mesh.expert),
        **sections,
    )


def run_from(config: object, ranks: int, *flags: str) -> RunConfig:
    """Return the run of a file on so many ranks, which need not be able to train it here."""
    return check_config([f"--job.config_file={config}", *flags], ranks, training=False)[1]
