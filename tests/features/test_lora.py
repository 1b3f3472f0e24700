"""Low-rank adapters: gradients as PEFT's, a base that stays, checkpoints of adapters alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.adapters import base_folder, peft_folder, peft_gradients, run_flags, train_seen
from tests.support.compare import relative
from tests.support.pool import Pools


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_folder(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    return peft_folder(tmp_path_factory.mktemp("peft"), base)


def global_batch(found: list[dict[str, Any]], copies: int) -> list[Any]:
    """The batches of all ranks. copies: ranks that share each."""
    return [batch for one in found[::copies] for batch in one["batches"]]


TP = "--training.tensor_parallel_degree=2"
PP = "--experimental.pipeline_parallel_degree=2"
WAYS: dict[str, tuple[int, int, list[str]]] = {
    "one rank": (1, 1, []),
    "FSDP 2": (2, 1, []),
    "TP 2": (2, 2, [TP]),
    "PP 2": (2, 2, [PP]),
    "HSDP 2": (2, 1, ["--training.data_parallel_replicate_degree=2"]),
    "recomputed": (1, 1, ["--activation_checkpoint.mode=full"]),
    "recomputed by operator": (
        1,
        1,
        [
            "--activation_checkpoint.mode=selective",
            "--activation_checkpoint.selective_ac_option=op",
        ],
    ),
    "loss in chunks": (2, 1, ["--training.loss_chunks=3"]),
}


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_peft(
    pool: Pools, tmp_path: Path, base: Path, adapters: Path, way: str
) -> None:
    ranks, copies, more = WAYS[way]
    flags = run_flags(base, f"--lora.adapter={adapters}", "--training.steps=2", *more)
    found = pool(ranks).run(train_seen, str(tmp_path), *flags)
    expected, loss = peft_gradients(base, global_batch(found, copies))
    gradients: dict[str, torch.Tensor] = {}
    for one in found:
        gradients |= one["gradients"]
    assert gradients.keys() == expected.keys() and len(expected) == 28
    for name, gradient in expected.items():
        assert relative(gradients[name], gradient) < 2e-6, name
    assert found[0]["rows"][0]["loss"] == pytest.approx(loss, abs=2e-6)
    for one in found:
        assert one["held"] == len(one["adapters"])
        for name, tensor in one["end"].items():
            changed = not torch.equal(tensor, one["start"][name])
            assert changed == (name in one["adapters"]), name
