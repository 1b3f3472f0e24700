"""The soft cap of the logits: its numbers and memory, in every loss, and its cost where it is off.

test_families.py and grid.py compare models with it with `transformers`, on one rank and on several.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.test_ops import DTYPES, gradients, kept_bytes
from tests.plan.measured import config_of
from tests.support.llamas import SMALL, built, relative, tokens_of
from titanlite.assembly.fingerprints import weights_fingerprints
from titanlite.assembly.saves import _check_hf_form
from titanlite.cli.plan.trace import trace
from titanlite.config.errors import ConfigError
from titanlite.config.model_sections import Model
from titanlite.features.loss_chunks.head import chunk_head
from titanlite.loss import batch_loss, cross_entropy_sum
from titanlite.models import SPECS
from titanlite.models.args import as_record, from_record, missing_fields, shape_of
from titanlite.models.layers import Llama
from titanlite.models.softcap import soft_cap
from titanlite.models.spec import ShapeError
from titanlite.plan.memory import estimate
from titanlite.plan.rank_sizes import head_memory
from titanlite.regularized_loss import regularized
from titanlite.resolve.load import check_config

CAP = 1.5
#: Fingerprint of the model without a cap.
WITHOUT = "cc183323e24ee532"
KEY = "model.overrides.final_softcap"


def formula(logits: Tensor) -> Tensor:
    return CAP * torch.tanh(logits.double() / CAP)


@pytest.mark.parametrize("dtype", DTYPES)
def test_value_and_slope_are_those_of_the_formula_also_near_the_cap(dtype: torch.dtype) -> None:
    logits = torch.linspace(-9, 9, 4001).to(dtype)
    out, grad = gradients(lambda x: soft_cap(x, CAP), logits)
    expected, slope = gradients(formula, logits)
    assert out.dtype == grad.dtype == dtype
    # Of bf16 one rounding, of the result: autograd of bf16 would be wrong by half of the slope.
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
    torch.testing.assert_close(out.double(), expected.double(), rtol=tolerance, atol=0)
    torch.testing.assert_close(grad.double(), slope.double(), rtol=2 * tolerance, atol=1e-6)


def test_it_keeps_its_input_alone() -> None:
    logits = torch.randn(4, 96)
    assert kept_bytes(lambda x: soft_cap(x, CAP), logits) == 0
    assert kept_bytes(lambda x: CAP * torch.tanh(x / CAP), logits) == logits.nbytes


def test_it_compiles_as_one_graph() -> None:
    logits = torch.linspace(-9, 9, 96).bfloat16()
    compiled: Any = torch.compile(soft_cap, backend="aot_eager", fullgraph=True)
    plain = gradients(lambda x: soft_cap(x, CAP), logits)
    for found, expected in zip(gradients(lambda x: compiled(x, CAP), logits), plain, strict=True):
        assert found.equal(expected)


class ByHand(nn.Module):
    """A decoder without a cap, and the formula after it."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return formula(self.model(tokens)).float()


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("penalty", [None, (1e-2, 0.1)], ids=["plain", "z-loss and smoothing"])
def test_every_loss_is_that_of_capped_logits(
    chunks: int, penalty: tuple[float, float] | None
) -> None:
    loss = cross_entropy_sum if penalty is None else regularized(*penalty)
    plain, capped = built(SMALL), built(replace(SMALL, final_softcap=CAP))
    if chunks > 1:
        chunk_head(capped, chunks)
    tokens = tokens_of(SMALL)
    labels = tokens.roll(-1, 1)
    expected = batch_loss(ByHand(plain), tokens, labels, loss)
    found = batch_loss(capped, tokens, labels, loss)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert found.item() != pytest.approx(batch_loss(plain, tokens, labels, loss).item(), rel=1e-2)
    for result in (expected, found):
        result.backward()
    for (name, p), (_, q) in zip(capped.named_parameters(), plain.named_parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert relative(p.grad, q.grad) < 2e-6, name
    # Text is of capped logits, too.
    with torch.no_grad():
        torch.testing.assert_close(capped(tokens), ByHand(plain)(tokens))


def test_a_model_without_it_imports_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("titanlite.models.softcap", "titanlite.plan.softcap_ops"):
        monkeypatch.setitem(sys.modules, name, None)  # an import would be an error
    built(SMALL)(tokens_of(SMALL))
    head_memory.cache_clear()
    estimate(check_config([], 1)[1], 0)
    with pytest.raises(ImportError):
        built(replace(SMALL, final_softcap=CAP))(tokens_of(SMALL))


@pytest.mark.parametrize("cap", [-1.0, float("inf"), float("nan")])
def test_a_cap_that_is_none_is_refused(cap: float) -> None:
    with pytest.raises(ShapeError, match="final_softcap must be 0 or a positive number"):
        replace(SMALL, final_softcap=cap)


def test_records_hold_it_and_older_ones_have_none() -> None:
    args = replace(SMALL, final_softcap=CAP)
    record = as_record("llama3", args)
    assert from_record(record) == ("llama3", args)
    del record["final_softcap"]
    assert from_record(record) == ("llama3", SMALL)
    assert args.deciding() != SMALL.deciding()
    # As versions without it wrote it in checkpoints: their runs can be resumed.
    tokenizer: Any = SimpleNamespace(fingerprint="")
    assert weights_fingerprints("llama3", SMALL, tokenizer)["model"] == WITHOUT
    assert weights_fingerprints("llama3", args, tokenizer)["model"] != WITHOUT
    shape = {name: value for name, value in asdict(SMALL).items() if name != "final_softcap"}
    taken = Model(name="llama3", flavor="from_folder", overrides=shape)
    assert missing_fields(taken) == [] and shape_of(taken) == SMALL


def test_gemma3_alone_is_written_with_it() -> None:
    for family, spec in SPECS.items():
        if family == "hf":
            continue
        args = replace(next(iter(spec.flavors.values())), vocab_size=96, final_softcap=30.0)
        if family == "gemma3":
            assert spec.hf_config(args)["final_logit_softcapping"] == 30.0
            assert (
                spec.hf_config(replace(args, final_softcap=0.0))["final_logit_softcapping"] is None
            )
            continue
        with pytest.raises(ValueError, match=r"final_softcap = 30\.0, and only gemma3"):
            spec.hf_config(args)
    run = check_config([f"--{KEY}=15"], 1)[1]
    with pytest.raises(ConfigError, match=r"last_save_in_hf.*llama caps no logits"):
        _check_hf_form(run, run.model_args(96))


#: Where the logits are most of a step.
LARGE = {
    "model.vocab_size": 16384,
    "activation_checkpoint.mode": "full",
    "training.mixed_precision_param": "bfloat16",
    KEY: 15,
}
TP = "training.tensor_parallel_degree"
CHUNKS = "training.loss_chunks"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, {}),
        (1, {"training.mixed_precision_param": "float32", CHUNKS: 2, "training.z_loss": 1e-4}),
        (2, {TP: 2}),
        (2, {TP: 2, CHUNKS: 2, "training.enable_loss_parallel": "false"}),
        (4, {TP: 2, "experimental.pipeline_parallel_degree": 2}),
    ],
)
def test_the_planned_peak_is_the_traced_one(ranks: int, flags: dict[str, Any]) -> None:
    words = [f"--{key}={value}" for key, value in {**LARGE, **flags}.items()]
    given = ["--job.config_file=debug_model.toml", *config_of("1 rank")[1], *words]
    run = check_config(given, ranks, training=False)[1]
    traced = trace(run, ranks - 1, "cpu").peak
    assert traced.module == "output"
    assert estimate(run, ranks - 1, "cpu").peak.total == pytest.approx(traced.total, rel=2e-3)
