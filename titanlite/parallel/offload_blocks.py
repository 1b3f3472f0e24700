"""Blocks whose saved activations wait in host memory until their backward.

Built on autograd's saved-tensor hooks, which torch 2.11 and 2.13 both have (checkpoint policies
offload only under `torch.compile`). Unlike `torch.autograd.graph.save_on_cpu` they leave weights
and tables on the device. They move a tensor once that several operators save, and copy beside the
computation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from titanlite.dist.local_parts import plain_local
from titanlite.parallel.host_memory import HostMemory, OffloadedTensor

#: Smaller tensors stay: a copy of any size costs some microseconds.
LEAST_BYTES = 1 << 16


def offload(
    block: nn.Module, host: HostMemory, model: nn.Module, least_bytes: int = LEAST_BYTES
) -> None:
    """Let `host` hold the tensors that calls of `block` save for their backward, in place; names
    stay.

    Weights, buffers of `model` and arguments without a gradient (masks, which all blocks share)
    stay on the device. Hooks surround the call, so compiled and checkpointed blocks work too.
    """
    object.__setattr__(block, "_offload", (host, model.buffers, least_bytes))
    cls: Any = type(block)
    block.__class__ = _offloaded(cls)


@functools.cache
def _offloaded(cls: type[nn.Module]) -> type:
    class Offloaded(cls):  # type: ignore[valid-type,misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with _sending(self, [*args, *kwargs.values()]):
                return super().__call__(*args, **kwargs)

    Offloaded.__name__ = Offloaded.__qualname__ = f"Offloaded{cls.__name__}"
    return Offloaded


@contextmanager
def _sending(block: nn.Module, arguments: list[Any]) -> Iterator[None]:
    host, buffers, least_bytes = block._offload  # type: ignore[misc]
    stay: set[int] = set()
    # Holds the tensors themselves until the block is done, so that an address means one tensor.
    sent: dict[tuple[Any, ...], tuple[Tensor, OffloadedTensor]] = {}

    def pack(tensor: Tensor) -> Callable[[], Tensor]:
        if not stay:
            # Not earlier: the weights of a sharded block are gathered inside its call.
            shared = [a for a in arguments if isinstance(a, Tensor) and not a.requires_grad]
            stay.update(
                _storage(plain_local(t)) for t in (*block.parameters(), *buffers(), *shared)
            )
        local = plain_local(tensor)
        # A tensor made of others is torchao's: a weight gathered in float8, or an input cast to
        # float8.
        if is_traceable_wrapper_subclass(local):
            return lambda: tensor
        if (
            local.device.type != host.device.type
            or local.nbytes < least_bytes
            or _storage(local) in stay
        ):
            return lambda: tensor
        layout = (local.shape, local.stride(), local.storage_offset())
        whole = local.nbytes == local.untyped_storage().nbytes()
        if whole:
            # As one flat tensor: views of it in other shapes are then sent once.
            local = local.as_strided((local.numel(),), (1,), 0)
        key = (
            _storage(local),
            local.storage_offset(),
            local.shape,
            local.stride(),
            local.dtype,
            local._version,
        )
        if key not in sent:
            sent[key] = local, host.send(local)
        offloaded = sent[key][1]

        def fetch() -> Tensor:
            fetched = offloaded.fetch()
            return fetched.as_strided(*layout) if whole else fetched

        if not isinstance(tensor, DTensor):
            return fetch
        mesh, placements = tensor.device_mesh, tensor.placements
        shape, stride = tensor.shape, tensor.stride()
        return lambda: DTensor.from_local(
            fetch(), mesh, placements, run_check=False, shape=shape, stride=stride
        ).detach()

    with saved_tensors_hooks(pack, lambda fetch: fetch()):
        yield
    # The graph holds `pack`, and so these variables, until the backward.
    sent.clear()
    arguments.clear()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
