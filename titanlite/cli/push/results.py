"""Figures of tasks in the metadata of a model card: the table `model-index` of the hub."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

INDEX = "model-index"
_TASK = "text-generation"
#: A data set and a metric.
Figure = tuple[str, str]
#: What tells a metric from others: a task, a data set, a metric, and their details.
Place = tuple[str, str, str, str]
#: Details of a data set and of a metric: figures with other ones are other figures.
_OF_DATASET = ("config", "split", "revision", "args")
_OF_METRIC = ("config", "args")


def index_of(name: str, tasks: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the index of a model with figures as `quiz/acc`."""
    results: dict[str, dict[str, Any]] = {}
    for title, value in tasks.items():
        task, _, figure = title.rpartition("/")
        task = task or title
        empty = {"task": {"type": _TASK}, "dataset": {"name": task, "type": task}, "metrics": []}
        metric = {"type": figure, "value": round(value, 6)}
        results.setdefault(task, empty)["metrics"].append(metric)
    return [{"name": name, "results": list(results.values())}]


def merged_index(index: Any, newer: Any, gone: Collection[Figure] = ()) -> Any:
    """Return an index with newer results in it; None where there are none.

    They take the place of those of the same task, data set and metric. gone: what a push before has
    written. All others stay. The newer one alone stays where one has another form than the hub's.
    """
    if not _is_index(index) or (newer and not _is_index(newer)):
        return newer or index
    added = [result for model in newer or [] for result in model["results"]]
    places = {place for result in added for place, _ in _metrics(result)}
    places.update((_TASK, *figure, "") for figure in gone)
    models = [_without(model, places) for model in index]
    models[0]["results"] += added
    return [model for model in models if model["results"]] or None


def _without(model: Mapping[str, Any], places: Collection[Place]) -> dict[str, Any]:
    """Return a model of an index without the metrics at some places."""
    results = []
    for result in model["results"]:
        kept = [metric for place, metric in _metrics(result) if place not in places]
        if kept:
            results.append({**result, "metrics": kept})
    return {**model, "results": results}


def _is_index(index: Any) -> bool:
    """Return whether an index of metadata has the form that the hub accepts."""
    try:
        for model in index:
            for result in model["results"]:
                list(_metrics(result))
    except (TypeError, KeyError, AttributeError):
        return False
    return bool(index)


def _metrics(result: Mapping[str, Any]) -> Iterator[tuple[Place, Any]]:
    """Yield each metric of a result, after what tells it from others."""
    dataset = result["dataset"]
    for metric in result["metrics"]:
        details = [dataset.get(name) for name in _OF_DATASET]
        details += [metric.get(name) for name in _OF_METRIC]
        text = repr(details) if any(detail is not None for detail in details) else ""
        yield (str(result["task"]["type"]), str(dataset["type"]), str(metric["type"]), text), metric
