"""The config: every section and key of a TOML file. `Config` at the end holds all sections, in their order in files.

A section class is the only place with a key's type, limits, default and meaning (see `titanlite.config.run_sections`).
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from titanlite.config import run_sections as run
from titanlite.config.run_sections import (
    Count,
    CountOrRest,
    Location,
    Name,
    Natural,
    NonNegative,
    Positive,
    Ratio,
    Section,
    Seed,
    dotted_or,
)

Decay = Annotated[float, Meta(ge=0, lt=1)]
Dtype = Literal["float32", "bfloat16"]


class Model(Section, frozen=True):
    """Which model is trained."""

    name: Name = "llama3"
    """Model family: llama2, llama3, or a dotted path to a ModelSpec (docs/library.md)."""
    flavor: str = "debugmodel"
    """Size within the family."""
    norm_type: Literal["rmsnorm", "layernorm", "np_layernorm", "fused_rmsnorm"] | None = None
    """Every normalisation of the model: rmsnorm (fused_rmsnorm is the same module: torch runs it as one kernel where
    it can), layernorm with a weight and no bias, or np_layernorm, without parameters. None: the flavor's, rmsnorm."""
    tokenizer_path: Location | None = None
    """Tokenizer: a tiktoken rank file (original/tokenizer.model of Llama 3), a sentencepiece model (tokenizer.model of
    Llama 2), a tokenizer.json, a folder with one of them, or a URL (https, s3, gs, az; of a folder with a slash at its
    end). `titanlite tokenizer fetch` downloads one. None: a bundled one, sentencepiece for llama2, else tiktoken."""
    overrides: dict[str, Any] = {}
    """Table of the flavor's own arguments to replace: `[model.overrides]`, `n_layers = 4`."""
    rope_scaling: Literal["none"] | Annotated[float, Meta(ge=1)] | dict[str, Any] | None = None
    """Llama 3.1's scaling of the rotary frequencies: a factor, a table with factor, low_freq_factor (1),
    high_freq_factor (4) and original_context (8192 tokens), or "none". None: the flavor's own."""
    vocab_size: Count | None = None
    """Vocabulary entries, at least the tokenizer's. None: the flavor's (the tokenizer's, for debug models)."""


class Training(Section, frozen=True):
    """The batch, the length of the run, sharding and precision."""

    dataset: Name = "c4_test"
    """Text by name: c4_test, and sft_test with prompts, are bundled; c4, fineweb, fineweb-edu, dclm, slimpajama and
    wikitext are streamed from the Hugging Face hub, as is any other id there ("owner/name"). Or a dotted path to a
    function that returns documents (docs/library.md). With dataset_path it is only a name."""
    dataset_path: Location | None = None
    """Text of your own: a file, folder, glob or URL (docs/data.md), or a folder that `titanlite data prepare` wrote."""
    batch_size: Count = 8
    """Sequences per data-parallel rank and micro-batch."""
    global_batch_size: CountOrRest = -1
    """Sequences per step over all ranks; gradients are accumulated to reach it. -1: batch_size times the data-parallel
    ranks."""
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
    """Parameters and gradients live in page-locked host memory, optimizer state in ordinary one. Without effect on a
    CPU."""
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of the gathered weights and of the forward and backward."""
    mixed_precision_reduce: Dtype = "float32"
    """Precision of the gradient reduction over ranks."""
    dtype: Dtype = "float32"
    """Precision of the weights themselves, which the optimizer updates."""
    loss: Annotated[str, dotted_or("cross_entropy")] = "cross_entropy"
    """Loss of each token, summed. Or a dotted path to a function of logits and labels (docs/library.md)."""
    loss_chunks: Count = 1
    """Compute head and cross-entropy in so many pieces of a micro-batch's tokens; only one piece's logits are in
    memory. 1: all at once."""
    compile: bool = False
    """torch.compile, per block, and the loss."""
    gc_freq: Count = 50
    """Collect garbage on all ranks together every so many steps."""
    seed: Seed | None = None
    """Seed of the initial weights and of torch's generators. None: 0 for the weights."""
    reshard_after_forward: Literal["default", "always", "never"] | Annotated[int, Meta(ge=2)] = "default"
    """Free a block's gathered weights after its forward. default: all but the last units; a number: keep them sharded
    over so many ranks, a divisor of data_parallel_shard_degree."""
    fsdp_units: Literal["block", "root", "size"] | Annotated[list[str], Meta(min_length=1)] = "block"
    """What is gathered together: a block, the whole model, modules of fsdp_min_params, or each module of the classes
    in a list, as ["Attention", "FeedForward"]."""
    fsdp_min_params: Count = 100_000_000
    """Least parameters of a unit with fsdp_units = "size"."""
    prefetch: Natural = 0
    """Units whose gathering starts before the one that computes, forward and backward; each takes memory. 0: torch's
    own choice."""
    gradient_sync: Literal["last", "every"] = "last"
    """Reduce gradients over ranks with the last micro-batch of a step, or with every one (less memory, more
    traffic)."""


class OptimizerGroup(Section, frozen=True):
    """One `[[optimizer.groups]]`: parameters whose names match a pattern get settings of their own."""

    pattern: Name
    """Regular expression; it must be found in some parameter's name."""
    lr: NonNegative | None = None
    """Learning rate. None: the optimizer's."""
    weight_decay: NonNegative | None = None
    """Weight decay. None: the optimizer's."""
    beta1: Decay | None = None
    """First decay rate. None: the optimizer's."""
    beta2: Decay | None = None
    """Second decay rate. None: the optimizer's."""
    eps: Positive | None = None
    """Epsilon. None: the optimizer's."""


class Optimizer(Section, frozen=True):
    """What turns gradients into updates."""

    name: Annotated[str, dotted_or("AdamW", "Adam", "AnyPrecisionAdamW", "Muon")] = "AdamW"
    """Algorithm. Or a dotted path to a function that makes an optimizer (docs/library.md)."""
    lr: NonNegative = 8e-4
    """Peak learning rate."""
    beta1: Decay = 0.9
    """Decay rate of the first moment."""
    beta2: Decay = 0.95
    """Decay rate of the second moment."""
    eps: Positive = 1e-8
    """Added to the denominator."""
    weight_decay: NonNegative = 0.1
    """Weight decay, decoupled in AdamW."""
    implementation: Literal["fused", "foreach", "for-loop"] | None = None
    """How the update is computed. None: fused on GPUs, foreach on CPU."""
    groups: list[OptimizerGroup] = []
    """Array of tables, each with a pattern and its settings. The first pattern found in a name decides."""
    no_decay_on_norms: bool = False
    """No weight decay of parameters that are no matrices: gains of norms, biases."""
    momentum: Decay = 0.95
    """Muon: decay rate of the momentum of matrices in blocks. The other parameters take AdamW."""
    kahan: bool = False
    """AnyPrecisionAdamW: Kahan summation of the updates."""
    momentum_dtype: Dtype = "float32"
    """AnyPrecisionAdamW: first moment."""
    variance_dtype: Dtype = "bfloat16"
    """AnyPrecisionAdamW: second moment."""
    compensation_dtype: Dtype = "bfloat16"
    """AnyPrecisionAdamW: the rest that Kahan summation carries over."""


class LrScheduler(Section, frozen=True):
    """The learning rate over the run. The warm-up in steps is training.warmup_steps."""

    style: Literal["titan", "titan-0.2", "fsdp"] = "titan"
    """Whose formulas, for n steps done. "titan": warm-up (n + 1) / (warmup + 1), a decay to the last step. "titan-0.2",
    as torchtitan 0.2.x: a warm-up of (n + 1) / warmup. "fsdp", as the AWS FSDP samples: warm-up n / warmup, then k
    steps later lr / 2 * (1 + cos(pi * k / total)), cut off at min_lr; after a plateau the decay ends at 0."""
    warmup_ratio: Ratio | None = None
    """Warm-up as a share of the schedule, instead of training.warmup_steps."""
    decay_type: Literal["constant", "linear", "cosine", "sqrt", "exponential", "plateau"] = "linear"
    """Shape of the decay; plateau: held for plateau_ratio of the run, then linear."""
    decay_ratio: Ratio | None = None
    """Decay over the last share of the schedule only. None: from the end of the warm-up."""
    decay_steps: Count | None = None
    """Decay over the last so many steps instead."""
    plateau_ratio: Ratio | None = None
    """Hold the peak for this share of the schedule, then decay. Never driven by a metric."""
    min_lr: NonNegative | None = None
    """Hard floor of the learning rate after the warm-up."""
    min_lr_factor: Ratio = 0.0
    """The decay ends at this share of the peak."""
    total_steps: Count | None = None
    """Length of the schedule. None: training.steps. Set it to shorten a run, not its curve."""


StepRange = Annotated[str, Meta(pattern=r"^[1-9][0-9]*-[1-9][0-9]*$", extra={"words": 'steps as "200-250"'})]
"""First and last step, both included."""


def steps_of(item: int | str) -> tuple[int, int]:
    """Return first and last step of an item of data.skip_steps."""
    first, _, last = str(item).partition("-")
    return int(first), int(last or first)


class DataSource(Section, frozen=True):
    """One `[[data.source]]`: text, and its share of the mixture. Without one, [training] and [data] name the text."""

    name: Name | None = None
    """Text by name, as for training.dataset; beside a path, its name in the log. None: the path."""
    path: Location | None = None
    """Files of text, as for training.dataset_path."""
    subset: Name | None = None
    """Part of a data set of the hub (its config). None: the default one."""
    split: Name | None = None
    """Split of a data set of the hub. None: train."""
    format: Literal["auto", "json", "parquet", "arrow", "text", "tokens"] = "auto"
    """Kind of file. auto: by content. text: each file is one document."""
    text_key: Name | None = None
    """Field of a record that holds the text. None: data.text_key."""
    prompt_key: Name | None = None
    """Field that the model reads and is not trained on. None: data.prompt_key."""
    completion_key: Name | None = None
    """Field that follows the prompt and is trained on. None: data.completion_key."""
    messages_key: Name | None = None
    """Field that holds a conversation. None: data.messages_key."""
    weight: Positive = 1.0
    """Share of the mixture in tokens, relative to the other sources."""
    epochs: Count | None = None
    """Most passes over this source. None: no limit."""


class DataPhase(Section, frozen=True):
    """One `[[data.phase]]`: other shares of the sources, or another learning rate, from a step or token on."""

    step: Annotated[int, Meta(ge=2)] | None = None
    """First step of the phase. Excludes tokens."""
    tokens: Count | None = None
    """Tokens of the run before the phase. Excludes step."""
    weights: dict[str, NonNegative] = {}
    """Source → share from here on; a source that is not named gets none. Empty: as before."""
    lr_factor: NonNegative = 1.0
    """The learning rate is the schedule's times this."""


class Data(Section, frozen=True):
    """The order in which text is read, and how."""

    seed: Seed = 0
    """Seed of the order, apart from training.seed."""
    shuffle: bool = True
    """A new order in each epoch; false: the order of the files."""
    packing: Literal["split", "best-fit"] = "split"
    """How documents fill sequences: split at the end of one, or fitted whole."""
    mask_documents: bool = False
    """Attention stays within a document."""
    source: list[DataSource] = []
    """Array of tables: a mixture of sources instead of one dataset."""
    phase: list[DataPhase] = []
    """Array of tables: changes of course while the run goes on."""
    text_key: Name | None = None
    """Field of a record that holds the text. None: that of a registered name, else text."""
    prompt_key: Name | None = None
    """Field that the model reads and is not trained on. Needs completion_key."""
    completion_key: Name | None = None
    """Field that follows the prompt; the loss is on its tokens alone. Needs prompt_key."""
    messages_key: Name | None = None
    """Field that holds a conversation, a list of {role, content}. The loss is on the assistant's turns alone."""
    chat_template: Location | None = None
    """Jinja file that renders conversations. None: that of chat_template.jinja or tokenizer_config.json."""
    subset: Name | None = None
    """Part of a data set of the hub (its config). None: the default one."""
    split: Name | None = None
    """Split of a data set of the hub. None: train."""
    streaming: Literal["auto"] | bool = "auto"
    """Read text while training. auto: data sets of the hub, URLs, local text above 4 GB. false: tokenize it first."""
    lanes: Count | None = None
    """Parts of a stream; they fix its order. None: chosen at the first start and stored in checkpoints."""
    shuffle_buffer: Count = 10_000
    """Documents of a stream shuffled together, over all lanes."""
    retry_seconds: NonNegative = 300.0
    """Time for a source that cannot be read to come back; on several ranks at most half of comm.train_timeout_seconds.
    Then the run saves a checkpoint and ends."""
    num_workers: Natural | None = None
    """Threads per rank that tokenize text. None: the cores of the node per rank, at most 8. 0: the main thread."""
    token_cache: Location = "auto"
    """Folder of tokenized text, shared by the ranks of a node and by later runs; best on a local disk. "auto":
    titanlite-tokens-UID in the folder of temporary files, for 32 MB and more. "off": each rank tokenizes alone."""
    prefetch: Natural = 2
    """Steps (in validation, batches) that a background thread keeps ready. 0: prepared when needed."""
    pin_memory: bool = True
    """On GPUs, that thread puts batches into page-locked memory, so that copies do not wait."""
    persistent_workers: bool = False
    """The thread of the validation batches stays between validations, with the first of them ready."""
    log_documents: bool = False
    """Write the documents of each step's batch to documents.jsonl in job.dump_folder."""
    skip_steps: list[Count | StepRange] = []
    """Steps of the data order to leave out, as [120, "200-250"]: those of an undisturbed run of this global batch."""


class Validation(Section, frozen=True):
    """Loss on held-out text while training goes on."""

    enable: bool = False
    """Validate every freq steps and after the last."""
    freq: Count = 100
    """Steps between validations."""
    first: bool = False
    """Also before the first step, so that curves of the loss begin at step 0."""
    steps: CountOrRest = -1
    """Batches of a validation, of each source. -1: one full pass."""
    batch_size: Count | None = None
    """Sequences per data-parallel rank. None: training.batch_size."""
    seq_len: Count | None = None
    """Tokens per sequence. None: training.seq_len."""
    dataset: Name = "c4_validation"
    """Text by name: the bundled held-out part, or a name, hub id or dotted path as for training.dataset. c4, slimpajama
    and wikitext stand for their validation split here."""
    dataset_path: Location | None = None
    """Text of your own to validate on, as for training.dataset_path."""
    sources: list[DataSource] = []
    """Array of tables: several texts, each with a name and its own loss, instead of dataset and dataset_path."""


class Checkpoint(Section, frozen=True):
    """What is saved, when, and what a run starts from."""

    enable_checkpoint: bool = False
    """Save checkpoints, and resume from the newest valid one."""
    folder: Location = "checkpoint"
    """job.dump_folder/folder/step-N, unless absolute; or a URL of an object store: s3://bucket/folder."""
    interval_type: Literal["steps", "seconds"] = "steps"
    """Unit of interval."""
    interval: Count = 500
    """Save every so many steps (or seconds), and at the end."""
    milestones: Literal["powers_of_two"] | list[Count] = []
    """Save after these steps too, and keep them for good. powers_of_two: 1, 2, 4, 8, …; or a list."""
    start: Literal["resume-or-fresh", "resume", "fresh", "from"] = "resume-or-fresh"
    """resume-or-fresh: the newest valid checkpoint if there is one; resume: there must be one; fresh: there must be
    none; from: as resume-or-fresh, and initial_load_path must be given."""
    load_step: Annotated[int, Meta(ge=-1)] = -1
    """Load this step. -1: the newest valid one."""
    exclude_from_loading: list[str] = []
    """Parts that are not loaded: model, optimizer, lr_scheduler, dataloader, rng, or patterns of tensor names.
    Checkpoints that the run has saved since are loaded whole."""
    allow_missing: list[str] = []
    """Patterns of tensors of the model that a checkpoint may lack; they keep their initial values."""
    allow_changes: list[Literal["model", "tokenizer", "data", "global_batch"]] = []
    """What may differ from the run that wrote the checkpoint; otherwise it is refused."""
    initial_load_path: Location | None = None
    """Checkpoint of any run to start from while this run has none of its own: step-N, or a folder or run that holds
    some (the newest good one). A folder or a URL."""
    initial_load_model_only: bool = True
    """Take only the weights from it and begin at step 0; false: continue at its step with all it holds."""
    initial_load_in_hf: bool = False
    """initial_load_path holds Hugging Face weights."""
    model_weights_only: bool = False
    """The last save holds weights only: for use elsewhere. No run can continue from it."""
    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of that last save."""
    last_save_in_hf: bool = False
    """That last save is in Hugging Face's format."""
    create_seed_checkpoint: bool = False
    """Save step 0 on one process, then exit."""
    enable_first_step_checkpoint: bool = False
    """Save after step 1 too, to test the storage."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Write while training goes on, from a copy in host memory; with_pinned_mem: copied beside the next step's forward
    and backward pass, on GPUs into page-locked memory."""
    keep_latest_k: Natural = 0
    """Keep the newest k checkpoints; 0: all. Pinned ones (a file KEEP inside) stay."""
    keep_every: Natural = 0
    """With keep_latest_k, also keep each checkpoint whose step is a multiple of this; 0: none."""
    keep_best: Natural = 0
    """Save when the validation loss is among the lowest so many so far, and keep those; 0: none."""
    verify: Literal["size", "hash"] = "hash"
    """What is checked before a checkpoint is loaded. hash: the hash of every file; size: every file is there and as
    long as it was."""
    verify_saves: bool = True
    """Read each checkpoint back and compare it with its hashes before it is published and older ones are deleted;
    false: compare only its files' lengths."""


class ActivationCheckpoint(Section, frozen=True):
    """Recompute activations in backward instead of keeping them."""

    mode: Literal["none", "selective", "full", "budget"] = "selective"
    """What is recomputed. none: nothing; full: every block but its input; selective: see selective_ac_option; budget:
    the compiler's choice within memory_budget, needs training.compile."""
    selective_ac_option: Annotated[
        str, Meta(pattern=r"^([1-9][0-9]*|op)$", extra={"words": '"op" or a number as "2"'})
    ] = "2"
    """selective: "N": every Nth block, whole; "op": in every block all but attention and every second matrix
    product."""
    memory_budget: Ratio = 0.5
    """budget: share of the compiler's usual activation memory that may be kept."""
    offload: bool = False
    """Kept activations wait in host memory. Without effect on a CPU."""


class Compile(Section, frozen=True):
    """How training.compile compiles."""

    components: Annotated[list[Literal["model", "loss"]], Meta(min_length=1)] = field(
        default_factory=lambda: ["model", "loss"]
    )
    """What training.compile compiles: each block of the model, the loss function."""
    backend: Name = "inductor"
    """Backend of torch.compile, by torch's name for it."""
    cache_dir: Location | None = None
    """Folder of inductor's cache. None: $TORCHINDUCTOR_CACHE_DIR, else ~/.cache/titanlite/inductor."""


AUTO_FILTER = "auto_filter_small_kn"
"""An entry of float8.filter_fqns that is no part of a name: layers too small to gain by the recipe stay."""


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
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """One scale per tensor, or per row; rowwise_with_gw_hp: gradients of weights in high precision."""
    filter_fqns: list[str] = []
    """Layers that stay in high precision: any part of their full names, as attention.wk. The head stays in any case.
    auto_filter_small_kn: also those that are too small to gain, by torchao's sizes."""
    emulate: bool = False
    """Multiply the rounded numbers in float32, on hardware without float8; for tests."""
    min_features: Natural = 0
    """Layers with fewer input or output features stay as they are."""
    drift_check: Natural = 0
    """Every so many steps, compare the loss of a micro-batch with that in high precision; 0: off."""


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
    enable_compiled_autograd: bool = False
    """Compile the backward as one graph."""
    context_parallel_degree: Count = 1
    """Ranks that share each sequence."""
    custom_import: str = ""
    """Module to import before the model is looked up, to register one's own."""


class Parallelism(Section, frozen=True):
    """Parallelism that the older sections have no name for."""

    expert_parallel_degree: Count = 1
    """Ranks that share the experts of a mixture."""


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
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    float8: Float8 = Float8()
    experimental: Experimental = Experimental()
    parallelism: Parallelism = Parallelism()
    guard: run.Guard = run.Guard()
    comm: run.Comm = run.Comm()
    debug: run.Debug = run.Debug()
    profiling: run.Profiling = run.Profiling()
    memory_estimation: run.MemoryEstimation = run.MemoryEstimation()
    stall: run.Stall = run.Stall()
    launch: run.Launch = run.Launch()
