"""Pipeline parallelism by `torch.distributed.pipelining`: each rank holds some of the layers.

    # on the meta device, before everything that wraps modules
    stages = cut_stages(build, layout, rank)
    model = PipelineModel(stages, layout, mesh)        # when each stage has its memory and weights
    pipeline = Pipeline(model, "1F1B", shape, microbatches, accumulation, device, loss)
    share = pipeline.forward_backward(micro_batches, tokens)

`titanlite.parallel.parallelize` does the first two (`build_model`) and the third
(`build_pipeline`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.loss import LossFunction, in_chunks
from titanlite.parallel import ParallelismError
from titanlite.parallel.fsdp import free_gathered
from titanlite.parallel.pipeline_split import SCHEDULES, StageLayout

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

    from titanlite.data.loader import Batch


def cut_stages(
    build: Callable[[], nn.Module], layout: StageLayout, rank: int
) -> dict[int, nn.Module]:
    """Return the stages of pipeline rank `rank`: whole models, in which modules of other stages are
    None or gone.

    build: makes the whole model; on the meta device it costs no memory. Raises ParallelismError for
    a parameter outside of all stages: each stage would train one of its own.
    """
    return {stage: _without_others(build(), layout, stage) for stage in layout.on(rank)}


def _without_others(model: nn.Module, layout: StageLayout, stage: int) -> nn.Module:
    for name in (
        name for other, names in enumerate(layout.stages) if other != stage for name in names
    ):
        parent, _, leaf = name.rpartition(".")
        holder = model.get_submodule(parent)
        if isinstance(holder, nn.ModuleDict):
            del holder[leaf]
        else:
            setattr(holder, leaf, None)
    own = tuple(f"{name}." for name in layout.stages[stage])
    if left := [name for name, _ in model.named_parameters() if not name.startswith(own)]:
        raise ParallelismError(
            f"no stage of the pipeline has {', '.join(left)}: pipeline_costs must name its module"
        )
    return model


class PipelineModel(nn.Module):
    """The stages of this rank as one module, in which every parameter has its name of the whole
    model.

    It serves the optimizer, norms and checkpoints. It cannot be called; `Pipeline` runs the stages.
    """

    def __init__(
        self, stages: Mapping[int, nn.Module], layout: StageLayout, mesh: DeviceMesh
    ) -> None:
        """mesh: from `DistEnv.build_mesh`."""
        super().__init__()
        #: By number. In a dictionary of Python's, so that no parameter has a second name.
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
                elif (
                    name not in self._modules
                ):  # all stages have the RoPE tables: register them once
                    self.add_module(name, child)
        held = set(self.parameters())
        every = [pair for stage in self.stages.values() for pair in stage.named_parameters()]
        if left := [name for name, parameter in every if parameter not in held]:
            shown = ", ".join(left[:3])
            raise ParallelismError(
                f"two stages of a rank share the module around {shown}: make it an nn.ModuleDict"
            )

    def pipeline_stages(self) -> list[nn.Module]:
        """Return the modules that this rank runs, see `titanlite.parallel.local.parts_of`."""
        return list(self.stages.values())

    def train(self, mode: bool = True) -> PipelineModel:
        for stage in self.stages.values():
            stage.train(mode)
        return super().train(mode)


@dataclass(frozen=True)
class MicroBatchShape:
    """The shapes of one pipeline micro-batch on one rank."""

    #: Sequences.
    rows: int
    #: Tokens of each sequence at the input of the first stage.
    seq_len: int
    #: Positions of each sequence in the hidden states between stages: fewer where ranks share a
    #: sequence.
    hidden_len: int
    dim: int
    vocab: int
    #: Of the hidden states and their gradients.
    dtype: torch.dtype

    def hidden(self, rows: int, seq_len: int, device: torch.device | str) -> Tensor:
        """Return an empty tensor for the hidden states of `rows` sequences of `seq_len` tokens
        between stages.
        """
        length = seq_len * self.hidden_len // self.seq_len
        return torch.empty(rows, length, self.dim, dtype=self.dtype, device=device)


class Pipeline:
    """Runs the stages of a `PipelineModel` by a schedule.

    All ranks of the pipeline call the same methods.
    """

    def __init__(
        self,
        model: PipelineModel,
        schedule: str,
        shape: MicroBatchShape,
        microbatches: int,
        accumulation: int,
        device: torch.device,
        loss: LossFunction,
        positions: Callable[[int], Tensor] | None = None,
    ) -> None:
        """schedule: a name of `titanlite.parallel.pipeline_split.SCHEDULES`.

        microbatches: pieces of each micro-batch. accumulation: micro-batches per step. All pieces
        of a step go through one run of the schedule, so ranks wait once per step for the pipeline
        to fill and to drain.
        loss: summed over tokens. positions: tokens per sequence on this rank → their places in it,
        [that many] int64; needed where hidden states have another length.
        """
        from torch.distributed.pipelining.schedules import (
            get_schedule_class,
        )  # it loads the compiler

        self._model, self._shape, self._device, self._loss = model, shape, device, loss
        self._microbatches = microbatches
        self._positions = positions
        self._tokens = torch.ones((), dtype=torch.float32, device=device)
        count = len(model.layout.stages)
        self._has_first, self._has_last = 0 in model.stages, count - 1 in model.stages
        #: The last stage takes labels and returns the loss.
        self._chunked = self._has_last and in_chunks(model.stages[count - 1])
        stages = [self._stage(number, count) for number in model.stages]
        self._schedule = get_schedule_class(schedule)(
            stages[0] if SCHEDULES[schedule].stages == "one" else stages,
            microbatches * accumulation,
            loss_fn=self._loss_share,
            # Each piece's loss is divided by the tokens of the whole step, so gradients add up as
            # they are.
            scale_grads=False,
        )

    def _stage(self, number: int, count: int) -> PipelineStage:
        """Make a stage of known shapes, so that torch does not run the model once to infer them."""
        from torch.distributed.pipelining import PipelineStage

        shape, first, last = self._shape, number == 0, number == count - 1
        tokens = torch.empty(shape.rows, shape.seq_len, dtype=torch.int64, device="meta")
        hidden = shape.hidden(shape.rows, shape.seq_len, "meta")
        logits = torch.empty(*tokens.shape, shape.vocab, dtype=shape.dtype, device="meta")
        result = torch.empty((), device="meta") if self._chunked else logits
        return PipelineStage(
            self._model.stages[number],
            number,
            count,
            self._device,
            input_args=(tokens if first else hidden.clone().requires_grad_(),),
            output_args=((result if last else hidden.clone()).requires_grad_(),),
            group=self._model.pipeline_group,
        )

    def _loss_share(self, output: Tensor, labels: Tensor) -> Tensor:
        """Return a piece's share of the step's loss, from the output of the last stage."""
        return self._loss_of(output, labels) / self._tokens

    def _loss_of(self, output: Tensor, labels: Tensor) -> Tensor:
        return output if self._chunked else self._loss(output, labels)

    def forward_backward(
        self,
        micro_batches: Sequence[Batch],
        tokens: Tensor,
        phase: Callable[[str], object] = lambda _: None,
    ) -> Tensor:
        """Accumulate gradients of the step's loss.

        Return this rank's share of it (0-dim, detached).

        Only the last stage has a loss: the shares of other ranks are zero. tokens: valid tokens of
        the whole step over all data-parallel ranks, so that shares simply add up. Gradients are
        reduced over ranks once, at the end. phase: is told that "pipeline" begins.
        """
        phase("pipeline")
        self._tokens = tokens
        inputs = (torch.cat([b.tokens for b in micro_batches]),) if self._has_first else ()
        labels = torch.cat([b.labels for b in micro_batches]) if self._has_last else None
        losses: list[Tensor] | None = [] if self._has_last else None
        rows = sum(len(b.tokens) for b in micro_batches)
        documents = [b.documents for b in micro_batches if b.documents is not None]
        keywords = self._keywords(
            rows, self._shape.seq_len, labels, torch.cat(documents) if documents else None
        )
        self._schedule.step(*inputs, target=labels, losses=losses, return_outputs=False, **keywords)
        return (
            torch.stack(losses).detach().sum() if losses else torch.zeros((), device=self._device)
        )

    @torch.no_grad()
    def loss_sum(self, batch: Batch) -> Tensor:
        """Return a batch's loss, summed over tokens (0-dim), without gradients: zero on ranks
        without the last stage.

        batch: any number of sequences, on the device; the same on all ranks of the pipeline.
        """
        count, ids = self._microbatches, batch.documents
        pieces, labels = batch.tokens.chunk(count), batch.labels.chunk(count)
        documents = [None] * len(pieces) if ids is None else ids.chunk(count)
        total = torch.zeros((), dtype=torch.float32, device=self._device)
        sent: list[tuple[dist.Work | None, Tensor]] = []
        local: list[Tensor] = []  # from a stage to the next one on the same rank
        for number, stage in self._model.stages.items():
            inputs = self._inputs(number, pieces, local)
            local = []
            for x, y, doc_ids in zip(inputs, labels, documents, strict=True):
                out = stage(x, **self._keywords(len(y), y.size(1), y, doc_ids))
                if number + 1 == len(self._model.layout.stages):
                    total += self._loss_of(out, y)
                elif number + 1 in self._model.stages:
                    local.append(out)
                else:
                    out = out.contiguous()
                    target = self._rank_of(number + 1)
                    sent.append((dist.isend(out, target, self._model.pipeline_group), out))
        for work, _ in sent:
            if work is not None:
                work.wait()
        for stage in self._model.stages.values():
            free_gathered(stage)  # no backward comes that would free the weights
        return total

    def _inputs(
        self, number: int, tokens: Sequence[Tensor], local: Sequence[Tensor]
    ) -> Iterator[Tensor]:
        """Yield the inputs of a stage, piece by piece; wait for each when it is needed."""
        if number == 0:
            yield from tokens
        elif number - 1 in self._model.stages:
            yield from local
        else:
            # Post all receives before the stage's first send: ranks that each wait in a send would
            # deadlock.
            buffers = [self._shape.hidden(len(t), t.size(1), self._device) for t in tokens]
            source, group = self._rank_of(number - 1), self._model.pipeline_group
            for work, buffer in [(dist.irecv(buffer, source, group), buffer) for buffer in buffers]:
                if work is not None:
                    work.wait()
                yield buffer

    def _rank_of(self, number: int) -> int:
        """Return the global rank that holds a stage."""
        return dist.get_global_rank(self._model.pipeline_group, self._model.layout.ranks[number])

    def _keywords(
        self, rows: int, seq_len: int, labels: Tensor | None, documents: Tensor | None
    ) -> dict[str, Any]:
        """Return the keyword arguments for all stages of this rank; only the last one uses the
        labels.
        """
        keywords: dict[str, Any] = {"labels": labels, "loss": self._loss} if self._chunked else {}
        if documents is not None:
            keywords["doc_ids"] = documents  # they tell positions too
        elif self._positions is not None:
            keywords["positions"] = self._positions(seq_len).expand(rows, -1)
        return keywords
