"""Sections about the batch, the data and how the work is divided over ranks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from titanlite.config.sections.base import Degree, DegreeOrRest, Location, Section, Seed, Step, StepRange


class Training(Section):
    """The batch, the length of the run, sharding and precision."""

    dataset: Literal["c4", "c4_test"] = Field(
        default="c4_test", description="Text by name: c4_test travels with titanlite, c4 is streamed from its hub."
    )
    dataset_path: Location | None = Field(
        default=None,
        min_length=1,
        description="Local file or folder of C4-format records, used instead of the named text.",
    )
    batch_size: int = Field(default=8, ge=1, description="Sequences per data-parallel rank and micro-batch.")
    global_batch_size: DegreeOrRest = Field(
        default=-1,
        description="Sequences per step over all ranks; gradients are accumulated to reach it. "
        "-1: batch_size times the data-parallel ranks.",
    )
    seq_len: int = Field(default=2048, ge=1, description="Tokens per sequence.")
    warmup_steps: int = Field(
        default=200, ge=0, description="Steps in which the learning rate rises from near 0 to its peak."
    )
    max_norm: float = Field(default=1.0, gt=0, description="Gradients are scaled down to this global norm.")
    steps: int = Field(default=10000, ge=1, description="Optimizer steps of the run. Excludes tokens and epochs.")
    tokens: int | None = Field(
        default=None, ge=1, description="Length of the run as a budget of tokens, instead of steps."
    )
    epochs: int | None = Field(
        default=None, ge=1, description="Length of the run as passes over the text, instead of steps."
    )
    data_parallel_replicate_degree: Degree = Field(
        default=1, description="Copies of the weights, each sharded over data_parallel_shard_degree ranks (HSDP)."
    )
    data_parallel_shard_degree: DegreeOrRest = Field(
        default=-1, description="Ranks that share one copy of the weights. -1: all ranks left over."
    )
    data_parallel_type: Literal["fsdp", "ddp"] = Field(
        default="fsdp",
        description="fsdp: weights are sharded; ddp: every rank keeps a whole copy (the oldest spelling).",
    )
    tensor_parallel_degree: Degree = Field(default=1, description="Ranks that share each matrix product.")
    enable_loss_parallel: bool = Field(
        default=True, description="With tensor parallelism: the loss is computed on sharded logits."
    )
    enable_cpu_offload: bool = Field(
        default=False,
        description="Parameters and gradients live in page-locked host memory, optimizer state in ordinary one. "
        "Without effect on a CPU.",
    )
    mixed_precision_param: Literal["bfloat16", "float32"] = Field(
        default="bfloat16", description="Precision of the gathered weights and of the forward and backward."
    )
    mixed_precision_reduce: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Precision of the gradient reduction over ranks."
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Precision of the weights themselves, which the optimizer updates."
    )
    loss_chunks: int = Field(
        default=1,
        ge=1,
        description="Head and cross-entropy take a micro-batch's tokens in so many pieces, and the logits of one alone "
        "are in memory. 1: all at once.",
    )
    compile: bool = Field(default=False, description="torch.compile, per block, and the loss.")
    gc_freq: int = Field(default=50, ge=1, description="Collect garbage on all ranks together every so many steps.")
    seed: Seed | None = Field(
        default=None,
        description="Seed of the initial weights and of torch's generators. None: 0 for the weights.",
    )
    reshard_after_forward: Literal["default", "always", "never"] | Annotated[int, Field(ge=2)] = Field(
        default="default",
        description="Free a block's gathered weights after its forward. default: all but the last units; a number: "
        "keep them sharded over so many ranks, a divisor of data_parallel_shard_degree.",
    )
    fsdp_units: Literal["block", "root", "size"] | Annotated[list[str], Field(min_length=1)] = Field(
        default="block",
        description="What is gathered together: a block, the whole model, modules of fsdp_min_params, or each module "
        'of the classes in a list, as ["Attention", "FeedForward"].',
    )
    fsdp_min_params: int = Field(
        default=100_000_000, ge=1, description='Least parameters of a unit with fsdp_units = "size".'
    )
    prefetch: int = Field(
        default=0,
        ge=0,
        description="Units whose gathering starts before the one that computes, forward and backward; each takes "
        "memory. 0: torch's own choice.",
    )
    gradient_sync: Literal["last", "every"] = Field(
        default="last",
        description="Reduce gradients over ranks with the last micro-batch of a step, or with every one "
        "(less memory, more traffic).",
    )


class Experimental(Section):
    """Parallelism beyond data and tensors; names of the older files."""

    enable_async_tensor_parallel: bool = Field(
        default=False, description="Overlap tensor-parallel traffic with products; needs training.compile."
    )
    pipeline_parallel_degree: Degree = Field(default=1, description="Ranks along the pipeline.")
    pipeline_parallel_split_points: list[str] = Field(
        default=[], description='Modules that start a stage, as "layers.4". Empty: stages of even cost.'
    )
    pipeline_parallel_schedule: str = Field(
        default="1F1B",
        min_length=1,
        description="GPipe, 1F1B, LoopedBFS, Interleaved1F1B, InterleavedZeroBubble or ZBVZeroBubble.",
    )
    pipeline_parallel_microbatches: int | None = Field(
        default=None, ge=1, description="Pieces that each batch of batch_size is cut into. None: the pipeline degree."
    )
    enable_compiled_autograd: bool = Field(default=False, description="Compile the backward as one graph.")
    context_parallel_degree: Degree = Field(default=1, description="Ranks that share each sequence.")
    custom_import: str = Field(
        default="", description="Module to import before the model is looked up, to register one's own."
    )


class Parallelism(Section):
    """Parallelism that the older sections have no name for."""

    expert_parallel_degree: Degree = Field(default=1, description="Ranks that share the experts of a mixture.")


class DataSource(Section):
    """One `[[data.source]]`: text, and its share of the mixture."""

    path: Location = Field(min_length=1, description="File, folder or hub id.")
    format: Literal["auto", "json", "parquet", "text", "tokens"] = Field(default="auto", description="Kind of file.")
    text_key: str = Field(default="text", min_length=1, description="Field of a record that holds the text.")
    weight: float = Field(default=1.0, gt=0, description="Share of the mixture, relative to the other sources.")
    epochs: float | None = Field(default=None, gt=0, description="Most passes over this source. None: no limit.")


class Data(Section):
    """The order in which text is read, and how."""

    seed: Seed = Field(default=0, description="Seed of the order, apart from training.seed.")
    shuffle: bool = Field(default=True, description="A new order in each epoch; false: the order of the files.")
    packing: Literal["split", "best-fit"] = Field(
        default="split", description="How documents fill sequences: split at the end of one, or fitted whole."
    )
    mask_documents: bool = Field(default=False, description="Attention stays within a document.")
    source: list[DataSource] = Field(
        default=[], description="Array of tables: a mixture of sources instead of one dataset."
    )
    lanes: int | None = Field(
        default=None, ge=1, description="Shares a stream is divided into. None: chosen at first start."
    )
    shuffle_buffer: int = Field(default=10_000, ge=1, description="Documents of a stream shuffled together.")
    num_workers: int | None = Field(
        default=None,
        ge=0,
        description="Threads per rank that tokenize text, at the start. None: as many as there are cores for each "
        "rank, 8 at most. 0: the main thread alone. The tokens are the same.",
    )
    token_cache: Location = Field(
        default="auto",
        min_length=1,
        description="Folder of tokenized text, shared by the ranks of a node and by later runs; best on a local disk. "
        "Relative paths start at the working directory, ~ at the home. "
        '"auto": titanlite-tokens-UID in the folder of temporary files, for texts of 32 MB and more. "off": every rank '
        "tokenizes for itself.",
    )
    prefetch: int = Field(
        default=2,
        ge=0,
        description="Steps (in validation, batches) that a background thread keeps ready. 0: prepared when needed.",
    )
    pin_memory: bool = Field(
        default=True,
        description="On GPUs, batches are put into page-locked memory by that thread, so that copies do not wait.",
    )
    persistent_workers: bool = Field(
        default=False,
        description="The thread of the validation batches stays between validations, with the first of them ready. "
        "Training's stays over epochs in any case.",
    )
    skip_steps: list[Step | StepRange] = Field(
        default=[],
        description='Steps of the data order that are left out, as [120, "200-250"], after a bad spot. Step n is what '
        "an undisturbed run of this global batch reads in its nth step.",
    )


class Validation(Section):
    """Loss on held-out text while training goes on."""

    enable: bool = Field(default=False, description="Validate every freq steps and after the last.")
    freq: int = Field(default=100, ge=1, description="Steps between validations.")
    steps: DegreeOrRest = Field(default=-1, description="Batches of a validation. -1: one full pass.")
    batch_size: int | None = Field(
        default=None, ge=1, description="Sequences per data-parallel rank. None: training.batch_size."
    )
    seq_len: int | None = Field(default=None, ge=1, description="Tokens per sequence. None: training.seq_len.")
    dataset: Literal["c4_validation", "c4_test"] = Field(
        default="c4_validation", description="Text by name: the held-out part, or what training reads."
    )
    dataset_path: Location | None = Field(
        default=None, min_length=1, description="Local file or folder of C4-format records to validate on."
    )
    sources: list[DataSource] = Field(default=[], description="Array of tables: several texts, each with its own loss.")
