"""Training speed on CPU ranks: tokens per second, start-up, memory, and the share of bare matrix
products.

    python benchmarks/throughput.py                        # titanlite alone
    # and torchtitan 0.2.2, in turn, in an environment of its own
    python benchmarks/throughput.py --versus torchtitan

A Llama of about 29 million parameters (dim 512, 8 layers, 8 heads, sequence 512, batch 4 per rank),
fp32 and bf16, on 1 and 2 gloo ranks with one thread each. Both trainers run as users run them:
torchrun on their own entry point, their own step lines read from the pipe, torchtitan's default
optimizer kernel (fused) in both. They start one after the other and then take turns, step by step:
the workers of the other wait stopped (SIGSTOP). So a machine whose speed drifts moves both alike;
ratios are medians of pairs of steps. Writes Markdown and JSON with --out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from peer import DEFAULT_ENVIRONMENT, ROOT, TITAN_SCRIPT, peer_python, torchrun, write_tokenizer

DIM, LAYERS, HEADS, FFN, SEQ, BATCH = 512, 8, 8, 1536, 512, 4
#: Steps of the warm-up of a run: their times are not counted.
WARM = 2
_STEP = re.compile(r"step:\s*(\d+).*?loss:\s*([\d.]+).*?tps:\s*([\d,]+)")
_ANSI = re.compile(r"\033\[[\d;]*m")


@dataclass(frozen=True)
class Cell:
    dtype: str
    ranks: int
    #: By inductor: the blocks and the loss, in both trainers.
    compiled: bool = False


@dataclass
class Run:
    """One run of one system."""

    system: str
    cell: Cell
    #: Over all ranks.
    tokens_per_second: float
    #: Those after the warm-up.
    step_seconds: list[float]
    seconds_to_step_1: float
    #: Processor time of a step, per rank: what a neighbour on the machine changes least.
    cpu_seconds_per_step: float
    #: Resident memory of the largest rank at its highest, GiB.
    peak_gib: float
    losses: list[float]


#: Comes to a step's end with each turn, and returns the run.
Running = Generator[None, None, Run]


def workers(launcher: int) -> Iterator[int]:
    """Direct children of the launcher that run a trainer."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == launcher:
            yield int(status.parent.name)


def high_water_gib(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    found = re.search(r"VmHWM:\s*(\d+) kB", text)
    return int(found[1]) / 2**20 if found else 0.0


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process so far."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def send(signal_number: signal.Signals, pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal_number)


def measure(
    system: str, cell: Cell, command: list[str], folder: Path, environment: dict[str, str]
) -> Running:
    """Start a trainer; each step line that arrives ends a turn, after which its workers are stopped
    until the next.
    """
    resumed = time.perf_counter()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "NO_COLOR": "1",
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    said: list[str] = []
    seconds: list[float] = []
    processor: list[float] = []
    losses: list[float] = []
    peak = 0.0
    running: list[int] = []
    try:
        for line in process.stdout:
            said.append(line)
            if found := _STEP.search(_ANSI.sub("", line)):
                seconds.append(time.perf_counter() - resumed)
                running = list(workers(process.pid))
                send(signal.SIGSTOP, running)
                processor.append(sum(map(cpu_seconds, running)) / cell.ranks)
                peak = max([peak, *map(high_water_gib, running)])
                losses.append(float(found[2]))
                yield
                resumed = time.perf_counter()
                send(signal.SIGCONT, running)
    except GeneratorExit:  # the other trainer has failed
        send(signal.SIGCONT, running)
        process.terminate()
        raise
    if process.wait() != 0 or len(seconds) <= WARM + 1:
        raise SystemExit(f"{system} {cell} failed:\n{''.join(said[-40:])}")
    steps = seconds[WARM:]
    return Run(
        system=system,
        cell=cell,
        tokens_per_second=BATCH * SEQ * cell.ranks / statistics.median(steps),
        step_seconds=steps,
        seconds_to_step_1=seconds[0],
        # The workers of the last line may be gone already.
        cpu_seconds_per_step=(processor[-2] - processor[WARM - 1]) / (len(processor) - 1 - WARM),
        peak_gib=peak,
        losses=losses,
    )


def take_turns(started: list[Running]) -> list[Run]:
    """Run all to their ends, one step of each at a time."""
    runs: dict[int, Run] = {}
    while len(runs) < len(started):
        for index, running in enumerate(started):
            if index not in runs:
                try:
                    next(running)
                except StopIteration as end:
                    runs[index] = end.value
    return [runs[index] for index in range(len(started))]


def run_titanlite(cell: Cell, steps: int, scratch: Path) -> Running:
    from titanlite.dist.process_settings import TUNABLES

    flags = {
        "job.config_file": "debug_model.toml",
        "job.dump_folder": str(scratch / "titanlite"),
        "model.overrides.dim": DIM,
        "model.overrides.n_layers": LAYERS,
        "model.overrides.n_heads": HEADS,
        "model.overrides.ffn_dim": FFN,
        "training.seq_len": SEQ,
        "training.batch_size": BATCH,
        "training.steps": steps,
        "training.mixed_precision_param": cell.dtype,
        "training.compile": str(cell.compiled).lower(),
        "training.reshard_after_forward": "default",
        "activation_checkpoint.mode": "none",
        "optimizer.lr": 8e-4,
        "optimizer.implementation": "fused",
        "training.warmup_steps": 2,
        "metrics.log_freq": 1,
        "validation.enable": "false",
    }
    arguments = [f"--{key}={value}" for key, value in flags.items()]
    command = torchrun(sys.executable, cell.ranks, str(ROOT / "train.py"), arguments)
    # The variables that our launcher sets; torchtitan's sets none for a CPU.
    return measure(
        "titanlite", cell, command, scratch, {"PYTHONPATH": str(ROOT), "GLIBC_TUNABLES": TUNABLES}
    )


class Torchtitan:
    """torchtitan in an environment of its own, with our text and tokenizer in the forms it
    reads.
    """

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.scratch = scratch
        self.python = peer_python(folder)
        self._write_assets()

    def _write_assets(self) -> None:
        from titanlite.data.text_files import BUNDLED, iter_records
        from titanlite.data.tokenizer import load_tokenizer

        self.assets = write_tokenizer(self.scratch / "assets")
        data = self.scratch / "tests" / "assets" / "c4_test"
        data.mkdir(parents=True)
        with open(data / "data.json", "w") as stream:
            for record in iter_records(BUNDLED["c4_test"]):
                stream.write(json.dumps({"text": record.text, "timestamp": "", "url": ""}) + "\n")
        self.model = {
            "dim": DIM,
            "n_layers": LAYERS,
            "n_heads": HEADS,
            "vocab_size": load_tokenizer().vocab_size,
            "multiple_of": 256,
            "rope_theta": 500000,
        }

    def run(self, cell: Cell, steps: int) -> Running:
        flags = {
            "job.dump_folder": str(self.scratch / "torchtitan"),
            "model.name": "llama3",
            "model.flavor": "bench",
            "model.hf_assets_path": str(self.assets),
            "training.dataset": "c4_test",
            "training.local_batch_size": BATCH,
            "training.seq_len": SEQ,
            "training.steps": steps,
            "training.mixed_precision_param": cell.dtype,
            "lr_scheduler.warmup_steps": 2,
            "optimizer.lr": 8e-4,
            "activation_checkpoint.mode": "none",
            "metrics.log_freq": 1,
        }
        arguments = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
        arguments += ["--compile.enable"] * cell.compiled
        model = json.dumps(self.model)
        command = torchrun(self.python, cell.ranks, TITAN_SCRIPT, arguments)
        return measure("torchtitan", cell, command, self.scratch, {"TITAN_BENCH_MODEL": model})


_BARE = f"""
import sys, time, torch
torch.set_num_threads(1)
dtype, vocab = getattr(torch, sys.argv[1]), int(sys.argv[2])
d, f, m, layers = {DIM}, {FFN}, {BATCH * SEQ}, {LAYERS}
shapes = [(d, d, 4 * layers), (d, f, 2 * layers), (f, d, layers), (d, vocab, 1)]
work = []
for k, n, times in shapes:
    x, w = torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype)
    g = torch.randn(m, n, dtype=dtype)
    work.append((times, x, w, g))
def once():
    for times, x, w, g in work:
        for _ in range(times):
            x @ w.t(); g @ w; g.t() @ x
once()
seconds = []
for _ in range(5):
    start = time.perf_counter(); once(); seconds.append(time.perf_counter() - start)
print(sorted(seconds)[2])
"""


def bare_products(cell: Cell, vocab: int) -> float:
    """Tokens per second of the linear layers' products alone, forward and backward, on all ranks at
    once.
    """
    command = [sys.executable, "-c", _BARE, cell.dtype, str(vocab)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(cell.ranks)
    ]
    return sum(BATCH * SEQ / float(process.communicate()[0]) for process in running)


def floor_seconds(ranks: int) -> float:
    """An empty torchrun whose workers import torch and its FSDP."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(
            "import os, torch, torch.distributed.fsdp, torch.distributed.checkpoint\nos._exit(0)\n"
        )
        script.flush()
        began = time.perf_counter()
        command = torchrun(sys.executable, ranks, script.name, [])
        subprocess.run(
            command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True
        )
        return time.perf_counter() - began


def table(
    runs: list[Run], bare: dict[Cell, list[float]], floors: dict[Cell, list[float]]
) -> list[str]:
    """Markdown: a row per cell and system, medians over repeats, then ratios: of pairs of steps,
    and of runs.
    """
    lines = [
        "| compute | ranks | system | tokens/s | of bare products | CPU s per step and rank | s "
        "to end of step 1 | floor + 1 step, s | peak GiB per rank |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    median = statistics.median
    for cell in bare:
        for system in dict.fromkeys(run.system for run in runs):
            mine = [run for run in runs if run.cell == cell and run.system == system]
            speed = median(run.tokens_per_second for run in mine)
            floor = median(floors[cell]) + BATCH * SEQ * cell.ranks / speed
            lines.append(
                f"| {cell.dtype} | {cell.ranks} | {system} | {speed:,.0f} | "
                f"{speed / median(bare[cell]):.0%} | "
                f"{median(r.cpu_seconds_per_step for r in mine):.2f} | "
                f"{median(r.seconds_to_step_1 for r in mine):.1f} | {floor:.1f} | "
                f"{median(r.peak_gib for r in mine):.2f} |"
            )
    if len({run.system for run in runs}) > 1:
        head = (
            "| compute | ranks | tokens/s, titanlite / torchtitan (min–max) | CPU time | memory | "
            "s to step 1 |"
        )
        lines += ["", head, "|---|---|---|---|---|---|"]
        for cell in bare:
            ours, theirs = (
                [run for run in runs if run.cell == cell and run.system == s]
                for s in ("titanlite", "torchtitan")
            )
            pairs = list(zip(ours, theirs, strict=True))

            def ratio(
                of: Callable[[Run], float], pairs: list[tuple[Run, Run]] = pairs
            ) -> list[float]:
                return [of(a) / of(b) for a, b in pairs]

            speeds = [
                b / a for x, y in pairs for a, b in zip(x.step_seconds, y.step_seconds, strict=True)
            ]  # of pairs of steps
            lines.append(
                f"| {cell.dtype} | {cell.ranks} | {median(speeds):.2f} "
                f"({min(speeds):.2f}–{max(speeds):.2f}) | "
                f"{median(ratio(lambda r: r.cpu_seconds_per_step)):.2f} | "
                f"{median(ratio(lambda r: r.peak_gib)):.2f} | "
                f"{median(ratio(lambda r: r.seconds_to_step_1)):.2f} |"
            )
    return lines


def hardware() -> str:
    import torch

    from titanlite.metrics.throughput import device_name

    cpu = device_name(torch.device("cpu"))
    return (
        f"{os.cpu_count()} cores, {cpu}, torch {torch.__version__}, Python "
        f"{platform.python_version()}"
    )


def has_bf16() -> bool:
    """Whether bf16 products are faster here than loops over elements, which take minutes a step."""
    import torch

    return torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--versus", choices=["torchtitan"], help="also run this trainer, in turn")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument(
        "--steps", type=int, default=10, help=f"steps per run, the first {WARM} not counted"
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument(
        "--dtypes",
        nargs="*",
        help="default: float32, and bfloat16 where the processor has instructions for it",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile both; run it twice, the first fills the caches",
    )
    parser.add_argument(
        "--peer-environment", type=Path, default=DEFAULT_ENVIRONMENT, metavar="FOLDER"
    )
    parser.add_argument("--out", type=Path, help="write FILE.md and FILE.json", metavar="FILE")
    arguments = parser.parse_args()
    if arguments.versus and importlib.util.find_spec("transformers") is None:
        parser.error(
            "--versus needs transformers, which the test environment has: `./run_tests.sh` makes it"
        )

    from titanlite.data.tokenizer import load_tokenizer

    vocab = load_tokenizer().vocab_size
    dtypes = arguments.dtypes or ["float32", *(["bfloat16"] if has_bf16() else [])]
    cells = [Cell(dtype, ranks, arguments.compile) for dtype in dtypes for ranks in arguments.ranks]
    runs: list[Run] = []
    bare: dict[Cell, list[float]] = {cell: [] for cell in cells}
    floors: dict[Cell, list[float]] = {cell: [] for cell in cells}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        peer = Torchtitan(arguments.peer_environment, scratch) if arguments.versus else None
        for repeat in range(arguments.repeats):
            for cell in cells:
                bare[cell].append(bare_products(cell, vocab))
                floors[cell].append(floor_seconds(cell.ranks))
                started = [run_titanlite(cell, arguments.steps, scratch)]
                if peer:
                    started.append(peer.run(cell, arguments.steps))
                latest = take_turns(started[:: -1 if repeat % 2 else 1])
                runs += latest
                shown = ", ".join(f"{r.system} {r.tokens_per_second:,.0f}" for r in latest)
                print(
                    f"repeat {repeat + 1}, {cell.dtype} on {cell.ranks}: {shown} tokens/s",
                    flush=True,
                )
    head = f"{hardware()}; {arguments.repeats} repeats of {arguments.steps} steps, medians."
    lines = [head, "", *table(runs, bare, floors)]
    if "bfloat16" not in dtypes:
        why = (
            "it was not asked for"
            if has_bf16()
            else "this processor has no instructions for it (AVX-512, AMX)"
        )
        lines += ["", f"bf16 was not measured: {why}."]
    print("\n".join(["", *lines]))
    if arguments.out:
        arguments.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
        arguments.out.with_suffix(".json").write_text(
            json.dumps(
                {
                    "hardware": hardware(),
                    "command": sys.argv,
                    "runs": [asdict(run) for run in runs],
                },
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
