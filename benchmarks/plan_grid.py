"""Compare memory by formulas with the trace on a grid of real sizes: `python
benchmarks/plan_grid.py [WORD …]`.

Prints a row of markdown for each config, and the largest deviations.
"""

from __future__ import annotations

import itertools
import sys

from titanlite.cli.plan.memory_trace import trace
from titanlite.plan.memory import estimate
from titanlite.resolve.load import check_config

GIB = 2**30
_AC = {
    "none": "--activation_checkpoint.mode=none",
    "full": "--activation_checkpoint.mode=full",
    "op": "--activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option=op",
    "2": "--activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option=2",
}
_TP, _PP = "--training.tensor_parallel_degree=", "--experimental.pipeline_parallel_degree="
_CP, _EP = "--experimental.context_parallel_degree=", "--parallelism.expert_parallel_degree="
_LAST = "--training.gradient_sync=last"
_CHUNKS = "--training.loss_chunks=8"
_SCHEDULE = "--experimental.pipeline_parallel_schedule="


def grid() -> list[tuple[str, int, str]]:
    """Return (config, ranks, flags) of each point."""
    points = [
        (config, ranks, f"{_AC[ac]} {chunks}")
        for config, ranks in (("llama3_2_1b", 8), ("llama3_8b", 8), ("llama3_8b", 64))
        for ac, chunks in itertools.product(_AC, ("", _CHUNKS))
    ]
    points += [
        (config, ranks, f"{_AC[ac]} {more}")
        for ac in ("full", "op")
        for config, ranks, more in (
            ("llama3_2_3b", 8, "--training.batch_size=2"),
            ("llama2_7b", 8, "--training.batch_size=2"),
            ("llama2_13b", 16, _CHUNKS),
            ("mistral_7b", 8, ""),
            ("qwen3_8b", 16, _CHUNKS),
            ("llama3_70b", 64, _CHUNKS),
            ("llama3_70b", 256, f"{_TP}8"),
            ("llama3_1_405b", 512, f"{_TP}8 {_CHUNKS}"),
            ("mixtral_8x7b", 64, _CHUNKS),
            ("mixtral_8x7b", 64, f"{_EP}8"),
        )
    ]
    points += [
        (config, ranks, f"--training.global_batch_size=-1 {more}")
        for config, ranks, more in (
            ("llama3_8b", 8, "--training.reshard_after_forward=never"),
            ("llama3_8b", 8, f"{_LAST} --training.global_batch_size=16"),
            ("llama3_8b", 64, "--training.data_parallel_replicate_degree=8"),
            ("llama3_8b", 8, "--training.data_parallel_type=ddp"),
            ("llama3_8b", 8, f"{_TP}2"),
            ("llama3_8b", 16, f"{_TP}4 {_CHUNKS}"),
            ("llama3_8b", 32, f"{_CP}4 --training.seq_len=32768 {_AC['full']} {_CHUNKS}"),
            ("llama3_8b", 64, f"{_CP}8 --training.seq_len=131072 {_AC['full']} {_CHUNKS}"),
            ("llama3_8b", 32, f"{_PP}4 {_LAST} --training.batch_size=8"),
            ("llama3_8b", 32, f"{_PP}4 {_LAST} --training.batch_size=8 {_SCHEDULE}GPipe"),
            ("llama3_8b", 32, f"{_PP}4 {_LAST} --training.batch_size=8 {_SCHEDULE}Interleaved1F1B"),
            ("llama3_70b", 256, f"{_PP}4 {_TP}8 {_LAST} --training.batch_size=8"),
            ("llama3_8b", 8, "--training.dtype=bfloat16"),
            ("llama3_8b", 8, "--optimizer.name=AnyPrecisionAdamW --optimizer.kahan"),
            ("llama3_8b", 8, "--optimizer.name=Muon"),
            ("llama3_8b", 8, "--optimizer.implementation=foreach"),
            ("llama3_8b", 8, "--optimizer.early_step_in_backward --training.max_norm=1e9"),
            ("llama3_8b", 8, "--float8.enable_float8_linear --float8.emulate"),
            ("llama3_8b", 512, f"{_AC['none']} {_CHUNKS}"),
        )
    ]
    return points


def main() -> None:
    """Print the table; an argument selects the points whose row contains it."""
    found: list[tuple[float, str]] = []
    print(
        "| config | ranks | settings | formula, GiB | trace, GiB | ratio | peak "
        "|\n|---|---|---|---|---|---|---|"
    )
    for config, ranks, flags in grid():
        name = f"{config} {ranks} {flags}"
        if not all(word in name for word in sys.argv[1:]):
            continue
        argv = [f"--job.config_file=train_configs/{config}.toml", *flags.split()]
        run = check_config(argv, ranks, training=False)[1]
        formula = estimate(run)
        traced = trace(run, formula.rank)
        ratio = formula.peak.total / traced.peak.total
        found.append((abs(ratio - 1), name))
        sizes = f"{formula.peak.total / GIB:.2f} | {traced.peak.total / GIB:.2f} | {ratio:.3f}"
        shown = flags.replace("--", "").strip()
        print(
            f"| {config} | {ranks} | {shown} | {sizes} | {formula.peak.phase} "
            f"{formula.peak.module} |",
            flush=True,
        )
    worst = ", ".join(
        f"{100 * off:.1f} % ({name})" for off, name in sorted(found, reverse=True)[:3]
    )
    print(f"\n{len(found)} configs; largest deviations: {worst}")


if __name__ == "__main__":
    main()
