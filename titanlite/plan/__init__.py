"""Needs of a run before it starts: memory, time, disk. The command is in `titanlite.cli.plan`."""
