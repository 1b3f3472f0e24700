"""A trainer without torch: it writes the records of a run with made-up figures.

The benchmark starts it as a process, so order, failure and resume are real.
Environment: STAND_IN_LOG, a file that gets the name of each run; STAND_IN_FAIL, a run that prints
and fails.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from titanlite.resolve.load import check_config
from titanlite.runs import provenance

#: Tokens per second and rank; each repeat on this machine is half as fast as the one before.
SPEEDS = {"default": 1000.0, "compile": 1500.0, "more": 500.0}
RANKS = 2
DEVICE = "CPU (made up)"


def main() -> None:
    command, *words = sys.argv[1:]
    assert command == "train", sys.argv
    flags = dict(word[2:].split("=", 1) for word in words if "=" in word)
    folder = Path(flags["job.dump_folder"])
    steps = int(flags["training.steps"])
    with open(os.environ["STAND_IN_LOG"], "a") as log:
        log.write(f"{folder.name}\n")
    if folder.name == os.environ.get("STAND_IN_FAIL"):
        print("step: 1  loss: 5.0\nerror: the cat sat on the keyboard", flush=True)
        raise SystemExit(3)
    level, _, repeat = folder.name.rpartition("-")
    shift = 0.001 * list(SPEEDS).index(level)
    rows = []
    for step in range(1, steps + 1):
        # The first two steps are as slow as those of a run that compiles; the first uses most
        # memory.
        speed = SPEEDS[level] / 2 ** (int(repeat) - 1) if step > 2 else 1.0
        rows.append(
            {
                "step": step,
                "loss": 9 - step / 10 + (shift if step > 1 else 0),
                "tps": speed,
                "seconds_per_step": 1000 / RANKS / speed,
                "tokens_seen": 1000 * step,
                "memory_gib": 2.5 if step == 1 else 2.0,
            }
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config, _ = check_config(words, RANKS, training=True)
    (folder / "config.toml").write_text(config.to_toml())
    attempt = {
        "steps": steps,
        "ranks": RANKS,
        "device": DEVICE,
    }
    attempt["versions"] = provenance.versions()
    start = {**attempt, "event": "start", "attempt": 1, "step": 0}
    end = {"event": "end", "attempt": 1, "state": "done", "step": steps}
    lines = [json.dumps(line) + "\n" for line in (start, end)]
    (folder / "attempts.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
