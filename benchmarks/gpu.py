"""What one GPU shows: its tests, the ladder on Llama's published shapes, and the modes of activation checkpointing.

    benchmarks/gpu.sh                                  # all pieces, one after the other
    benchmarks/gpu.sh --list                           # the pieces
    benchmarks/gpu.sh tests ladder-8b --budget 540     # some, for at most nine minutes

Each piece writes FOLDER/NAME.json when it is done and is not run again then, so the same command goes on where it was
broken off; a ladder goes on with the runs it lacks. What is done is printed as tables and written to FOLDER/gpu.md.
Pieces are started anew with --again, and when the sources have changed; one that failed is tried again in any case.

A piece takes the largest number of blocks of its model that fits: by the bytes of weights, gradients and optimizer
state, then two fewer as long as a step runs out of memory. What does not run is in the table with its reason.
Exit status: 0 when all that was asked for is done or not built yet, else 1.
--toy runs every piece on tiny shapes, on a CPU too: that shows that the pieces work, and measures nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "benchmarks" / "gpu"
sys.path.insert(0, str(ROOT))
GIB = 2**30
#: Bytes of a parameter's weight, gradient and two Adam moments in fp32.
FP32_STATE = 16
#: Left for activations, gathered weights, logits and the allocator, of a GPU's memory.
SPARE = 16 * GIB
MFU_FORMULA = "6 (N - embedding) + 12 layers heads head_dim seq_len FLOPs per token, causality not discounted"


class NotMeasured(Exception):
    """Why a piece has no figures here."""


class Failed(NotMeasured):
    """What went wrong in a piece that should have figures."""


class OutOfTime(Exception):
    """The budget is spent; what the piece has so far stays."""


@dataclass
class Bench:
    """The settings of one call, and its clock."""

    folder: Path
    toy: bool
    deadline: float
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self.deadline - time.monotonic()

    def call(self, command: Sequence[str], log: Path, stop: signal.Signals = signal.SIGINT) -> int:
        """Run a command with its output in `log`; its exit code. Raises OutOfTime when the budget ends it."""
        if self.left < 5:
            raise OutOfTime
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "w") as stream:
            process = subprocess.Popen(command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT)
            try:
                return process.wait(None if self.deadline == float("inf") else max(self.left, 1))
            except subprocess.TimeoutExpired:
                process.send_signal(stop)
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                raise OutOfTime from None
            except BaseException:
                process.kill()
                process.wait()
                raise


@dataclass(frozen=True)
class Setting:
    """A ladder: a config of benchmarks/gpu, and the levels that are left out."""

    config: str
    steps: int
    warmup: int
    repeats: int
    skip: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    state_bytes: int = FP32_STATE


SETTINGS = {
    "ladder-8b": Setting("llama3_8b.toml", steps=25, warmup=8, repeats=2),
    "rival-7b": Setting("llama2_7b.toml", steps=15, warmup=5, repeats=2, skip=("float8",)),
    # Losses of the compiled bf16 run and of float8 with everything, read every fifth step.
    "loss-8b": Setting(
        "llama3_8b.toml", steps=500, warmup=20, repeats=1, skip=("default", "float8"), flags=("--metrics.log_freq=5",)
    ),
    "kahan-8b": Setting("llama3_8b_kahan.toml", steps=15, warmup=5, repeats=2, state_bytes=10),
}
TOY_FLAGS = (
    *("--training.seq_len=32", "--training.batch_size=2", "--compile.backend=aot_eager", "--model.vocab_size=4096"),
    *("--model.overrides.dim=64", "--model.overrides.n_heads=4", "--model.overrides.n_kv_heads=4"),
)


def machine(bench: Bench) -> list[dict[str, Any]]:
    """What this device reaches: large products, and copies within its memory."""
    import torch

    from titanlite.observe.flops import device_name, peak_flops

    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    size, copied = (256, 2**20) if bench.toy else (8192, 4 * GIB)

    def median_seconds(work: Callable[[], Any], times: int = 10) -> float:
        found = []
        for turn in range(times + 3):
            if cuda:
                torch.cuda.synchronize()
            began = time.perf_counter()
            work()
            if cuda:
                torch.cuda.synchronize()
            if turn >= 3:
                found.append(time.perf_counter() - began)
        return sorted(found)[len(found) // 2]

    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(copied // 4, device=device)
    target = torch.empty_like(source)
    product = 2 * size**3 / median_seconds(lambda: a @ b)
    copy = 2 * source.nbytes / median_seconds(lambda: target.copy_(source))
    peak = peak_flops(device_name(device))
    return [
        {"what": f"bf16 product of {size} x {size}", "value": product / 1e12, "unit": "TFLOP/s"},
        {"what": "assumed peak of bf16", "value": None if peak is None else peak / 1e12, "unit": "TFLOP/s"},
        {"what": "copy within the device's memory, read and written", "value": copy / 1e9, "unit": "GB/s"},
    ]


def tests(bench: Bench) -> list[dict[str, Any]]:
    """The GPU tests, file by file; those that need no GPU are run elsewhere."""
    found = []
    files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    files += [ROOT / "tests/parallel/test_activation_checkpoint.py", ROOT / "tests/observe/test_meter.py"]
    for file in files:
        name = str(file.relative_to(ROOT))
        done = bench.folder / "parts" / f"{name.replace('/', '.')}.json"
        if not done.exists() or json.loads(done.read_text())["code"]:
            select = [] if file.parent.name == "gpu" else ["-k", "gpu or cuda or device"]
            log = bench.folder / "logs" / f"{name.replace('/', '.')}.log"
            code = bench.call([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name, *select], log)
            lines = log.read_text().splitlines()
            failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
            done.parent.mkdir(parents=True, exist_ok=True)
            result = {"what": name, "value": lines[-1].strip("= ") if lines else "", "code": code, "failed": failed}
            done.write_text(json.dumps(result))
        found.append(json.loads(done.read_text()))
    return found


def modes(bench: Bench) -> list[dict[str, Any]]:
    """Activation checkpointing, eager and compiled, side by side."""
    out = bench.folder / "activation_modes"
    command = [sys.executable, "benchmarks/activation_modes.py", "--out", str(out)]
    command += ["--compile", "both"] if not bench.toy else ["--steps", "1"]
    code = bench.call(command, bench.folder / "logs" / "modes.log")
    if code:
        raise Failed(f"exit {code}: {_last_line(bench.folder / 'logs' / 'modes.log')}")
    return [{"what": "table", "value": "activation_modes.md"}]


def climb(bench: Bench, name: str) -> list[dict[str, Any]]:
    """One ladder, with as many blocks as fit."""
    setting = SETTINGS[name]
    flags = [*setting.flags, *(TOY_FLAGS if bench.toy else ())]
    _refuse(setting, flags)
    layers = _fitting(bench, name, setting, flags)
    steps, warmup = (4, 2) if bench.toy else (setting.steps, setting.warmup)
    out = bench.folder / "ladders" / name
    command = [
        *(
            sys.executable,
            "-m",
            "titanlite.cli",
            "ladder",
            str(CONFIGS / setting.config),
            "--ranks",
            "1",
            "--out",
            str(out),
        ),
        *("--steps", str(steps), "--warmup", str(warmup), "--repeats", str(1 if bench.toy else setting.repeats)),
        *(word for level in setting.skip for word in ("--skip", level)),
        *(f"--model.overrides.n_layers={layers}", *flags),
    ]
    log = bench.folder / "logs" / f"{name}.log"
    code = bench.call(command, log)
    if code:
        raise Failed(f"exit {code}: {_last_line(log)}")
    return _ladder_rows(setting, flags, layers, json.loads((out / "ladder.json").read_text()), " ".join(command[1:]))


def _ladder_rows(
    setting: Setting, flags: Sequence[str], layers: int, ladder: dict[str, Any], command: str
) -> list[dict[str, Any]]:
    from titanlite.models.shapes import count_parameters, flops_per_token
    from titanlite.prepare import load_plans, model_args

    plans = load_plans(str(CONFIGS / setting.config), 1, [f"--model.overrides.n_layers={layers}", *flags])
    args = model_args(plans.model)
    per_token = flops_per_token(args, plans.batch.seq_len)
    rows = []
    for level in ladder["levels"]:
        speed = level["tokens_per_second"]
        rows.append(
            {
                "what": level["level"],
                "tokens_per_second": speed,
                "tflops": None if speed is None else speed * per_token / 1e12,
                "ratio": level["ratio"],
                "mfu": level["mfu"],
                "memory_gib": level["memory_gib"],
                "loss": level["loss"],
                "loss_difference": level["loss_difference"],
                "layers": layers,
                "parameters": count_parameters(args),
                "state_bytes_per_parameter": setting.state_bytes,
                "seq_len": plans.batch.seq_len,
                "sequences": plans.batch.global_batch_size,
                "activation_checkpoint": plans.activations.mode,
                "loss_chunks": plans.loss.chunks,
                "flops_per_token": per_token,
                "command": command,
            }
        )
    return rows


def _refuse(setting: Setting, flags: Sequence[str]) -> None:
    """Raise NotMeasured where a feature is still to come, Failed where the config is refused for another reason."""
    from titanlite.config.errors import ConfigError
    from titanlite.prepare import load_plans

    try:
        load_plans(str(CONFIGS / setting.config), 1, list(flags))
    except ConfigError as error:
        to_come = all("is not built yet" in one.message for one in error.problems)
        text = "; ".join(f"{one.key}: {one.message}" for one in error.problems)
        raise (NotMeasured if to_come else Failed)(text) from None


def _fitting(bench: Bench, name: str, setting: Setting, flags: Sequence[str]) -> int:
    """Blocks with which two steps run: as many as the model has, or as memory allows. Raises NotMeasured."""
    kept = bench.folder / "parts" / f"{name}.layers"
    if kept.exists():
        return int(kept.read_text())
    layers = 2 if bench.toy else _layers_by_state(setting, flags)
    log = bench.folder / "logs" / f"{name}-fit.log"
    while layers > 0:
        command = [
            *(sys.executable, "train.py", f"--job.config_file={CONFIGS / setting.config}", *flags),
            *(f"--model.overrides.n_layers={layers}", f"--job.dump_folder={bench.folder / 'fit'}"),
            *("--training.steps=2", "--lr_scheduler.total_steps=1000", "--no-validation.enable"),
            *("--no-checkpoint.enable_checkpoint", "--no-training.compile"),
        ]
        code = bench.call(command, log, signal.SIGKILL)
        if code == 0:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(str(layers))
            return layers
        if "out of memory" not in log.read_text().lower():
            raise Failed(f"exit {code}: {_last_line(log)}")
        layers -= 2
    raise NotMeasured("not even two blocks fit")


def _layers_by_state(setting: Setting, flags: Sequence[str]) -> int:
    from dataclasses import replace

    import torch

    from titanlite.models.shapes import count_parameters
    from titanlite.prepare import load_plans, model_args

    if not torch.cuda.is_available():
        raise NotMeasured("there is no GPU here")
    args = model_args(load_plans(str(CONFIGS / setting.config), 1, list(flags)).model)
    free = torch.cuda.mem_get_info()[1] - SPARE
    layers = args.n_layers
    while layers > 1 and setting.state_bytes * count_parameters(replace(args, n_layers=layers)) > free:
        layers -= 1
    return layers


def _last_line(log: Path) -> str:
    """What a command said why it failed."""
    lines = [line.strip() for line in log.read_text().splitlines() if line.strip()]
    start = next((i for i, line in enumerate(lines) if line.startswith("error:")), None)
    if start is not None:
        return " ".join(lines[start:])[:400]
    wrong = [line for line in lines if re.match(r"[\w.]*Error\b", line)]
    return (wrong or lines or ["no output"])[-1][:400]


PIECES: dict[str, Callable[[Bench], list[dict[str, Any]]]] = {
    "machine": machine,
    "tests": tests,
    **{
        name: (lambda bench, name=name: climb(bench, name)) for name in ("ladder-8b", "rival-7b", "loss-8b", "kahan-8b")
    },
    "modes": modes,
}


def facts() -> dict[str, Any]:
    """Hardware, versions and sources that figures hold for."""
    import torch

    from titanlite.observe.flops import device_name

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    driver = ""
    if device.type == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True)
        driver = found.stdout.strip().splitlines()[0] if found.returncode == 0 and found.stdout.strip() else ""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("torchao", "triton", "transformers"):
        try:
            from importlib.metadata import version

            versions[package] = version(package)
        except ImportError:
            versions[package] = "none"
    return {
        "device": device_name(device),
        "driver and power limit": driver,
        "cuda": torch.version.cuda or "none",
        "versions": versions,
        "sources": sources(),
    }


def sources() -> str:
    """A hash of what is measured; pieces of other sources are run again."""
    digest = hashlib.sha256()
    for folder in ("titanlite", "tests/gpu", "train_configs", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".toml", ".sh"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def page(done: dict[str, dict[str, Any]], about: dict[str, Any]) -> str:
    """gpu.md."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    driver = f", driver and power limit {about['driver and power limit']}" if about["driver and power limit"] else ""
    lines = ["# On one GPU", "", f"{about['device']}{driver}; CUDA {about['cuda']}; {versions}.  ", f"`{_command()}`"]
    for name, result in done.items():
        lines += ["", f"## {name}", ""]
        if "reason" in result:
            lines.append(f"{'Failed' if result['failed'] else 'Not measured'}: {result['reason']}")
        elif name in SETTINGS:
            lines += _ladder_table(result["rows"])
        else:
            for row in result["rows"]:
                value = row["value"]
                shown = "unknown" if value is None else value if isinstance(value, str) else f"{value:,.1f}"
                lines.append(f"- {row['what']}: {shown} {row.get('unit', '')}".rstrip())
                lines += [f"  - {failed}" for failed in row.get("failed", [])]
    return "\n".join(lines) + "\n"


def _ladder_table(rows: list[dict[str, Any]]) -> list[str]:
    first = rows[0]
    lines = [
        f"{first['parameters']:,} parameters ({first['layers']} blocks), {first['sequences']} sequences of "
        f"{first['seq_len']} tokens, activation checkpointing {first['activation_checkpoint']}, "
        f"loss in {first['loss_chunks']} {'pieces' if first['loss_chunks'] > 1 else 'piece'}, "
        f"{first['state_bytes_per_parameter']} bytes of state per parameter; {MFU_FORMULA}.",
        "",
        "| level | tokens/s | ratio | TFLOP/s | MFU % of bf16's peak | memory GiB | loss | largest difference |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]

    def shown(value: Any, pattern: str) -> str:
        return "–" if value is None else value if isinstance(value, str) else format(value, pattern)

    for row in rows:
        ratio = row["ratio"][0] if row["ratio"] else None
        cells = [
            row["what"],
            shown(row["tokens_per_second"], ",.0f"),
            shown(ratio, ".2f"),
            shown(row["tflops"], ".1f"),
            shown(row["mfu"], ".1f"),
            shown(row["memory_gib"], ".1f"),
            shown(row["loss"], ".4f"),
            shown(row["loss_difference"], ".2g"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _command() -> str:
    return " ".join(["benchmarks/gpu.sh", *sys.argv[1:]])


def main() -> int:
    """Run the pieces that are missing; 0 when all that were asked for are done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help="all when none is named")
    parser.add_argument("--list", action="store_true", help="name the pieces and end")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="results (default: outputs/gpu)")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="end within it; the same command goes on")
    parser.add_argument("--again", action="store_true", help="run the named pieces anew")
    parser.add_argument("--toy", action="store_true", help="tiny shapes, on a CPU too; measures nothing")
    arguments = parser.parse_args()
    if arguments.list:
        for name, piece in PIECES.items():
            setting = SETTINGS.get(name)
            about = f"{setting.config} {' '.join(setting.flags)}" if setting else (piece.__doc__ or "")
            print(f"{name:<10}  {about}")
        return 0
    if unknown := [name for name in arguments.pieces if name not in PIECES]:
        parser.error(f"no piece {', '.join(unknown)}; there are {', '.join(PIECES)}")
    folder = (arguments.out or ROOT / "outputs" / ("gpu-toy" if arguments.toy else "gpu")).absolute()
    deadline = float("inf") if arguments.budget is None else time.monotonic() + arguments.budget
    bench = Bench(folder, arguments.toy, deadline)
    return run(bench, arguments.pieces or list(PIECES), arguments.again)


def run(bench: Bench, names: Sequence[str], again: bool) -> int:
    """The pieces in turn, the page after each."""
    import shutil

    about = facts()
    bench.folder.mkdir(parents=True, exist_ok=True)
    stamp = bench.folder / "facts.json"
    if stamp.exists() and json.loads(stamp.read_text()) != about:
        old = bench.folder.with_name(f"{bench.folder.name}-{time.strftime('%Y%m%d-%H%M%S')}")
        bench.folder.rename(old)
        print(f"sources, device or versions are others than in {old.name}, which is kept: starting anew", flush=True)
        bench.folder.mkdir()
    stamp.write_text(json.dumps(about, indent=1))
    complete = True
    for name in names:
        result = bench.folder / f"{name}.json"
        if again:
            result.unlink(missing_ok=True)
            shutil.rmtree(bench.folder / "ladders" / name, ignore_errors=True)
            if name == "tests":
                shutil.rmtree(bench.folder / "parts", ignore_errors=True)
        if result.exists() and not json.loads(result.read_text())["failed"]:
            print(f"{name}: done before", flush=True)
            continue
        print(f"{name}: running", flush=True)
        began = time.monotonic()
        try:
            rows = PIECES[name](bench)
            found: dict[str, Any] = {"rows": rows, "failed": any(row.get("code") for row in rows)}
        except NotMeasured as reason:
            found = {"reason": str(reason), "failed": isinstance(reason, Failed)}
        except OutOfTime:
            print(f"{name}: the budget is spent; the same command goes on from here", flush=True)
            complete = False
            break
        found = {"piece": name, "seconds": round(time.monotonic() - began, 1), **about, **found}
        aside = result.with_suffix(".tmp")
        aside.write_text(json.dumps(found, indent=1) + "\n")
        os.replace(aside, result)
    done = {name: json.loads(path.read_text()) for name in PIECES if (path := bench.folder / f"{name}.json").exists()}
    text = page(done, about)
    (bench.folder / "gpu.md").write_text(text)
    print(f"\n{text}\nwritten: {bench.folder / 'gpu.md'} and a .json for each piece")
    bad = [name for name, found in done.items() if found["failed"]]
    return 0 if complete and not bad else 1


if __name__ == "__main__":
    raise SystemExit(main())
