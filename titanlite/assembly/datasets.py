"""The text of a run: a config's keys → tokenizer, training rows and held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from titanlite.config.errors import refuse
from titanlite.data.dataset_builder import Share, TextReader, alone
from titanlite.data.dataset_sources import endless
from titanlite.data.rows import Rows
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.run.config import RunConfig

if TYPE_CHECKING:
    from titanlite.data.phases import Phases
    from titanlite.features.tasks.harness import HarnessTask


@dataclass(frozen=True)
class Datasets:
    """Data that is read before anything is built."""

    tokenizer: Tokenizer
    train: Rows
    #: By name, see `TextReader.held_out`; empty where nothing is validated.
    validation: dict[str, Rows]
    #: Tasks of `eval.tasks`, on rank 0.
    tasks: Sequence[HarnessTask] = ()


def read_datasets(run: RunConfig, share: Share = alone) -> Datasets:
    """Read tokenizer and texts.

    Before any process group or model exists, so that bad ones end a run early.

    share: gives all ranks what a function returns on rank 0, under a name; by default each rank
    lists files itself. Raises DataError naming file and record, ShapeError when the tokenizer has
    more entries than the model.
    """
    tokenizer = load_tokenizer(run.model.tokenizer_path, run.model.name)
    # Text takes long; a vocabulary that is the tokenizer's was not known when the config was
    # checked.
    if run.checkpoint.initial_load_path is not None:
        from titanlite.resolve.weights_shape import source_problems

        args = run.model_args(tokenizer.vocab_size)
        refuse(list(source_problems(run.model, run.checkpoint, args)))
    train = read_training_text(run, tokenizer, share)
    if run.steps:
        train.check_length(run.course, run.steps)
    validation: dict[str, Rows] = {}
    if run.validation.enable:
        validation = read_held_out(run, tokenizer, share)
    tasks = run.features.tasks
    if tasks is None:
        return Datasets(tokenizer, train, validation)
    return Datasets(tokenizer, train, validation, tasks.load(run, share))


def read_training_text(run: RunConfig, tokenizer: Tokenizer, share: Share = alone) -> Rows:
    """Read the training text alone. Raises as `read_datasets`."""
    phases = phases_of(run)
    shares = None if phases is None else phases.shares()
    # Shorter sequences are pieces of rows.
    training = replace(run.training, seq_len=run.row_len)
    return text_reader(run, tokenizer, share).train(training, shares)


def text_reader(run: RunConfig, tokenizer: Tokenizer, share: Share = alone) -> TextReader:
    """Return what opens the texts of a run. Raises ShapeError as `read_datasets`."""
    patience = run.data.retry_seconds
    if run.mesh.world_size > 1:
        # The other ranks wait in a collective.
        patience = min(patience, run.comm.train_timeout_seconds / 2)
    vocabulary = run.model_args(tokenizer.vocab_size).vocab_size
    return TextReader(run.data, tokenizer, vocabulary, run.mesh.dp_degree, share, patience)


def phases_of(run: RunConfig) -> Phases | None:
    """Return the `[[data.phase]]` tables with the numbers that tell where they begin.

    A run without phases and sources, whose schedule counts steps, has none.
    """
    if not run.data.phase and not run.data.source and not run.schedule.in_tokens:
        return None
    from titanlite.data.phases import Phases
    from titanlite.data.skip_ranges import ranges_of_steps

    return Phases(
        phases=run.data.phase,
        first={source.title: source.weight for source in run.data.source},
        global_batch=run.batch.global_batch_size,
        tokens_per_step=run.batch.tokens_per_step,
        skip=ranges_of_steps(run.data.skip_steps, run.course),
    )


def read_held_out(run: RunConfig, tokenizer: Tokenizer, share: Share = alone) -> dict[str, Rows]:
    """Read the texts of validation, by name.

    Raises as `read_datasets`, and ConfigError for a full pass over endless text.
    """
    seq_len = run.validation.seq_len or run.training.seq_len
    found = text_reader(run, tokenizer, share).held_out(run.validation, seq_len)
    if run.validation.steps == -1:
        names = [name for name, rows in found.items() if rows.total_sequences is None]
        refuse([endless(name or run.validation.dataset) for name in names])
    return found
