"""examples/transformers_loop.py: T5 of `transformers` and DeepViT, sharded, trained, saved and
resumed; transformers_memory.py plans their large sizes.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.processes import python
from titanlite import Checkpointer, apply_fsdp, groups_by_class
from titanlite.checkpoint.manifest import read_manifest
from titanlite.config.import_objects import resolve
from titanlite.dist.dist_env import DistEnv

FILE = Path(__file__).resolve().parents[1] / "examples" / "transformers_loop.py"
BLOCKS = {
    "t5": ["decoder.block.0", "decoder.block.1", "encoder.block.0", "encoder.block.1"],
    "deepvit": ["blocks.0", "blocks.1"],
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
@pytest.mark.parametrize("kind", ["deepvit", "t5"])
def test_it_trains_sharded_and_resumes_exactly_on_another_rank_count(pool, tmp_path, kind):
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


def _rope(world: DistEnv) -> tuple[torch.Tensor, torch.Tensor]:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    rope = model.model.rotary_emb
    before = rope.inv_freq.clone()
    seen: list[torch.Tensor] = []
    rope.register_forward_pre_hook(lambda module, _: seen.append(module.inv_freq))
    groups = groups_by_class(model, ["LlamaDecoderLayer"])
    apply_fsdp(model, groups, world.build_mesh(dp_shard=1), param_dtype=torch.bfloat16)
    model(torch.zeros(1, 4, dtype=torch.int64))
    return before, seen[0]


def test_buffers_stay_in_float32_beside_bfloat16_weights(pool):
    """FSDP1's `buffer_dtype = float32`: the frequencies of RoPE are not rounded."""
    before, seen = pool(1).run(_rope)[0]
    assert seen.dtype == torch.float32
    assert torch.equal(before, seen)


@pytest.mark.slow
def test_the_memory_of_a_large_model_is_that_of_its_page():
    """Parameters and optimizer are counted by hand: 4 and 4 + 2 bytes over 24 GPUs."""
    out = python(str(FILE.with_name("transformers_memory.py")), "t5-11b", "24", "50").stdout
    assert "t5-11b: 11,307,321,344 parameters" in out
    found = dict(re.findall(r"^(\w[\w ]*\w) +([0-9.]+) GiB", out, re.MULTILINE))
    for part, size in (("parameters", 4), ("optimizer", 6)):
        assert float(found[part]) == pytest.approx(11307321344 * size / 24 / 2**30, abs=0.06)
    page = (FILE.parents[1] / "docs" / "from-aws-fsdp.md").read_text()
    assert f"| T5 11B | `t5-11b 24 50` | {found['in all']} |" in page
