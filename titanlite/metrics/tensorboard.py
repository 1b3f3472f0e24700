"""TensorBoard events under the tags that users of this kind of trainer have dashboards for."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from titanlite.utils import logger

#: Key of metrics.jsonl -> tag.
TAGS: Mapping[str, str] = MappingProxyType(
    {
        "loss": "loss_metrics/global_avg_loss",
        "max_loss": "loss_metrics/global_max_loss",
        "validation_loss": "validation_metrics/loss",
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
)

#: Keys that begin so are tags already, one for each layer.
_BY_LAYER = "grad_norm/"


def tags(row: Mapping[str, float]) -> dict[str, float]:
    """A row of metrics.jsonl under the tags of dashboards; what has no tag is left out."""
    names = {key: key if key.startswith(_BY_LAYER) else TAGS.get(key) for key in row}
    return {tag: row[key] for key, tag in names.items() if tag is not None}


_DATED = "%Y%m%d-%H%M"
#: Events are handed to the writer's thread. Its queue is long, so that a stuck file system does not stop training.
_QUEUE = 1_000_000
_FLUSH_SECONDS = 10
_CLOSE_SECONDS = 10.0
#: After a failure the launcher soon ends this process, which still has to say why.
_FAILED_SECONDS = 0.3


class TensorBoard:
    """Writes into a dated subfolder of `folder`; the first error ends it with one warning, never the training.

    purge_step: first step that will be written. A resumed run (over 1) goes on in the newest subfolder, and
    TensorBoard forgets what stood there from this step on; a new run begins a subfolder.
    """

    def __init__(self, folder: Path, purge_step: int) -> None:
        self._writer: Any = None
        self.folder = Path(folder)
        try:
            self.folder = _subfolder(self.folder, resumed=purge_step > 1)
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(
                str(self.folder), purge_step=purge_step, max_queue=_QUEUE, flush_secs=_FLUSH_SECONDS
            )
        except Exception as error:
            self._disable(error)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars by tag. They are in the file within about ten seconds."""
        if self._writer is None:
            return
        try:
            for tag, value in values.items():
                self._writer.add_scalar(tag, value, step)
        except Exception as error:
            self._disable(error)

    def close(self, failed: bool = False) -> None:
        """Write what is left; gives up after ten seconds, or 0.3 when the run failed."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        failure: list[Exception] = []

        def finish() -> None:
            try:
                writer.close()
            except Exception as error:
                failure.append(error)

        thread = threading.Thread(target=finish, daemon=True)
        thread.start()
        seconds = _FAILED_SECONDS if failed else _CLOSE_SECONDS
        thread.join(seconds)
        if thread.is_alive():
            failure.append(TimeoutError(f"not closed within {seconds:g} s"))
        if failure:
            self._disable(failure[0])

    def _disable(self, error: Exception) -> None:
        self._writer = None
        logger.warning(f"TensorBoard is off from here on ({self.folder}): {type(error).__name__}: {error}")


def _subfolder(folder: Path, resumed: bool) -> Path:
    if resumed and folder.is_dir():
        earlier = [path for path in folder.iterdir() if path.is_dir() and _is_dated(path.name)]
        if earlier:
            return max(earlier)
    return folder / datetime.now().strftime(_DATED)


def _is_dated(name: str) -> bool:
    try:
        datetime.strptime(name, _DATED)
    except ValueError:
        return False
    return True
