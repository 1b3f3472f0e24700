"""Runs on the null GPU: the table of `test_steps.py` and of `benchmarks/nullgpu.py`, and how one is
played.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
#: Figures of all cases, which benchmarks/nullgpu.py writes and the tests compare with.
STORED = HERE / "expected.json"


@dataclass(frozen=True)
class Case:
    """One run: a config with flags on so many ranks of a GPU."""

    flags: str = ""
    ranks: int = 8
    config: str = "llama3_8b"
    gpu: str = "h100-80g"
    #: Device of the rank on its machine: another than 0 shows contexts on GPU 0.
    device: int = 0
    #: Depth; None: the model's. Where no memory is asked for a few show what each layer adds.
    layers: int | None = None
    vocabulary: int = 128256
    #: Name of a figure → the most there may be, where that is not zero.
    allowed: Mapping[str, int] = field(default_factory=dict)

    def argv(self) -> list[str]:
        """Return the flags of the run."""
        depth = [f"--model.overrides.n_layers={self.layers}"] if self.layers else []
        config = f"--job.config_file={ROOT}/train_configs/{self.config}.toml"
        return [
            config,
            f"--model.vocab_size={self.vocabulary}",
            *(f"--{flag}" for flag in PLAIN.split()),
            *depth,
            *(f"--{flag}" for flag in self.flags.split()),
        ]


#: Flags before a case's own: one micro-batch a step, eager, nothing twice, no saves.
PLAIN = (
    "training.global_batch_size=-1 activation_checkpoint.mode=none no-training.compile "
    "no-checkpoint.enable_checkpoint"
)


COMPILE = "training.compile "
FULL = "activation_checkpoint.mode=full "
EVERY = "activation_checkpoint.mode=selective activation_checkpoint.selective_ac_option="
OP = f"{EVERY}op "
FLOAT8 = COMPILE + "float8.enable_float8_linear "
GATHERED = FLOAT8 + "float8.enable_fsdp_float8_all_gather "
PRECOMPUTED = "float8.precompute_float8_dynamic_scale_for_fsdp "
#: The file and the GPU of benchmarks/gpu.py.
H200 = {"config": "llama3_8b_h200", "gpu": "h200-141g"}
TP_2 = "training.tensor_parallel_degree=2 "
TP_8 = "training.tensor_parallel_degree=8 "
PIPELINE = (
    "training.gradient_sync=last training.batch_size=4 experimental.pipeline_parallel_degree=2 "
)
SAVES = "checkpoint.enable_checkpoint checkpoint.interval=2 checkpoint.async_mode="
#: Nine parameters a layer and three more: FSDP2 waits for the copy of each gradient. One more: the
#: norm, with the flag.
ON_HOST = {"eventsync": 9 * 8 + 3 + 1}

#: The allocator's pool still grows in the third step.
GROWS = {"malloc": 1}
#: Recomputation by name, and its flags.
RECOMPUTED = {"": "", ", AC op": OP, ", AC full": FULL}
EAGER_AND_COMPILED = {"": "", ", compiled": COMPILE}
#: Blocks with experts in the runs of MoE models.
SPARSE = 4


def of_experts(name: str, config: str, vocabulary: int, dense: int) -> dict[str, Case]:
    """Return the runs of an MoE model: experts gathered by FSDP, and shared by 8 ranks.

    dense: blocks without experts. In each of the others the host waits for the rows that ranks
    send.
    """
    cases = {}
    reads = {"syncs": SPARSE, "pageable": SPARSE, **GROWS}
    for shared, ranks in (("", 1), (", EP 8", 8)):
        for compiled, compile_flags in EAGER_AND_COMPILED.items():
            for recomputed, flags in RECOMPUTED.items():
                cases[f"{name}{shared}{compiled}{recomputed}"] = Case(
                    f"parallelism.expert_parallel_degree={ranks} {compile_flags}{flags}",
                    config=config,
                    layers=dense + SPARSE,
                    vocabulary=vocabulary,
                    allowed=reads if ranks > 1 else {},
                )
    return cases


CASES: dict[str, Case] = {
    "8B": Case(),
    "8B, AC op": Case(OP),
    "8B, AC full": Case(FULL),
    "8B, AC every 2nd block": Case(f"{EVERY}2"),
    "8B, compiled": Case(COMPILE),
    "8B, compiled, AC op": Case(COMPILE + OP),
    "8B, compiled, AC full": Case(COMPILE + FULL),
    "8B, compiled, AC budget 0.5": Case(COMPILE + "activation_checkpoint.mode=budget", layers=8),
    "8B, compiled, loss in 8 chunks": Case(COMPILE + "training.loss_chunks=8", layers=8),
    "8B, activations offloaded": Case(COMPILE + FULL + "activation_checkpoint.offload"),
    "8B, float8 eager": Case("float8.enable_float8_linear", layers=8),
    "8B, float8": Case(FLOAT8),
    "8B, float8 all-gather": Case(GATHERED, layers=8),
    "8B, float8 all-gather, scales precomputed": Case(GATHERED + PRECOMPUTED),
    "8B, float8 rowwise": Case(FLOAT8 + "float8.recipe_name=rowwise"),
    "8B, float8 rowwise eager": Case(
        "float8.enable_float8_linear float8.recipe_name=rowwise", layers=8
    ),
    "8B, float8 rowwise_with_gw_hp": Case(
        FLOAT8 + "float8.recipe_name=rowwise_with_gw_hp", layers=8
    ),
    "8B, HSDP 2 x 8": Case(COMPILE + "training.data_parallel_replicate_degree=2", 16),
    "8B, AC full, z-loss": Case(FULL + "training.z_loss=1e-4", layers=8),
    "8B, TP 2": Case(TP_2, layers=8),
    "8B, TP 2, AC op": Case(TP_2 + OP, layers=8),
    "8B, TP 2, AC full": Case(TP_2 + FULL, layers=8),
    "8B, TP 2, AC full, loss in 2 chunks": Case(TP_2 + FULL + "training.loss_chunks=2", layers=8),
    "8B, TP 2, AC full, whole logits": Case(
        TP_2 + FULL + "no-training.enable_loss_parallel", layers=8
    ),
    "8B, TP 2, compiled": Case(TP_2 + COMPILE, layers=8),
    "8B, TP 2, compiled, AC full": Case(TP_2 + COMPILE + FULL, layers=8),
    "8B, TP 2, compiled, AC full, loss in 2 chunks": Case(
        TP_2 + COMPILE + FULL + "training.loss_chunks=2", layers=8
    ),
    "8B, TP 8": Case(TP_8, layers=8),
    "8B, TP 8, compiled": Case(COMPILE + TP_8),
    "8B, CP 4": Case("experimental.context_parallel_degree=4", layers=8),
    "8B, CP 4, compiled": Case(COMPILE + "experimental.context_parallel_degree=4"),
    "8B, PP 2, 1F1B": Case(PIPELINE + FULL),
    "8B, 4 micro-batches, last sums": Case(
        COMPILE + FULL + "training.global_batch_size=32 training.gradient_sync=last", layers=8
    ),
    "8B, parameters offloaded": Case(
        "training.enable_cpu_offload " + OP, layers=8, allowed=ON_HOST
    ),
    "8B, save in the background": Case(SAVES + "async " + OP, device=3, layers=2),
    "8B, pinned save in the background": Case(
        SAVES + "async_with_pinned_mem " + OP, device=3, layers=2
    ),
    "8B, one H200": Case(COMPILE, 1, **H200),
    "8B, one H200, fp32 eager": Case("training.mixed_precision_param=float32", 1, layers=8, **H200),
    "8B, one H200, float8 all-gather, scales precomputed": Case(GATHERED + PRECOMPUTED, 1, **H200),
    "8B, one H200, the rival's shape": Case(
        COMPILE + FULL + "training.global_batch_size=8",
        1,
        "../benchmarks/gpu/rival_8b",
        "h200-141g",
    ),
    "8B, one H200, Kahan": Case(
        COMPILE + "training.global_batch_size=4",
        1,
        "../benchmarks/gpu/llama3_8b_kahan",
        "h200-141g",
    ),
    "8B, one H200, AC full": Case(COMPILE + FULL + "training.loss_chunks=8", 1, gpu="h200-141g"),
    "70B on 64": Case(FULL, 64, "llama3_70b", layers=8),
    "70B on 64, compiled": Case(COMPILE + FULL, 64, "llama3_70b"),
    "70B on 64, TP 8, batch 16": Case(
        TP_8 + FULL + "training.batch_size=16", 64, "llama3_70b", layers=8, allowed=GROWS
    ),
    "70B on 64, TP 8, compiled": Case(COMPILE + FULL + TP_8, 64, "llama3_70b"),
    "405B on 512": Case(FULL, 512, "llama3_1_405b", "h200-141g"),
    **of_experts("DeepSeek 16B", "deepseek_v3_16b", 102400, 1),
    **of_experts("Qwen3 30B-A3B", "qwen3_30b_a3b", 151936, 0),
}


def play(
    folder: Path,
    case: Case,
    steps: int = 2,
    more: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Play a case on the null GPU in `folder`, and return what play.py prints.

    more: flags. options: of play.py. Raises RuntimeError as `run` does.
    """
    from titanlite.plan.hardware import find_gpu

    memory = {"NULLGPU_GIB": f"{find_gpu(case.gpu).memory / 2**30:.2f}"}
    ranks = [f"--ranks={case.ranks}", f"--device={case.device}", f"--steps={steps}", *options]
    command = [HERE / "play.py", *ranks, "--", *case.argv(), *more]
    return run(folder, *command, NULLGPU_NAME=f"NVIDIA {case.gpu[:4].upper()}", **memory)


def run(folder: Path, *command: str | Path, **variables: str) -> dict[str, Any]:
    """Run Python on the null GPU in `folder`, and return the JSON of its last line.

    variables: of its environment. Raises RuntimeError with the end of its output.
    """
    own = {**os.environ, **variables}
    done = subprocess.run(
        [HERE / "run.sh", folder, *command], env=own, capture_output=True, text=True, cwd=ROOT
    )
    if done.returncode or not done.stdout.strip():
        raise RuntimeError(
            "\n".join([*done.stdout.splitlines()[-5:], *done.stderr.splitlines()[-25:]])
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def figures(found: Mapping[str, Any]) -> dict[str, int]:
    """Return the counts of a step that are to be zero: waits of the host, slow copies, calls that
    stop the device.
    """
    calls = found["calls"]
    copies = found["copies"]
    return {
        "syncs": found["syncs"].get("compute", 0),
        "devsync": calls["devsync"],
        # The guard reads the record of the step before: its event has passed.
        "eventsync": max(calls["eventsync"] - 1, 0),
        "pageable": sum(count for kind, count in copies.items() if kind.endswith("pageable")),
        "syncmemcpy": calls["syncmemcpy"],
        "malloc": calls["malloc"],
        "free": calls["free"],
        "blockingstream": calls["blockingstream"],
        "retries": found["retries"],
        "ooms": found["ooms"],
        "other contexts": len(found["other_contexts"]),
    }
