"""Any causal language model of `transformers`, from its config.json: `model.name = "hf"`.

Parameters have the names of `transformers`. All that the spec says is read from the model itself,
built on the meta device. `transformers` and torch are imported when such a model is asked for.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.models.spec import Init, Misfit, ModelSpec, ShapeError, Size, names_like, shown
from titanlite.utils import parse_json, pip_install

if TYPE_CHECKING:
    from torch import Tensor

#: Entries of a config.json that change no number of a run.
_IGNORED = (
    "_name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "use_cache",
    "architectures",
    "auto_map",
)
#: Entries besides that change no tensor and no logit.
_UNDECIDING = frozenset(
    {*_IGNORED, "max_position_embeddings", "rope_scaling", "router_aux_loss_coef"}
    | {"bos_token_id", "eos_token_id", "pad_token_id"}
)


#: Entries that name Python files for `transformers` to run.
_CODE = ("auto_map", "trust_remote_code")
#: Entries that may name kernels for `transformers` to fetch from the hub and run, and values that
#: name none.
_KERNELS = (
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "_experts_implementation",
)
_NO_KERNELS = (None, "eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm")


@dataclass(frozen=True)
class HFArgs:
    """A model of `transformers`."""

    #: The content of its config.json, as JSON.
    config: str
    #: In place of the one in `config`.
    vocab_size: int
    #: Tokens of the longest sequence.
    max_seq_len: int

    def __post_init__(self) -> None:
        """Raise ShapeError if `transformers` makes no causal model of it, or none for such
        sequences.
        """
        if any(".experts." in name for name, _ in self.skeleton.model.named_parameters()):
            # Their products cannot be traced in float32, which the plan of memory needs.
            message = "models of transformers with experts cannot be trained here"
            raise _refused(message, 'of a Mixtral set model.name = "mixtral"', "name")
        positions = getattr(self.skeleton.config, "max_position_embeddings", None)
        if positions is not None and self.max_seq_len > positions:
            message = (
                f"sequences have {self.max_seq_len} tokens, and the model has {positions} positions"
            )
            raise ShapeError(Misfit(message, advice="set model.overrides.max_position_embeddings"))

    @property
    def skeleton(self) -> Skeleton:
        return _skeleton(self.config, self.vocab_size)

    def deciding(self) -> dict[str, Any]:
        """Return the entries of config.json that decide tensors or logits, nested ones by dotted
        names.
        """
        left_out = set(_UNDECIDING)
        if "rope_parameters" in self.skeleton.config.to_dict():
            left_out.add("rope_theta")
        found: dict[str, Any] = {}
        for name, value in hf_config(self).items():
            if name in left_out:
                continue
            if isinstance(value, dict):
                found.update({f"{name}.{inner}": item for inner, item in value.items()})
            else:
                found[name] = value
        return found


@dataclass(frozen=True)
class Skeleton:
    """Facts about a model, read from it on the meta device."""

    #: Its `transformers` config.
    config: Any
    model: Any
    blocks: list[str]
    rules: dict[str, Init]
    #: Name of a parameter → name of the one whose tensor it shares.
    tied: dict[str, str]
    #: Names of the embedding of tokens and of the head.
    embedding: str
    head: str


@functools.lru_cache(maxsize=8)
def _skeleton(content: str, vocab_size: int) -> Skeleton:
    import torch

    config = read_config({**json.loads(content), "vocab_size": vocab_size})
    try:
        with torch.device("meta"), _recorded() as operations:
            model = _causal_model(config)
            model.initialize_weights()
    except Exception as error:  # a constructor of `transformers` raises any class for wrong values
        raise _refused(
            f"transformers makes no model of this config: {type(error).__name__}: {error}"
        ) from error
    _check_buffers(model, operations)
    _check_causal(model, config)
    names: dict[Tensor, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(parameter, name)
        if first != name:
            tied[name] = first
    rules = {}
    for parameter, name in names.items():
        operation, arguments, _ = operations.get(id(parameter), ("nothing", (), parameter))
        rules[name] = _rule(name, operation, arguments)
    paths = {module: name for name, module in model.named_modules()}
    return Skeleton(
        config,
        model,
        _blocks(model),
        rules,
        tied,
        embedding=paths[model.get_input_embeddings()],
        head=paths.get(model.get_output_embeddings(), ""),
    )


def _check_buffers(model: Any, operations: Mapping[int, Any]) -> None:
    """Raise ShapeError for a buffer that the model does not compute with its initial weights."""
    for name, buffer in model.named_buffers():
        if buffer.is_meta and id(buffer) not in operations:
            raise _refused(
                f"{type(model).__name__} does not compute its buffer {name} with its initial "
                "weights"
            )


def _check_causal(model: Any, config: Any) -> None:
    """Raise ShapeError if a token sees those after it."""
    # Attention of BERT's family says so; others name `is_decoder` in the config alone, and do not
    # read it.
    if all(getattr(module, "is_decoder", True) is not False for module in model.modules()):
        return
    message = (
        f"each token of this {config.model_type} sees those after it: it would learn to copy "
        "the next one"
    )
    has_switch = hasattr(config, "is_decoder")
    raise _refused(message, "set model.overrides.is_decoder = true" if has_switch else "")


def _refused(message: str, advice: str = "", field: str = "hf_config") -> ShapeError:
    return ShapeError(Misfit(message, field, advice))


def _without_code(value: Any) -> Any:
    """Return the content of a config.json without entries that let `transformers` run other code
    than its own.
    """
    if isinstance(value, list):
        return [_without_code(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {}
    for name, item in value.items():
        names_kernel = name in _KERNELS and item not in _NO_KERNELS
        if name not in _CODE and not names_kernel:
            kept[name] = _without_code(item)
    return kept


def read_config(content: Mapping[str, Any]) -> Any:
    """Return the `transformers` config of a config.json, which names no code. Raises ShapeError."""
    # Their lines are about kernels for other devices.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        from transformers import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import (
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL,
        )
    except ModuleNotFoundError as error:
        message = '"hf" needs the package transformers, which is not installed'
        raise _refused(message, pip_install("transformers"), "name") from error
    except ImportError as error:
        message = f'"hf" needs the package transformers: {error}'
        raise _refused(message, pip_install("transformers"), "name") from error
    kind: Any = content.get("model_type")
    if not isinstance(kind, str) or kind not in CAUSAL:
        near = names_like(str(kind), CAUSAL).partition("; there are")[0]
        raise _refused(
            f"transformers has no causal language model of model_type {shown(kind)}", near
        )
    try:
        config = CONFIG_MAPPING[kind].from_dict(_without_code(dict(content)))
    except Exception as error:  # `transformers` raises its own classes for wrong values
        raise _refused(f"transformers refuses the config of a {kind}: {error}") from error
    if not hasattr(config, "vocab_size"):
        raise _refused(f"a {kind} has no vocab_size; only text models are supported")
    return config


def _causal_model(config: Any) -> Any:
    """Return the model of a config on the current default device, as `ModelSpec` wants it."""
    import torch
    from transformers import AutoModelForCausalLM

    make = functools.partial(AutoModelForCausalLM.from_config, config, dtype=torch.float32)
    try:
        model = make(attn_implementation="sdpa")
    except ValueError:  # some models have only their own attention
        model = make(attn_implementation="eager")
    cls: Any = type(model)
    model.__class__ = _logits_class(cls)
    return model


@functools.cache
def _logits_class(cls: Any) -> Any:
    class Causal(cls):
        def forward(self, tokens: Tensor) -> Tensor:
            """Return the logits [batch, seq, vocab] of tokens [batch, seq] int64."""
            from transformers import masking_utils as masks

            # It asks the device whether a row holds several sequences, and waits for the answer:
            # here it never does.
            plain = masks.find_packed_sequence_indices
            masks.find_packed_sequence_indices = lambda position_ids: None
            try:
                logits: Tensor = super().forward(input_ids=tokens, use_cache=False).logits
            finally:
                masks.find_packed_sequence_indices = plain
            return logits

        def init_buffers(self) -> None:
            """Compute the buffers by the model's own rules, which leave marked parameters as they
            are.
            """
            for parameter in self.parameters():
                parameter._is_hf_initialized = True
            for module in self.modules():
                module.__dict__.pop("_is_hf_initialized", None)
            self.initialize_weights()

    Causal.__name__ = cls.__name__
    Causal.__qualname__ = cls.__qualname__
    Causal.__module__ = cls.__module__
    return Causal


@contextlib.contextmanager
def _recorded() -> Iterator[dict[int, tuple[str, Any, Tensor]]]:
    """Note the last operation that set each whole tensor: id → name, arguments, and the tensor, to
    keep the id.
    """
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers.initialization import TORCH_INIT_FUNCTIONS as FUNCTIONS

    found: dict[int, tuple[str, Any, Tensor]] = {}

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            name = func._schema.name.removeprefix("aten::")
            if name.endswith("_"):
                found[id(args[0])] = (name, args[1:], args[0])
            return out

    def trunc_normal_(
        tensor: Any, mean: Any = 0.0, std: Any = 1.0, a: Any = -2.0, b: Any = 2.0, **_: Any
    ) -> Any:
        # torch's reads values, and there are none.
        found[id(tensor)] = ("trunc_normal_", (mean, std, a, b), tensor)
        return tensor

    plain = FUNCTIONS["trunc_normal_"]
    FUNCTIONS["trunc_normal_"] = trunc_normal_
    try:
        with Mode():
            yield found
    finally:
        FUNCTIONS["trunc_normal_"] = plain


def _rule(name: str, operation: str, given: tuple[Any, ...]) -> Init:
    """Return the distribution of the operation that set a parameter."""
    mean, std, low, high = given + (0.0, 1.0, -2.0, 2.0)[len(given) :]
    if operation in ("zero_", "fill_"):
        value = given[0] if given else 0.0
        return {0.0: Init("zeros"), 1.0: Init("ones")}.get(value, Init("constant", value=value))
    if operation == "normal_" and mean == 0:
        return Init("normal", std=std)
    if operation == "trunc_normal_" and mean == 0 and -low == high:
        return Init("trunc_normal", std=std, bound=high)
    if operation == "uniform_" and given and -given[0] == given[1]:
        return Init("uniform", bound=given[1])
    raise _refused(
        f"no rule is known for the initial values of {name}: transformers sets them by {operation}"
    )


def _blocks(model: Any) -> list[str]:
    """Return the list of blocks that `transformers` does not split over devices, else the longest
    of one class.
    """
    from torch import nn

    whole = set(model._no_split_modules or ())
    longest: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            classes = {type(block).__name__ for block in module}
            names = [f"{path}.{i}" for i in range(len(module))]
            if classes & whole:
                return names
            if len(classes) == 1 and len(names) > len(longest):
                longest = names
    if not longest:
        raise _refused(f"{type(model).__name__} has no list of blocks to shard by")
    return longest


def fsdp_units(args: HFArgs) -> list[tuple[str, ...]]:
    """Return the embedding, each block and the head; of tied models the blocks: the rest is the
    root's.
    """
    known = args.skeleton
    blocks: list[tuple[str, ...]] = [(name,) for name in known.blocks]
    if known.tied or not known.head:
        return blocks
    return [(known.embedding,), *blocks, (known.head,)]


def linears(args: HFArgs) -> dict[str, Size]:
    """Return name → size of every linear, but not of a head with another name than `lm_head`."""
    from torch import nn

    found = {}
    for name, module in args.skeleton.model.named_modules():
        if type(module) is nn.Linear:
            found[name] = Size(module.in_features, module.out_features)
    if args.skeleton.head != SPEC.head:
        found.pop(args.skeleton.head, None)
    return found


def count_parameters(args: HFArgs) -> int:
    """Return the number of parameters; a shared one counts once."""
    return sum(parameter.numel() for parameter in args.skeleton.model.parameters())


def flops_per_token(args: HFArgs, seq_len: int) -> int:
    """Return the model FLOPs of one training token, forward and backward, by the formula of the
    Llamas.

    6 per parameter outside of embeddings; a tied embedding counts as the head.
    Plus 6 * heads * (width of a key + width of a value) * seq_len per layer with attention; windows
    and causality are not discounted.
    """
    from torch import nn

    known = args.skeleton
    config = known.config
    tables = {module.weight for module in known.model.modules() if isinstance(module, nn.Embedding)}
    tables -= {known.model.get_parameter(name) for name in known.tied.values()}
    multiplied = [weight for weight in known.model.parameters() if weight not in tables]
    weights = sum(weight.numel() for weight in multiplied)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    key_width = getattr(config, "qk_head_dim", None) or width
    value_width = getattr(config, "v_head_dim", None) or width
    kinds = getattr(config, "layer_types", None) or [""] * len(known.blocks)
    attending = sum(not re.search("linear|conv", kind) for kind in kinds)
    per_layer = config.num_attention_heads * (key_width + value_width) * seq_len
    return 6 * weights + 6 * attending * per_layer


def read_args(source: str | None, overrides: Mapping[str, Any]) -> HFArgs:
    """Return the arguments of a config.json: a file, its folder, or the id of a model on the hub.

    overrides: entries of config.json to replace. Raises ShapeError.
    """
    if source is None:
        raise _refused(
            'is needed for model.name = "hf": a config.json, its folder, or the id of a model on '
            "the hub"
        )
    try:
        content = parse_json(Path(config_file(source)).read_bytes())
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
        return args_from_hf(content, overrides)
    except ShapeError:
        raise
    except Exception as error:  # huggingface_hub and its HTTP client raise their own classes
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise _refused(
            f"cannot read {shown(source)}: {reason}", "give a config.json or its folder"
        ) from error


def config_file(source: str) -> str:
    """Return the path of a config.json: a file, its folder, or the id of a model on the hub, which
    is downloaded.

    Nothing but the hub is asked whether it is there. Raises what `huggingface_hub` and its HTTP
    client raise.
    """
    path = os.path.join(source, "config.json") if os.path.isdir(source) else source
    if not os.path.exists(path) and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source):
        from huggingface_hub import hf_hub_download

        from titanlite.data.contact import contact_problem

        problem = contact_problem("hf://")
        try:
            # What an earlier download has left serves without a network.
            path = hf_hub_download(source, "config.json", local_files_only=problem is not None)
        except FileNotFoundError as error:
            if problem is None:
                raise
            raise FileNotFoundError(problem) from error
    return path


def args_from_hf(content: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> HFArgs:
    """Return the arguments that a config.json describes. Raises ShapeError, a ValueError."""
    kept = {key: value for key, value in content.items() if key not in _IGNORED}
    config = read_config(kept)
    for key in overrides or {}:
        if not hasattr(config, key):
            near = names_like(key, config.to_dict()).partition("; there are")[0]
            raise _refused(f"{type(config).__name__} has no such entry", near, f"overrides.{key}")
    kept = {**kept, **(overrides or {})}
    config = read_config(kept)
    kept.pop("vocab_size", None)
    names = ("max_position_embeddings", "seq_length", "n_positions")
    given = [getattr(config, name, None) for name in names]
    positions = next((number for number in given if number), 2048)
    return HFArgs(json.dumps(kept, sort_keys=True), config.vocab_size, positions)


def hf_config(args: HFArgs) -> dict[str, Any]:
    """Return the content of a config.json with every entry, to compare two.

    The tokenizer's ids are not the model's.
    """
    entries = dict(args.skeleton.config.to_dict())
    for name in (*_IGNORED, "bos_token_id", "eos_token_id"):
        entries.pop(name, None)
    return {**entries, "architectures": [type(args.skeleton.model).__name__]}


def hf_names(args: HFArgs) -> dict[str, str]:
    """Return the names of all saved tensors; files have the same.

    Raises ValueError where they have others.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    model = args.skeleton.model
    if any(isinstance(found, WeightConverter) for found in get_model_conversion_mapping(model)):
        kind = args.skeleton.config.model_type
        raise ValueError(
            f"files of a {kind} hold weights in another form than transformers' modules"
        )
    return {name: name for name in model.state_dict() if name not in args.skeleton.tied}


SPEC = ModelSpec(
    name="hf",
    args_class=HFArgs,
    flavors={},
    build=lambda args: _causal_model(args.skeleton.config),
    # A padding token's row is drawn as the others.
    init_rule=lambda name, args: args.skeleton.rules[name],
    block_names=lambda args: list(args.skeleton.blocks),
    count_parameters=count_parameters,
    flops_per_token=flops_per_token,
    head="lm_head",
    fsdp_units=fsdp_units,
    linears=linears,
    tied=lambda args: dict(args.skeleton.tied),
    hf_names=hf_names,
    hf_config=hf_config,
    args_from_hf=args_from_hf,
)
