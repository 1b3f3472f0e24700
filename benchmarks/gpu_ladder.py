"""The ladders of benchmarks/gpu.py: how many blocks fit, levels that fail or run out of memory, and
a row per level.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu_bench import ROOT, Bench, Failed, Result, last_line, out_of_memory
from benchmarks.levels import LEVELS, RESULTS
from titanlite.config.errors import ConfigError
from titanlite.models.counts import count_parameters, flops_per_token
from titanlite.resolve.load import load_config
from titanlite.runs.jsonl import json_value

CONFIGS = ROOT / "benchmarks" / "gpu"
GIB = 2**30
#: Bytes of a parameter's weight, gradient and two Adam moments in fp32.
FP32_STATE = 16
#: Left for activations, gathered weights, logits and the allocator, of a GPU's memory.
SPARE = 16 * GIB
MFU_FORMULA = (
    "6 (N - embedding) + 12 layers heads head_dim seq_len FLOPs per token, causality not discounted"
)
#: The level that float8 is set against: bf16, compiled.
REFERENCE = "compile"
#: Ladders that are begun with fewer and fewer blocks when a level runs out of memory.
TRIES = 4
#: Share of the peak, for the time that is told before a ladder.
EXPECTED_MFU = 0.4


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
    #: None: as many as fit.
    layers: int | None = None


SETTINGS = {
    "ladder-8b": Setting("llama3_8b.toml", steps=25, warmup=8, repeats=2),
    "rival-7b": Setting("llama2_7b.toml", steps=15, warmup=5, repeats=2, skip=("float8",)),
    # Losses of the compiled bf16 run and of float8 with everything, read every fifth step. Eight
    # blocks: what is compared are losses, and a run of 500 steps with all that fit takes longer
    # than one call may.
    "loss-8b": Setting(
        "llama3_8b.toml",
        steps=500,
        warmup=20,
        repeats=1,
        skip=("default", "float8"),
        flags=("--metrics.log_freq=5",),
        layers=8,
    ),
    "kahan-8b": Setting("llama3_8b_kahan.toml", steps=15, warmup=5, repeats=2, state_bytes=10),
}
TOY_FLAGS = (
    *(
        "--training.seq_len=32",
        "--training.batch_size=2",
        "--compile.backend=aot_eager",
        "--model.vocab_size=4096",
    ),
    *("--model.overrides.dim=64", "--model.overrides.n_heads=4", "--model.overrides.n_kv_heads=4"),
)


def climb(bench: Bench, name: str) -> Result:
    """One ladder, with as many blocks as fit; a level that fails does not take the others
    with it.
    """
    setting = SETTINGS[name]
    flags = [*setting.flags, *(TOY_FLAGS if bench.toy else ())]
    refuse(setting, flags)
    layers = fitting(bench, name, setting, flags)
    tell_time(bench, name, setting, flags, layers)
    for tries_left in reversed(range(TRIES)):
        may_shrink = setting.layers is None and layers > 2 and tries_left > 0
        out = bench.folder / "ladders" / name / f"{layers}-blocks"
        command, problems = _all_levels(bench, name, setting, flags, layers, out, may_shrink)
        if command:
            break
        print(f"{name}: {problems[-1]}; again with {layers - 2} blocks", flush=True)
        layers -= 2
        keep_layers(bench, name, layers)
    state = out / RESULTS
    if not state.exists():
        raise Failed("; ".join(problems) or f"no {state}")
    ladder = json.loads(state.read_text())
    rows = ladder_rows(setting, flags, layers, ladder, " ".join(command[1:]))
    if not any(row["tokens_per_second"] for row in rows):
        raise Failed("; ".join(problems) or f"{state} has no figures")
    return Result(rows, problems)


def _all_levels(
    bench: Bench,
    name: str,
    setting: Setting,
    flags: Sequence[str],
    layers: int,
    out: Path,
    may_shrink: bool,
) -> tuple[list[str], list[str]]:
    """Run a ladder, again without each level that fails.

    The command, or none when memory ran out and fewer blocks may do; and what went wrong.
    """
    failed: dict[str, str] = {}
    log = bench.folder / "logs" / f"{name}.log"
    while True:
        command = ladder_command(bench, setting, flags, layers, out, [*setting.skip, *failed])
        code = bench.call(command, log)
        if code == 0:
            break
        level, said = _what_failed(log, out)
        if may_shrink and out_of_memory(said):
            return [], [f"level {level} runs out of memory with {layers} blocks"]
        if level is None or level in failed:
            return command, [*failed.values(), f"exit {code}: {last_line(log)}"]
        failed[level] = f"level {level}: {said}"
        if len(failed) + len(setting.skip) == len(LEVELS):
            break
    return command, list(failed.values())


_FAILED = re.compile(r"run \d+ of \d+: (\S+), repeat (\d+) (?:failed with|left no)")


def _what_failed(log: Path, out: Path) -> tuple[str | None, str]:
    """The level that ended a ladder, and what its run said why."""
    found = _FAILED.search(log.read_text(errors="replace"))
    if found is None:
        return None, last_line(log)
    console = out / "runs" / f"{found[1]}-{found[2]}" / "console.log"
    said = (
        console.read_text(errors="replace") if console.exists() else log.read_text(errors="replace")
    )
    lines = [line.strip() for line in said.splitlines()]
    memory = [line for line in lines if out_of_memory(line)]
    return found[1], memory[-1][:400] if memory else last_line(console if console.exists() else log)


def ladder_command(
    bench: Bench,
    setting: Setting,
    flags: Sequence[str],
    layers: int,
    out: Path,
    skip: Sequence[str],
) -> list[str]:
    """The levels on one rank."""
    steps, warmup = (6, 2) if bench.short else (setting.steps, setting.warmup)
    return [
        *(sys.executable, "-m", "benchmarks.levels", str(CONFIGS / setting.config)),
        *("--out", str(out), "--steps", str(steps), "--warmup", str(warmup)),
        *("--repeats", str(repeats(bench, setting))),
        *(word for level in skip for word in ("--skip", level)),
        *(f"--model.overrides.n_layers={layers}", *flags),
    ]


def repeats(bench: Bench, setting: Setting) -> int:
    """Runs of each level."""
    if bench.short:
        return 1
    return bench.repeats or setting.repeats


def refuse(setting: Setting, flags: Sequence[str]) -> None:
    """Raise Failed where the config is refused."""
    try:
        load_config(str(CONFIGS / setting.config), 1, list(flags))
    except ConfigError as error:
        raise Failed("; ".join(f"{one.key}: {one.message}" for one in error.problems)) from None


def kept_layers(bench: Bench, name: str) -> Path:
    """The file that remembers with how many blocks a ladder fits."""
    return bench.folder / "parts" / f"{name}.layers"


def keep_layers(bench: Bench, name: str, layers: int) -> None:
    path = kept_layers(bench, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(str(layers))


def fitting(bench: Bench, name: str, setting: Setting, flags: Sequence[str]) -> int:
    """Blocks with which two eager steps run: as many as the model has, or as memory allows.

    Raises Failed.
    """
    kept, log = kept_layers(bench, name), bench.folder / "logs" / f"{name}-fit.log"
    if kept.exists():
        return int(kept.read_text())
    if bench.short:
        layers = 2
        if bench.dry and (code := bench.call(fit_command(bench, setting, flags, layers), log)):
            raise Failed(f"exit {code}: {last_line(log)}")
        return layers
    if setting.layers is not None:
        return setting.layers
    layers = layers_by_state(setting, flags, bench.about.get("memory_bytes"))
    while layers > 0:
        code = bench.call(fit_command(bench, setting, flags, layers), log)
        if code == 0:
            keep_layers(bench, name, layers)
            return layers
        if not out_of_memory(log.read_text(errors="replace")):
            raise Failed(f"exit {code}: {last_line(log)}")
        layers -= 2
    raise Failed("not even two blocks fit")


def fit_command(bench: Bench, setting: Setting, flags: Sequence[str], layers: int) -> list[str]:
    """Two eager steps."""
    return [
        *(sys.executable, "train.py", f"--job.config_file={CONFIGS / setting.config}", *flags),
        *(f"--model.overrides.n_layers={layers}", f"--job.dump_folder={bench.folder / 'fit'}"),
        *("--training.steps=2", "--lr_scheduler.total_steps=1000", "--no-validation.enable"),
        *("--no-checkpoint.enable_checkpoint", "--no-training.compile"),
    ]


def layers_by_state(setting: Setting, flags: Sequence[str], memory_bytes: int | None) -> int:
    """Blocks whose weights, gradients and optimizer state leave SPARE bytes of the GPU's.

    Raises Failed.
    """
    if memory_bytes is None:
        raise Failed("there is no GPU here")
    args = load_config(str(CONFIGS / setting.config), 1, list(flags)).model_args()
    layers = args.n_layers
    while (
        layers > 1
        and setting.state_bytes * count_parameters(replace(args, n_layers=layers))
        > memory_bytes - SPARE
    ):
        layers -= 1
    return layers


def tell_time(bench: Bench, name: str, setting: Setting, flags: Sequence[str], layers: int) -> None:
    """Print about how long each run will take, where the device's peak is known: a ladder resumes
    whole runs only.
    """
    peak = bench.about.get("peak_flops")
    if bench.short or not peak:
        return
    config = load_config(
        str(CONFIGS / setting.config), 1, [f"--model.overrides.n_layers={layers}", *flags]
    )
    tokens = setting.steps * config.batch.tokens_per_step
    seconds = (
        tokens
        * flops_per_token(config.model_args(), config.training.seq_len)
        / (EXPECTED_MFU * peak)
    )
    runs = repeats(bench, setting) * (len(LEVELS) - len(setting.skip))
    print(
        f"{name}: {runs} runs of {setting.steps} steps with {layers} blocks, each about "
        f"{seconds / 60:.1f} minutes at {EXPECTED_MFU:.0%} MFU and its start; a call that has "
        "less left begins the run again next time",
        flush=True,
    )


def ladder_rows(
    setting: Setting, flags: Sequence[str], layers: int, ladder: dict[str, Any], command: str
) -> list[dict[str, Any]]:
    """A row per level that was run, each with all that its figures depend on."""
    config = load_config(
        str(CONFIGS / setting.config), 1, [f"--model.overrides.n_layers={layers}", *flags]
    )
    args = config.model_args()
    per_token = flops_per_token(args, config.training.seq_len)
    rows = []
    for level in ladder["levels"]:
        name, speed = level["level"], level["tokens_per_second"]
        values = ladder["config"].get(name, {})
        float8 = values.get("float8.enable_float8_linear", False)
        rows.append(
            {
                "what": name,
                "tokens_per_second": speed,
                "tflops": None if speed is None else speed * per_token / 1e12,
                "ratio": level["ratio"],
                "ratio_to_compile": ratio_to(ladder, name),
                "mfu": level["mfu"],
                "mfu_formula": MFU_FORMULA,
                "memory_gib": level["memory_gib"],
                "loss": level["loss"],
                "loss_difference": level["loss_difference"],
                "final_loss_difference": json_value(final_difference(ladder, name)),
                "steps": ladder["steps"],
                "runs": level["repeats"],
                "layers": layers,
                "parameters": count_parameters(args),
                "state_bytes_per_parameter": setting.state_bytes,
                "seq_len": config.training.seq_len,
                "sequences": config.batch.global_batch_size,
                "activation_checkpoint": values.get(
                    "activation_checkpoint.mode", config.activation_checkpoint.mode
                ),
                "loss_chunks": config.training.loss_chunks,
                "float8_recipe": values.get("float8.recipe_name", config.float8.recipe_name)
                if float8
                else None,
                "flops_per_token": per_token,
                "command": command,
            }
        )
    return rows


def _pairs(ladder: dict[str, Any], level: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The runs of a level, each with the compiled bf16 run of the same repeat."""
    reference = {run["repeat"]: run for run in ladder["runs"] if run["level"] == REFERENCE}
    mine = [run for run in ladder["runs"] if run["level"] == level]
    return [(run, reference[run["repeat"]]) for run in mine if run["repeat"] in reference]


def ratio_to(ladder: dict[str, Any], level: str) -> float | None:
    """Speed against compiled bf16: the median of the repeats."""
    ratios = [
        one["tokens_per_second"] / other["tokens_per_second"]
        for one, other in _pairs(ladder, level)
    ]
    return median(ratios) if ratios else None


def final_difference(ladder: dict[str, Any], level: str) -> float | None:
    """Loss of the last step against compiled bf16's, without sign, the largest of the repeats;
    infinite when one of the two is not a number. None for compiled bf16 itself.
    """
    if level == REFERENCE:
        return None
    last = str(ladder["steps"])
    found = []
    for one, other in _pairs(ladder, level):
        if last in one["losses"] and last in other["losses"]:
            difference = abs(float(one["losses"][last]) - float(other["losses"][last]))
            found.append(math.inf if math.isnan(difference) else difference)
    return max(found, default=None)
