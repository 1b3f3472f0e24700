"""Sections of the config for the model, the optimizer and the learning rate."""

from typing import Annotated, Any, Literal

from msgspec import Meta

from titanlite.config.dataset_registry import BUNDLED_TOKENIZER_NAME as BUNDLED
from titanlite.config.decays import DECAYS, IN_WORDS
from titanlite.config.toml import quote, quote_key
from titanlite.config.value_types import (
    Count,
    Dtype,
    Location,
    Name,
    NonNegative,
    Positive,
    Ratio,
    Section,
    dotted_or,
)

Decay = Annotated[float, Meta(ge=0, lt=1)]


class Model(Section, frozen=True):
    """Which model is trained."""

    name: Name = "llama3"
    """Model family (docs/models.md), hf for a model of transformers (docs/transformers.md), or a
    dotted path to a ModelSpec (docs/library.md).
    """
    flavor: str = "debugmodel"
    """Size within the family. from_folder: that of the model in checkpoint.initial_load_path, or of
    hf_config.
    """
    hf_config: Location | None = None
    """A config.json of transformers, its folder, or the id of a model on Hugging Face's hub. It is
    for name = "hf", and for the shape of flavor = "from_folder". A path that begins with a dot is
    relative to the file that names it.
    """
    norm_type: Literal["rmsnorm", "fused_rmsnorm"] | None = None
    """Normalisations of hidden states. Both are one module, which torch runs as one kernel where it
    can. None: rmsnorm.
    """
    tokenizer_path: Location = BUNDLED
    """Tokenizer: a tiktoken rank file (original/tokenizer.model of Llama 3), a sentencepiece model
    (tokenizer.model of Llama 2), a tokenizer.json, or a folder with one of them. bundled: that of
    titanlite, sentencepiece for llama2, else tiktoken. It is for debug models; others take it only
    where the config says so.
    """
    overrides: dict[str, Any] = {}
    """Table of the flavor's own arguments to replace: `[model.overrides]`, `n_layers = 4`."""
    rope_scaling: Literal["none"] | Annotated[float, Meta(ge=1)] | dict[str, Any] | None = None
    """Scaling of the rotary frequencies: a factor (Llama 3.1's), "none", or a table. A table has
    the fields of transformers (docs/models.md). Its rope_type is llama3, linear or yarn. None:
    the flavor's own.
    """
    vocab_size: Count | None = None
    """Vocabulary entries, at least the tokenizer's. None: the flavor's (the tokenizer's, for debug
    models).
    """

    @property
    def title(self) -> str:
        """Name, flavor and overrides, for messages."""
        is_hf = self.name == "hf" and self.hf_config
        title = f"{self.name} {self.hf_config if is_hf else self.flavor}"
        if not self.overrides or self.flavor == "from_folder":
            return title
        entries = [f"{quote_key(key)} = {quote(value)}" for key, value in self.overrides.items()]
        first = entries[:4]
        rest = len(self.overrides) - len(first)
        return f"{title} with {', '.join(first)}" + (f" and {rest} more" if rest else "")


class OptimizerGroup(Section, frozen=True):
    """One `[[optimizer.groups]]`: parameters whose names match a pattern get settings of
    their own.
    """

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
    """The optimizer, which turns gradients into updates."""

    name: Annotated[str, dotted_or("AdamW", "Adam", "AnyPrecisionAdamW", "Muon", classes=True)] = (
        "AdamW"
    )
    """Algorithm. Or a class of optimizers, as "torch.optim.SGD", or a dotted path to a function
    that makes one (docs/library.md).
    """
    args: dict[str, Any] = {}
    """Keyword arguments of a class of optimizers: it is called with (params, lr=optimizer.lr,
    **args).
    """
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
    early_step_in_backward: bool = False
    """Update each parameter as soon as its gradient is there, and free the gradient. So gradients
    of one FSDP group exist at a time. Needs training.max_norm = 1e9 and one micro-batch per step. A
    bad step ends the run or rolls it back.
    """
    ema_decay: Decay = 0.0
    """Keep an exponential moving average of the weights in float32: each step leaves this share of
    it. 0: none.
    """
    groups: list[OptimizerGroup] = []
    """Array of tables, each with a pattern and its settings. The first pattern found in a name
    decides.
    """
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

    @property
    def peak_lr(self) -> float:
        """The rate that the schedule scales: lr; where that is 0, the largest of the groups, which
        keep their own.
        """
        return self.lr or max((group.lr or 0.0 for group in self.groups), default=0.0)


class LrScheduler(Section, frozen=True):
    """The learning rate over the run. The warm-up in steps is training.warmup_steps."""

    unit: Literal["steps", "tokens"] = "steps"
    """What training.warmup_steps, decay_steps and total_steps count. tokens: those of the run over
    all ranks, so that a phase with another batch does not bend the curve.
    """
    style: Literal["titan", "titan-0.2", "fsdp"] = "titan"
    """Whose formulas, for n steps done. "titan": warm-up (n + 1) / (warmup + 1), a decay to the
    last step. "titan-0.2", as torchtitan 0.2.x: a warm-up of (n + 1) / warmup. "fsdp", as the AWS
    FSDP samples: warm-up n / warmup, then k steps later lr / 2 * (1 + cos(pi * k / total)), cut off
    at min_lr; after a plateau the decay ends at 0.
    """
    warmup_ratio: Ratio | None = None
    """Warm-up as a share of the schedule, instead of training.warmup_steps."""
    decay_type: Annotated[
        Literal[tuple(DECAYS)],  # type: ignore[valid-type]
        Meta(extra={"words": IN_WORDS}),
    ] = "linear"
    """Shape of the decay."""
    decay_ratio: Ratio | None = None
    """Decay over the last share of the schedule only. None: from the end of the warm-up."""
    decay_steps: Count | None = None
    """Decay over this number of last steps instead."""
    plateau_ratio: Ratio | None = None
    """Hold the peak for this share of the schedule, then decay. Never driven by a metric."""
    min_lr: NonNegative | None = None
    """Hard floor of the learning rate after the warm-up."""
    min_lr_factor: Ratio = 0.0
    """The decay ends at this share of the peak."""
    total_steps: Count | None = None
    """Length of the schedule. None: training.steps. Set it to shorten a run, not its curve."""
