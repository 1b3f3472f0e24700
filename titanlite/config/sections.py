"""The config: every section and key of a TOML file.

`Config` at the end holds all sections, in their order in files.

A section class is the only place with a key's type, limits, default and meaning (see
`titanlite.config.run_sections`).
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from titanlite.config import run_sections as run
from titanlite.config.data_sections import Data, Validation
from titanlite.config.model_sections import LrScheduler, Model, Optimizer
from titanlite.config.value_types import (
    Count,
    CountOrRest,
    Dtype,
    HubName,
    Location,
    Name,
    Natural,
    NonNegative,
    Positive,
    Ratio,
    Section,
    Seed,
    WeightDtype,
    dotted_or,
)


class Training(Section, frozen=True):
    """The batch, the length of the run, sharding and precision."""

    dataset: Name = "c4_test"
    """Dataset by name: c4_test, and sft_test with prompts, are bundled. c4, fineweb, fineweb-edu,
    dclm, slimpajama and wikitext are streamed from the Hugging Face hub, as is any other id there
    ("owner/name"). Or a dotted path to a function that returns documents (docs/library.md). With
    dataset_path it is only a name.
    """
    dataset_path: Location | None = None
    """Text of your own: a file, folder, glob or URL (docs/data.md), or a folder that `titanlite
    data prepare` wrote.
    """
    batch_size: Count = 8
    """Sequences per data-parallel rank and micro-batch."""
    global_batch_size: CountOrRest = -1
    """Sequences per step over all ranks; gradients are accumulated to reach it. -1: batch_size
    times the data-parallel ranks.
    """
    seq_len: Count = 2048
    """Tokens per sequence."""
    warmup_steps: Natural = 200
    """Steps in which the learning rate rises from near 0 to its peak."""
    max_norm: Positive = 1.0
    """Gradients are scaled down to this global norm."""
    steps: Count = 10000
    """Optimizer steps of the run. Excludes tokens and epochs."""
    tokens: Count | None = None
    """Length of the run as a budget of tokens, instead of steps."""
    epochs: Count | None = None
    """Length of the run as passes over the text, instead of steps."""
    data_parallel_replicate_degree: Count = 1
    """Copies of the weights, each sharded over data_parallel_shard_degree ranks (HSDP)."""
    data_parallel_shard_degree: CountOrRest = -1
    """Ranks that share one copy of the weights. -1: all ranks left over."""
    data_parallel_type: Literal["fsdp", "ddp"] = "fsdp"
    """fsdp: weights are sharded; ddp: every rank keeps a whole copy (the oldest spelling)."""
    tensor_parallel_degree: Count = 1
    """Ranks that share each matrix product."""
    enable_loss_parallel: bool = True
    """With tensor parallelism: the loss is computed on sharded logits."""
    enable_cpu_offload: bool = False
    """Parameters and gradients live in page-locked host memory, optimizer state in ordinary one.
    Without effect on a CPU.
    """
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of the gathered weights and of the forward and backward."""
    mixed_precision_reduce: Dtype = "float32"
    """Precision of the gradient reduction over ranks."""
    dtype: Dtype = "float32"
    """Precision of the weights themselves, which the optimizer updates."""
    loss: Annotated[str, dotted_or("cross_entropy")] = "cross_entropy"
    """Loss of each token, summed. Or a dotted path to a function of logits and labels
    (docs/library.md).
    """
    z_loss: NonNegative = 0.0
    """Adds this times log(Z)^2 to the objective of each token, Z the sum of its exponentiated
    logits; PaLM takes 1e-4. Logs and validation show the cross-entropy alone.
    """
    label_smoothing: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Share of each target that is spread over the vocabulary. Logs and validation show the
    cross-entropy alone.
    """
    loss_chunks: Count = 1
    """Compute head and cross-entropy in this many pieces of a micro-batch's tokens; only one
    piece's logits are in memory. 1: all at once.
    """
    compile: bool = False
    """torch.compile, per block, and the loss."""
    attention_kernel: Literal["auto", "cudnn", "flash", "efficient", "math"] = "auto"
    """The kernel of attention that a GPU tries first. auto: its fastest (docs/models.md)."""
    gc_freq: Count = 50
    """Collect garbage on all ranks together every gc_freq steps."""
    seed: Seed = 0
    """Seed of the initial weights and of torch's generators (dropout)."""
    reshard_after_forward: Literal["default", "always", "never"] | Annotated[int, Meta(ge=2)] = (
        "default"
    )
    """Free a block's gathered weights after its forward. default: all but the last units; a number:
    keep them sharded over that many ranks, a divisor of data_parallel_shard_degree.
    """
    fsdp_units: Literal["block", "root"] | Annotated[list[str], Meta(min_length=1)] = "block"
    """What is gathered together: a block, or the whole model. A list of classes, as ["Attention",
    "FeedForward"]: each module of them.
    """
    prefetch: Natural = 0
    """Units whose gathering starts before the one that computes, forward and backward; each takes
    memory. 0: torch's own choice.
    """
    gradient_sync: Literal["last", "every"] = "last"
    """Reduce gradients over ranks with the last micro-batch of a step, or with every one (less
    memory, more traffic).
    """


class Checkpoint(Section, frozen=True):
    """What is saved, when, and what a run starts from."""

    enable_checkpoint: bool = False
    """Save checkpoints, and resume from the newest valid one."""
    folder: Location = "checkpoint"
    """job.dump_folder/folder/step-N, unless absolute; or a URL of an object store:
    s3://bucket/folder.
    """
    interval_type: Literal["steps", "seconds"] = "steps"
    """Unit of interval."""
    interval: Count = 500
    """Save every interval steps (or seconds), and at the end."""
    milestones: Literal["powers_of_two"] | list[Count] = []
    """Save after these steps too, and keep them for good. powers_of_two: 1, 2, 4, 8, …; or a list.
    """
    start: Literal["resume-or-fresh", "resume", "fresh", "from"] = "resume-or-fresh"
    """resume-or-fresh: the newest valid checkpoint if there is one; resume: there must be one;
    fresh: there must be none; from: as resume-or-fresh, and initial_load_path must be given.
    """
    load_step: Annotated[int, Meta(ge=-1)] = -1
    """Load this step. -1: the newest valid one."""
    exclude_from_loading: list[str] = []
    """Parts that are not loaded: model, optimizer, lr_scheduler, dataloader, rng, ema, or patterns
    of tensor names. Checkpoints that the run has saved since are loaded whole.
    """
    allow_missing: list[str] = []
    """Patterns of tensors of the model that a checkpoint may lack; they keep their initial values.
    """
    allow_changes: list[Literal["model", "tokenizer", "data", "global_batch"]] = []
    """What may differ from the run that wrote the checkpoint; otherwise it is refused."""
    initial_load_path: Location | None = None
    """Checkpoint of any run to start from while this run has no checkpoint: step-N, or a folder or
    run that holds some (the newest good one). A folder or a URL. Or a local folder of Hugging
    Face's or torchtitan's, found by its files.
    """
    initial_load_model_only: bool = True
    """Take only the weights from it and begin at step 0; false: continue at its step with all it
    holds.
    """
    initial_load_in_hf: bool = False
    """initial_load_path must hold weights of Hugging Face's; without this key they are recognised
    by their files.
    """
    model_weights_only: bool = False
    """The last save holds weights only: for use elsewhere. No run can continue from it."""
    export_dtype: WeightDtype = "float32"
    """Precision of that last save."""
    export_ema: bool = False
    """That last save holds the average of the weights (optimizer.ema_decay)."""
    last_save_in_hf: bool = False
    """That last save is a folder step-N-hf of Hugging Face's, with the tokenizer's files."""
    create_seed_checkpoint: bool = False
    """Save step 0 on one process, then exit."""
    enable_first_step_checkpoint: bool = False
    """Save after step 1 too, to test the storage."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Write during training, from a copy in host memory. The copy is made beside the next step's
    forward and backward pass. with_pinned_mem: on GPUs into page-locked memory, which is faster.
    """
    keep_latest_k: Natural = 0
    """Keep the newest k checkpoints; 0: all. Pinned ones (a file KEEP inside) stay."""
    keep_every: Natural = 0
    """With keep_latest_k, also keep each checkpoint whose step is a multiple of this; 0: none."""
    local_folder: Location | None = None
    """Also save to this folder of each node, on its own disk or in its memory (/dev/shm), where a
    restart finds newer steps. {local_rank}: a disk for each GPU. None: no local saves.
    """
    local_interval: Count = 50
    """Steps between local saves; less than interval."""
    local_keep_latest_k: Count = 2
    """Keep the newest k local saves."""
    local_copies: Natural = 0
    """Copies of each local save on so many other nodes: then a lost node costs local_interval too.
    """
    verify: Literal["size", "hash"] = "hash"
    """What is checked before a checkpoint is loaded. hash: the hash of every file; size: every file
    is there and as long as it was.
    """
    verify_saves: bool = True
    """Read each checkpoint back and compare it with its hashes. Only then publish it and delete
    older ones. false: compare only its files' lengths.
    """
    hub: HubName = ""
    """Upload checkpoints to this repository of the Hugging Face hub, in the background: each to its
    branch step-N, the last one to main too. A repository that the run makes is private. The token
    is that of HF_TOKEN or of a login. "": off.
    """
    hub_every: Natural = 0
    """Upload those whose step is a multiple of this, milestones and the last one. 0: all."""
    hub_dtype: WeightDtype | None = None
    """Precision of uploaded weights. None: as they are."""

    def is_milestone(self, step: int) -> bool:
        """Return whether the checkpoint of a step is one of `milestones`."""
        if self.milestones == "powers_of_two":
            return step > 0 and step & (step - 1) == 0
        return step in self.milestones

    def stays(self, step: int) -> bool:
        """Return whether the checkpoint of a step stays for good."""
        is_multiple = self.keep_every > 0 and step % self.keep_every == 0
        return is_multiple or self.is_milestone(step)


class ActivationCheckpoint(Section, frozen=True):
    """Recompute activations in backward instead of keeping them."""

    mode: Literal["none", "selective", "full", "budget"] = "selective"
    """What is recomputed. none: nothing; full: every block but its input; selective: see
    selective_ac_option; budget: the compiler's choice within memory_budget, needs training.compile.
    """
    selective_ac_option: Annotated[
        str, Meta(pattern=r"^([1-9][0-9]*|op)$", extra={"words": '"op" or a number as "2"'})
    ] = "2"
    """selective: "N": every Nth block, whole; "op": in every block all but attention and every
    second matrix product.
    """
    memory_budget: Ratio = 0.5
    """budget: share of the compiler's usual activation memory that may be kept."""
    offload: bool = False
    """Kept activations wait in host memory. Without effect on a CPU."""

    @property
    def by_op(self) -> bool:
        """Whether recomputation is decided operator by operator, in every block."""
        return self.mode == "selective" and self.selective_ac_option == "op"


class Compile(Section, frozen=True):
    """How training.compile compiles."""

    components: Annotated[list[Literal["model", "loss"]], Meta(min_length=1)] = field(
        default_factory=lambda: ["model", "loss"]
    )
    """What training.compile compiles: each block of the model, the loss function."""
    backend: Name = "inductor"
    """Backend of torch.compile, by torch's name for it."""
    cache_dir: Location | None = None
    """Folder of inductor's cache. None: $TORCHINDUCTOR_CACHE_DIR, else torch's in /tmp."""


AUTO_FILTER = "auto_filter_small_kn"
"""An entry of float8.filter_fqns that is no part of a name: layers too small to gain by the recipe
stay.
"""


class Float8(Section, frozen=True):
    """Matrix products in float8, through torchao."""

    enable_float8_linear: bool = False
    """Float8 products in linear layers, all but the head. Best with training.compile."""
    enable_fsdp_float8_all_gather: bool = False
    """FSDP gathers float8 weights (tensorwise only)."""
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """All scales of gathered weights in one all-reduce after the optimizer step."""
    scaling_type_input: Literal["dynamic"] = "dynamic"
    """How inputs are scaled."""
    scaling_type_weight: Literal["dynamic"] = "dynamic"
    """How weights are scaled."""
    scaling_type_grad_output: Literal["dynamic"] = "dynamic"
    """How gradients are scaled."""
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8", "mxfp8_floor"] = (
        "tensorwise"
    )
    """One scale per tensor, or per row; rowwise_with_gw_hp: gradients of weights in high precision.
    mxfp8: MXFP8, a scale per 32 numbers, for Blackwell; mxfp8_floor: its scales are rounded down.
    """
    filter_fqns: list[str] = []
    """Layers that stay in high precision: any part of their full names, as attention.wk. The head
    stays in any case. auto_filter_small_kn: also those that are too small to gain, by torchao's
    sizes.
    """
    emulate: bool = False
    """Multiply the rounded numbers by ordinary products, on hardware without float8; for tests."""
    min_features: Natural = 0
    """Layers with fewer input or output features stay as they are."""

    @property
    def is_mx(self) -> bool:
        """Whether products have an MX format, and not plain float8."""
        return self.recipe_name.startswith("mx")


class Lora(Section, frozen=True):
    """Train low-rank adapters beside frozen weights (LoRA, Hu et al. 2021)."""

    rank: Natural = 0
    """Width of the adapters. 0: off, all weights are trained. Above: the weights of
    checkpoint.initial_load_path stay as they are, and checkpoints hold the adapters alone.
    """
    alpha: Positive = 16.0
    """Scale of an adapter: its output is multiplied by alpha / rank."""
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead."""
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that are zero while it is trained."""
    targets: Annotated[list[Name], Meta(min_length=1)] = field(
        default_factory=lambda: ["all-linear"]
    )
    """Linears that get an adapter: ends of their names, here or at Hugging Face, as wq,
    attention.wq or q_proj. all-linear: those of all blocks, without routers and experts.
    """
    adapter: Location | None = None
    """Adapters to start from while this run has no checkpoint: a folder of PEFT's, or a checkpoint,
    folder or run of adapters. None: new ones, which change nothing at first.
    """


class Mup(Section, frozen=True):
    """Maximal update parametrization: what was tuned on a narrow model holds for a wide one."""

    base_dim: Natural = 0
    """Width of the base model, whose learning rate and other settings this file has. Initial
    weights and rates are scaled from there (docs/mup.md). 0: off.
    """
    base: dict[str, Any] = {}
    """Table of the base model's other arguments, as `[model.overrides]` has them: n_heads, ffn_dim,
    n_layers. Others follow from base_dim: heads as wide as here, other widths in proportion, the
    same depth.
    """


class Experimental(Section, frozen=True):
    """Parallelism beyond data and tensors; names of the older files."""

    enable_async_tensor_parallel: bool = False
    """Overlap tensor-parallel traffic with products; needs training.compile."""
    pipeline_parallel_degree: Count = 1
    """Ranks along the pipeline."""
    pipeline_parallel_split_points: list[str] = []
    """Modules that start a stage, as "layers.4". Empty: stages of even cost."""
    pipeline_parallel_schedule: Name = "1F1B"
    """GPipe, 1F1B, LoopedBFS, Interleaved1F1B, InterleavedZeroBubble or ZBVZeroBubble."""
    pipeline_parallel_microbatches: Count | None = None
    """Pieces that each batch of batch_size is cut into. None: the pipeline degree."""
    context_parallel_degree: Count = 1
    """Ranks that share each sequence."""


class Parallelism(Section, frozen=True):
    """Parallelism that the older sections have no name for."""

    expert_parallel_degree: Count = 1
    """Ranks that share the experts of an MoE layer: a divisor of data_parallel_shard *
    context_parallel * tensor_parallel.
    """


class Config(Section, frozen=True):
    """All sections, in the order in which files and `explain` show them."""

    job: run.Job = run.Job()
    model: Model = Model()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LrScheduler = LrScheduler()
    data: Data = Data()
    validation: Validation = Validation()
    checkpoint: Checkpoint = Checkpoint()
    metrics: run.Metrics = run.Metrics()
    eval: run.Eval = run.Eval()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    float8: Float8 = Float8()
    lora: Lora = Lora()
    mup: Mup = Mup()
    experimental: Experimental = Experimental()
    parallelism: Parallelism = Parallelism()
    guard: run.Guard = run.Guard()
    sdc: run.Sdc = run.Sdc()
    comm: run.Comm = run.Comm()
    debug: run.Debug = run.Debug()
    profiling: run.Profiling = run.Profiling()
    stall: run.Stall = run.Stall()
    launch: run.Launch = run.Launch()
    ladder: run.Ladder = run.Ladder()
    others: dict[str, Section] = {}
    """Sections of features of other packages, as far as a config has named them."""

    @property
    def compiles_blocks(self) -> bool:
        """Whether `torch.compile` makes graphs of the blocks of the model."""
        return self.training.compile and "model" in self.compile.components
