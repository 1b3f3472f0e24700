"""From a config's numbers to a model's arguments, and from arguments to JSON.

No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

from titanlite.config.errors import Problem
from titanlite.models.argument_fields import checked_fields, declared
from titanlite.models.families import get_spec
from titanlite.models.spec import ModelSpec, ShapeError, names_like, shown

if TYPE_CHECKING:
    from titanlite.config.model_sections import Model


#: Value of `model.flavor`: the shape is that of a folder. `titanlite.resolve.weights_shape` reads
#: it into `model.overrides`, so that the config which is kept needs the folder no more.
FROM_FOLDER = "from_folder"


def resolve_args(  # noqa: PLR0913
    family: str,
    flavor: str,
    overrides: Mapping[str, object] | None = None,
    *,
    vocab_size: int | None = None,
    tokenizer_size: int | None = None,
    max_seq_len: int | None = None,
    base: Any = None,
) -> Any:
    """Return the arguments of one flavor with a user's changes, checked.

    `overrides`: fields to replace. `tokenizer_size`: the vocabulary of a flavor without one; it
    must not exceed any other. `max_seq_len`: in tokens. `base`: arguments in place of the flavor's.

    Raises ShapeError for an unknown name, a wrong type, or numbers that make no model.
    """
    spec = get_spec(family)
    base = base or spec.flavors.get(flavor)
    if base is None:
        raise unknown_flavor(spec, flavor)
    changes = checked_fields(spec.args_class, overrides or {}, "overrides")
    if vocab_size is not None:
        if changes.get("vocab_size", vocab_size) != vocab_size:
            message = f"is {vocab_size}, but model.overrides.vocab_size = {changes['vocab_size']}"
            raise ShapeError(Problem("model", "vocab_size", message))
        changes["vocab_size"] = vocab_size
    if max_seq_len is not None:
        wanted = changes.setdefault("max_seq_len", max_seq_len)
        if wanted < max_seq_len:
            message = f"is {wanted}, shorter than the sequences of {max_seq_len} tokens"
            raise ShapeError(Problem("model", "overrides.max_seq_len", message))
    if changes.get("vocab_size", base.vocab_size) is None:
        changes["vocab_size"] = tokenizer_size
    args = made(lambda: replace(base, **changes))
    if tokenizer_size is not None and tokenizer_size > args.vocab_size:
        message = (
            f"the tokenizer has {tokenizer_size} entries but the model's vocabulary only "
            f"{args.vocab_size}: choose the model's own tokenizer, or set model.vocab_size"
        )
        raise ShapeError(message)
    return args


def unknown_flavor(spec: ModelSpec, flavor: str) -> ShapeError:
    """Return the error of an unknown flavor."""
    message = f"{spec.name} has no flavor {shown(flavor)}"
    return ShapeError(
        Problem("model", "flavor", message, names_like(flavor, [*spec.flavors, FROM_FOLDER]))
    )


def model_args(model: Model, max_seq_len: int, tokenizer_size: int | None = None) -> Any:
    """Return the arguments of section `[model]`; the rest is as for `resolve_args`."""
    overrides = dict(model.overrides)
    base = None
    known = {field.name for field in fields(get_spec(model.name).args_class)}
    for name, value in {"norm_type": model.norm_type, "rope_scaling": model.rope_scaling}.items():
        if name in known and value is not None:
            overrides[name] = value
        elif value not in (None, "rmsnorm"):
            raise ShapeError(
                Problem("model", name, f"the model {model.name} has no such argument", "remove it")
            )
    if model.name == "hf":
        if model.flavor != "debugmodel":  # the key's default
            raise ShapeError(
                Problem(
                    "model", "flavor", "hf has no flavors: model.hf_config says all", "remove it"
                )
            )
        from titanlite.models.hf import read_args

        base = read_args(model.hf_config, overrides)
        overrides = {}
    elif model.flavor == FROM_FOLDER:
        base = shape_of(model)
    elif model.hf_config is not None:
        raise ShapeError(Problem("model", "hf_config", f"the model {model.name} takes none", _WAYS))
    args = resolve_args(
        model.name,
        model.flavor,
        overrides,
        vocab_size=model.vocab_size,
        tokenizer_size=tokenizer_size,
        max_seq_len=max_seq_len,
        base=base,
    )
    serves = getattr(getattr(args, "rope_scaling", None), "serves", None)
    if serves is not None and max_seq_len > serves:
        message = (
            f"serves {serves} tokens, factor times original_max_position_embeddings, and sequences "
            f"have {max_seq_len}"
        )
        raise ShapeError(Problem("model", "rope_scaling.factor", message, "raise it"))
    return args


_WAYS = 'set model.name = "hf", or model.flavor = "from_folder" to take its shape'


def shape_of(model: Model) -> Any:
    """Return the arguments of a model from a folder. Raises ShapeError if some are missing."""
    cls = get_spec(model.name).args_class
    given = checked_fields(cls, model.overrides, "overrides")
    missing = missing_fields(model)
    if missing:
        message = f'"{FROM_FOLDER}" needs the folder to take {", ".join(missing)} from'
        advice = "name it as checkpoint.initial_load_path, or as model.hf_config"
        raise ShapeError(Problem("model", "flavor", message, advice))
    return made(lambda: cls(**given))


def missing_fields(model: Model) -> list[str]:
    """Return the fields that `[model]` leaves open for a folder's model."""
    found = []
    cls: Any = get_spec(model.name).args_class
    for field in fields(cls):
        told = declared(cls, field.name)
        can_lack = field.default is None or told["of_training"] or told["came_later"]
        is_given = field.name in model.overrides or getattr(model, field.name, None) is not None
        if not can_lack and not is_given:
            found.append(field.name)
    return found


def as_record(family: str, args: Any) -> dict[str, Any]:
    """Return a model as JSON; `titanlite.models.recorded_args.from_record` reads it."""
    # Without classes of ours, which `torch.load` would refuse.
    record: dict[str, Any] = json.loads(json.dumps({"family": family, **asdict(args)}))
    return record


def made(make: Callable[[], Any]) -> Any:
    """Return what `make` makes; any ValueError becomes a ShapeError."""
    try:
        return make()
    except ShapeError:
        raise
    except ValueError as error:
        raise ShapeError(str(error)) from error
