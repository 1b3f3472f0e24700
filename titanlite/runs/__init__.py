"""The folder of a run: its record, its lock, its logs, and reading them. No torch here."""
