"""Initial weights by name, sharding units, and weights under other names."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from titanlite.assembly.fingerprints import weights_fingerprints
from titanlite.config.model_sections import Model, Optimizer
from titanlite.models import Init, LlamaArgs, ShapeError, get_spec, resolve_args
from titanlite.models.args import as_record, missing_fields
from titanlite.models.argument_fields import argument, deciding
from titanlite.models.llama import decoder_spec
from titanlite.models.llama_hf import ENTRIES, NAMES, Entry, HFTable
from titanlite.models.recorded_args import from_record
from titanlite.optim.groups import parameter_groups

ARGS = LlamaArgs(dim=64, n_layers=3, n_heads=4, n_kv_heads=2, vocab_size=96)
TIED = replace(ARGS, tied=True)
TOKENIZER: Any = SimpleNamespace(fingerprint="")


def test_initial_distribution_of_every_kind_of_parameter():
    rule = get_spec("llama3").init_rule
    assert rule("tok_embeddings.weight", ARGS) == Init("normal", std=1.0)
    assert rule("output.weight", ARGS) == Init("trunc_normal", std=0.125, bound=0.375)
    assert (
        rule("tok_embeddings.weight", TIED)
        == rule("output.weight", TIED)
        == rule("output.weight", ARGS)
    )
    for name in ("norm", "layers.2.attention_norm", "layers.0.ffn_norm"):
        assert rule(f"{name}.weight", ARGS) == Init("ones")
    for linear in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1"):
        assert rule(f"layers.2.{linear}.weight", ARGS) == Init("trunc_normal", std=0.02, bound=0.06)
    for linear in ("attention.wo", "feed_forward.w2", "feed_forward.w3"):
        for layer in range(3):
            init = rule(f"layers.{layer}.{linear}.weight", ARGS)
            assert init.kind == "trunc_normal"
            assert init.std == pytest.approx(0.02 / math.sqrt(2 * (layer + 1)), rel=1e-12)
            assert init.bound == pytest.approx(3 * init.std, rel=1e-12)
    experts = [f"layers.1.feed_forward.experts.w{number}" for number in (1, 2)]
    mixture = resolve_args("mixtral", "8x7B")
    stds = [get_spec("mixtral").init_rule(name, mixture).std for name in experts]
    assert stds == [0.02, pytest.approx(0.02 / 2)]


@pytest.mark.parametrize(
    "name",
    [
        "layers.3.attention.wq.weight",
        "layers.0.attention.w1x.weight",
    ],
)
def test_a_name_without_a_rule_raises(name):
    with pytest.raises(KeyError, match="no initialisation is known"):
        get_spec("llama3").init_rule(name, ARGS)


def test_biases_and_sinks_begin_at_zero_and_have_no_decay():
    spec = get_spec("gpt_oss")
    args = replace(spec.flavors["debugmodel"], n_layers=2, vocab_size=96)
    parameters = dict(spec.build_on_meta(args).named_parameters())
    zeros = {name for name in parameters if spec.init_rule(name, args).kind == "zeros"}
    assert {name.split(".", 2)[2] for name in zeros} == {
        *(f"attention.w{one}.bias" for one in "qkvo"),
        "attention.sinks.weight",
        "feed_forward.gate.bias",
        "feed_forward.experts.gate_up_bias",
        "feed_forward.experts.down_bias",
    }
    names = {id(parameter): name for name, parameter in parameters.items()}
    blocks = spec.block_names(args)
    without = {
        names[id(parameter)]
        for group in parameter_groups(parameters, Optimizer(no_decay_on_norms=True), blocks)
        if group.get("weight_decay") == 0.0
        for parameter in group["params"]
    }
    assert without == {name for name in parameters if "norm" in name or "bias" in name} | {
        f"{block}.attention.sinks.weight" for block in blocks
    }
    (muon,) = (
        group
        for group in parameter_groups(parameters, Optimizer(name="Muon"), blocks)
        if group.get("muon")
    )
    assert not any("bias" in names[id(parameter)] for parameter in muon["params"])
    assert len(muon["params"]) == 2 * (4 + 1 + 2)


@dataclass(frozen=True)
class EarlierArgs(LlamaArgs):
    """Arguments that no code but this names."""

    gain: float = 2.0
    shift: float = -0.5
    penalty: float = argument(0.5, of_training=True, may_be_zero=True)
    narrow: int | None = argument(None, decides="narrow_width")

    @property
    def narrow_width(self) -> int:
        return self.narrow or self.dim // 2


@dataclass(frozen=True)
class TunedArgs(EarlierArgs):
    """Those of the next version."""

    twist: float = argument(1.0, came_later=True)


TUNED = decoder_spec("tuned", {"debugmodel": TunedArgs(64, 2, 4, vocab_size=96)})
TUNED_NAME = f"{__name__}:TUNED"


def test_a_new_argument_is_declared_in_one_place():
    def changed(name=TUNED_NAME, **changes):
        return resolve_args(name, "debugmodel", changes, tokenizer_size=96)

    def told(args, name=TUNED_NAME):
        """Whether checkpoints are of another model, and whether weights of others are."""
        both = changed(name), args
        resumed = [weights_fingerprints(name, one, TOKENIZER)["model"] for one in both]
        compared = [deciding(one) for one in both]
        return resumed[0] != resumed[1], compared[0] != compared[1]

    assert told(changed(gain=3.0)) == (True, True)
    assert told(changed(penalty=0.0)) == (False, False)
    assert told(changed(narrow=32)) == (True, False)
    assert told(changed(narrow=16)) == (True, True)
    assert told(changed(max_seq_len=64)) == (False, False)
    assert told(changed(shift=0.5)) == (True, True)
    assert told(changed(twist=2.0)) == (True, True)
    routed = changed("mixtral", aux_loss=0.5, z_loss=0.1)
    assert told(routed, "mixtral") == (False, False), "losses of routers make no other model"
    wanted = "gain must be positive, got 0.0; .*penalty must not be negative, got -1.0"
    with pytest.raises(ShapeError, match=wanted):
        changed(gain=0.0, penalty=-1.0)
    kept = changed(gain=3.0, penalty=0.25)
    assert from_record(as_record(TUNED_NAME, kept)) == (TUNED_NAME, kept)


def test_an_argument_that_came_later_has_its_default_in_older_models_and_in_files():
    older, newer = EarlierArgs(64, 2, 4, vocab_size=96), TUNED.flavors["debugmodel"]
    prints = [weights_fingerprints(TUNED_NAME, one, TOKENIZER) for one in (older, newer)]
    assert prints[0] == prints[1]
    assert from_record(as_record(TUNED_NAME, older))[1] == newer
    given = {"dim": 64, "n_layers": 2, "n_heads": 4}
    open_fields = missing_fields(Model(name=TUNED_NAME, flavor="from_folder", overrides=given))
    assert "gain" in open_fields and "twist" not in open_fields
    files = HFTable("llama", TunedArgs, {**ENTRIES, "gain": Entry("gain", 2.0)}, NAMES)
    assert files.args_from_hf(files.hf_config(newer)).twist == 1.0
    for function in (files.hf_config, files.hf_names):
        function(replace(newer, gain=3.0))
        with pytest.raises(ValueError, match="twist is 2.0, and llama of `transformers` lacks it"):
            function(replace(newer, twist=2.0))
    told = replace(files, entries={**ENTRIES, "twist": Entry("twist", 1.0)})
    assert told.args_from_hf(told.hf_config(replace(newer, twist=2.0))).twist == 2.0


@dataclass(frozen=True)
class RoutedArgs:
    """Arguments of a model of a user, as 0.2.0 knew them: nothing is declared."""

    dim: int = 8
    max_seq_len: int = 16
    aux_loss: float = 0.01


def test_checkpoints_of_0_2_0_with_arguments_of_a_user_are_resumed():
    found = weights_fingerprints("mine.py:SPEC", RoutedArgs(), TOKENIZER)
    shape = b'{"dim": 8, "model": "mine.py:SPEC"}'
    assert found["model"] == hashlib.sha256(shape).hexdigest()[:16]
