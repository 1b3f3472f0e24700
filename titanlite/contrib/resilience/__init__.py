"""Local saves: on each node's own disk or in its memory, more often than shared checkpoints."""
