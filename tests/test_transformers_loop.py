"""examples/transformers_loop.py: T5 and ViT of `transformers`, sharded, trained, saved and
resumed.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.support.pool import Pools
from titanlite import Checkpointer
from titanlite.checkpoint.manifest import read_manifest
from titanlite.config.dotted_paths import resolve
from titanlite.dist.dist_env import DistEnv

FILE = Path(__file__).resolve().parents[1] / "examples" / "transformers_loop.py"
BLOCKS = {
    "t5": ["decoder.block.0", "decoder.block.1", "encoder.block.0", "encoder.block.1"],
    "vit": ["vit.layers.0", "vit.layers.1"],
}


def _train(
    world: DistEnv, kind: str, steps: int, folder: str
) -> tuple[list[tuple[int, float]], Any]:
    """Steps with their losses; of the model when it is saved the FSDP groups, recomputing modules,
    sharding.
    """
    seen: list[Any] = []
    save = Checkpointer.save

    def look(self: Checkpointer, step: int, model: Any, *args: Any, **kwargs: Any) -> Any:
        wrapped = sorted(n for n, m in model.named_modules() if isinstance(m, FSDPModule) and n)
        shards = all(isinstance(p, DTensor) for p in model.parameters())
        recompute = sorted(
            n for n, m in model.named_modules() if "Checkpointed" in type(m).__name__
        )
        seen.append((wrapped, recompute, shards))
        return save(self, step, model, *args, **kwargs)

    Checkpointer.save = look  # type: ignore[method-assign]
    try:
        return list(resolve(f"{FILE}:train")(world, kind, steps, folder)), seen[0]
    finally:
        Checkpointer.save = save  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vit", "t5"])
def test_it_trains_sharded_and_resumes_exactly_on_another_rank_count(
    pool: Pools, tmp_path: Path, kind: str
) -> None:
    straight, seen = pool(2).run(_train, kind, 8, str(tmp_path / "straight"))[0]
    assert seen == (BLOCKS[kind], BLOCKS[kind], True)
    losses = [loss for _, loss in straight]
    assert sum(losses[5:]) < sum(losses[:3])

    first, _ = pool(2).run(_train, kind, 5, str(tmp_path / "two"))[0]
    tensors = read_manifest(tmp_path / "two" / "step-5").tensors
    kinds = {dtype for name, (dtype, _) in tensors.items() if name.endswith("exp_avg_sq")}
    assert kinds == {"bfloat16"}
    shutil.copytree(tmp_path / "two", tmp_path / "one")
    second, _ = pool(2).run(_train, kind, 8, str(tmp_path / "two"))[0]
    assert first + second == straight, "to the last bit"
    alone, _ = pool(1).run(_train, kind, 8, str(tmp_path / "one"))[0]
    assert [step for step, _ in alone] == [6, 7, 8]
    # Its first loss is of the loaded weights alone; the others also of the optimizer's state.
    assert alone[0][1] == pytest.approx(losses[5], rel=1e-6)
    assert [loss for _, loss in alone] == pytest.approx(losses[5:], rel=1e-4)
