"""The first look at tokenizer, text and model, before there is any process. It imports numpy and
torch late.
"""

from __future__ import annotations

from threading import Thread

from titanlite.config.checks import is_there
from titanlite.config.dataset_registry import BUNDLED_IDS, BUNDLED_TOKENIZER_NAME
from titanlite.config.errors import Problem
from titanlite.run.config import RunConfig

#: Number of records that are read of each text.
_RECORDS = 8


def name_problems(run: RunConfig) -> list[Problem]:
    """Find classes and parameters that the config names and the model does not have."""
    if run.training.fsdp_units in ("block", "root") and not run.optimizer.groups:
        return []
    from titanlite.assembly.preflight import fsdp_problems, optimizer_problems

    args = run.model_args(BUNDLED_IDS)
    return [*optimizer_problems(run, args), *fsdp_problems(run, args)]


def first_look(run: RunConfig, seconds: float = 2.0) -> str:
    """Open the tokenizer and the first records of each local text, without a network.

    Returns what to say if that takes longer than `seconds`, or if the tokenizer seems to be another
    model's. Raises DataError and ShapeError as the run would.
    """
    failures: list[Exception] = []
    said: list[str] = []

    def look() -> None:
        try:
            said.append(_look(run))
        except Exception as error:  # it is raised below
            failures.append(error)

    thread = Thread(target=look, daemon=True)
    thread.start()
    thread.join(seconds)
    if failures:
        raise failures[0]
    if thread.is_alive():
        return f"tokenizer and first records take more than {seconds:g} s: not all were looked at"
    return said[0]


def _look(run: RunConfig) -> str:
    path = run.model.tokenizer_path
    if path != BUNDLED_TOKENIZER_NAME and not is_there(path):
        return ""
    from titanlite.assembly.datasets import text_reader
    from titanlite.data.dataset_sources import held_out_texts, training_texts
    from titanlite.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path, run.model.name)
    reader = text_reader(run, tokenizer)
    texts = training_texts(run.training, run.data)
    if run.validation.enable:
        texts |= held_out_texts(run.validation)
    for section, source in texts.items():
        reader.look(source, section, _RECORDS)
    vocabulary = run.model_args().vocab_size or 0
    if path != BUNDLED_TOKENIZER_NAME and 2 * tokenizer.vocab_size < vocabulary:
        return (
            f"model.tokenizer_path: {path} has {tokenizer.vocab_size:,} ids, and {run.model.title} "
            f"{vocabulary:,}: it may be another model's"
        )
    return ""
