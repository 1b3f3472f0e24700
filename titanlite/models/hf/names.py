"""Names of a model's tensors in files of `transformers`.

`transformers` itself tells the names, by its own way to save. Files may hold each expert's matrices
as separate tensors: consecutive pieces of our stacks. Other forms are refused.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from titanlite.models.hf_names import HFName

if TYPE_CHECKING:
    from titanlite.models.hf.args import HFArgs

#: Rows and columns of small matrices whose way into files is followed.
_ROWS = 12
_COLUMNS = 3


@functools.lru_cache(maxsize=8)
def hf_names(args: HFArgs) -> dict[str, HFName]:
    """Return the names of saved tensors in files. Raises ValueError for other forms."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    known = args.skeleton
    dimensions = {}
    for name, tensor in known.model.state_dict().items():
        if name not in known.tied:
            dimensions[name] = tensor.ndim
    mapping = get_model_conversion_mapping(known.model)
    has_other_form = any(isinstance(found, WeightConverter) for found in mapping)
    if has_other_form or known.moe_layers:
        return _followed(args, dimensions)
    return {name: name for name in dimensions}


def _other_form(args: HFArgs) -> ValueError:
    kind = args.skeleton.config.model_type
    return ValueError(f"files of a {kind} hold weights in another form than transformers' modules")


def _followed(args: HFArgs, dimensions: Mapping[str, int]) -> dict[str, HFName]:
    """Find the names in files by following each tensor's numbers."""
    from transformers.core_model_loading import revert_weight_conversion

    ours: dict[str, torch.Tensor] = {}
    firsts: list[int] = []
    end = 0
    for name, number in dimensions.items():
        # Small, with unequal dimensions; of a stack with all experts.
        layer = args.skeleton.moe_layers.get(name.rpartition(".")[0])
        first = layer.experts if layer is not None else _ROWS + 1
        more = range(_COLUMNS + 1, _COLUMNS + number)
        shape = torch.Size([first, _ROWS, _COLUMNS, *more][:number])
        firsts.append(end)
        end += shape.numel()
        ours[name] = torch.arange(firsts[-1], end).view(shape)
    try:
        theirs = revert_weight_conversion(args.skeleton.model, dict(ours))
    except Exception as error:  # its operations raise any class
        raise _other_form(args) from error
    names = list(dimensions)
    pieces: dict[str, list[tuple[int, str, torch.Tensor]]] = {name: [] for name in names}
    for name, tensor in theirs.items():
        first = int(tensor.flatten()[0])
        owner = names[bisect.bisect_right(firsts, first) - 1]
        pieces[owner].append((first, name, tensor))
    return {name: _joined(args, ours[name], sorted(pieces[name])) for name in names}


def _joined(args: HFArgs, whole: torch.Tensor, pieces: list[tuple[int, str, Any]]) -> HFName:
    """Return the name in files of one of our tensors, or of its pieces."""
    if len(pieces) == 1 and pieces[0][2].equal(whole):
        return pieces[0][1]
    joined = torch.cat([tensor.flatten() for _, _, tensor in pieces] or [whole[:0]])
    experts = len(whole)
    parts, rest = divmod(len(pieces), experts)
    shapes = {tensor.shape for _, _, tensor in pieces}
    expected = {torch.Size([_ROWS // max(parts, 1), *whole.shape[2:]])}
    if rest or not joined.equal(whole.flatten()) or shapes != expected:
        raise _other_form(args)
    names = [name for _, name, _ in pieces]
    if parts == 1:
        return tuple(names)
    return tuple(tuple(names[at : at + parts]) for at in range(0, len(names), parts))
