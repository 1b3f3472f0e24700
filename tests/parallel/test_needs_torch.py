"""What an older torch cannot divide is refused."""

from __future__ import annotations

import pytest
import torch

from titanlite.dist import ParallelismError
from titanlite.parallel import needs_torch


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.11.0+cu130"))
    needs_torch("2.11", "nothing")
    with pytest.raises(ParallelismError) as caught:
        needs_torch("2.12", "tensor parallelism")
    expected = "tensor parallelism needs torch 2.12 or later; this is torch 2.11.0+cu130"
    assert str(caught.value) == expected
