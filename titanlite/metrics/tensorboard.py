"""TensorBoard events under the tags that users of this kind of trainer have dashboards for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from titanlite.metrics.background_writer import BackgroundWriter

#: Key of metrics.jsonl -> tag.
TAGS: Mapping[str, str] = {
    "loss": "loss_metrics/global_avg_loss",
    "max_loss": "loss_metrics/global_max_loss",
    "validation_loss": "validation_metrics/loss",
    "validation_perplexity": "validation_metrics/perplexity",
    "float8_drift": "float8/drift",
    "float8_drift_relative": "float8/drift(relative)",
    "grad_norm": "grad_norm",
    "lr": "lr",
    "tokens_seen": "n_tokens_seen",
    "tps": "throughput(tps)",
    "tflops": "tflops",
    "mfu": "mfu(%)",
    "seconds_per_step": "time_metrics/end_to_end(s)",
    "data_seconds": "time_metrics/data_loading(s)",
    "data_percent": "time_metrics/data_loading(%)",
    "gc_seconds": "time_metrics/garbage_collection(s)",
    "slowest_rank": "ranks/slowest",
    "fastest_rank": "ranks/fastest",
    "lag_seconds": "ranks/lag(s)",
    "lag_percent": "ranks/lag(%)",
    "memory_gib": "memory/max_active(GiB)",
    "memory_percent": "memory/max_active(%)",
    "reserved_gib": "memory/max_reserved(GiB)",
    "reserved_percent": "memory/max_reserved(%)",
    "alloc_retries": "memory/num_alloc_retries",
    "ooms": "memory/num_ooms",
}
#: Keys with these prefixes are tags already, many of them by layer or source.
_TAGS = ("grad_norm/", "validation/", "loss/", "share/", "experts/")
_FLUSH_SECONDS = 10


def tags(row: Mapping[str, float]) -> dict[str, float]:
    """Return a row of metrics.jsonl under the tags of dashboards, without the keys that have none."""
    names = {key: key if key.startswith(_TAGS) else TAGS.get(key) for key in row}
    return {tag: row[key] for key, tag in names.items() if tag is not None}


class TensorBoard(BackgroundWriter):
    """Writes into a dated subfolder of `folder`, within about ten seconds.

    purge_step: first step that will be written. A resumed run (over 1) goes on in the newest subfolder, and
    TensorBoard forgets the values there from this step on; a new run begins a subfolder.
    """

    name = "TensorBoard"
    failed_seconds = 0.3

    def __init__(self, folder: Path, purge_step: int) -> None:
        self.folder, self._purge_step = Path(folder), purge_step
        super().__init__()

    def send(self, rows: Iterator[tuple[int, dict[str, Any]]]) -> None:
        dated = list(self.folder.glob("2???????-????"))
        new = self.folder / datetime.now().strftime("%Y%m%d-%H%M")
        self.folder = max(dated) if dated and self._purge_step > 1 else new
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(self.folder), purge_step=self._purge_step, flush_secs=_FLUSH_SECONDS) as writer:
            for step, values in rows:
                for tag, value in values.items():
                    add = writer.add_text if isinstance(value, str) else writer.add_scalar
                    add(tag, value, step)
