"""Settings that two runs must share for one to resume the other's checkpoints."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, fields
from typing import Any

from titanlite.assembly.datasets import Datasets
from titanlite.data.tokenizer import Tokenizer
from titanlite.models.argument_fields import declared
from titanlite.utils import is_dotted

#: Left out of the arguments of any model, as in checkpoints of 0.2.0: weights of routers' losses.
_NEVER = ("aux_loss", "z_loss")


def fingerprints(model: str, args: Any, datasets: Datasets) -> dict[str, str]:
    """Return what two runs must share for one to resume the other's checkpoints."""
    order = {name: value for name, value in datasets.train.settings.items() if name != "epochs"}
    return {
        **weights_fingerprints(model, args, datasets.tokenizer),
        "data": datasets.train.fingerprint[:16],
        "data order": ", ".join(f"{name} {value}" for name, value in order.items()),
    }


def weights_fingerprints(model: str, args: Any, tokenizer: Tokenizer) -> dict[str, str]:
    """Return the part of `fingerprints` on which the meaning of weights depends."""
    shape = asdict(args)
    cls: Any = type(args)
    for one in fields(args):
        told = declared(cls, one.name)
        is_older = told["came_later"] and shape[one.name] == one.default
        if one.name in _NEVER or is_older or told["of_training"]:
            del shape[one.name]
    if is_dotted(model):
        shape["model"] = os.path.basename(model)
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True, default=str).encode()).hexdigest()
    return {"model": digest[:16], "tokenizer": tokenizer.fingerprint[:16]}
