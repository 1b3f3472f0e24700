"""The folder of a run: its record, its lock, its logs, and reading them. No torch here."""

#: A line for each start of a run and for each end, see `titanlite.runs.record`.
ATTEMPTS = "attempts.jsonl"
#: Folder of the export under way to the hub.
HUB = ".hub"
#: Folder of the last collectives, for a run that hangs.
TRACES = "comm_traces"
