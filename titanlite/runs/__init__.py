"""The folder of a run: its record, its lock, its logs, and reading them. No torch here."""

#: A line for each start of a run and for each end, see `titanlite.runs.record`.
ATTEMPTS = "attempts.jsonl"
#: The same in folders of titanlite 0.1.0.
OLD_ATTEMPTS = "run.json"
#: Folder of what waits for its upload to the hub, see `titanlite.features.hub.record`.
HUB = ".hub"
