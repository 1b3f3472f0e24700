"""What a person and other tools see of a run."""
