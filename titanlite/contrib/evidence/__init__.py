"""Evidence: a config whose runs are proved to be exact, and finished runs whose records fit."""
