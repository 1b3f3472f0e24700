"""The stages of a model on one pipeline rank.

# on the meta device, before everything that wraps modules
stages = cut_stages(build, layout, rank)
model = PipelineModel(stages, layout, mesh)  # when each stage is divided and wrapped
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.dist import ParallelismError
from titanlite.features.pipeline.stage_layout import StageLayout


def cut_stages(
    build: Callable[[], nn.Module], layout: StageLayout, rank: int
) -> dict[int, nn.Module]:
    """Return the stages of pipeline rank `rank`: whole models, in which modules of other stages are
    None or gone.

    build: makes the whole model, best on the meta device. Raises ParallelismError for a parameter
    outside of all stages: each would train a copy.
    """
    found = {}
    for stage in layout.on(rank):
        model = build()
        for name in itertools.chain(*layout.stages):
            if name in layout.stages[stage]:
                continue
            parent, _, leaf = name.rpartition(".")
            holder = model.get_submodule(parent)
            if isinstance(holder, nn.ModuleDict):
                del holder[leaf]
            else:
                setattr(holder, leaf, None)
        own = tuple(f"{name}." for name in layout.stages[stage])
        left = [name for name, _ in model.named_parameters() if not name.startswith(own)]
        if left:
            message = f"no stage of the pipeline has {', '.join(left)}"
            raise ParallelismError(f"{message}: pipeline_costs must name its module")
        found[stage] = model
    return found


class PipelineModel(nn.Module):
    """The stages of this rank as one module, with the whole model's names of parameters.

    It serves the optimizer, norms and checkpoints; `Pipeline` runs the stages.
    """

    def __init__(
        self, stages: Mapping[int, nn.Module], layout: StageLayout, mesh: DeviceMesh
    ) -> None:
        super().__init__()
        #: Stages by number, in a dictionary of Python so that no parameter has a second name.
        self.stages = dict(stages)
        self.layout = layout
        self.mesh = mesh
        #: The ranks of the pipeline, in order.
        self.pipeline_group = mesh.get_group("pp")
        for stage in self.stages.values():
            for name, child in stage.named_children():
                if isinstance(child, nn.ModuleDict):
                    if name not in self._modules:
                        self.add_module(name, nn.ModuleDict())
                    cast(nn.ModuleDict, self.get_submodule(name)).update(dict(child.items()))
                elif name not in self._modules:
                    # All stages have the RoPE tables: register them once.
                    self.add_module(name, child)
        held = set(self.parameters())
        left: list[str] = []
        for stage in self.stages.values():
            left += [name for name, weight in stage.named_parameters() if weight not in held]
        if left:
            shown = ", ".join(left[:3])
            raise ParallelismError(
                f"two stages of a rank share the module around {shown}: make it an nn.ModuleDict"
            )

    def pipeline_stages(self) -> list[nn.Module]:
        """See `titanlite.dist.local_parts.parts_of`."""
        return list(self.stages.values())

    def train(self, mode: bool = True) -> PipelineModel:
        for stage in self.stages.values():
            stage.train(mode)
        return super().train(mode)
