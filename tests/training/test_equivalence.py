"""Other shapes, and other units of sharding, train as `transformers` does. The splits are in grid.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.training.compare import LABELS, TOKENS, WARM, References
from tests.training.harness import TINY, Run, full_precision
from titanlite.config.sections import ActivationCheckpoint, Training
from titanlite.models import RopeScaling

SHAPES = {
    "gqa": TINY,
    "tied": replace(TINY, tied=True),
    "scaled-rope": replace(TINY, rope_scaling=RopeScaling(factor=8.0, original_context=16), rope_theta=5e5),
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("shape", ["tied", "scaled-rope"])
def test_other_shapes_train_as_transformers_does(references: References, shape: str, ranks: int) -> None:
    run = Run(TOKENS, LABELS, WARM, args=SHAPES[shape], accumulation=2)
    references.compare(run, ranks)


# ranks, replicas, shape, plan
UNITS = [
    pytest.param(2, 1, "gqa", full_precision(fsdp_units="size", fsdp_min_params=30_000, prefetch=1), id="size"),
    pytest.param(
        2,
        1,
        "tied",
        full_precision(fsdp_units=["Block", "Embedding"], prefetch=2),
        id="tied classes",
        marks=pytest.mark.slow,
    ),
    *(
        pytest.param(*row, marks=pytest.mark.soak, id=name)
        for name, row in {
            "root": (2, 1, "gqa", full_precision(fsdp_units="root")),
            "root, always": (2, 1, "gqa", full_precision(fsdp_units="root", reshard_after_forward="always")),
            "blocks, ahead 2": (4, 1, "gqa", full_precision(prefetch=2, reshard_after_forward="always")),
            "over 2 of 4, ahead 1": (4, 1, "gqa", full_precision(prefetch=1, reshard_after_forward=2)),
            "hsdp-2x2": (
                4,
                2,
                "gqa",
                full_precision(fsdp_units="size", fsdp_min_params=4_000, prefetch=3),
            ),
            "ddp, classes": (2, 2, "gqa", full_precision(fsdp_units=["Attention", "FeedForward"])),
            "nested": (2, 1, "gqa", full_precision(fsdp_units=["Block", "Linear"], reshard_after_forward="always")),
        }.items()
    ),
]


@pytest.mark.parametrize(("ranks", "replicas", "shape", "training"), UNITS)
def test_other_units_train_as_transformers_does(
    references: References, ranks: int, replicas: int, shape: str, training: Training
) -> None:
    run = Run(TOKENS, LABELS, WARM, args=SHAPES[shape], training=training, accumulation=2, replicas=replicas)
    references.compare(run, ranks)


@pytest.mark.soak
def test_units_inside_recomputed_blocks_train_as_transformers_does(references: References) -> None:
    training = full_precision(fsdp_units=["Block", "Attention"], prefetch=2, reshard_after_forward="always")
    run = Run(TOKENS, LABELS, WARM, training=training, accumulation=2, activations=ActivationCheckpoint(mode="full"))
    references.compare(run, 2)
