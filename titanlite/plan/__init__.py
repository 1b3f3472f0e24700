"""Needs of a run before it starts: memory, time, disk. `titanlite.tools.plan` is the command."""
