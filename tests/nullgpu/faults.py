"""Faults that the null GPU has to count: a callback that makes each of them in every step."""

import ctypes
from typing import Any

import torch
import torch.distributed as dist

from titanlite.callbacks import Callback


class Faults(Callback):
    def before_update(self, trainer: Any) -> None:
        weight = next(trainer.parts.model.parameters()).to_local()
        weight.sum().item()
        weight[:1].cpu()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.empty(2**31, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()
        torch.empty(1, device="cuda:1")
        ctypes.CDLL(None).cudaStreamCreate(ctypes.byref(ctypes.c_void_p()))
        dist.all_reduce(weight.sum())
