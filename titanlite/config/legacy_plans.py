"""Temporary: the plans that rooms took before they took sections. Delete it when no room imports it.

With it go `config/plans.py`, `config/resolve.py` and `prepare.py`, which only give its names to old imports.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from titanlite.config.derive import BatchSizes as BatchPlan
from titanlite.config.derive import Deadlines as StallPlan
from titanlite.config.derive import MeshSizes as MeshPlan
from titanlite.config.derive import RunConfig
from titanlite.config.fit import check_config, fitted
from titanlite.config.loaded import LoadedConfig
from titanlite.config.sections import AUTO_FILTER, steps_of
from titanlite.models.shapes import LlamaArgs, resolve_args
from titanlite.optim.schedule import Schedule as SchedulePlan

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class TensorParallelPlan:
    """How `MeshPlan.tensor` ranks share each product."""

    #: Logits stay divided by vocabulary, and the loss is computed on the parts.
    loss_parallel: bool = True
    #: Compiled products overlap with their traffic.
    asynchronous: bool = False


@dataclass(frozen=True)
class Float8Plan:
    """Products of linears in float8. The head's is never one of them."""

    enable: bool = False
    #: One scale for a whole tensor or for each row; the third as the second, with weights' gradients in high precision.
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    #: FSDP gathers weights in float8.
    all_gather: bool = False
    #: The scales of those weights are computed together, after each update.
    precompute: bool = False
    #: Linears with any of these in their names stay as they are.
    keep: tuple[str, ...] = ()
    #: The same rounded numbers, multiplied in float32.
    emulate: bool = False
    #: Linears with fewer input or output features stay as they are.
    min_features: int = 0
    #: Steps between measurements of what float8 changes in the loss; 0: none.
    drift_check: int = 0
    #: Linears that are too small to gain by the recipe stay as they are.
    skip_small: bool = False


@dataclass(frozen=True)
class PipelinePlan:
    """How `MeshPlan.pipeline` ranks share the layers."""

    #: A name of `titanlite.config.pipeline.SCHEDULES`.
    schedule: str = "1F1B"
    #: Over all ranks.
    stages: int = 1
    #: Modules that start a stage, all but the first; empty: stages of even cost.
    split_points: tuple[str, ...] = ()
    #: Pieces that each micro-batch of `BatchPlan.micro_batch_size` sequences is cut into.
    microbatches: int = 1


@dataclass(frozen=True)
class ShardPlan:
    """How `fully_shard` is applied."""

    param_dtype: Dtype = "bfloat16"
    reduce_dtype: Dtype = "float32"
    #: True / False / shard size of the partial reshard; None: every block but the last unit.
    reshard_after_forward: bool | int | None = None
    #: "last": reduce gradients with the last micro-batch only; "every": with each one.
    gradient_sync: Literal["last", "every"] = "last"
    #: What is gathered together: each block, the whole model, modules of `min_params`, or modules of classes by name.
    units: Literal["block", "root", "size"] | tuple[str, ...] = "block"
    #: units = "size": least parameters of a unit.
    min_params: int = 100_000_000
    #: Units whose all-gathers start before the one that computes; 0: as `fully_shard` does by itself.
    prefetch: int = 0
    #: Parameters, gradients and optimizer state live in host memory.
    cpu_offload: bool = False


@dataclass(frozen=True)
class CompilePlan:
    """What `torch.compile` compiles."""

    #: The decoder's blocks, one by one.
    model: bool = False
    #: The loss function.
    loss: bool = False
    backend: str = "inductor"
    #: Where compiled code is kept; None: see `titanlite.parallel.compile.use_cache_folder`.
    cache_dir: str | None = None


@dataclass(frozen=True)
class LossPlan:
    """How the loss is computed."""

    #: Pieces of a micro-batch's tokens, one after the other, of which one alone has logits; 1: all at once.
    chunks: int = 1


@dataclass(frozen=True)
class ActivationCheckpointPlan:
    """What is recomputed in the backward instead of being kept."""

    #: "every": every Nth block is recomputed whole; "full": all of them; "op": the policy by operation in each block;
    #: "budget": the compiler's choice.
    mode: Literal["none", "full", "every", "op", "budget"] = "none"
    #: "every": N.
    every: int = 2
    #: "budget": share of the activations' memory that may be kept, 0 to 1.
    memory_budget: float = 0.5
    #: What is kept waits in host memory.
    offload: bool = False


@dataclass(frozen=True)
class OptimizerPlan:
    #: `titanlite.optim` builds AdamW and Adam, and refuses the others.
    name: Literal["AdamW", "Adam", "AnyPrecisionAdamW", "Muon"] = "AdamW"
    lr: float = 8e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    #: None: fused on GPUs, foreach on CPU.
    implementation: Literal["fused", "foreach", "for-loop"] | None = None
    #: Gradients are scaled down to this global norm.
    max_norm: float = 1.0


@dataclass(frozen=True)
class TrainPlan:
    """The loop itself."""

    #: None only while `training.epochs` waits for the text to be counted (see `resolve`).
    steps: int | None = 10000
    #: Seed of the initial weights and of torch's generators; None: 0 for the weights.
    seed: int | None = None
    #: Collect garbage on all ranks together every so many steps.
    gc_freq: int = 50
    deterministic: bool = False
    deterministic_warn_only: bool = False


@dataclass(frozen=True)
class GuardPlan:
    """What is done about a step whose loss or gradient is not finite, or whose loss jumps."""

    policy: Literal["stop", "skip", "rollback"] = "stop"
    #: Bad steps, of the last `window`, that do not end the run; under "stop" it ends with the first.
    max_skips: int = 10
    #: A loss so many standard deviations above the mean of the last `window` good ones is bad; 0: none is for that.
    spike_sigmas: float = 0.0
    window: int = 100


@dataclass(frozen=True)
class CheckpointPlan:
    enable: bool = False
    #: Absolute or working-directory-relative folder that holds step-N folders.
    folder: str = "./outputs/checkpoint"
    #: Steps or seconds between saves.
    interval: int = 500
    interval_type: Literal["steps", "seconds"] = "steps"
    #: Saved as well, and never deleted: these steps, or 1, 2, 4, 8, …
    milestones: Literal["powers_of_two"] | tuple[int, ...] = ()
    #: Save after step 1 too.
    first_step: bool = False
    #: Type of the weights in the last save, which holds nothing else; None: it is as all others.
    weights_only: Literal["float32", "bfloat16", "float16"] | None = None
    #: Save step 0 and end.
    seed_only: bool = False
    #: "resume-or-fresh": newest valid one or start new; "resume": must exist; "fresh": must not; "from": as the first,
    #: and there is an `initial_load_path`.
    start: Literal["resume-or-fresh", "resume", "fresh", "from"] = "resume-or-fresh"
    #: Step to load, or None: the newest valid one.
    load_step: int | None = None
    #: Parts (`titanlite.checkpoint.selection.GROUPS`) and patterns of tensor names that are not loaded.
    exclude_from_loading: tuple[str, ...] = ()
    #: Patterns of tensors of the model that a checkpoint may lack.
    allow_missing: tuple[str, ...] = ()
    #: What may differ from the run that wrote a checkpoint: "model", "tokenizer", "data", "global_batch".
    allow_changes: tuple[str, ...] = ()
    #: Another run's checkpoint (or its folder) to begin with where `folder` has none; only its weights, or all of it.
    initial_load_path: str | None = None
    initial_load_model_only: bool = True
    #: "hash": every byte is compared with what was written before it is loaded; "size": lengths of files only.
    verify: Literal["size", "hash"] = "hash"
    #: What was saved is read back and compared before it is published.
    verify_saves: bool = True
    #: The newest checkpoints that stay (0: all), and the steps whose multiples stay besides (0: none).
    keep_latest_k: int = 0
    keep_every: int = 0
    #: So many with the lowest validation loss are saved when they come, and stay (0: none).
    keep_best: int = 0
    #: "async": training goes on while a copy is written; "async_with_pinned_mem": while it is made, too; page-locked.
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"


@dataclass(frozen=True)
class CommPlan:
    #: Collective timeout in seconds until step 1 is done, and after it.
    init_timeout_seconds: int = 300
    train_timeout_seconds: int = 100
    #: How long a rank waits at the start for the others' processes, and for connections to them.
    meeting_seconds: float = 60.0
    #: Collectives that torch's flight recorder keeps (0: off).
    trace_buf_size: int = 20000
    #: Folder that the ranks' records are left in when a collective fails; "": torch's place on GPUs, none on CPUs.
    trace_folder: str = ""


@dataclass(frozen=True)
class ObservePlan:
    """What a person and other tools see."""

    dump_folder: str = "./outputs"
    description: str = ""
    #: The first step of every start, the last one, and every so many.
    log_freq: int = 10
    log_style: Literal["titan", "fsdp"] = "titan"
    #: None: colours on a terminal only.
    color: bool | None = None
    #: The live view, on a terminal.
    progress: bool = True
    #: None where TensorBoard is off; else its folder (a dated subfolder is added).
    tensorboard_folder: str | None = None
    rank_0_only: bool = True
    #: Send metrics to Weights & Biases.
    wandb: bool = False
    #: Gradient norms by layer with every so many logs; 0: never.
    layer_norms: int = 0
    #: FLOPS of one device; None: known devices only.
    peak_flops: float | None = None
    #: Print `Plans.config_toml` when the run starts.
    print_config: bool = False
    #: Write `Plans.config_toml` to this file when the run starts.
    save_config_file: str | None = None


@dataclass(frozen=True)
class ProfilePlan:
    #: Folder of torch.profiler traces; None: none.
    trace_folder: str | None = None
    #: Folder of CUDA memory snapshots; None: none.
    snapshot_folder: str | None = None
    #: Steps of a cycle, and of those: in which the profiler runs without recording, and in which it records.
    freq: int = 10
    warmup: int = 3
    active: int = 1


@dataclass(frozen=True)
class ModelPlan:
    """Which decoder to build."""

    name: str = "llama3"
    flavor: str = "debugmodel"
    #: Fields of the flavor's arguments to replace, e.g. {"n_layers": 4}; sorted (key, value) pairs.
    overrides: tuple[tuple[str, object], ...] = ()
    norm_type: str = "rmsnorm"
    #: Longest sequence the RoPE tables must serve, in tokens.
    max_seq_len: int = 2048
    #: Vocabulary entries, or None: the flavor's (the tokenizer's, for `debugmodel`).
    vocab_size: int | None = None


@dataclass(frozen=True)
class TokenizerPlan:
    """Where the tokenizer is."""

    #: File or folder, or None: the one of the kind `bundled` that travels with titanlite.
    path: str | None = None
    bundled: Literal["tiktoken", "sentencepiece"] = "tiktoken"


@dataclass(frozen=True)
class DataPlan:
    """What text is read and in which order it is served."""

    dataset: str = "c4_test"
    #: Local file or folder of C4-format records; None: the bundled text of `dataset`.
    path: str | None = None
    #: Tokens per training sequence (the loader packs seq_len + 1 and shifts).
    seq_len: int = 2048
    seed: int = 0
    shuffle: bool = True
    #: Passes over the data, or None: as many as the steps need.
    epochs: int | None = None
    #: Threads that tokenize text at the start; None: by the cores there are, 0: none besides the main one.
    num_workers: int | None = None
    #: Folder of tokenized text; "auto": a temporary one, for large texts; "off": none.
    token_cache: str = "auto"
    #: Steps that a thread prepares ahead of training; 0: no thread.
    prefetch: int = 2
    #: Batches for a GPU are put into page-locked memory.
    pin_memory: bool = True
    #: The thread that prepares validation batches stays between validations.
    persistent_workers: bool = False
    #: Steps (first, last) of the data order, from 1, that are left out; in order.
    skip_steps: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class ValidationPlan:
    enable: bool = False
    #: Steps between validations (the last step always validates).
    freq: int = 100
    #: Validation batches; -1: one full pass over the held-out text.
    steps: int = -1
    #: Sequences per data-parallel rank.
    batch_size: int = 8
    seq_len: int = 2048
    dataset: str = "c4_validation"
    path: str | None = None


@dataclass(frozen=True)
class Plans:
    """One run, as rooms took it before. `config` is the run itself."""

    config: RunConfig = field(default_factory=RunConfig, compare=False)
    model: ModelPlan = field(default_factory=ModelPlan)
    tokenizer: TokenizerPlan = field(default_factory=TokenizerPlan)
    data: DataPlan = field(default_factory=DataPlan)
    batch: BatchPlan = field(default_factory=BatchPlan)
    mesh: MeshPlan = field(default_factory=MeshPlan)
    tensor_parallel: TensorParallelPlan = field(default_factory=TensorParallelPlan)
    pipeline: PipelinePlan = field(default_factory=PipelinePlan)
    shard: ShardPlan = field(default_factory=ShardPlan)
    float8: Float8Plan = field(default_factory=Float8Plan)
    activations: ActivationCheckpointPlan = field(default_factory=ActivationCheckpointPlan)
    compile: CompilePlan = field(default_factory=CompilePlan)
    loss: LossPlan = field(default_factory=LossPlan)
    optimizer: OptimizerPlan = field(default_factory=OptimizerPlan)
    schedule: SchedulePlan = field(default_factory=SchedulePlan)
    train: TrainPlan = field(default_factory=TrainPlan)
    guard: GuardPlan = field(default_factory=GuardPlan)
    validation: ValidationPlan = field(default_factory=ValidationPlan)
    checkpoint: CheckpointPlan = field(default_factory=CheckpointPlan)
    comm: CommPlan = field(default_factory=CommPlan)
    stall: StallPlan = field(default_factory=StallPlan)
    observe: ObservePlan = field(default_factory=ObservePlan)
    profile: ProfilePlan = field(default_factory=ProfilePlan)
    #: The whole config as a TOML file that loads to the same values, with the source of each as a comment.
    config_toml: str = ""
    #: How each derived number came about, one sentence each; logged at start.
    notes: tuple[str, ...] = ()
    #: Things a user should know but that stop nothing (a warm-up shortened, a key without effect).
    warnings: tuple[str, ...] = ()


def legacy_plans(run: RunConfig) -> Plans:
    """Return the plans of a run."""
    t, c, f, e, p = run.training, run.checkpoint, run.float8, run.experimental, run.profiling
    return Plans(
        config=run,
        model=ModelPlan(
            name=run.model.name,
            flavor=run.model.flavor,
            overrides=tuple(sorted(_overrides(run).items())),
            norm_type=run.model.norm_type,
            max_seq_len=run.max_seq_len,
            vocab_size=run.model.vocab_size,
        ),
        tokenizer=TokenizerPlan(
            run.model.tokenizer_path, "sentencepiece" if run.model.name == "llama2" else "tiktoken"
        ),
        data=DataPlan(
            dataset=t.dataset,
            path=t.dataset_path,
            seq_len=t.seq_len,
            seed=run.data.seed,
            shuffle=run.data.shuffle,
            epochs=t.epochs,
            num_workers=run.data.num_workers,
            token_cache=run.data.token_cache,
            prefetch=run.data.prefetch,
            pin_memory=run.data.pin_memory,
            persistent_workers=run.data.persistent_workers,
            skip_steps=tuple(sorted(map(steps_of, run.data.skip_steps))),
        ),
        batch=run.batch,
        mesh=run.mesh,
        tensor_parallel=TensorParallelPlan(t.enable_loss_parallel, e.enable_async_tensor_parallel),
        pipeline=PipelinePlan(
            schedule=e.pipeline_parallel_schedule,
            stages=run.pipeline.stages,
            split_points=tuple(e.pipeline_parallel_split_points),
            microbatches=run.pipeline.microbatches,
        )
        if run.mesh.pipeline > 1
        else PipelinePlan(),
        shard=_shard(run),
        float8=Float8Plan(
            enable=True,
            recipe=f.recipe_name,
            all_gather=f.enable_fsdp_float8_all_gather,
            precompute=f.precompute_float8_dynamic_scale_for_fsdp,
            keep=tuple(part for part in f.filter_fqns if part != AUTO_FILTER),
            emulate=f.emulate,
            min_features=f.min_features,
            drift_check=f.drift_check,
            skip_small=AUTO_FILTER in f.filter_fqns,
        )
        if f.enable_float8_linear
        else Float8Plan(),
        activations=_activations(run),
        compile=CompilePlan(
            model=t.compile and "model" in run.compile.components,
            loss=t.compile and "loss" in run.compile.components,
            backend=run.compile.backend,
            cache_dir=run.compile.cache_dir,
        ),
        loss=LossPlan(t.loss_chunks),
        optimizer=OptimizerPlan(
            **{name: getattr(run.optimizer, name) for name in OptimizerPlan.__annotations__ if name != "max_norm"},
            max_norm=t.max_norm,
        ),
        schedule=run.schedule,
        train=TrainPlan(
            steps=run.steps,
            seed=t.seed,
            gc_freq=t.gc_freq,
            deterministic=run.debug.deterministic,
            deterministic_warn_only=run.debug.deterministic_warn_only,
        ),
        guard=GuardPlan(run.guard.policy, run.guard.max_skips, run.guard.spike_sigmas, run.guard.window),
        validation=ValidationPlan(
            enable=run.validation.enable,
            freq=run.validation.freq,
            steps=run.validation.steps,
            batch_size=run.validation.batch_size or t.batch_size,
            seq_len=run.validation.seq_len or t.seq_len,
            dataset=run.validation.dataset,
            path=run.validation.dataset_path,
        ),
        checkpoint=CheckpointPlan(
            enable=c.enable_checkpoint,
            folder=c.folder,
            interval=c.interval,
            interval_type=c.interval_type,
            milestones=c.milestones if isinstance(c.milestones, str) else tuple(c.milestones),
            first_step=c.enable_first_step_checkpoint,
            weights_only=c.export_dtype if c.model_weights_only else None,
            seed_only=c.create_seed_checkpoint,
            start=c.start,
            load_step=None if c.load_step == -1 else c.load_step,
            exclude_from_loading=tuple(c.exclude_from_loading),
            allow_missing=tuple(c.allow_missing),
            allow_changes=tuple(c.allow_changes),
            initial_load_path=c.initial_load_path,
            initial_load_model_only=c.initial_load_model_only,
            verify=c.verify,
            verify_saves=c.verify_saves,
            keep_latest_k=c.keep_latest_k,
            keep_every=c.keep_every,
            keep_best=c.keep_best,
            async_mode=c.async_mode,
        ),
        comm=CommPlan(
            init_timeout_seconds=run.comm.init_timeout_seconds,
            train_timeout_seconds=run.comm.train_timeout_seconds,
            trace_buf_size=run.comm.trace_buf_size,
            trace_folder=os.path.join(run.job.dump_folder, "comm_traces"),
        ),
        stall=run.deadlines,
        observe=ObservePlan(
            dump_folder=run.job.dump_folder,
            description=run.job.description,
            log_freq=run.metrics.log_freq,
            log_style=run.metrics.log_style,
            color=run.metrics.enable_color_printing,
            progress=run.metrics.enable_progress,
            tensorboard_folder=run.metrics.save_tb_folder if run.metrics.enable_tensorboard else None,
            rank_0_only=run.metrics.rank_0_only,
            wandb=run.metrics.enable_wandb,
            layer_norms=run.metrics.layer_norms,
            peak_flops=None if run.metrics.peak_tflops is None else run.metrics.peak_tflops * 1e12,
            print_config=run.job.print_config,
            save_config_file=run.job.save_config_file,
        ),
        profile=ProfilePlan(
            trace_folder=p.save_traces_folder if p.enable_profiling else None,
            snapshot_folder=p.save_memory_snapshot_folder if p.enable_memory_snapshot else None,
            freq=p.profile_freq,
            warmup=p.profiler_warmup,
            active=p.profiler_active,
        ),
        config_toml=run.toml,
        notes=run.notes,
        warnings=run.warnings,
    )


def _overrides(run: RunConfig) -> dict[str, Any]:
    overrides = dict(run.model.overrides)
    scaling = run.model.rope_scaling
    if scaling is not None:
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_context")
        overrides["rope_scaling"] = (
            {name: getattr(scaling, name) for name in names} if hasattr(scaling, "factor") else scaling
        )
    return overrides


def _shard(run: RunConfig) -> ShardPlan:
    t = run.training
    words: dict[str | int, bool | None] = {"default": None, "always": True, "never": False}
    given = t.reshard_after_forward
    return ShardPlan(
        param_dtype=t.mixed_precision_param,
        reduce_dtype=t.mixed_precision_reduce,
        reshard_after_forward=given if isinstance(given, int) else words[given],
        gradient_sync=t.gradient_sync,
        units=tuple(t.fsdp_units) if isinstance(t.fsdp_units, list) else t.fsdp_units,
        min_params=t.fsdp_min_params,
        prefetch=t.prefetch,
        cpu_offload=t.enable_cpu_offload,
    )


def _activations(run: RunConfig) -> ActivationCheckpointPlan:
    ac = run.activation_checkpoint
    if ac.mode == "budget":
        return ActivationCheckpointPlan("budget", memory_budget=ac.memory_budget, offload=ac.offload)
    if ac.mode != "selective":
        return ActivationCheckpointPlan(ac.mode, offload=ac.offload)
    if ac.selective_ac_option == "op":
        return ActivationCheckpointPlan("op", offload=ac.offload)
    return ActivationCheckpointPlan("every", every=int(ac.selective_ac_option), offload=ac.offload)


# The functions that gave plans.


def load_plans(path: str, world_size: int, flags: Sequence[str] = ()) -> Plans:
    """As `load_config`."""
    return checked_plans([f"--job.config_file={path}", *flags], world_size, training=True)[1]


def checked_plans(argv: Sequence[str], world_size: int | None = None, *, training: bool) -> tuple[LoadedConfig, Plans]:
    """As `check_config`."""
    config, run = check_config(argv, world_size, training=training)
    return config, legacy_plans(run)


def resolve_plans(config: LoadedConfig, world_size: int, total_sequences: int | None = None) -> Plans:
    """As `fitted`."""
    return legacy_plans(fitted(config, world_size, total_sequences))


def resolve(
    config: LoadedConfig, *, world_size: int, shapes: object = None, total_sequences: int | None = None
) -> Plans:
    """As `fitted`."""
    return legacy_plans(fitted(config, world_size, total_sequences))


def model_args(plan: ModelPlan, tokenizer_size: int | None = None) -> LlamaArgs:
    """As `RunConfig.model_args`."""
    return resolve_args(
        plan.name,
        plan.flavor,
        {**dict(plan.overrides), "norm_type": plan.norm_type},
        vocab_size=plan.vocab_size,
        tokenizer_size=tokenizer_size,
        max_seq_len=plan.max_seq_len,
    )
