"""The resolved config of a run: its sections, and the numbers that follow from them. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from msgspec.structs import replace as replace_fields

from titanlite.config.notes import Note
from titanlite.config.sections import Config
from titanlite.data.step_sizes import Course
from titanlite.models.args import model_args
from titanlite.models.families import get_spec
from titanlite.models.spec import ModelSpec
from titanlite.optim.schedule import Schedule
from titanlite.run.features import Features, features_of


@dataclass(frozen=True)
class MeshSizes:
    """Degrees of parallelism; their product is the world size."""

    world_size: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    #: Ranks that share one sequence (context), one layer's weights (tensor), the layers of one copy
    #: (pipeline).
    context: int = 1
    tensor: int = 1
    pipeline: int = 1
    #: Ranks that share the experts of an MoE layer; no factor of the world size.
    expert: int = 1

    @property
    def dimensions(self) -> dict[str, int]:
        """Degrees by mesh dimension, outermost first."""
        return {
            "pp": self.pipeline,
            "dp_replicate": self.dp_replicate,
            "dp_shard": self.dp_shard,
            "cp": self.context,
            "tp": self.tensor,
        }

    @property
    def dp_degree(self) -> int:
        """Ranks that read different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def weight_shards(self) -> int:
        """Ranks over which `fully_shard` divides each weight, also those that share sequences."""
        return self.dp_shard * self.context

    @property
    def expert_shards(self) -> int:
        """Ranks over which `fully_shard` divides each expert.

        Tensor-parallel ranks have copies of experts that no ranks share.
        """
        if self.expert == 1:
            return self.weight_shards
        return self.weight_shards * self.tensor // self.expert

    @property
    def weight_shards_in_words(self) -> str:
        if self.context == 1:
            return "data_parallel_shard"
        return "data_parallel_shard * context_parallel"


@dataclass(frozen=True)
class BatchSizes:
    """Batch arithmetic: sequences per step = micro_batch_size * accumulation *
    data-parallel ranks.
    """

    #: Sequences per micro-batch and data-parallel rank.
    micro_batch_size: int
    #: Micro-batches per step and rank.
    accumulation: int
    #: Sequences per step over all ranks.
    global_batch_size: int
    #: Tokens per sequence.
    seq_len: int
    #: Tokens per step over all ranks (global_batch_size * seq_len).
    tokens_per_step: int


@dataclass(frozen=True)
class PipelineSizes:
    """How often a model and a micro-batch are cut."""

    #: Stages of the whole model, over all ranks.
    stages: int = 1
    #: Pieces of each micro-batch of `BatchSizes.micro_batch_size` sequences.
    microbatches: int = 1


class Trained(NamedTuple):
    """The parameters that a run trains, and the averages that it keeps."""

    #: Parameters of adapters beside those of the model, which are frozen; None: the model's own.
    adapters: int | None
    #: Bytes of averages for each trained parameter, in memory and in checkpoints.
    averages: int


class RunConfig(Config, frozen=True, kw_only=True, dict=True):
    """One run: its sections, with folders joined and defaults of other sections filled in, and what
    follows from them.

    Filled in: folders below job.dump_folder, validation.batch_size and seq_len, and of a pipeline
    its schedule's exact name, its micro-batches and training.reshard_after_forward. The degrees and
    sizes that are -1 in the sections are in `mesh` and `batch`.
    """

    mesh: MeshSizes
    #: Batch sizes of the first step.
    batch: BatchSizes
    #: The sizes of all steps, where nothing disturbs the run.
    course: Course
    pipeline: PipelineSizes
    #: Optimizer steps; None: `training.epochs` waits for the length of the text.
    steps: int | None
    schedule: Schedule
    #: How derived numbers came about, and what a user should know, the gravest first.
    notes: tuple[Note, ...]
    #: The config as written, as one TOML file with the source of each value as a comment.
    toml: str

    @cached_property
    def features(self) -> Features:
        """Features that the run switches on."""
        return features_of(self)

    @property
    def tokens(self) -> int | None:
        """Tokens of all steps; None: their number is not known yet."""
        return None if self.steps is None else self.course.tokens_after(self.steps)

    @property
    def legs(self) -> dict[int, BatchSizes]:
        """The batches of the run by their first step."""
        found = {}
        for done, size in self.course.legs:
            at_once = self.batch.micro_batch_size * self.mesh.dp_degree
            found[done.steps + 1] = BatchSizes(
                self.batch.micro_batch_size,
                max(size.sequences // at_once, 1),
                size.sequences,
                size.seq_len,
                size.tokens,
            )
        return found

    def steady_at(self, step: int) -> RunConfig:
        """Return the run as if all its steps were like this one."""
        batches = [batch for first, batch in self.legs.items() if first <= step]
        course = Course.steady(self.course.size(step))
        return replace_fields(self, batch=batches[-1], course=course)

    @property
    def sequences_at_once(self) -> int:
        """Sequences that a rank's model takes at once: a micro-batch, or a pipeline's piece of
        one.
        """
        return self.batch.micro_batch_size // self.pipeline.microbatches

    @property
    def rank_len(self) -> int:
        """Tokens of each sequence that a rank has; ranks of context parallelism share it."""
        return self.batch.seq_len // self.mesh.context

    @property
    def tokens_at_once(self) -> int:
        """Tokens that a rank's model takes at once."""
        return self.sequences_at_once * self.rank_len

    @property
    def max_seq_len(self) -> int:
        """The longest sequence of training and validation, in tokens."""
        return max(self.sequence_lengths.values())

    @property
    def row_len(self) -> int:
        """Tokens of a row of the data order: those of the longest sequence of training."""
        return max([self.training.seq_len, *(leg.size.seq_len for leg in self.course.legs)])

    @property
    def sequence_lengths(self) -> dict[str, int]:
        """The lengths of sequences by key, in tokens; validation's if it is another than the
        first.
        """
        lengths = {"training.seq_len": self.training.seq_len}
        for number, phase in enumerate(self.data.phase):
            if phase.seq_len is not None:
                lengths[f"data.phase[{number}].seq_len"] = phase.seq_len
        held_out = self.validation.seq_len if self.validation.enable else None
        if held_out is not None and held_out != self.training.seq_len:
            lengths["validation.seq_len"] = held_out
        return lengths

    @property
    def spec(self) -> ModelSpec:
        """The model. Raises ShapeError for an unknown name."""
        return get_spec(self.model.name)

    def flops_per_token(self, args: Any, seq_len: int) -> int:
        """Return the model FLOPs of a training token, forward and backward.

        args: the model's. seq_len: tokens of a sequence.
        """
        flops = self.spec.flops_per_token(args, seq_len)
        adapters = self.trained(args).adapters
        if adapters is None:
            return flops
        # Frozen products have two passes of three: no gradient of their weights is made.
        return flops - self.spec.flops_per_token(args, 0) // 3 + 6 * adapters

    def trained(self, args: Any) -> Trained:
        """Return what the run trains. args: the model's."""
        lora, ema = self.features.lora, self.features.ema
        adapters = None if lora is None else lora.adapters(self.spec, args).parameters
        return Trained(adapters, 0 if ema is None else ema.bytes_each)

    def model_args(self, tokenizer_size: int | None = None) -> Any:
        """Return the model's arguments.

        Raises ShapeError when the tokenizer has more entries than the model.
        """
        return model_args(self.model, self.max_seq_len, tokenizer_size)
