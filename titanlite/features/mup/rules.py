"""The rules of muP: what each parameter has, relative to the base model. No torch here.

A model of m times the width of the base model has, for each matrix with r times the inputs:

    matrix                     initial std        AdamW's rate       Muon's rate
    hidden, wide on both sides 1 / sqrt(r)        1 / r              sqrt(out / in / largest)
    output: head, router       1 / r              1 / r              the same
    input: embedding           1                  1
    vectors: norms, biases     1                  1

after Yang et al. 2022 (arXiv:2203.03466, "Tensor Programs V"), table 3. A side of a matrix is wide
if it differs from the base model's, as in their package `mup`. The router is an output (Malasnicki
et al. 2025, arXiv:2508.09752).

Muon's update has the spectral norm 0.2 * sqrt(max(in, out)). It should have sqrt(out / in) (Yang,
Simon, Bernstein 2023, arXiv:2310.17813), so the rate is the ratio of both. In the table each size
is divided by the base model's.

Some rules are multipliers:

    scores of attention   1 / d in place of 1 / sqrt(d)    table 8 of Tensor Programs V
    logits, tied head     1 / m                            the same
    what a block adds     base depth / depth               Dey et al. 2025, arXiv:2505.01618

The last is CompleteP's, with alpha = 1. A weight beside each multiplier takes it in. A multiplier c
does what an initial value, a rate and 1 / epsilon times c do (lemma J.1 of Tensor Programs V). For
Adam and Muon ignore the scale of a gradient. So the forward pass is that without muP, and every
file of the weights is one of an ordinary model.

Rate times weight decay stays that of the base model, as in `mup` and CompleteP. Epsilon shrinks
with the gradients (CompleteP, equation 40).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from titanlite.features.mup.base import head_width
from titanlite.models.linears import kind_of
from titanlite.models.llama import LlamaArgs
from titanlite.models.spec import Init, ModelSpec, Size

_EMBEDDING = "tok_embeddings"
_HEAD = "output"
_LAST_NORM = "norm"
_LAYER = re.compile(r"layers\.(\d+)\.")
#: Linears that write to the residual stream, if no norm comes after them.
_RESIDUAL = re.compile(
    r"attention\.wo(\.bias)?|feed_forward\.(w2|shared\.w2|experts\.(w2|down(_bias)?))"
)
_POST_NORMS = ("attention_post_norm", "ffn_post_norm")


class Factors(NamedTuple):
    """Settings of one parameter, as multiples of the base model's."""

    #: Standard deviation of the initial values; of a norm, the value itself.
    init: float = 1.0
    #: Learning rate. Weight decay is divided by it.
    rate: float = 1.0
    #: Epsilon of AdamW.
    eps: float = 1.0


class Ratios(NamedTuple):
    """Sizes of a parameter as multiples of the base model's: exactly 1 for a side that is equal."""

    #: Ratio of its inputs to those of the base model; 1 for a vector.
    inputs: float
    #: Ratio of its outputs, or of a vector's length.
    outputs: float
    #: Ratio of the larger one of the two.
    largest: float


@dataclass(frozen=True)
class Rules:
    """The factors of all parameters of a model. Its methods raise KeyError for an unknown name.

    base: the arguments of the base model.
    """

    spec: ModelSpec
    args: LlamaArgs
    base: LlamaArgs

    def init(self, name: str) -> Init:
        rule = self.spec.init_rule(name, self._as_deep)
        return _scaled(rule, self.factors(name).init, self._is_offset(name))

    def factors(self, name: str, muon: bool = False) -> Factors:
        """muon: Muon updates the parameter, and not AdamW."""
        ratios = self.ratios(name)
        held = self._multiplier(name)
        rate = 1 / ratios.inputs
        if muon:
            rate = math.sqrt(ratios.outputs / ratios.inputs / ratios.largest)
        # Gradients of what has a wide output fall with the width, and those in blocks also with
        # the depth.
        gradient = 1.0 if ratios.outputs == 1 else self.base.dim / self.args.dim
        if _LAYER.match(name):
            gradient *= self._depth
        init = 1.0
        if ratios.inputs != 1:
            init = 1 / ratios.inputs if ratios.outputs == 1 else ratios.inputs**-0.5
        return Factors(init * held, rate * held, gradient / held)

    def ratios(self, name: str) -> Ratios:
        module = _module_of(name)
        here = self.size(name)
        match = _LAYER.match(name)
        if match is None:
            there = _outer_sizes(self.base)[module]
        else:
            there = self._as_deep.of_block(int(match[1])).parameters()[kind_of(module)]
        return Ratios(
            here.in_features / there.in_features,
            here.out_features / there.out_features,
            _largest(here) / _largest(there),
        )

    def size(self, name: str) -> Size:
        """Return the size of a parameter; a vector has one input."""
        module = _module_of(name)
        match = _LAYER.match(name)
        if match is None:
            return _outer_sizes(self.args)[module]
        return self.args.of_block(int(match[1])).parameters()[kind_of(module)]

    def names(self) -> list[str]:
        """Return the names of all parameters but a tied head, in the model's order."""
        found = [f"{_EMBEDDING}.weight"]
        for name, block in self.args.blocks().items():
            for kind in block.parameters():
                is_stack = kind.startswith("feed_forward.experts.")
                is_whole = is_stack or kind.endswith(".bias")
                found.append(f"{name}.{kind}" if is_whole else f"{name}.{kind}.weight")
        found.append(f"{_LAST_NORM}.weight")
        if not self.args.tied:
            found.append(f"{_HEAD}.weight")
        return found

    def offset_gains(self) -> list[str]:
        """Return the norms that multiply by 1 + weight and hold a multiplier."""
        return [
            name for name in self.names() if self._is_offset(name) and self._multiplier(name) != 1
        ]

    @cached_property
    def _as_deep(self) -> LlamaArgs:
        return replace(self.base, n_layers=self.args.n_layers)

    # Multipliers, and where they are

    def _multiplier(self, name: str) -> float:
        kind = kind_of(_module_of(name))
        if kind == _EMBEDDING:
            return 1 / self._embedding
        if kind == _LAST_NORM and self.args.tied:
            return self._embedding / (self.args.dim / self.base.dim)
        # The last weight that multiplies all of a query.
        query = "attention.q_norm" if self.args.qk_norm else "attention.wq"
        if self.args.is_latent:
            query = "attention.wq_b" if getattr(self.args, "q_lora_rank", 0) else "attention.wq"
        if kind.removesuffix(".bias") == query:
            # Scores fall with 1 / head_dim.
            wanted = head_width(self.base) / head_width(self.args)
            if wanted == 1:
                return 1.0
            return wanted / (_score_scale(self.args) / _score_scale(self.base))
        if self.args.norm_placement == "before":
            adds = _RESIDUAL.fullmatch(kind) is not None
        else:
            adds = kind in _POST_NORMS
        return self._depth if adds else 1.0

    @cached_property
    def _embedding(self) -> float:
        return self.args.embedding_scale / self.base.embedding_scale

    @cached_property
    def _depth(self) -> float:
        return self.base.n_layers / self.args.n_layers

    def _is_offset(self, name: str) -> bool:
        return self.args.norm_offset and kind_of(_module_of(name)).endswith("norm")


def _score_scale(args: LlamaArgs) -> float:
    return args.query_scale / math.sqrt(head_width(args))


def _scaled(rule: Init, factor: float, is_offset: bool) -> Init:
    if factor == 1:
        return rule
    if is_offset:
        return Init("constant", value=factor - 1)
    if rule.kind == "ones":
        return Init("constant", value=factor)
    # Zeros stay zeros.
    return replace(
        rule, std=rule.std * factor, bound=rule.bound * factor, value=rule.value * factor
    )


# Sizes by name


def _outer_sizes(args: LlamaArgs) -> Mapping[str, Size]:
    """Return the sizes outside of blocks, without the vocabulary: it is the same in all models."""
    return {
        _EMBEDDING: Size(1, args.dim),
        _LAST_NORM: Size(1, args.dim),
        _HEAD: Size(args.dim, 1),
    }


def _largest(size: Size) -> int:
    return max(size.in_features, size.out_features)


def _module_of(name: str) -> str:
    return name.removesuffix(".weight")
