"""Any causal language model of `transformers`, from its config.json: `model.name = "hf"`.

    config_json.py   the file, and a config that names no code     args.py     arguments
    causal.py        the module                                    counts.py   parts and numbers
    skeleton.py      facts, read from the model on the meta device
    chunks.py        labels for the head, and what follows the head, for `training.loss_chunks`
    documents.py     attention within documents, for `data.mask_documents`
    experts.py       its experts
    names.py         names in files

Parameters have the names of `transformers`. All that the spec says is read from the model itself,
built on the meta device. `transformers` and torch are imported when such a model is asked for.
"""

from __future__ import annotations

import functools
from typing import Any

from titanlite.models.hf.args import HFArgs, args_from_hf, hf_config, read_args
from titanlite.models.hf.config_json import config_file, read_config
from titanlite.models.hf.counts import (
    count_parameters,
    flops_per_token,
    fsdp_units,
    linears,
    sublayer_names,
)
from titanlite.models.hf.skeleton import HEAD
from titanlite.models.spec import ModelSpec, imported_when_called

__all__ = ["HFArgs", "SPEC", "args_from_hf", "config_file", "read_args", "read_config"]


def _build(args: HFArgs) -> Any:
    from titanlite.models.hf.causal import Extras, causal_model
    from titanlite.models.hf.chunks import loss_of_head
    from titanlite.models.hf.documents import packed

    extras = Extras(functools.partial(packed, args), loss_of_head)
    return causal_model(args.skeleton.config, extras)


def _why_not(args: HFArgs, key: str) -> str:
    if key == "training.loss_chunks":
        from titanlite.models.hf.chunks import why_no_chunks

        return why_no_chunks(args)
    if key == "data.mask_documents":
        from titanlite.models.hf.documents import why_no_documents

        return why_no_documents(args)
    if key == "activation_checkpoint.selective_ac_option" and args.skeleton.moe_layers:
        return "experts of transformers change results in place that it would save; take a number"
    return ""


SPEC = ModelSpec(
    name="hf",
    args_class=HFArgs,
    flavors={},
    build=_build,
    # A padding token's row is drawn as the others.
    init_rule=lambda name, args: args.skeleton.rules[name],
    block_names=lambda args: list(args.skeleton.blocks),
    count_parameters=count_parameters,
    flops_per_token=flops_per_token,
    head=HEAD,
    fsdp_units=fsdp_units,
    linears=linears,
    sublayer_names=sublayer_names,
    why_not=_why_not,
    tied=lambda args: dict(args.skeleton.tied),
    hf_names=imported_when_called("titanlite.models.hf.names:hf_names"),
    hf_config=hf_config,
    args_from_hf=args_from_hf,
)
