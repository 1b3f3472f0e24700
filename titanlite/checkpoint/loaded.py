"""The result of a load, and the names by which checkpoints hold a run's state. No torch here.

A run without checkpoints imports this file alone of the package, and `errors`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from titanlite.checkpoint.store_paths import AnyPath

#: Parts of a checkpoint by name: weights, state of the optimizer, first step of the schedule, place
#: in the text, random generators, averages of the weights.
GROUPS = ("model", "optimizer", "lr_scheduler", "dataloader", "rng", "ema")
#: Prefix of the names of weights.
WEIGHT = "model."
#: The same of averages of the weights.
AVERAGE = "ema."
#: Endings of the names of biases that balance experts, ours and those of `transformers`.
EXPERT_BIAS = (".expert_bias", ".e_score_correction_bias")
#: Entry of the train state: the value of `exclude_from_loading` when the checkpoint was written.
LEFT_OUT = "left_out"
#: Entry of the train state: what `checkpoint.verify_resume` compares after a resume.
RESUME = "resume"


def group_of(name: str) -> str:
    """Return the part of a checkpoint that a tensor belongs to, one of `GROUPS`."""
    return name.partition(".")[0]


def average_of(weight: str) -> str:
    """Return the name of a weight's average."""
    return AVERAGE + weight.removeprefix(WEIGHT)


def weight_of(average: str) -> str:
    """Return the name of the weight that an average is of."""
    return WEIGHT + average.removeprefix(AVERAGE)


@dataclass(frozen=True)
class LoadedState:
    """The result of a load, besides the filled model and optimizer."""

    #: Steps done; 0 after a start from another run's weights.
    step: int
    #: The saved train state; empty where only weights were taken.
    train: dict[str, Any]
    #: Lines for the start report, such as newer folders that were passed over.
    notices: list[str] = field(default_factory=list)
    #: The loaded checkpoint.
    folder: AnyPath = Path()
    #: "resume": of this run; "from": `initial_load_path`, of another one.
    origin: Literal["resume", "from"] = "resume"
    #: Names of `GROUPS` that were not taken.
    left_out: frozenset[str] = frozenset()
    #: Some of the model's tensors kept their initial values.
    partial: bool = False
    #: The configuration of the run that wrote the checkpoint.
    config: dict[str, Any] = field(default_factory=dict)
    #: Differences to this run that need `allow_changes`, and have it; a line each.
    changes: tuple[str, ...] = ()
    #: Whether every byte was compared with its hash.
    verified: bool = False
    #: The files are another program's, such as a folder of Hugging Face's.
    is_foreign: bool = False
