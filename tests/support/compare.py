"""Holds a run of titanlite's against the plain single-process one."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tests.support.harness import (
    Run,
    alone,
    batches,
    changed,
    initial_weights,
    train,
    train_afresh,
)
from tests.support.llamas import relative
from tests.support.pool import Pools
from tests.support.reference import Curve, in_memory, model_of, train_reference
from titanlite.models import get_spec

STEPS = 20
GLOBAL_BATCH = 8
SEQ = 32
TOKENS, LABELS = batches(STEPS, GLOBAL_BATCH, SEQ, 192)
#: Gradients' distance by family. A norm after attention or feed-forward divides by the small output
#: of new weights, and so by its rounding. A bias of keys has a sum of terms that nearly cancel.
WITHIN = dict.fromkeys(("olmo2", "olmo3", "gemma3", "gpt_oss"), 2e-6)
#: Several documents in each sequence.
DOCUMENTS = (
    (torch.rand(TOKENS.shape, generator=torch.Generator().manual_seed(0)) < 0.1).long().cumsum(-1)
)
DOCUMENTS -= DOCUMENTS[..., :1].clone()
#: Learning rates with a warm-up.
WARM = [3e-3 * min(1.0, (n + 1) / 5) for n in range(STEPS)]


def distance(a: list[float], b: list[float]) -> float:
    """Mean distance of two runs' losses over steps."""
    return (torch.tensor(a) - torch.tensor(b)).abs().mean().item()


def spread(plain: list[float], others: list[list[float]]) -> float:
    """How far runs from other seeds are from this one, as the mean over steps."""
    return statistics.fmean(distance(plain, other) for other in others)


#: Arguments → a module from tokens to logits, with titanlite's names of weights.
Reference = Callable[[Any], torch.nn.Module]


class References:
    """Curves of `transformers`' models, or of modules in plain torch, with torch's optimizers, each
    computed once and shared by all splits.
    """

    def __init__(self, pool: Pools) -> None:
        self._pool = pool
        self._curves: dict[Any, Curve] = {}
        self._seeds: dict[Any, list[list[float]]] = {}

    def of(self, run: Run, reference: Reference | None = None) -> Curve:
        """The plain run on the same global batches from the same weights."""
        tokens, labels = run.tokens, run.labels
        if run.documents is not None:
            tokens, labels = alone(tokens, labels, run.documents)
        batch = (tokens.numpy().tobytes(), labels.numpy().tobytes())
        key = (run.args, run.seed, run.optimizer, tuple(run.rates), run.max_norm, batch, reference)
        if key not in self._curves:
            # One rank cannot keep weights over two.
            training = changed(run.training, reshard_after_forward="never")
            plain = replace(run.alone(), training=training)
            start = self._pool(1).run(initial_weights, plain)[0]
            spec = get_spec(run.family)
            if reference is None:
                model = model_of(spec.hf_config(run.args), spec.to_hf(start, run.args))
            else:
                model = reference(run.args)
                model.load_state_dict(start)
            self._curves[key] = train_reference(
                model,
                tokens,
                labels,
                optimizer=run.optimizer,
                rates=run.rates,
                max_norm=run.max_norm,
            )
        return self._curves[key]

    def losses(self, run: Run, ranks: int) -> list[float]:
        """Of a run on so many ranks."""
        return self._pool(ranks).run(train, run)[0].losses

    def seeds(self, run: Run) -> list[list[float]]:
        """Losses of titanlite's own run on one rank, from the run's seed and from two others."""
        alone = run.alone()
        key = (alone.args, str(alone.training), alone.accumulation, tuple(alone.rates))
        if key not in self._seeds:
            self._seeds[key] = [self.losses(replace(alone, seed=run.seed + i), 1) for i in range(3)]
        return self._seeds[key]

    def compare(self, run: Run, ranks: int, reference: Reference | None = None) -> None:
        """Gradients of every parameter, losses and norms of every step, weights after the last.

        reference: None: the model of `transformers`.
        """
        expected = self.of(run, reference)
        curves = self._pool(ranks).run(train_afresh, run)
        ours = curves[0]
        for other in curves[1:]:
            assert other.losses == ours.losses and other.norms == ours.norms, (
                "ranks disagree about the loss"
            )
        spec = get_spec(run.family)
        gradients, weights = ours.gradients, ours.weights
        if reference is None:
            # Those of buffers, which have none.
            zeros = {name: torch.zeros(1) for name in weights.keys() - gradients.keys()}
            gradients = in_memory(spec.to_hf({**gradients, **zeros}, run.args))
            for name in zeros:
                del gradients[spec.hf_names(run.args)[name]]
            weights = in_memory(spec.to_hf(weights, run.args))
        assert gradients.keys() == expected.gradients.keys()
        # Ours are caught after clipping, the reference's before.
        clip = min(1.0, run.max_norm / (expected.norms[0] + 1e-6))
        for name, gradient in expected.gradients.items():
            assert relative(gradients[name], gradient * clip) < WITHIN.get(run.family, 1e-6), name
        torch.testing.assert_close(
            torch.tensor(ours.losses), torch.tensor(expected.losses), rtol=0, atol=5e-6
        )
        # AdamW divides by the root of the second moment, which amplifies rounding.
        weights_within, norms_within = (1e-6, 1e-5) if run.optimizer == "SGD" else (1e-4, 1e-4)
        torch.testing.assert_close(
            torch.tensor(ours.norms), torch.tensor(expected.norms), rtol=norms_within, atol=0
        )
        for name, weight in expected.weights.items():
            assert relative(weights[name], weight) < weights_within, name
