"""A run that is killed again and again at random moments, and the question whether anyone could
tell.

    python benchmarks/crash_soak.py --kills 40 --out benchmarks/results/crash_soak

A small Llama trains on real ranks (gloo) and saves often. At a random moment of its start or its
training all ranks, or one of them, get SIGKILL; then the same command is given again. In some
rounds a random bit of a random file of the newest checkpoint is changed in between. Each start must
resume the newest good checkpoint, and at the end every step must have been trained once on the
sequences of a run that nothing happened to, with its losses and its final weights, bit for bit. The
kills are shared out among kinds of saves: in the foreground, in the background, with the copy in
the background too, and to an object store (a server of moto's on loopback, which `--kinds store`
needs). Two more kinds save to local folders too, one of each rank, as if each were a node: with and
without copies on the next node. There a node may be lost with its folder, or a bit of the newest
local save is changed. Exit status 1 when anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.local_tier import SHARED_EVERY, LocalTier, change_a_bit  # noqa: E402
from tests.support.ranks import TIMEOUT_SECONDS, Ranks, check, train  # noqa: E402
from tests.support.train_runs import batches  # noqa: E402
from titanlite.checkpoint.manifest import CheckpointError, read_manifest, step_folder, steps_in  # noqa: E402
from titanlite.checkpoint.store_paths import AnyPath, StorePath, entries, files_in  # noqa: E402
from titanlite.runs.read_jsonl import read_metrics  # noqa: E402


@dataclass(frozen=True)
class Kind:
    """One kind of saves."""

    title: str
    #: checkpoint.async_mode
    mode: str
    #: To an object store.
    store: bool = False
    #: Copies of each part of a local save on other nodes; None: no local saves.
    copies: int | None = None


KINDS = {
    "foreground": Kind("saves in the foreground", "disabled"),
    "background": Kind("saves in the background", "async"),
    "pinned": Kind("copied in the background too", "async_with_pinned_mem"),
    "store": Kind("in the background to an object store", "async", store=True),
    "local": Kind("in the background, local ones too", "async", copies=0),
    "copied": Kind("local ones with a copy on the next node", "async", copies=1),
}
#: The module whose `main` a rank calls: `train.py` that logs the batches of each step.
LOGGED = "tests.support.logged"
#: Seconds after a kill in which a store may still carry out what it was asked before.
_STORE_SETTLES = 1.0
#: Share of the kills that come while the processes start, before the first step.
IN_START = 0.15
#: Share of the kills that hit one rank instead of all at once.
ONE_RANK = 0.4
#: Share of the rounds after which a bit of the newest checkpoint is changed.
DAMAGED = 0.3
#: Share of the rounds with local saves after which a node is lost with its folder.
NODE_LOST = 0.25
FLAGS = [
    "--job.config_file=debug_model.toml",
    "--model.overrides.dim=64",
    "--model.overrides.n_layers=2",
    "--model.overrides.n_heads=4",
    "--training.seq_len=32",
    "--training.batch_size=1",
    "--training.global_batch_size=4",
    "--training.mixed_precision_param=float32",
    "--metrics.log_freq=1",
    "--no-validation.enable",
    "--checkpoint.enable_checkpoint",
    "--checkpoint.keep_latest_k=3",
]


class Wrong(Exception):
    """The run that was killed is not the run that was not."""


@dataclass
class Tally:
    """What was done to the runs of one kind of saves, by its name in `KINDS`, and what it cost."""

    kind: str
    kills: int = 0
    kills_of_one_rank: int = 0
    #: Kills while a save had begun and was not published.
    kills_in_a_save: int = 0
    kills_in_the_start: int = 0
    corruptions: int = 0
    corruptions_found: int = 0
    nodes_lost: int = 0
    starts: int = 0
    runs_finished: int = 0
    #: Steps that were trained again, for each kill after which no damage was done.
    lost: list[int] = field(default_factory=list)
    #: The same where the newest checkpoint was damaged too.
    lost_with_damage: list[int] = field(default_factory=list)
    #: The same where a node was lost.
    lost_with_node: list[int] = field(default_factory=list)
    #: Steps of finished runs that were left out, or recorded twice, or trained on other sequences.
    data_lost: int = 0
    tensors_unequal: int = 0
    #: Seconds until the other ranks had ended by themselves.
    others_gone: list[float] = field(default_factory=list)


@dataclass
class Soak:
    """One kind of saves, killed so many times."""

    tally: Tally
    folder: Path
    #: Where checkpoints go: a bucket's URL, or "" for the runs' own folders.
    bucket: str
    steps: int
    interval: int
    ranks: int
    chance: random.Random
    reference: Path
    #: Seconds of the undisturbed run: until its first step, and of its steps.
    startup: float
    training: float
    _lives: int = 0
    #: Damaged steps that a start has told of, and how many folders of that step were set aside
    #: before; it will be one more when the step is saved again.
    _reported: dict[int, int] = field(default_factory=dict)
    #: What befell local saves since the latest start that got through, if anything.
    _node_lost: bool = False
    _changed_part: Path | None = None

    def __post_init__(self) -> None:
        copies = KINDS[self.tally.kind].copies
        self._tier: LocalTier | None = None
        if copies is not None:
            self._tier = LocalTier(self.interval, self.ranks, copies, self.chance)

    def go(self, kills: int) -> None:
        while self.tally.kills < kills:
            self._run(kills)

    def _run(self, kills: int) -> None:
        """One run from its first start to its end, killed until there were enough kills or it got
        through.
        """
        self._lives += 1
        run = self.folder / f"{self.tally.kind}-{self._lives}"
        run.mkdir()
        self._reported.clear()
        self._node_lost = False
        self._changed_part = None
        damaged: set[int] = set()
        last_seen: int | None = None
        while True:
            expected = self._newest_good(run, damaged)
            last_seen = self._start(run, expected, last_seen, kills, damaged)
            if last_seen is None:
                break
            self._trouble(run, damaged)
        self._compare(run)
        self.tally.runs_finished += 1
        shutil.rmtree(run)

    def _start(
        self, run: Path, expected: int, last: int | None, kills: int, damaged: set[int]
    ) -> int | None:
        """One start, killed if there are kills left; the last step it recorded, None when it came
        to its end.
        """
        tally = self.tally
        tally.starts += 1
        with Ranks(self._flags(run), self.ranks, run / "console", main=LOGGED) as ranks:
            if tally.kills < kills and self.chance.random() < IN_START:
                time.sleep(self.chance.uniform(0, self.startup))
                began = "resumed from step" in ranks.output() or "a fresh run" in ranks.output()
            else:
                said = until(ranks, r"resumed from step (\d+)|a fresh run")
                began = True
                resumed = int(said.group(1) or 0)
                if resumed != expected:
                    raise Wrong(
                        f"resumed from step {resumed}, and the newest good checkpoint is of "
                        f"{expected}"
                    )
                if last is not None:
                    self._count_lost(last - resumed, damaged)
                self._count_found(run, ranks.output(), damaged)
                if tally.kills < kills:
                    time.sleep(self.chance.uniform(0, self.training / 3))
            if tally.kills >= kills or all(
                process.exitcode is not None for process in ranks.processes
            ):
                codes = ranks.wait()
                check(
                    codes == [0] * self.ranks,
                    f"a start without a kill has exit codes {codes}",
                    ranks.output(),
                )
                return None
            self._kill(run, ranks, began)
        return self._last_step(run)

    def _count_lost(self, steps: int, damaged: set[int]) -> None:
        """Note how many steps are trained again, by what had happened."""
        tally = self.tally
        if self._node_lost:
            tally.lost_with_node.append(steps)
        elif damaged or self._changed_part:
            tally.lost_with_damage.append(steps)
        else:
            tally.lost.append(steps)

    def _count_found(self, run: Path, said: str, damaged: set[int]) -> None:
        """Note which damage the starts since then have told of."""
        passed = {int(step) for step in re.findall(r"passed over: \S+/step-(\d+)\b", said)}
        self.tally.corruptions_found += len(passed & damaged)
        self._reported.update({step: self._set_aside(run, step) for step in passed & damaged})
        damaged -= passed
        if self._changed_part is not None:
            told = f"{self._changed_part} has changed since it was written"
            # A start that was killed may have told it.
            self.tally.corruptions_found += told in (run / "console").read_text()
        self._changed_part = None
        self._node_lost = False

    def _kill(self, run: Path, ranks: Ranks, began: bool) -> None:
        tally, one = self.tally, self.chance.random() < ONE_RANK
        victim = self.chance.randrange(self.ranks)
        ranks.send(signal.SIGKILL, victim if one else None)
        tally.kills += 1
        tally.kills_of_one_rank += one
        tally.kills_in_the_start += not began
        if one and began:
            killed = time.monotonic()
            ranks.wait(60)
            tally.others_gone.append(time.monotonic() - killed)
        ranks.kill()
        if self.bucket:
            time.sleep(_STORE_SETTLES)
        begun = any(name.startswith(".partial-") for name in self._there(run))
        if self._tier is not None:
            begun = begun or self._tier.has_begun(run)
        tally.kills_in_a_save += begun
        print(f"{tally.kind}: kill {tally.kills}", file=sys.stderr, flush=True)

    def _root(self, run: Path) -> AnyPath:
        return StorePath(f"{self.bucket}/{run.name}") if self.bucket else run / "checkpoint"

    def _there(self, run: Path) -> list[str]:
        """Names of what lies where its checkpoints are."""
        return list(entries(self._root(run)))

    def _flags(self, run: Path) -> list[str]:
        mode = KINDS[self.tally.kind].mode
        where = [f"--checkpoint.folder={self._root(run)}"] if self.bucket else []
        interval = self.interval
        if self._tier is not None:
            interval *= SHARED_EVERY
            where = self._tier.flags(run)
        return [
            *run_flags(run, self.steps, interval),
            f"--checkpoint.async_mode={mode}",
            *where,
        ]

    def _set_aside(self, run: Path, step: int) -> int:
        return sum(name.startswith(f"step-{step}.invalid-") for name in self._there(run))

    def _good(self, run: Path, damaged: set[int]) -> list[int]:
        """Steps of published checkpoints that nobody has damaged."""
        good = []
        root = self._root(run)
        for step in steps_in(root):
            if step in self._reported and self._set_aside(run, step) > self._reported[step]:
                del self._reported[step]  # it was saved again
            try:
                read_manifest(step_folder(root, step))
            except CheckpointError:
                continue
            if step not in damaged and step not in self._reported:
                good.append(step)
        return good

    def _newest_good(self, run: Path, damaged: set[int]) -> int:
        newest = max(self._good(run, damaged), default=0)
        if self._tier is not None:
            newest = max(newest, self._tier.newest(run))
        return newest

    def _trouble(self, run: Path, damaged: set[int]) -> None:
        """Let more happen between a kill and the next start, by chance."""
        if self._changed_part is not None:
            return
        if self._tier is not None and self.chance.random() < NODE_LOST:
            self._tier.lose_a_node(run)
            self.tally.nodes_lost += 1
            self._node_lost = True
        elif self.chance.random() < DAMAGED:
            if self._tier is None:
                self._damage(run, damaged)
            else:
                self._damage_part(run, self._tier)

    def _damage_part(self, run: Path, tier: LocalTier) -> None:
        """Change one bit of the newest local save, if the next start is to take that."""
        step = tier.newest(run)
        if step > max(self._good(run, set()), default=0):
            self._changed_part = tier.damage(run, step)
            self.tally.corruptions += 1

    def _damage(self, run: Path, damaged: set[int]) -> None:
        """Change one bit of the newest checkpoint, if there is another good one."""
        good = self._good(run, damaged)
        if len(good) < 2:
            return
        folder = step_folder(self._root(run), good[-1])
        file = folder / self.chance.choice(
            sorted(name for name, stat in files_in(folder).items() if stat.st_size)
        )
        change_a_bit(file, self.chance)
        damaged.add(good[-1])
        self.tally.corruptions += 1

    def _last_step(self, run: Path) -> int:
        try:
            return max((row["step"] for row in read_metrics(run / "metrics.jsonl")), default=0)
        except FileNotFoundError:
            return 0

    def _compare(self, run: Path) -> None:
        """Count what is not as in the run that nothing happened to."""
        from titanlite.cli.hub.compare_checkpoints import Contents, compare

        expected, found = records(self.reference), records(run)
        steps = range(1, self.steps + 1)
        unlike = {step for step in steps if found.get(step) != expected[step]}
        ours, theirs = batches(run, self.ranks), batches(self.reference, self.ranks)
        unlike |= {
            step
            for step in steps
            if any(a.get(step) != b[step] for a, b in zip(ours, theirs, strict=True))
        }
        self.tally.data_lost += len(unlike)
        roots = self._root(run), self.reference / "checkpoint"
        sides = [Contents(step_folder(root, self.steps)) for root in roots]
        self.tally.tensors_unequal += sum(
            1 for one in compare(*sides) if one.elements or one.left != one.right
        )


def until(ranks: Ranks, pattern: str) -> re.Match[str]:
    """Wait for a pattern in the output.

    Raises RanksError when all ranks end without it, or after the timeout.
    """
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        ended = all(process.exitcode is not None for process in ranks.processes)
        if found := re.search(pattern, ranks.output()):
            return found
        check(
            not ended and time.monotonic() < deadline,
            f"no {pattern!r} in the output",
            ranks.output(),
        )
        time.sleep(0.005)


def run_flags(folder: Path, steps: int, interval: int) -> list[str]:
    length = [
        f"--training.steps={steps}",
        f"--lr_scheduler.total_steps={steps}",
        f"--checkpoint.interval={interval}",
    ]
    return [
        *FLAGS,
        *length,
        f"--data.token_cache={folder.parent / 'tokens'}",
        f"--job.dump_folder={folder}",
    ]


def records(run: Path) -> dict[int, list[tuple[Any, ...]]]:
    """Step -> its rows in metrics.jsonl: one of each, if nothing is wrong."""
    found: dict[int, list[tuple[Any, ...]]] = {}
    for row in read_metrics(run / "metrics.jsonl"):
        figures = tuple(row[key] for key in ("loss", "grad_norm", "lr", "tokens_seen"))
        found.setdefault(row["step"], []).append(figures)
    return found


def table(tallies: list[Tally], interval: int) -> list[str]:
    def worst(values: list[int]) -> str:
        return f"{max(values)} (mean {sum(values) / len(values):.1f})" if values else "–"

    lines = [
        "| | " + " | ".join(KINDS[t.kind].title for t in tallies) + " |",
        "|---" * (len(tallies) + 1) + "|",
    ]
    rows = {
        "kills": [str(t.kills) for t in tallies],
        "… of one rank, of all": [
            f"{t.kills_of_one_rank}, {t.kills - t.kills_of_one_rank}" for t in tallies
        ],
        "… in the start, in a save": [
            f"{t.kills_in_the_start}, {t.kills_in_a_save}" for t in tallies
        ],
        "bits flipped in the newest checkpoint": [str(t.corruptions) for t in tallies],
        "… found by the next start": [str(t.corruptions_found) for t in tallies],
        "nodes lost with their local saves": [_of_tier(t, str(t.nodes_lost)) for t in tallies],
        f"steps trained again after a kill, at most (saved every {interval})": [
            worst(t.lost) for t in tallies
        ],
        "… after a kill and a flipped bit": [worst(t.lost_with_damage) for t in tallies],
        f"… after a lost node (shared saves every {interval * SHARED_EVERY})": [
            _of_tier(t, worst(t.lost_with_node)) for t in tallies
        ],
        "seconds until the other ranks had ended, at most": [
            f"{max(t.others_gone, default=0):.1f}" for t in tallies
        ],
        "runs that came to their end": [str(t.runs_finished) for t in tallies],
        "steps lost, doubled or trained on other sequences": [str(t.data_lost) for t in tallies],
        "final tensors that differ from an undisturbed run": [
            str(t.tensors_unequal) for t in tallies
        ],
    }
    return [*lines, *(f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows.items())]


def _of_tier(tally: Tally, cell: str) -> str:
    """A cell that only kinds with local saves have."""
    return "–" if KINDS[tally.kind].copies is None else cell


def wrong(tally: Tally, interval: int) -> list[str]:
    """What should not be, in words."""
    kind = KINDS[tally.kind]
    most = interval * (1 if kind.mode == "disabled" else 2)
    most_with_node = most if kind.copies else most * SHARED_EVERY
    found = []
    if max(tally.lost, default=0) > most:
        found.append(f"{max(tally.lost)} steps lost by one kill")
    if max(tally.lost_with_node, default=0) > most_with_node:
        found.append(f"{max(tally.lost_with_node)} steps lost with a node")
    if tally.corruptions_found != tally.corruptions:
        found.append(f"{tally.corruptions - tally.corruptions_found} corruptions not found")
    if tally.data_lost or tally.tensors_unequal:
        found.append(f"{tally.data_lost} steps and {tally.tensors_unequal} tensors differ")
    return [f"{kind.title}: {line}" for line in found]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--kills", type=int, default=40, help="of all kinds of saves together")
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of saves")
    add("--ranks", type=int, default=2)
    add("--steps", type=int, default=200, help="of each run")
    add("--interval", type=int, default=5, help="steps between saves; between local ones, if any")
    add("--seed", type=int, default=0)
    add("--out", type=Path, metavar="FILE", help="write FILE.md and FILE.json")
    arguments = parser.parse_args()
    began = time.monotonic()
    chance = random.Random(arguments.seed)
    tallies = [Tally(name) for name in arguments.kinds]
    with (
        tempfile.TemporaryDirectory(prefix="crash-soak-") as folder,
        contextlib.ExitStack() as stack,
    ):
        buckets = {
            name: stack.enter_context(bucket()) for name in arguments.kinds if KINDS[name].store
        }
        reference = Path(folder) / "undisturbed"
        reference.mkdir()
        flags = run_flags(reference, arguments.steps, arguments.interval)
        train(
            run_flags(Path(folder) / "warm", 1, 1), 1, Path(folder) / "warm.log"
        )  # imports torch, tokenizes the text
        started = time.monotonic()
        with Ranks(flags, arguments.ranks, reference / "console", main=LOGGED) as ranks:
            until(ranks, "a fresh run")
            startup = time.monotonic() - started
            codes = ranks.wait()
            training = time.monotonic() - started - startup
            check(
                codes == [0] * arguments.ranks,
                f"the undisturbed run failed: {codes}",
                ranks.output(),
            )
        for i, tally in enumerate(tallies):
            share = arguments.kills // len(tallies) + (i < arguments.kills % len(tallies))
            shape = (arguments.steps, arguments.interval, arguments.ranks)
            url = buckets.get(tally.kind, "")
            Soak(tally, Path(folder), url, *shape, chance, reference, startup, training).go(share)
    seconds = time.monotonic() - began
    return report(arguments, tallies, seconds)


@contextlib.contextmanager
def bucket() -> Iterator[str]:
    """The URL of an empty bucket of a server that lives as long as the block; to be entered before
    any rank starts.
    """
    from tests.support import s3

    with s3.serving() as port:
        made = s3.new_bucket(port)
        os.environ.update(made.environment)
        yield f"s3://{made.name}"


def report(arguments: argparse.Namespace, tallies: list[Tally], seconds: float) -> int:
    import torch

    from titanlite.metrics.throughput import device_name
    from titanlite.runs import provenance

    device = device_name(torch.device("cpu"))
    head = (
        f"{device}, {os.cpu_count()} cores, Python {platform.python_version()}, torch "
        f"{torch.__version__}; {arguments.ranks} ranks, runs of {arguments.steps} steps, seed "
        f"{arguments.seed}; {seconds:.0f} s for {sum(t.starts for t in tallies)} starts, load "
        f"{os.getloadavg()[2]:.0f}."
    )
    problems = [line for tally in tallies for line in wrong(tally, arguments.interval)]
    verdict = (
        f"**WRONG:** {'; '.join(problems)}" if problems else "Nothing was lost, nothing came twice."
    )
    lines = [head, "", *table(tallies, arguments.interval), "", verdict]
    print("\n".join(lines))
    if arguments.out:
        arguments.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
        record = {
            **{
                "device": device,
                "cores": os.cpu_count(),
                "versions": provenance.versions(),
                "seconds": seconds,
            },
            "arguments": {k: v for k, v in vars(arguments).items() if k != "out"},
            **{"tallies": [asdict(tally) for tally in tallies], "wrong": problems},
        }
        arguments.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
