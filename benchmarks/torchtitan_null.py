"""Counts a step of torchtitan 0.2.2 on the null GPU, as `tests/nullgpu/play.py` does for titanlite.

    PYTHONPATH=WHERE tests/nullgpu/run.sh FOLDER benchmarks/torchtitan_null.py RANKS torchtitan's
        flags …

WHERE has torchtitan==0.2.2, torchdata, tyro, einops, datasets and their needs (`pip install
--no-deps --target WHERE`), but no torch: FOLDER has the CUDA build. torchtitan's own Trainer and
step run as they are, on one sequence of zeros in place of a text. LAYERS in the environment cuts
the depth. Models with experts attend causally, and each rank sends as many rows to each.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tests.nullgpu.counts import WARM, Counted, Counting, nobody_else, set_ranks

STEPS = 2


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="nullgpu-") as folder:
        log = Path(folder, "calls")
        set_ranks(0, int(sys.argv[1]), log)
        size = [
            f"--training.steps={WARM + STEPS + 2}",
            f"--job.dump_folder={folder}/run",
            "--metrics.log_freq=1000",
        ]
        found = play([*sys.argv[2:], *size], Counting(log, STEPS, traffic=True))
    print(json.dumps(found), flush=True)
    os._exit(0)


def play(flags: list[str], counting: Counting) -> dict[str, Any]:
    """Train as the flags say until all steps are counted, and return the counts."""
    import torch
    import torchtitan.protocols.train_spec as specs
    from torchtitan.config import ConfigManager
    from torchtitan.train import Trainer

    config = ConfigManager().parse_args(flags)
    rows, length = config.training.local_batch_size, config.training.seq_len
    own = specs.get_train_spec(config.model.name)
    args = own.model_args[config.model.flavor]
    if "LAYERS" in os.environ:
        args.n_layers = int(os.environ["LAYERS"])
    if config.model.name != "llama3":
        args.attn_type = "sdpa"
        args.attn_mask_type = "causal"
    own.build_tokenizer_fn = None
    own.build_dataloader_fn = lambda **_: _Zeros(torch.zeros(rows, length, dtype=torch.int64))
    specs.register_train_spec(config.model.name, own)

    class Observed(Trainer):
        def train_step(self, data: Any) -> None:
            counting.begin(self.step)
            super().train_step(data)
            counting.end(self.step)

    with nobody_else(), even_rows(), contextlib.suppress(Counted):
        Observed(config).train()
    return counting.found


@contextlib.contextmanager
def even_rows() -> Iterator[None]:
    """Let the host read as many rows to and from each rank that shares experts."""
    import torch
    from torchtitan.distributed.expert_parallel import ExpertParallel

    dispatch = ExpertParallel._token_dispatch
    read = torch.Tensor.tolist

    def dispatch_even(self: Any, module: Any, inputs: Any, mesh: Any) -> Any:
        def read_even(sizes: Any) -> list[int]:
            read(sizes)
            return [len(inputs[0]) // mesh.size()] * mesh.size()

        with mock.patch.object(torch.Tensor, "tolist", read_even):
            return dispatch(self, module, inputs, mesh)

    with mock.patch.object(ExpertParallel, "_token_dispatch", dispatch_even):
        yield


class _Zeros:
    """The methods of a data loader that torchtitan's trainer calls."""

    def __init__(self, tokens: Any) -> None:
        self._tokens = tokens

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Any]]:
        while True:
            yield {"input": self._tokens.clone()}, self._tokens.clone()


if __name__ == "__main__":
    main()
