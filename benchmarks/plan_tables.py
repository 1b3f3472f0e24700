"""Which machines a model needs, by the planner: the tables of titanlite/plan/FORMULAS.md, section
"Platforms", as markdown.

    python benchmarks/plan_tables.py

`platforms` plans the smallest AWS platforms that are said to train each model (full sharding,
activation checkpointing and offload of activations, sequences of 4,096 tokens, one per GPU), and
half of each. `ladder` finds the largest model of a family that fits on 8 x A100 40 GB, with less
and less on the GPU. No GPU and no torch is used.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from titanlite.plan.hardware import cluster_of
from titanlite.plan.parts import GIB
from titanlite.plan.plan import Plan, make_plan
from titanlite.resolve.load import check_config
from titanlite.utils import human_count

#: Config, GPUs, GPU.
PLATFORMS = (
    ("llama3_1_8b.toml", 4, "l40s-48g"),
    ("llama3_2_1b.toml", 2, "a10g-24g"),
    ("llama3_2_3b.toml", 4, "a10g-24g"),
    ("llama2_13b.toml", 8, "l40s-48g"),
    ("llama2_70b.toml", 16, "h200-141g"),
    ("llama2_70b.toml", 32, "h100-80g"),
    ("llama3_1_70b.toml", 32, "h200-141g"),
    ("llama3_1_70b.toml", 32, "h100-80g"),
)
FULL_AC = ("--activation_checkpoint.mode=full",)
AC_OFFLOAD = (*FULL_AC, "--activation_checkpoint.offload")
CPU_OFFLOAD = (*AC_OFFLOAD, "--training.enable_cpu_offload")
SETTINGS = (
    "--training.seq_len=4096",
    "--training.batch_size=1",
    "--training.global_batch_size=-1",
    *AC_OFFLOAD,
)
#: What else may help, in the order in which a user would try it.
REMEDIES = {
    "": (),
    "loss in 8 chunks": ("--training.loss_chunks=8",),
    "bf16 weights and states, Kahan": (
        *(
            "--training.loss_chunks=8",
            "--training.dtype=bfloat16",
            "--optimizer.name=AnyPrecisionAdamW",
        ),
        *("--optimizer.momentum_dtype=bfloat16", "--optimizer.kahan"),
    ),
    "CPU offload": ("--training.loss_chunks=8", "--training.enable_cpu_offload"),
}
#: Bytes of host memory of the machine with 8 x A100 40 GB (p4d.24xlarge).
HOST = 1152 * GIB
#: Rows of the ladder.
RUNGS = {
    "DDP": ("--training.data_parallel_type=ddp", "--activation_checkpoint.mode=none"),
    "FSDP": ("--activation_checkpoint.mode=none",),
    "FSDP, AC": FULL_AC,
    "FSDP, AC, activations offloaded": AC_OFFLOAD,
    "FSDP, AC, weights and states offloaded too": CPU_OFFLOAD,
}


def plan(config: str, gpus: int, gpu: str, flags: Sequence[str]) -> Plan:
    """Return the plan of a config on so many GPUs."""
    run = check_config([f"--job.config_file={config}", *flags], gpus, training=False)[1]
    return make_plan(run, cluster_of(run, gpu=gpu, gpus=gpus))


def platforms() -> Iterator[tuple[str, int, str, Plan, dict[str, Plan]]]:
    """Yield model, GPUs, GPU, the plan on them, and on half of them by remedy, up to the first that
    is enough.
    """
    for config, gpus, gpu in PLATFORMS:
        halves: dict[str, Plan] = {}
        for name, flags in REMEDIES.items():
            halves[name] = plan(config, gpus // 2, gpu, (*SETTINGS, *flags))
            if halves[name].fits:
                break
        yield config.removesuffix(".toml"), gpus, gpu, plan(config, gpus, gpu, SETTINGS), halves


def width(flags: Sequence[str], tokens: int) -> int:
    """Return the largest width, a multiple of 128, of Llama-like models that fit on 8 x A100 40 GB.

    Layers and heads are a 128th of the width, as in Llama 2 7B. tokens: of a sequence; a GPU has
    one.
    """
    low, high = 4, 256
    while high - low > 1:
        middle = (low + high) // 2
        found = plan(
            "llama2_7b.toml",
            8,
            "a100-40g",
            (*shape(middle), f"--training.seq_len={tokens}", *flags),
        )
        fits = found.fits and sum(found.host.values()) <= HOST
        low, high = (middle, high) if fits else (low, middle)
    return 128 * low


def shape(n: int) -> list[str]:
    """Return the flags of a model of width 128 * n."""
    sizes = {"dim": 128 * n, "n_layers": n, "n_heads": n, "n_kv_heads": n}
    batch = ["--training.batch_size=1", "--training.global_batch_size=-1"]
    return [
        *batch,
        *(
            word
            for name, size in sizes.items()
            for word in (f"--model.overrides.{name}", str(size))
        ),
    ]


def ladder(tokens: int) -> dict[str, int]:
    """Return row → parameters of the largest model."""
    found = {}
    for name, flags in RUNGS.items():
        run = check_config(
            ["--job.config_file=llama2_7b.toml", *shape(width(flags, tokens) // 128)],
            8,
            training=False,
        )[1]
        found[name] = run.spec.count_parameters(run.model_args())
    return found


def shown(found: Plan) -> str:
    """Return the memory that a plan needs, and whether it is there."""
    return (
        f"{found.needed / GIB:.1f} of {found.cluster.gpu.memory / GIB:.1f}, "
        f"{'fits' if found.fits else 'does not fit'}"
    )


def main() -> None:
    """Print both tables."""
    print(
        "| model | GPUs | needed, GiB | half of them, as it is | half of them, with "
        "|\n|---|---|---|---|---|"
    )
    for model, gpus, gpu, whole, halves in platforms():
        name, last = list(halves.items())[-1]
        with_ = f"{name}: {shown(last)}" if name else ""
        print(f"| {model} | {gpus} x {gpu} | {shown(whole)} | {shown(halves[''])} | {with_} |")
    lengths = (2048, 8192)
    tables = [ladder(tokens) for tokens in lengths]
    print("\n| 8 x A100 40 GB |" + "".join(f" {n:,} tokens per GPU | to DDP |" for n in lengths))
    print("|---|" + "---|---|" * len(lengths))
    for name in RUNGS:
        cells = "".join(f" {human_count(t[name])} | {t[name] / t['DDP']:.1f} |" for t in tables)
        print(f"| {name} |{cells}")


if __name__ == "__main__":
    main()
