"""`ModelSpec`: all that the rest of titanlite asks of a model family.

No torch here, so that a config with a built-in model is checked without it.
"""

from __future__ import annotations

import importlib
import json
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from titanlite import exit_codes
from titanlite.config.errors import Problem, nearest

if TYPE_CHECKING:
    from torch import Tensor, nn

    from titanlite.models.hf_names import HFName


class ShapeError(ValueError):
    """Numbers that make no model, or an unknown name; `problems` says which.

    Their keys are those of `[model]`, as `overrides.dim`; empty where several are to blame.
    """

    exit_code = exit_codes.CONFIG

    def __init__(self, *problems: Problem | str) -> None:
        self.problems = [
            Problem("model", "", problem) if isinstance(problem, str) else problem
            for problem in problems
        ]
        lines = []
        for problem in self.problems:
            key = f"model.{problem.key}".rstrip(".")
            lines.append("; ".join(filter(None, [f"{key}: {problem.message}", problem.remedy])))
        super().__init__("; ".join(lines))


@dataclass(frozen=True)
class Init:
    """The distribution that one parameter is drawn from."""

    kind: Literal["ones", "zeros", "constant", "normal", "trunc_normal", "uniform"]
    std: float = 0.0
    #: trunc_normal and uniform: no value lies outside [-bound, bound].
    bound: float = 0.0
    #: constant only.
    value: float = 0.0


@dataclass(frozen=True)
class Cost:
    """Cost of one module."""

    #: Per training token, forward and backward.
    flops: int
    parameters: int


@dataclass(frozen=True)
class Size:
    """Size of a linear: its weight is [out_features, in_features]."""

    in_features: int
    out_features: int


def imported_when_called(path: str) -> Callable[..., Any]:
    """Return the function `module:name`, imported when called: few runs need every module."""
    module, _, name = path.partition(":")

    def call(*arguments: Any) -> Any:
        return operator.attrgetter(name)(importlib.import_module(module))(*arguments)

    return call


def _no_hf(*_: Any) -> NoReturn:
    raise ValueError(
        "this model offers no conversion from or to Hugging Face's format (ModelSpec.hf_names)"
    )


@dataclass(frozen=True)
class ModelSpec:
    """A model family as functions of its arguments.

    The arguments are a frozen dataclass of the model's own. Two of its fields are fixed:
    `vocab_size` (None only in a flavor that takes the tokenizer's) and `max_seq_len`, the longest
    sequence in tokens. A pipeline also reads `dim`, the width of hidden states. A `__post_init__`
    that raises ValueError refuses arguments.

    The module maps tokens [batch, seq] int64 to logits [batch, seq, vocab]. It keeps its blocks
    where `block_names` says, and may have `init_buffers()`, which computes the buffers that no
    checkpoint holds. For `training.loss_chunks` it takes `labels` and `loss` and returns `head(x,
    labels, loss)` if there are labels. For `data.mask_documents` it takes `doc_ids` [batch, seq]
    int32, the number of each token's document in its row.

    Fields with the default None are features that a model may lack. A config that asks for one is
    then refused.
    """

    name: str
    #: Class of the arguments; `model.overrides` sets its fields.
    args_class: type[Any]
    #: Value of `model.flavor` → arguments.
    flavors: Mapping[str, Any]
    #: Builds the module on the current default device (`with torch.device("meta")` for none).
    build: Callable[[Any], nn.Module]
    #: (full parameter name, arguments) → how to draw it.
    init_rule: Callable[[str, Any], Init]
    #: Names of the blocks, in the order they run: each is wrapped, recomputed and compiled as one.
    block_names: Callable[[Any], list[str]]
    #: A shared parameter counts once.
    count_parameters: Callable[[Any], int]
    #: (arguments, tokens per sequence) → model FLOPs of one training token, forward and backward.
    flops_per_token: Callable[[Any, int], int]
    #: Name of the linear that computes the logits.
    head: str = "output"
    #: Names of modules to shard together, in order of last use. None: each block, and the rest.
    fsdp_units: Callable[[Any], list[tuple[str, ...]]] | None = None
    #: For float8. Name → size of every linear, in the model's order.
    linears: Callable[[Any], dict[str, Size]] | None = None
    #: For tensor parallelism. Module name → how it is divided, see
    #: `titanlite.parallel.tensor.apply_tp`.
    tensor_plan: Callable[[Any], dict[str, str]] | None = None
    #: For tensor parallelism. Name for messages → number that the ranks must divide, besides the
    #: vocabulary.
    tensor_sizes: Callable[[Any], dict[str, int]] = lambda args: {}
    #: For `titanlite.run.interactions.compiles_halves`. Names of the parts of each block,
    #: each compiled as one.
    sublayer_names: Callable[[Any], list[str]] | None = None
    #: For pipelines. (arguments, tokens per sequence) → cost of each module that a stage may start
    #: with: embedding, blocks, last norm, head. The module must run with the others set to None, as
    #: `titanlite.models.layers.Llama`. Every parameter is in one of them. Where a rank has several
    #: stages, blocks are in an `nn.ModuleDict`.
    pipeline_costs: Callable[[Any, int], dict[str, Cost]] | None = None
    #: For context parallelism: blocks have an `inner_attention`, the model a `rope`, and its call
    #: takes `positions`.
    context_parallel: bool = False
    #: Name of each MoE layer (`titanlite.models.experts.layer.MoE`) → number of its experts; empty
    #: where these arguments have none. For expert parallelism the module that holds their
    #: parameters [experts, …] has an attribute `exchange`, see `titanlite.features.experts`.
    experts: Callable[[Any], dict[str, int]] | None = None
    #: Name of a parameter → name of the one whose tensor it shares.
    tied: Callable[[Any], dict[str, str]] = lambda args: {}
    #: Our parameter name → Hugging Face's, of every tensor that its files hold. A tuple of names:
    #: ours is the stack of these tensors along a new first dimension. A tuple of tuples: an entry
    #: of the stack has the rows of several.
    hf_names: Callable[[Any], Mapping[str, HFName]] = _no_hf
    #: Names of tensors in Hugging Face's files → those of parts that are not trained here, each
    #: with the reason. They are left out, and a line tells.
    left_out: Callable[[Collection[str]], Mapping[str, str]] = lambda names: {}
    #: `model_type` of a larger model at Hugging Face that has this one as a part, and what names of
    #: that part begin with in its files. `args_from_hf` takes its config.json, too.
    part_of: str = ""
    part_prefix: str = ""
    #: The content of Hugging Face's config.json, and the arguments that one describes.
    hf_config: Callable[[Any], dict[str, Any]] = _no_hf
    args_from_hf: Callable[[Mapping[str, Any]], Any] = _no_hf
    #: (arguments, key) → why this model cannot do what a key asks for; "": it can. Asked of the
    #: keys of `titanlite.resolve.model_rules`.
    why_not: Callable[[Any, str], str] = lambda args, key: ""

    def moe_layers(self, args: Any) -> dict[str, int]:
        """Return name → number of experts of each MoE layer; empty for a model without."""
        return {} if self.experts is None else self.experts(args)

    def build_on_meta(self, args: Any) -> nn.Module:
        """Build the module on the meta device, in float32 (the masters of mixed precision) with
        every default dtype.
        """
        import torch

        with torch.device("meta"):
            return self.build(args).float()

    def fsdp_groups(self, args: Any) -> list[tuple[str, ...]]:
        """Return the modules that are sharded together: `fsdp_units`, or each block."""
        if self.fsdp_units:
            return self.fsdp_units(args)
        return [(name,) for name in self.block_names(args)]

    def to_hf(self, state: Mapping[str, Tensor], args: Any) -> dict[str, Tensor]:
        """Return a full state dictionary under Hugging Face's names; the tensors are shared, not
        copied. `titanlite.checkpoint.foreign_formats.open_weights` reads files.
        """
        from titanlite.models.hf_names import pieces_of

        found: dict[str, Tensor] = {}
        for ours, theirs in self.hf_names(args).items():
            found.update(pieces_of(state[ours], theirs))
        return found


def shown(value: object) -> str:
    """Return a value as TOML writes it."""
    return json.dumps(value, default=str, ensure_ascii=False)


def names_like(word: str, known: Iterable[str]) -> str:
    """Return existing names, those nearest to `word` first."""
    known = list(known)
    every = f"there are {', '.join(known)}"
    close = nearest(word, known, 3)
    return f"nearest: {', '.join(close)}; {every}" if close else every
