"""A meter counts every byte once, from its operator until nothing refers to it."""

from __future__ import annotations

import torch
from torch import nn

from titanlite.cli.plan.memory_tracker import MemoryMeter

KB = 1024


class Net(nn.Module):
    """A block that keeps 4 KiB for its backward and needs 8 KiB in between, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": nn.Linear(16, 16, bias=False)})
        self.head = nn.Linear(16, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers["0"](x).relu())


def metered() -> dict[str, dict[str, int]]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    x = torch.ones(64, 16)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    meter = MemoryMeter(model, optimizer, ["layers.0"], "head")
    meter.track(x)
    meter.restart()
    with meter:
        meter.phase("forward")
        loss = model(x).sum()
        meter.phase("backward")
        loss.backward()
        meter.phase("optimizer")
        optimizer.step()
        optimizer.zero_grad()
    return {moment.place: dict(moment.parts) for moment in meter.moments()}


def test_each_module_has_a_moment_in_each_direction_and_bytes_by_part_are_exact():
    found = metered()
    forward = ["forward", "forward of layers.0", "forward of head"]
    assert list(found) == [*forward, "backward of head", "backward of layers.0", "optimizer"]
    weights = (16 * 16 + 64 * 16) * 4
    assert all(parts["parameters"] == weights for parts in found.values())
    assert all(2 * weights <= parts["optimizer"] <= 2 * weights + 16 for parts in found.values())
    # x, the block's output, which nothing keeps, and that of relu; then logits and their sum.
    assert found["forward of layers.0"]["activations"] == 8 * KB
    assert found["forward of layers.0"]["working memory"] == 4 * KB
    assert found["forward of head"]["activations"] == 8 * KB
    assert found["forward of head"]["logits and loss"] == 16 * KB + 4
    assert found["optimizer"]["gradients"] == weights
    # AdamW with foreach holds the denominators of all weights at a time.
    assert weights <= found["optimizer"]["working memory"] < 1.5 * weights


def test_storages_that_are_resized_count_as_gathered_weights():
    model = Net()
    meter = MemoryMeter(model, torch.optim.SGD(model.parameters(), lr=0.1), [], "head")
    with meter:
        whole = torch.empty(KB, dtype=torch.uint8)
        whole.untyped_storage().resize_(0)
        meter.enter("forward", "gathered")
        whole.untyped_storage().resize_(KB)
        meter.enter("backward", "freed")
        whole.untyped_storage().resize_(0)
    by_module = {moment.module: moment.parts["gathered weights"] for moment in meter.moments()}
    assert by_module == {"": KB, "gathered": KB, "freed": KB}
    assert meter.moments()[-1].total >= KB
    assert len(meter.moments()) == 3
