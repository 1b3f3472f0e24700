"""Weights of checkpoints and of other programs: read, compared, exported."""
