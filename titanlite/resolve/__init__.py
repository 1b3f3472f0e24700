"""From config files to a checked run: load, check, derive."""
