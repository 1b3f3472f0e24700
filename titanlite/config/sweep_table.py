"""Names in the table [sweep] of a file; `titanlite.tools.sweep.points` reads it."""

from __future__ import annotations

METRICS = ("validation_loss", "best_validation_loss", "training_loss")
#: How the values of a range lie between its ends.
RANGES = ("log", "linear")
