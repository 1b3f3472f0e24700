"""The sections of the TOML dialect, as strict pydantic models.

A field's `description` is its documentation: `titanlite config explain KEY` prints it.
"""

from titanlite.config.sections.base import steps_of
from titanlite.config.sections.model import AUTO_FILTER, Float8, Model, Optimizer
from titanlite.config.sections.training import Data, Training, Validation

__all__ = ["AUTO_FILTER", "Data", "Float8", "Model", "Optimizer", "Training", "Validation", "steps_of"]
