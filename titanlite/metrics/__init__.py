"""The figures and messages of a run, for people and other tools.

- `metrics_logger` makes the figures of a log; `step_line` and `console` print them; `boards`,
  `run_boards` and `tracker_base` send them on. `throughput` and `stragglers` measure.
- `watchdog` finds ranks that hang (`phase_tracker`, `rank_state`, `hang_report`), `nan_finder`
  where a number that is not finite came from, `bad_step_log` records bad steps.
- `profiler`, `compile_report` and `replicas` are callbacks of their own.
"""
