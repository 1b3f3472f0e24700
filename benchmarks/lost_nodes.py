"""Nodes of a Slurm job that are lost in the middle of a save or of a step, and what each loss
costs.

    python benchmarks/lost_nodes.py --losses 10 --out benchmarks/results/lost_nodes

It starts a real Slurm on this machine (tests/launch/slurm_cluster.py; root, and Slurm's programs).
Each job of `titanlite launch slurm` has two nodes with a rank each (gloo), and a spare one. It
saves to a folder of each node, with a copy on the other node, and less often to a shared folder.
Its second node stops at a moment of a save, or of a step. There its daemon and all processes of the
job get SIGKILL, and its folder is deleted. An allocation of Slurm never gets a lost node back, so
each loss has its own job.

The job must go on in its allocation, and name the node. It must lose no more steps than the local
interval. Its losses and final weights must be those of an undisturbed run, bit for bit. Exit status
1 when anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.launch.slurm_cluster import Cluster, cluster, missing  # noqa: E402
from tests.launch.slurm_jobs import ENDS, RUN, STEPS, lose, read_log, submit  # noqa: E402
from tests.support import ranks as local_ranks  # noqa: E402
from tests.support.train_runs import rows, unequal  # noqa: E402
from titanlite.runs.attempts import read_entries  # noqa: E402
from titanlite.runs.read_jsonl import read_metrics  # noqa: E402

#: Steps between saves.
LOCAL_INTERVAL = 4
SHARED_INTERVAL = 12
#: Slurm's own default: after so many seconds it takes a node for lost.
SLURMD_TIMEOUT = 300
#: Limit of each wait.
PATIENCE_SECONDS = 300.0
KINDS = ("save", "step")


@dataclass(frozen=True)
class Moment:
    """Where the node stops. variable, value: of `tests.launch.slow_steps.Held`."""

    kind: str
    title: str
    variable: str
    value: str


def _save(title: str, pattern: str) -> Moment:
    return Moment("save", title, "HELD_FILE", pattern)


def _step(phase: str, step: int) -> Moment:
    return Moment("step", f"{phase} of step {step}", "HELD_PHASE", f"{phase}:{step}")


MOMENTS = [
    _save("local save of step 8, before its own part", "/rank-./step-8/"),
    _step("backward", 11),
    _save("local save of step 16, before the other's copy", "/copy-./step-16/"),
    _step("forward", 7),
    _save("shared save of step 12", "/checkpoint/step-12/"),
    _step("optimizer", 15),
    _save("local save of step 20, before its manifest", "/rank-./step-20/.*manifest"),
    _step("data", 20),
    _save("local save of step 28, before its own part", "/rank-./step-28/"),
    _step("forward", 26),
]


@dataclass
class Loss:
    """A lost node, and what it has cost."""

    kind: str
    moment: str
    job: str
    node: str
    replaced_by: str
    #: Steps done before the loss, and those after which the job went on.
    done: int
    resumed: int
    #: Seconds from the kill until the ranks had ended, until the next start, and until its first
    #: step was done.
    ended: float
    started: float
    stepped: float
    #: The downtime that the job's log tells: between the two steps.
    told: float

    @property
    def lost_steps(self) -> int:
        return self.done - self.resumed


class Wrong(Exception):
    """A job did not go on as it should."""


def lose_one(slurm: Cluster, folder: Path, moment: Moment, reference: Path) -> Loss:
    """Run a job that loses a node, and compare it with an undisturbed run. Raises Wrong."""
    disks = folder / "disks"
    run = folder / "run"
    held = [f"--launch.environment.{moment.variable}={moment.value}"]
    job = submit(slurm, run, *_flags(disks), *held)
    _until("the moment", (run / "held").exists, run, job)
    other, lost = placed(read_log(run, job))[0]
    done = _last_step(run)
    began = slurm.field(job, "StartTime")
    killed = time.time()
    try:
        lose(slurm, lost, job)
        shutil.rmtree(disks / lost)
        ends = [
            _until(what, ask, run, job) - killed
            for what, ask in {
                "the end of the ranks": lambda: "== the ranks ended" in read_log(run, job),
                "a further start": lambda: len(placed(read_log(run, job))) > 1,
                "a further step": lambda: _has_stepped(run, killed),
            }.items()
        ]
        # Until the node comes back, or Slurm takes it for lost, the job cannot end.
        _until("the end", lambda: "== the ranks ended with code 0" in read_log(run, job), run, job)
    finally:
        slurm.start_node(lost)
    state = slurm.wait(job, *ENDS)
    said = read_log(run, job)
    _check(state == "COMPLETED", f"job {job} is {state}", said)
    _check(slurm.field(job, "Restarts") == "0", "the job went through the queue", said)
    _check(slurm.field(job, "StartTime") == began, "the job began anew", said)
    _check(re.findall("== node (..) is lost", said) == [lost], f"only {lost} is lost", said)
    kept, replaced_by = placed(said)[-1]
    _check(kept == other and replaced_by not in (other, lost), "wrong nodes", said)
    _check(rows(run) == rows(reference), "other steps or losses", said)
    _check(unequal(reference, run, STEPS) == [], "other weights", said)
    resumed = [entry["step"] for entry in read_entries(run) if entry["event"] == "start"][-1]
    (told,) = re.findall("== downtime ([0-9.]*) s,", said)
    nodes = (lost, replaced_by)
    loss = Loss(moment.kind, moment.title, job, *nodes, done, resumed, *ends, told=float(told))
    _check(0 <= loss.lost_steps <= LOCAL_INTERVAL, f"{loss.lost_steps} steps are lost", said)
    return loss


def _flags(disks: Path) -> list[str]:
    """Return the flags of a job. disks: holds a folder for each node."""
    return [
        "--launch.nodes=2",
        "--launch.spare_nodes=1",
        "--launch.environment.STEP_SECONDS=0",
        "--job.callbacks=tests.launch.slow_steps:Held",
        f"--checkpoint.interval={SHARED_INTERVAL}",
        # The variable has its value on the node.
        f"--checkpoint.local_folder={disks}/${{SLURMD_NODENAME}}",
        f"--checkpoint.local_interval={LOCAL_INTERVAL}",
        "--checkpoint.local_copies=1",
    ]


def placed(said: str) -> list[tuple[str, str]]:
    """Return the two nodes of each start, from the job's log."""
    return re.findall("== start .: 2 nodes with ranks, (.*),(.*);", said)


def _check(good: bool, what: str, said: str) -> None:
    if not good:
        raise Wrong(f"{what}\n{said}")


def _until(what: str, ask: Callable[[], bool], run: Path, job: str) -> float:
    """Wait until the answer is true; return the time. Raises Wrong."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not ask():
        if time.monotonic() > deadline:
            raise Wrong(f"{what} does not come\n{read_log(run, job)}")
        time.sleep(0.05)
    return time.time()


def _last_step(run: Path) -> int:
    return max((row["step"] for row in read_metrics(run / "metrics.jsonl")), default=0)


def _has_stepped(run: Path, killed: float) -> bool:
    return any(row["time"] > killed for row in read_metrics(run / "metrics.jsonl"))


def measure(root: Path, losses: int) -> tuple[str, list[Loss]]:
    """Return Slurm's version, and the figures of so many losses. Raises Wrong."""
    reference = root / "reference"
    local_ranks.train([*RUN, f"--job.dump_folder={reference}"], 2, root / "console")
    found = []
    with cluster(root / "slurm", SLURMD_TIMEOUT) as slurm:
        version = slurm.run("sinfo", "--version").strip()
        for number in range(losses):
            folder = root / f"job-{number}"
            found.append(lose_one(slurm, folder, MOMENTS[number % len(MOMENTS)], reference))
            print(_line(found[-1]), file=sys.stderr)
    return version, found


def _line(loss: Loss) -> str:
    cells = [
        loss.moment,
        f"{loss.done}",
        f"{loss.resumed}",
        f"{loss.lost_steps}",
        f"{loss.ended:.1f}",
        f"{loss.started - loss.ended:.1f}",
        f"{loss.stepped - loss.started:.1f}",
        f"**{loss.stepped:.1f}**",
        f"{loss.told:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


_HEAD = [
    "| the node is lost in | steps done | goes on after step | steps lost | s until the ranks "
    "have ended | s until the next start | s until its first step | **downtime, s** | in the job's "
    "log, s |",
    "|---|---|---|---|---|---|---|---|---|",
]


def page(head: str, found: Sequence[Loss]) -> list[str]:
    """Return the page of results."""
    stepped = [loss.stepped for loss in found]
    kinds = [f"{len([1 for loss in found if loss.kind == kind])} in a {kind}" for kind in KINDS]
    return [
        head,
        "",
        *_HEAD,
        *map(_line, found),
        "",
        f"{len(found)} losses: {' and '.join(kinds)}. Each job went on in its allocation without "
        "the lost node, which its log names. Each has the losses and the final weights of an "
        "undisturbed run, bit for bit.",
        f"Steps lost: at most {max(loss.lost_steps for loss in found)}, and the local interval is "
        f"{LOCAL_INTERVAL}. Downtime: median {statistics.median(stepped):.1f} s, "
        f"{min(stepped):.1f} to {max(stepped):.1f} s from the kill to the end of the first step.",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--losses", type=int, default=len(MOMENTS), help="each has its own job")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write FILE.md and FILE.json")
    arguments = parser.parse_args()
    if arguments.losses < 1:
        parser.error("--losses must be at least 1")
    if lacks := missing():
        parser.error(f"no Slurm here: {', '.join(lacks)}")
    with tempfile.TemporaryDirectory(prefix="lost-nodes-") as root:
        try:
            version, found = measure(Path(root), arguments.losses)
        except Wrong as wrong:
            print(f"WRONG: {wrong}", file=sys.stderr)
            return 1
    import torch

    from titanlite.metrics.throughput import device_name
    from titanlite.runs import provenance

    programs = (
        f"Python {platform.python_version()}, torch {torch.__version__}, {version} on loopback "
        f"with SlurmdTimeout={SLURMD_TIMEOUT}"
    )
    head = (
        f"{device_name(torch.device('cpu'))}, {os.cpu_count()} cores with a load of "
        f"{os.getloadavg()[2]:.0f}; {programs}. 2 nodes and 1 spare, a rank each, {STEPS} steps; "
        f"`python benchmarks/lost_nodes.py --losses {arguments.losses}`."
    )
    lines = page(head, found)
    print("\n".join(lines))
    if arguments.out:
        arguments.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
        record = {
            "head": head,
            "versions": provenance.versions(),
            "found": [asdict(loss) for loss in found],
        }
        arguments.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
