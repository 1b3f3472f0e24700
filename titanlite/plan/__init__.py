"""Needs of a run before it starts: memory, time, disk. The command is in `titanlite.cli.plan`.

- `plan` puts all together, `text` prints it. `hardware` is the table of GPUs and machines.
- Memory: `rank_sizes` and `weights` give sizes, `step_events` and its parts the events of a step,
  `events` replays them; `blocks` and `loss_ops` say what each operator keeps.
- Time: `speed` is a roofline over `computing`, `traffic` and the products, at the `rates` of a
  cluster.

FORMULAS.md derives the numbers.
"""
