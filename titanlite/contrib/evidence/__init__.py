"""Evidence that a run computes what it should."""
