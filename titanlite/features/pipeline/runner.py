"""Runs the stages of a `PipelineModel` by a schedule of `torch.distributed.pipelining`.

pipeline = Pipeline(builder, model, "1F1B", microbatches, loss)
share = pipeline.forward_backward(micro_batches, tokens)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.features.pipeline.stages import PipelineModel
from titanlite.loss import LossFunction, in_chunks
from titanlite.parallel.fsdp import free_gathered
from titanlite.parallel.schedules import SCHEDULES

if TYPE_CHECKING:
    from titanlite.data.loader import Batch
    from titanlite.parallel.parallelize import ModelBuilder


class Pipeline:
    """Runs the stages of a `PipelineModel` by a schedule.

    All ranks of the pipeline call the same methods.
    """

    def __init__(
        self,
        builder: ModelBuilder,
        model: PipelineModel,
        schedule: str,
        microbatches: int,
        loss: LossFunction,
    ) -> None:
        """schedule: a name of `SCHEDULES`. microbatches: pieces of each micro-batch. loss: summed
        over tokens.

        All pieces of a step go through one run of the schedule, so the pipeline fills and drains
        once per step.
        """
        run = builder.run
        self._builder = builder
        self._model = model
        self._name = schedule
        self._device = builder.device
        self._loss = loss
        self._microbatches = microbatches
        self._tokens = torch.ones((), dtype=torch.float32, device=self._device)
        count = len(model.layout.stages)
        self._has_first = 0 in model.stages
        self._has_last = count - 1 in model.stages
        #: The last stage takes labels and returns the loss.
        self._chunked = self._has_last and in_chunks(model.stages[count - 1])
        self.resize(run.batch.accumulation, run.rank_len)

    def resize(self, accumulation: int, seq_len: int) -> None:
        """Run steps of so many micro-batches. seq_len: tokens of a row on this rank."""
        self._seq_len = seq_len
        # It loads the compiler.
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        def loss_share(output: Tensor, labels: Tensor) -> Tensor:
            return self._loss_of(output, labels, self._loss) / self._tokens

        builder = self._builder
        rows = builder.run.batch.micro_batch_size // self._microbatches
        tokens = torch.empty(rows, seq_len, dtype=torch.int64, device="meta")
        hidden = self._hidden(tokens, "meta")
        result = torch.empty((), device="meta")
        if not self._chunked:
            shape = (*tokens.shape, builder.args.vocab_size)
            result = torch.empty(shape, dtype=builder.param_dtype, device="meta")
        count = len(self._model.layout.stages)
        stages = []
        for number, model in self._model.stages.items():
            taken = tokens if number == 0 else hidden.clone().requires_grad_()
            made = result if number == count - 1 else hidden.clone()
            # With known shapes torch does not run the model once to infer them.
            stage = PipelineStage(
                model,
                number,
                count,
                self._device,
                input_args=(taken,),
                output_args=(made.requires_grad_(),),
                group=self._model.pipeline_group,
            )
            stages.append(stage)
        self._schedule = get_schedule_class(self._name)(
            stages[0] if SCHEDULES[self._name].stages == "one" else stages,
            self._microbatches * accumulation,
            loss_fn=loss_share,
            # Each piece's loss is divided by the tokens of the whole step, so gradients add up as
            # they are.
            scale_grads=False,
        )

    def _hidden(self, tokens: Tensor, device: torch.device | str) -> Tensor:
        """Return an empty tensor for hidden states of tokens [rows, seq], whose sequence
        tensor-parallel ranks divide.
        """
        rows, seq_len = tokens.shape
        shape = (rows, seq_len // self._builder.tp, self._builder.args.dim)
        return torch.empty(shape, dtype=self._builder.param_dtype, device=device)

    def _loss_of(self, output: Tensor, labels: Tensor, loss: LossFunction) -> Tensor:
        return output if self._chunked else loss(output, labels)

    def forward_backward(
        self,
        micro_batches: Sequence[Batch],
        tokens: Tensor,
        phase: Callable[[str], object] = lambda _: None,
    ) -> Tensor:
        """Accumulate gradients of the step's loss; return this rank's share of it (0-dim,
        detached).

        Only the last stage has a loss; other shares are zero. tokens: valid ones of the step over
        all data-parallel ranks, so that shares add up. Gradients are reduced once, at the end.
        phase: is told "pipeline".
        """
        phase("pipeline")
        self._tokens = tokens
        inputs: tuple[Tensor, ...] = ()
        labels: Tensor | None = None
        losses: list[Tensor] | None = None
        if self._has_first:
            inputs = (torch.cat([b.tokens for b in micro_batches]),)
        if self._has_last:
            labels = torch.cat([b.labels for b in micro_batches])
            losses = []
        rows = sum(len(b.tokens) for b in micro_batches)
        parts = [b.documents for b in micro_batches if b.documents is not None]
        documents = torch.cat(parts) if parts else None
        keywords = self._keywords(rows, self._seq_len, labels, documents, self._loss)
        self._schedule.step(*inputs, target=labels, losses=losses, return_outputs=False, **keywords)
        if not losses:
            return torch.zeros((), device=self._device)
        return torch.stack(losses).detach().sum()

    @torch.no_grad()
    def loss_sum(self, batch: Batch, loss: LossFunction | None = None) -> Tensor:
        """Return a batch's loss, summed over tokens (0-dim), without gradients: zero on ranks
        without the last stage.

        batch: any number of sequences, the same on all ranks of the pipeline. loss: None: that of
        training.
        """
        loss = loss or self._loss
        count = self._microbatches
        pieces = batch.tokens.chunk(count)
        labels = batch.labels.chunk(count)
        documents: Sequence[Tensor | None] = [None] * len(pieces)
        if batch.documents is not None:
            documents = batch.documents.chunk(count)
        total = torch.zeros((), dtype=torch.float32, device=self._device)
        sent: list[tuple[dist.Work | None, Tensor]] = []
        local: list[Tensor] = []  # from a stage to the next one on the same rank
        for number, stage in self._model.stages.items():
            inputs = self._inputs(number, pieces, local)
            local = []
            for x, y, doc_ids in zip(inputs, labels, documents, strict=True):
                out = stage(x, **self._keywords(len(y), y.size(1), y, doc_ids, loss))
                if number + 1 == len(self._model.layout.stages):
                    total += self._loss_of(out, y, loss)
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
            # No backward comes that would free the weights.
            free_gathered(stage)
        return total

    def _inputs(
        self, number: int, tokens: Sequence[Tensor], local: Sequence[Tensor]
    ) -> Iterator[Tensor]:
        """Each input is waited for when it is needed."""
        if number == 0:
            yield from tokens
        elif number - 1 in self._model.stages:
            yield from local
        else:
            # Post all receives before the stage's first send: ranks that each wait in a send would
            # deadlock.
            buffers = [self._hidden(piece, self._device) for piece in tokens]
            source = self._rank_of(number - 1)
            group = self._model.pipeline_group
            works = [dist.irecv(buffer, source, group) for buffer in buffers]
            for work, buffer in zip(works, buffers, strict=True):
                if work is not None:
                    work.wait()
                yield buffer

    def _rank_of(self, number: int) -> int:
        return dist.get_global_rank(self._model.pipeline_group, self._model.layout.ranks[number])

    def _keywords(
        self,
        rows: int,
        seq_len: int,
        labels: Tensor | None,
        documents: Tensor | None,
        loss: LossFunction,
    ) -> dict[str, Any]:
        keywords: dict[str, Any] = {"labels": labels, "loss": loss} if self._chunked else {}
        if documents is not None:
            keywords["doc_ids"] = documents  # they tell positions too
        elif self._builder.tp > 1:
            # Hidden states have fewer positions than tokens.
            run = self._builder.run
            places = torch.arange(seq_len * run.mesh.context, device=self._device)
            context = run.features.context
            if context is not None:
                places = context.part(places, self._builder.mesh)
            keywords["positions"] = places.expand(rows, -1)
        return keywords
