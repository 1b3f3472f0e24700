"""What a person and other tools see of a run.

- `observer` makes the figures of a log; `step_line` and `console` print them; `boards`,
  `run_boards` and `trackers` send them on. `throughput` and `stragglers` measure.
- `watchdog` finds ranks that hang (`position`, `rank_state`, `hang_report`), `nan_finder` where a
  number that is not finite came from, `anomalies` records bad steps.
- `profiler`, `compile_report` and `replicas` are callbacks of their own.
"""
