"""The losses of a step's documents: which one made a spike."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from titanlite.data.documents import documents_of
from titanlite.data.rows import IGNORE
from titanlite.dist.dist_env import gather_objects
from titanlite.parallel.target_logs import TargetLogs, evaluating

if TYPE_CHECKING:
    from titanlite.assembly.build import TrainingComponents
    from titanlite.data.loader import Fetched

#: Documents that are kept, and tokens of each one's text.
_KEPT, _SHOWN = 100, 64


def document_losses(parts: TrainingComponents, fetched: Fetched) -> list[dict[str, Any]]:
    """Return a step's documents with their mean losses, and that of all others (`others`).

    The first is the one without which the loss falls most. The weights are those at hand. All ranks
    call it together.
    """
    documents: dict[tuple[str, str], dict[str, Any]] = {}
    for found in gather_objects(_losses_on_rank(parts, fetched)):
        for one in found:
            known = documents.setdefault((one["source"], one["document"]), one)
            if known is not one:
                known["loss"] += one["loss"]
                known["targets"] += one["targets"]
    finite = [one for one in documents.values() if math.isfinite(one["loss"])]
    loss = sum(one["loss"] for one in finite)
    targets = sum(one["targets"] for one in finite)
    for one in documents.values():
        other_loss, other_targets = loss, targets
        if math.isfinite(one["loss"]):
            other_loss -= one["loss"]
            other_targets -= one["targets"]
        one["others"] = other_loss / other_targets if other_targets else math.nan
        one["loss"] /= one["targets"]
        # Ranks of tensor parallelism count the same targets.
        one["targets"] = round(one["targets"] / parts.train_step.factors.loss)

    def rank(one: dict[str, Any]) -> tuple[bool, float]:
        return math.isfinite(one["loss"]), one["others"]

    worst = sorted(documents.values(), key=rank)[:_KEPT]
    for one in worst:
        one["text"] = parts.datasets.tokenizer.decode(one.pop("ids"))
    return worst


def _losses_on_rank(parts: TrainingComponents, fetched: Fetched) -> list[dict[str, Any]]:
    """Return the documents of this rank's sequences, with sums of losses and targets."""
    record = TargetLogs(parts.world.device)
    with evaluating(parts.model):
        for batch in fetched.batches:
            parts.train_step.runner.loss_sum(batch, record)
    if not record.logs:
        # A pipeline stage before the last.
        return []
    run, dataset = parts.run, parts.datasets.train
    labels = torch.cat([batch.labels for batch in fetched.batches])
    places = torch.arange(labels.size(1) * run.mesh.context, device=labels.device)
    width = len(places)
    if run.features.context is not None:
        places = run.features.context.part(places, parts.mesh)
    figures = torch.zeros(2, len(labels), width, dtype=torch.float64, device=labels.device)
    figures[0][:, places] = -torch.cat(record.logs).view_as(labels)
    figures[1][:, places] = (labels != IGNORE).double()
    rank, degree = parts.loaders.share
    sequences = fetched.sequences
    mine = sequences[(rank - sequences[0]) % degree :: degree]
    # A phase may cut sequences into pieces.
    losses, counted = figures.view(2, len(mine), -1).cpu().numpy()
    found = []
    for place, number in enumerate(mine):
        if not counted[place].any():
            # Padding of the last step.
            continue
        documents = documents_of(dataset, number, "")
        ends = np.cumsum([one.tokens for one in documents])
        # A label is the token after its place.
        owners = np.searchsorted(ends, np.arange(1, dataset.seq_len + 1), side="right")
        owners = owners.clip(max=len(documents) - 1)
        sums = np.bincount(owners, losses[place], len(documents)).tolist()
        targets = np.bincount(owners, counted[place], len(documents)).tolist()
        tokens = dataset.sequence(number).tokens
        for document, end, loss, count in zip(documents, ends, sums, targets, strict=True):
            if not count:
                continue
            begin = end - document.tokens
            row = {
                "loss": loss,
                "targets": count,
                "source": document.source,
                "document": document.name,
                "sequence": number,
                "ids": tokens[begin:end][:_SHOWN].tolist(),
            }
            if document.file is not None:
                row["file"] = document.file
                row["record"] = document.record
            found.append(row)
    return found
