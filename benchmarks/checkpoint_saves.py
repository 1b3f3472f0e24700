"""What saving and loading a checkpoint of about 1 GB costs: how long the loop stands, how fast
bytes go, what memory.

    python benchmarks/checkpoint_saves.py --folder /where/the/disk/is --out
        benchmarks/results/checkpoint_saves

A Llama of 89 million float32 parameters with AdamW's moments is trained, saved and loaded by
titanlite's own pieces, on one process and on two (gloo), a thread each. The modes take turns, so
that a disk whose speed drifts moves them alike; medians are shown. Hashing is timed within the
saves: a file's bytes are hashed before they are written; and so is reading back. That and loads
read what the system still has in memory: they measure titanlite, not the disk. "Blocked" is the
time that `Checkpointer.save` and `await_copy` keep the loop; steps that are taken while a save is
written are compared with steps alone.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODES = ("disabled", "async", "async_with_pinned_mem")
#: For the page; docs/log.md has the whole measurement.
WHY = """\
**Why a thread writes.** A separate process was tried on two cores, in turn with the thread. Steps
meanwhile took so many times as long, thread and process: 1.63 and 1.32 on one rank, 1.81 and 1.74
on two, 2.02 and 2.07 on four. Its saves took 1.4 times as long, and 0.22 GB more memory a rank. A
lower priority of the thread (niceness + 10, one rank) gave 1.37 instead of 1.64, but saves took 2.5
times as long. So steps lost more in all: 0.93 of the time of a save instead of 0.64. The work is
the same, and waits for the same cores."""
SHAPE = {"dim": 768, "n_layers": 9, "n_heads": 12, "vocab_size": 16384, "max_seq_len": 128}
TOKENS = (1, 32)


class TimedHash:
    """A hash, and how long it takes: what writes waits for it."""

    #: Seconds of all hashes of this process since it was last set.
    seconds = 0.0

    def __init__(self, real: Any) -> None:
        self._real = real

    def update(self, data: bytes | memoryview, /) -> None:
        began = time.perf_counter()
        self._real.update(data)
        TimedHash.seconds += time.perf_counter() - began

    def hexdigest(self) -> str:
        return self._real.hexdigest()


@contextmanager
def timed_hashes() -> Any:
    from titanlite.checkpoint import dcp_files

    real = dcp_files.new_hash
    dcp_files.new_hash = lambda algorithm: TimedHash(real(algorithm))  # type: ignore[assignment]
    TimedHash.seconds = 0.0
    try:
        yield
    finally:
        dcp_files.new_hash = real


@contextmanager
def timed_reading_back() -> Any:
    """Gives a list that comes to hold the seconds of each comparison."""
    from titanlite.checkpoint import dcp_files

    real, found = dcp_files.verify_files, []

    def timed(*arguments: Any, **more: Any) -> Any:
        began = time.perf_counter()
        problem = real(*arguments, **more)
        found.append(time.perf_counter() - began)
        return problem

    dcp_files.verify_files = timed
    try:
        yield found
    finally:
        dcp_files.verify_files = real


def cell(folder: Path, repeats: int, dim: int) -> None:
    """What each rank does; rank 0 prints a JSON object with what was measured."""
    sys.path.insert(0, str(ROOT))
    import torch
    import torch.distributed as dist

    from titanlite.checkpoint.manager import Checkpointer
    from titanlite.config.model_sections import Optimizer
    from titanlite.config.sections import Checkpoint
    from titanlite.data.loader import Batch, to_device
    from titanlite.dist.dist_env import DistEnv
    from titanlite.models import LlamaArgs
    from titanlite.optim.guard import FiniteGuard
    from titanlite.optim.optimizer import build_optimizer
    from titanlite.parallel.parallelize import ModelBuilder
    from titanlite.resolve.load import load_config
    from titanlite.step import PlainRunner, TrainStep, do_nothing

    with DistEnv.open() as world:
        mesh = world.build_mesh(dp_shard=world.size)
        args = LlamaArgs(**{**SHAPE, "dim": dim})
        flags = ["--training.mixed_precision_param=float32"]
        run = load_config("debug_model.toml", world.size, flags)
        model = ModelBuilder(run, args, mesh, world.device).build(seed=0)
        optimizer = build_optimizer(dict(model.named_parameters()), Optimizer(), world.device)
        train_step = TrainStep(
            model, optimizer, PlainRunner(model), FiniteGuard(world.device), max_norm=1.0
        )
        window = torch.randint(
            0, args.n_vocab, (TOKENS[0], TOKENS[1] + 1), generator=torch.Generator().manual_seed(0)
        )
        data = to_device(
            [Batch(window[:, :-1].contiguous(), window[:, 1:].contiguous())], world.device
        )
        step = 0

        def train(before_update: Any = None) -> float:
            nonlocal step
            step += 1
            began = time.perf_counter()
            train_step.before_update = before_update or do_nothing
            train_step(data, step, lr=1e-5).loss.item()
            dist.barrier()
            return time.perf_counter() - began

        def checkpointer(mode: str, verify: str = "hash") -> Any:
            config = Checkpoint(
                enable_checkpoint=True, folder=str(folder / mode), async_mode=mode, verify=verify
            )
            return Checkpointer(config, world, {"model": "benchmark"})

        for _ in range(3):
            train()
        savers = {mode: checkpointer(mode) for mode in MODES}
        found: dict[str, list[dict[str, float]]] = {}
        # One save of each kind is not counted: memory for copies is taken, the disk makes room.
        for repeat in range(-1, repeats):
            for mode in MODES:
                train()
                alone = statistics.median(train() for _ in range(2))
                figures = _save(savers[mode], train, world, model, optimizer, step)
                published = Path(savers[mode].root) / f"step-{step - int(figures.pop('steps'))}"
                size = sum(path.stat().st_size for path in published.iterdir())
                figures |= {"step_alone": alone, "bytes": size}
                dist.barrier()
                if world.rank == 0:
                    shutil.rmtree(published)
                    print(f"{mode}: {figures}", file=sys.stderr, flush=True)
                dist.barrier()
                if repeat >= 0:
                    found.setdefault(mode, []).append(figures)
        # At the end: a load gives the optimizer new tensors, for which the next background save
        # takes new memory.
        savers["disabled"].save(step, model, optimizer, {})
        for repeat in range(-1, repeats):
            for verify in ("hash", "size"):
                seconds = _load(checkpointer("disabled", verify), world, model, optimizer)
                if repeat >= 0:
                    found["disabled"][repeat][f"load_{verify}"] = seconds
        for saver in savers.values():
            saver.close()
        if world.rank == 0:
            print(json.dumps(found), flush=True)


def _save(
    saver: Any, train: Any, world: Any, model: Any, optimizer: Any, step: int
) -> dict[str, float]:
    """One save, with steps while it is written."""
    import torch
    import torch.distributed as dist

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    # a run saves every few minutes: the disk has long written what the save before left it
    os.sync()
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS:")
    dist.barrier()
    blocked = 0.0

    def await_copy() -> None:
        nonlocal blocked
        waiting = time.perf_counter()
        saver.await_copy()
        blocked += time.perf_counter() - waiting

    with timed_hashes(), timed_reading_back() as read_back:
        began = time.perf_counter()
        saver.save(step, model, optimizer, {})
        blocked += time.perf_counter() - began
        meanwhile = []
        while _any(saver.in_flight):
            meanwhile.append(train(await_copy))
        saver.wait()
        ended = time.perf_counter() - began
    outcome = saver.poll()
    written = outcome.seconds if outcome else ended
    memory = torch.tensor([_resident("VmHWM:"), _resident("VmHWM:") - before], dtype=torch.float64)
    dist.all_reduce(memory)
    hashing = torch.tensor(TimedHash.seconds)
    dist.all_reduce(hashing, dist.ReduceOp.MAX)
    figures = {
        "blocked": blocked,
        "written": written,
        "peak": memory[0].item(),
        "more": memory[1].item(),
    }
    figures["hashing"], figures["read_back"] = hashing.item(), sum(read_back)
    if meanwhile:
        figures["step_meanwhile"] = statistics.median(meanwhile)
    return {**figures, "steps": float(len(meanwhile))}


def _load(loader: Any, world: Any, model: Any, optimizer: Any) -> float:
    import torch.distributed as dist

    dist.barrier()
    began = time.perf_counter()
    loader.load(model, optimizer)
    dist.barrier()
    seconds = time.perf_counter() - began
    loader.close()
    return seconds


def _any(mine: bool) -> bool:
    """Whether it is so on any rank: all must take as many steps."""
    import torch
    import torch.distributed as dist

    flag = torch.tensor(int(mine))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def _resident(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {key} in /proc/self/status")


def measure(ranks: int, folder: Path, repeats: int, dim: int) -> dict[str, list[dict[str, float]]]:
    """Start the ranks and wait for what they found."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
    where = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    cell = ["--cell", json.dumps({"folder": str(folder), "repeats": repeats, "dim": dim})]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, *where, __file__, *cell], stdout=subprocess.PIPE, text=True, env=environment
    )
    if done.returncode:
        raise SystemExit(f"{ranks} ranks failed (see above)")
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def median(rows: list[dict[str, float]], key: str) -> float:
    return statistics.median(row[key] for row in rows if key in row)


def share(rows: list[dict[str, float]], of: str) -> float:
    """Of the seconds until a checkpoint was there."""
    return statistics.median(row[of] / row["written"] for row in rows)


def table(ranks: int, found: dict[str, list[dict[str, float]]]) -> list[str]:
    lines = [
        f"### {ranks} process{'es' if ranks > 1 else ''}",
        "",
        "| async_mode | loop blocked, s | of a foreground save | written after, s | GB/s | of "
        "that hashing | "
        "of that reading back | memory at most, GB | more than before, GB | steps meanwhile take |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    base = found["disabled"]
    for mode in MODES:
        rows = found[mode]
        gigabytes = median(rows, "bytes") / 1e9
        longer = (
            (
                f"{statistics.median(r['step_meanwhile'] / r['step_alone'] for r in rows if 'step_meanwhile' in r):.2f} "  # noqa: E501
                "x"
            )
            if any("step_meanwhile" in r for r in rows)
            else "–"
        )
        lines.append(
            f"| {mode} | {median(rows, 'blocked'):.2f} | "
            f"{median(rows, 'blocked') / median(base, 'blocked'):.1%} | "
            f"{median(rows, 'written'):.2f} | {gigabytes / median(rows, 'written'):.2f} | "
            f"{share(rows, 'hashing'):.1%} | {share(rows, 'read_back'):.1%} | "
            f"{median(rows, 'peak') / 1e9:.2f} | {median(rows, 'more') / 1e9:.2f} | {longer} |"
        )
    gigabytes = median(base, "bytes") / 1e9
    loads = {verify: median(base, f"load_{verify}") for verify in ("hash", "size")}
    lines += [
        "",
        f"A load that verifies every byte: {loads['hash']:.2f} s, {gigabytes / loads['hash']:.2f} "
        "GB/s; with "
        f'verify = "size": {loads["size"]:.2f} s, {gigabytes / loads["size"]:.2f} GB/s.',
    ]
    return lines


def verdict(all_found: dict[int, dict[str, list[dict[str, float]]]]) -> list[str]:
    lines = []
    for ranks, found in all_found.items():
        base = median(found["disabled"], "blocked")
        shares = {
            f"{mode} blocks, of a foreground save": median(found[mode], "blocked") / base
            for mode in MODES[1:]
        }
        for name, value in {
            **shares,
            "hashing, of a foreground save": share(found["disabled"], "hashing"),
        }.items():
            lines.append(
                f"- {ranks} rank(s): {name}: {value:.1%} "
                f"({'under' if value < 0.1 else 'NOT under'} 10 %)"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, help="where to save (default: the folder of temporary files)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="counted saves of each kind")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument(
        "--dim", type=int, default=SHAPE["dim"], help="of the model: another size of checkpoint"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write FILE.md and FILE.json")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cell:
        settings = json.loads(arguments.cell)
        cell(Path(settings["folder"]), settings["repeats"], settings["dim"])
        return
    found = {}
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory(
            prefix="checkpoint-saves-", dir=arguments.folder
        ) as folder:
            kind = subprocess.run(
                ["stat", "-f", "-c", "%T", folder], capture_output=True, text=True
            ).stdout.strip()
            found[ranks] = measure(ranks, Path(folder), arguments.repeats, arguments.dim)
    import torch

    sys.path.insert(0, str(ROOT))
    from titanlite.metrics.throughput import device_name
    from titanlite.runs import provenance

    gigabytes = median(next(iter(found.values()))["disabled"], "bytes") / 1e9
    head = (
        f"{device_name(torch.device('cpu'))}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, torch {torch.__version__}; {gigabytes:.2f} GB per "
        f"checkpoint, file system {kind}; medians of {arguments.repeats} saves of each kind in "
        "turn, memory summed over ranks."
    )
    lines = [head]
    for ranks, figures in found.items():
        lines += ["", *table(ranks, figures)]
    lines += ["", *verdict(found), "", WHY]
    print("\n".join(lines))
    if arguments.out:
        arguments.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
        record = {
            "head": head,
            "versions": provenance.versions(),
            "shape": {**SHAPE, "dim": arguments.dim},
            "found": found,
        }
        arguments.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
