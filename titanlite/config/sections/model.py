"""Sections about the model and the arithmetic applied to it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from titanlite.config.sections.base import Location, NthOrOp, Ratio, Section


class RopeScaling(Section):
    """`[model.rope_scaling]`: Llama 3.1's stretching of the rotary frequencies."""

    factor: float = Field(ge=1, description="How far the lowest frequencies are stretched.")
    low_freq_factor: float = Field(
        default=1.0, gt=0, description="Wavelengths above original_context / this are stretched."
    )
    high_freq_factor: float = Field(default=4.0, gt=0, description="Wavelengths below original_context / this stay.")
    original_context: int = Field(default=8192, ge=1, description="Tokens of context the model was first trained with.")


class Model(Section):
    """Which model is trained."""

    name: str = Field(default="llama3", description="Model family.")
    flavor: str = Field(default="debugmodel", description="Size within the family.")
    norm_type: Literal["rmsnorm", "layernorm", "np_layernorm", "fused_rmsnorm"] = Field(
        default="rmsnorm",
        description="Every normalisation of the model: rmsnorm (fused_rmsnorm is the same module: torch runs it as one "
        "kernel where it can), layernorm with a weight and no bias, or np_layernorm, without parameters.",
    )
    tokenizer_path: Location | None = Field(
        default=None,
        min_length=1,
        description="Tokenizer: a tiktoken rank file (original/tokenizer.model of Llama 3), a sentencepiece model "
        "(tokenizer.model of Llama 2), a Hugging Face tokenizer.json, or a folder with a tokenizer.json or "
        "tokenizer.model. None: one that travels with titanlite, sentencepiece for llama2, else tiktoken.",
    )
    overrides: dict[str, Any] = Field(
        default={}, description="Table of the flavor's own arguments to replace: `[model.overrides]`, `n_layers = 4`."
    )
    rope_scaling: Literal["none"] | Annotated[float, Field(ge=1)] | RopeScaling | None = Field(
        default=None,
        description="Llama 3.1's stretching of the rotary frequencies: a factor, a table with factor, low_freq_factor, "
        'high_freq_factor and original_context, or "none". None: the flavor\'s own.',
    )
    vocab_size: int | None = Field(
        default=None,
        ge=1,
        description="Vocabulary entries. None: the flavor's (the tokenizer's, for debug models). A tokenizer with more "
        "is an error.",
    )


class OptimizerGroup(Section):
    """One `[[optimizer.groups]]`: parameters whose names match a pattern get settings of their own."""

    pattern: str = Field(min_length=1, description="Regular expression over parameter names; it must match some.")
    lr: float | None = Field(default=None, ge=0, description="Learning rate. None: the optimizer's.")
    weight_decay: float | None = Field(default=None, ge=0, description="Weight decay. None: the optimizer's.")
    beta1: float | None = Field(default=None, ge=0, lt=1, description="First decay rate. None: the optimizer's.")
    beta2: float | None = Field(default=None, ge=0, lt=1, description="Second decay rate. None: the optimizer's.")
    eps: float | None = Field(default=None, gt=0, description="Epsilon. None: the optimizer's.")


class Optimizer(Section):
    """What turns gradients into updates."""

    name: Literal["AdamW", "Adam", "AnyPrecisionAdamW", "Muon"] = Field(default="AdamW", description="Algorithm.")
    lr: float = Field(default=8e-4, ge=0, description="Peak learning rate.")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay rate of the first moment.")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="Decay rate of the second moment.")
    eps: float = Field(default=1e-8, gt=0, description="Added to the denominator.")
    weight_decay: float = Field(default=0.1, ge=0, description="Weight decay, decoupled in AdamW.")
    implementation: Literal["fused", "foreach", "for-loop"] | None = Field(
        default=None, description="How the update is computed. None: fused on GPUs, foreach on CPU."
    )
    groups: list[OptimizerGroup] = Field(
        default=[], description="Array of tables, each with a pattern and its settings."
    )
    kahan: bool = Field(default=False, description="AnyPrecisionAdamW: Kahan summation of the updates.")
    momentum_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="AnyPrecisionAdamW: first moment."
    )
    variance_dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16", description="AnyPrecisionAdamW: second moment."
    )
    compensation_dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16", description="AnyPrecisionAdamW: what Kahan summation carries over."
    )


class LrScheduler(Section):
    """The learning rate over the run. The warm-up in steps is training.warmup_steps."""

    style: Literal["titan", "titan-0.2", "fsdp"] = Field(
        default="titan",
        description='Whose formulas. "titan": warm-up (n + 1) / (warmup + 1), then a decay that ends at the last step. '
        '"titan-0.2", as torchtitan 0.2.x: the same with a warm-up of (n + 1) / warmup. '
        '"fsdp": as the AWS FSDP samples: warm-up n / warmup, then a decay of the peak over the whole schedule '
        "(lr / 2 * (1 + cos(pi * k / total)) k steps after the warm-up), cut off at min_lr. With a plateau the decay "
        "ends at 0 with the schedule. A warm-up or plateau given as a ratio may end within a step.",
    )
    warmup_ratio: Ratio | None = Field(
        default=None, description="Warm-up as a share of the schedule, instead of training.warmup_steps."
    )
    decay_type: Literal["constant", "linear", "cosine", "sqrt", "exponential", "plateau"] = Field(
        default="linear",
        description="Shape of the decay; plateau: held for plateau_ratio of the run, then linear.",
    )
    decay_ratio: Ratio | None = Field(
        default=None, description="Decay over the last share of the schedule only. None: from the end of the warm-up."
    )
    decay_steps: int | None = Field(default=None, ge=1, description="Decay over the last so many steps instead.")
    plateau_ratio: Ratio | None = Field(
        default=None, description="Hold the peak for this share of the schedule, then decay. Never driven by a metric."
    )
    min_lr: float | None = Field(default=None, ge=0, description="Hard floor of the learning rate after the warm-up.")
    min_lr_factor: Ratio = Field(default=0.0, description="The decay ends at this share of the peak.")
    total_steps: int | None = Field(
        default=None,
        ge=1,
        description="Length of the schedule. None: training.steps. Set it to shorten a run, not its curve.",
    )


class ActivationCheckpoint(Section):
    """Recompute activations in backward instead of keeping them."""

    mode: Literal["none", "selective", "full", "budget"] = Field(
        default="selective",
        description="What is recomputed. none: nothing; full: every block but its input; selective: see "
        "selective_ac_option; budget: the compiler's choice within memory_budget, needs training.compile.",
    )
    selective_ac_option: NthOrOp = Field(
        default="2",
        description='selective: "N": every Nth block, whole; "op": in every block all but attention and every second '
        "matrix product.",
    )
    memory_budget: Ratio = Field(
        default=0.5, description="budget: share of what the compiler keeps by itself that may be kept."
    )
    offload: bool = Field(default=False, description="What blocks keep waits in host memory. Without effect on a CPU.")


class Compile(Section):
    """How training.compile compiles."""

    components: list[Literal["model", "loss"]] = Field(
        default=["model", "loss"],
        description="What training.compile compiles: each block of the model, the loss function.",
    )
    backend: str = Field(
        default="inductor", min_length=1, description="Backend of torch.compile, by torch's name for it."
    )
    cache_dir: Location | None = Field(
        default=None,
        min_length=1,
        description="Folder of inductor's cache. None: $TORCHINDUCTOR_CACHE_DIR, else ~/.cache/titanlite/inductor.",
    )


AUTO_FILTER = "auto_filter_small_kn"
"""An entry of float8.filter_fqns that is no part of a name: layers too small to gain by the recipe stay."""


class Float8(Section):
    """Matrix products in float8, through torchao."""

    enable_float8_linear: bool = Field(
        default=False, description="Float8 products in linear layers, all but the head. Best with training.compile."
    )
    enable_fsdp_float8_all_gather: bool = Field(
        default=False, description="FSDP gathers float8 weights (tensorwise only)."
    )
    precompute_float8_dynamic_scale_for_fsdp: bool = Field(
        default=False, description="All scales of gathered weights in one all-reduce after the optimizer step."
    )
    scaling_type_input: Literal["dynamic"] = Field(default="dynamic", description="How inputs are scaled.")
    scaling_type_weight: Literal["dynamic"] = Field(default="dynamic", description="How weights are scaled.")
    scaling_type_grad_output: Literal["dynamic"] = Field(default="dynamic", description="How gradients are scaled.")
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = Field(
        default="tensorwise",
        description="One scale per tensor, or per row; rowwise_with_gw_hp: gradients of weights in high precision.",
    )
    filter_fqns: list[str] = Field(
        default=[],
        description="Layers that stay in high precision: any part of their full names, as attention.wk. The head stays "
        f"in any case. {AUTO_FILTER}: also those that are too small to gain, by torchao's sizes.",
    )
    emulate: bool = Field(
        default=False, description="Multiply the rounded numbers in float32, on hardware without float8; for tests."
    )
    min_features: int = Field(
        default=0, ge=0, description="Layers with fewer input or output features stay as they are."
    )
    drift_check: int = Field(
        default=0,
        ge=0,
        description="Every so many steps, compare the loss of a micro-batch with that in high precision; 0: off.",
    )
