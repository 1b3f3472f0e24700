"""The statement of data and compute beside exported weights: what their run recorded."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.checkpoint.hf_save import as_json
from titanlite.checkpoint.loaded import WEIGHT
from titanlite.config import trust
from titanlite.config.data_sections import DataSource
from titanlite.config.load import read_text
from titanlite.contrib.hub.hide_private_paths import public_place
from titanlite.data.mixtures.state import check_mixture, read_state
from titanlite.data.mixtures.turns import Turns
from titanlite.features.lora.settings import RECORD
from titanlite.models import get_spec
from titanlite.runs.read import Run, RunError, read_run

if TYPE_CHECKING:
    from titanlite.checkpoint.manifest import Manifest
    from titanlite.cli.hub.export_weights import Source
    from titanlite.config.sections import Config


def statement_files(source: Source) -> dict[str, bytes]:
    """Return the statement for programs and for people; {} for weights that tell no run."""
    manifest = source.manifest
    if manifest is None or "toml" not in manifest.config or "data" not in manifest.train:
        return {}
    import jinja2

    about = statement(manifest, source)
    template = Path(__file__).with_name("statement.md.jinja").read_text(encoding="utf-8")
    page = jinja2.Template(template, keep_trailing_newline=True).render(about)
    return {"statement.json": as_json(about), "statement.md": page.encode()}


def statement(manifest: Manifest, source: Source) -> dict[str, Any]:
    """Return the statement of a checkpoint."""
    place = Path(str(source.path))
    config = read_text(manifest.config["toml"], place, (), trust.foreign(False))[0].sections
    run = Run(place)
    with suppress(RunError):
        run = read_run(place.parent.parent)
    spec, args, data = get_spec(source.family), source.args, config.data
    flops = spec.flops_per_token(args, config.training.seq_len)
    if RECORD in manifest.config:
        # A frozen weight has two of the three products, as it has no gradient.
        own = [entry[1] for name, entry in manifest.tensors.items() if name.startswith(WEIGHT)]
        flops += 6 * sum(map(math.prod, own)) - spec.flops_per_token(args, 0) // 3
    tokens = manifest.train["tokens_seen"]
    hours = [seconds / 3600 for seconds in run.durations]
    ranks = [attempt.get("ranks") or 0 for attempt in run.attempts]
    joules: list[Any] = [attempt.get("joules") for attempt in run.attempts]
    return {
        "family": source.family,
        "parameters": spec.count_parameters(args),
        "weights_from": public_place(config.checkpoint.initial_load_path or "") or None,
        "step": manifest.step,
        "steps": run.steps,
        "saved": manifest.created,
        "tokens": tokens,
        "sources": sources_of(config, manifest.train),
        "sequence_length": config.training.seq_len,
        "packing": data.packing,
        "shuffled": data.shuffle,
        "skipped_steps": data.skip_steps,
        "flops": tokens * flops,
        "flops_per_token": flops,
        "hours": hours,
        "devices": [attempt.get("device") for attempt in run.attempts],
        "ranks": ranks,
        "device_hours": sum(map(operator.mul, hours, ranks)),
        "gpu_energy_kwh": sum(joules) / 3.6e6 if joules and None not in joules else None,
        "peak_memory_gib": max((row.get("memory_gib", 0.0) for row in run.rows), default=None),
        "software": manifest.versions,
    }


def sources_of(config: Config, train: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the amount that a run has read of each text, by its train state in a checkpoint."""
    data, training = config.data, config.training
    alone = DataSource(name=training.dataset, path=training.dataset_path)
    served = _served(train["data"], data.seed)
    found = []
    for name, text in {text.title: text for text in data.source}.items() or [("", alone)]:
        share = served.get(name, 0) / sum(served.values()) if served else 1.0
        tokens = round(share * train["tokens_seen"])
        epoch = train.get("epoch_tokens", {}).get(name)
        found.append(
            {
                "name": public_place(text.title),
                "license": text.license or data.license,
                "tokens": tokens,
                "share": share,
                "epochs": tokens / epoch if epoch else None,
            }
        )
    return found


def _served(state: Mapping[str, Any], seed: int) -> dict[str, int]:
    """Return how many sequences of each source of a mixture were trained on; {}: of one text."""
    rows = state.get("rows", {})
    if "segments" not in rows:
        return {}
    check_mixture(rows)
    names = rows["names"]
    turns = Turns(names, rows["slots"], seed)
    segments = read_state(rows, names)[1]

    def before(index: int) -> Any:
        segment = next(one for one in reversed(segments) if one.start <= index)
        return turns.given_before(segment, index).sum(0)

    found = before(state["next_sequence"])
    for first, end in state.get("left_out", ()):
        found = found - (before(end) - before(first))
    return dict(zip(names, found.tolist(), strict=True))
