"""The folder of a run. No torch here.

`record` writes a line for each attempt, and `attempts` reads them. `lock` keeps a second run out.
`metrics_jsonl` writes metrics, and `read_jsonl` reads them. `rank_logs` opens a file for each rank.
`prediction` keeps what was expected of a run, `provenance` where it comes from. `read` gives
commands all of it.
"""

#: A line for each start of a run and for each end, see `titanlite.runs.record`.
ATTEMPTS = "attempts.jsonl"
#: File of a run's prediction, see `titanlite.runs.prediction`.
PREDICTION = "prediction.json"
#: Folder of the export under way to the hub.
HUB = ".hub"
#: Folder of the last collectives, for a run that hangs.
TRACES = "comm_traces"
