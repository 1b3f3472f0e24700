"""Names in the table [sweep] of a file; `titanlite.tools.sweep.points` reads it."""

from __future__ import annotations

#: Name of the table, which is no section of a run.
SWEEP = "sweep"
METRICS = ("validation_loss", "best_validation_loss", "training_loss")
#: How the values of a range lie between its ends.
RANGES = ("log", "linear")
