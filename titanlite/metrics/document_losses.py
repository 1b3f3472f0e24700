"""Which document made a spike."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from titanlite.data.documents import documents_of
from titanlite.data.rows import IGNORE
from titanlite.dist.dist_env import gather_objects
from titanlite.parallel.target_logs import TargetLogs, evaluating
from titanlite.utils import logger

if TYPE_CHECKING:
    from titanlite.assembly.build import TrainingComponents
    from titanlite.data.loader import Fetched

#: Documents that are kept, and tokens of each one's text.
_KEPT, _SHOWN = 100, 64


def document_losses(parts: TrainingComponents, fetched: Fetched) -> list[dict[str, Any]]:
    """Return a step's documents, the one without which its loss falls most first; none, and a
    warning, where that fails.

    All ranks call it together.
    """
    # An error in a collective ends the run: the other ranks wait there.
    alone = parts.world.size == 1
    found: Any
    try:
        logs = _target_logs(parts, fetched)
        alone = True
        found = _losses_on_rank(parts, fetched, logs)
    except Exception as error:
        if not alone:
            raise
        found = f"the losses of documents cannot be measured: {type(error).__name__}: {error}"
    ranks = gather_objects(found)
    failed = [one for one in ranks if isinstance(one, str)]
    if failed:
        logger.warning(failed[0])
        return []
    documents: dict[tuple[str, str], dict[str, Any]] = {}
    for one in chain.from_iterable(ranks):
        known = documents.setdefault((one["source"], one["name"]), one)
        if known is not one:
            known["loss"] += one["loss"]
            known["tokens"] += one["tokens"]
    counted = [one for one in documents.values() if one["tokens"]]
    sums = np.array([(one["loss"], one["tokens"]) for one in counted])
    finite = np.isfinite(sums[:, 0])
    loss, tokens = (sums[finite].sum(0) - np.where(finite[:, None], sums, 0)).T
    others = loss / np.where(tokens, tokens, np.nan)
    worst = []
    for index in np.lexsort((others, finite))[:_KEPT].tolist():
        one = counted[index]
        one["loss"] /= one["tokens"]
        # Ranks of tensor parallelism count the same ones.
        one["tokens"] = round(one["tokens"] / parts.train_step.factors.loss)
        one["others"] = float(others[index])
        one["text"] = parts.datasets.tokenizer.decode(one.pop("ids"))
        worst.append(one)
    return worst


def _target_logs(parts: TrainingComponents, fetched: Fetched) -> list[torch.Tensor]:
    record = TargetLogs(parts.world.device)
    with evaluating(parts.model):
        for batch in fetched.batches:
            parts.train_step.runner.loss_sum(batch, record)
    return record.logs


def _losses_on_rank(
    parts: TrainingComponents, fetched: Fetched, logs: list[torch.Tensor]
) -> list[dict[str, Any]]:
    if not logs:
        # A pipeline stage before the last.
        return []
    run, dataset = parts.run, parts.datasets.train
    labels = torch.cat([batch.labels for batch in fetched.batches])
    width = labels.size(1) * run.mesh.context
    places = torch.arange(width, device=labels.device)
    if run.features.context is not None:
        places = run.features.context.part(places, parts.mesh)
    figures = torch.zeros(2, len(labels), width, dtype=torch.float64, device=labels.device)
    figures[0, :, places] = -torch.cat(logs).view_as(labels)
    figures[1, :, places] = (labels != IGNORE).double()
    rank, degree = parts.loaders.share
    sequences = fetched.sequences
    mine = sequences[(rank - sequences[0]) % degree :: degree]
    # A phase may cut sequences into pieces. A label is the token after its place.
    of_tokens = np.pad(figures.view(2, len(mine), -1).cpu(), ((0, 0), (0, 0), (1, 0)))
    found = []
    for place, number in enumerate(mine):
        if not of_tokens[1, place].any():
            # Padding of the last step.
            continue
        documents = documents_of(dataset, number, "")
        begins = np.cumsum([one.tokens for one in documents[:-1]], dtype=int)
        ids = np.split(dataset.sequence(number).tokens, begins)
        sums = np.split(of_tokens[:, place], begins, 1)
        for document, tokens, both in zip(documents, ids, sums, strict=True):
            loss, count = both.sum(1).tolist()
            row = {**document._asdict(), "sequence": number, "loss": loss, "tokens": count}
            found.append({**row, "ids": tokens[:_SHOWN].tolist()})
    return found
