"""`titanlite parity`: equal programs are found equal, and the first tensor of a fault is named.

tests/models/test_families.py compares every family.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from titanlite.cli.hub.compare_checkpoints import read_transformers
from titanlite.cli.main import main
from titanlite.contrib.evidence.module_differences import (
    compare,
    read_model,
    trace_ours,
    trace_transformers,
    write_random,
)
from titanlite.contrib.evidence.parity import DIFFERENT, TOLERANCE
from titanlite.models import SPECS

SPEC = SPECS["llama3"]
SMALL = {"dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 256, "max_seq_len": 64}
ARGS = replace(SPEC.flavors["debugmodel"], **SMALL)
TOKENS = torch.randint(256, (2, 32), generator=torch.Generator())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights as a folder of Hugging Face's."""
    folder = tmp_path_factory.mktemp("parity") / "weights"
    write_random(SPEC, ARGS, folder)
    return folder


def first_difference(folder: Path, model: nn.Module, scratch: Path) -> tuple[str, str]:
    """The kind and the name of the first tensor that differs; of none, two empty texts."""
    other = read_transformers(folder)
    theirs = trace_transformers(other, SPEC, ARGS, TOKENS, scratch / "gradients")
    for kind, differences in compare(trace_ours(model, TOKENS), theirs).items():
        for one in differences:
            if one.relative > TOLERANCE:
                return kind, one.name
    return "", ""


def one_weight(model: Any) -> None:
    model.layers["1"].attention.wo.weight.data[3, 5] += 0.01


def swapped(model: Any) -> None:
    part = model.layers["1"].feed_forward
    part.w1, part.w3 = part.w3, part.w1


def transposed(model: Any) -> None:
    weight = model.layers["0"].attention.wq.weight
    weight.data = weight.data.T.contiguous()


def epsilon(model: Any) -> None:
    model.layers["1"].ffn_norm.eps = 1e-3


def gradient(model: Any) -> None:
    model.layers["1"].attention.wv.weight.register_hook(lambda grad: grad * 1.0001)


def not_a_number(model: Any) -> None:
    model.layers["0"].feed_forward.w2.weight.data[0, 0] = torch.nan


def rotation(model: Any) -> None:
    model.rope = SPEC.build(replace(ARGS, rope_theta=2 * ARGS.rope_theta)).rope


@pytest.mark.parametrize(
    ("fault", "kind", "name"),
    [
        (one_weight, "activations", "layers.1.attention.wo"),
        (swapped, "activations", "layers.1.feed_forward.w1"),
        (transposed, "activations", "layers.0.attention.wq"),
        (epsilon, "activations", "layers.1.ffn_norm"),
        (not_a_number, "activations", "layers.0.feed_forward.w2"),
        # Linears are equal, and what attention makes of them is not.
        (rotation, "activations", "layers.0.attention.wo, input"),
        (gradient, "gradients", "layers.1.attention.wv.weight"),
        (lambda model: None, "", ""),
    ],
)
def test_the_first_tensor_of_a_fault_is_named(fault, kind, name, folder, tmp_path):
    model = read_model(folder, SPEC, ARGS)
    fault(model)
    assert first_difference(folder, model, tmp_path) == (kind, name)


def parity(*words: str) -> int:
    return main(["parity", "debug_model.toml", *words])


def test_the_command_compares_a_small_model_and_counts_what_is_equal(capsys):
    assert parity() == 0
    said = capsys.readouterr().out
    assert re.match(r"llama3 in titanlite and transformers \S+, \[2, 64\] tokens, float32:\n", said)
    # Input and result of 7 linears, 2 norms, 2 parts and the block itself, twice; of embedding,
    # last norm and head. Parameters: 9 of each block, and 3.
    counts = re.findall(r"^  (\d+) (\w+): largest difference \S+, \S+ of", said, re.M)
    assert counts == [("54", "activations"), ("1", "loss"), ("21", "gradients")]
    assert said.endswith("equal: no difference above 1e-05 of the largest value\n")


def test_weights_of_a_folder_and_a_config_that_computes_something_else(folder, capsys):
    words = [f"--model.hf_config={folder}", "--model.flavor=from_folder", f"--weights={folder}"]
    assert parity(*words) == 0
    assert parity(*words, "--model.overrides.norm_eps=1e-3") == DIFFERENT
    name = "layers.0.attention_norm"
    assert re.search(
        rf"first difference: {name}, there model\.layers\.0\.input_layernorm\n"
        r"  \[2, 64, 64\] here, \[2, 64, 64\] there, largest difference \S+, \S+ of the largest "
        rf"value\n  equal just before: {name}, input\n$",
        capsys.readouterr().out,
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "--torchtitan: /bin/false cannot run torchtitan 0.2.2:\n"),
        (
            ("--model.overrides.tied=true",),
            "--torchtitan: torchtitan has this model in another form",
        ),
    ],
)
def test_what_torchtitan_cannot_do_is_refused(flags, said, capsys):
    assert parity("--torchtitan=/bin/false", *flags) == 2
    assert said in capsys.readouterr().err


def test_weights_of_another_shape_are_refused(folder, capsys):
    assert parity(f"--weights={folder}") == 4
    said = capsys.readouterr().err
    assert f"{folder} does not fit the config: " in said
    assert "size mismatch for layers.0.attention.wq.weight" in said


def test_a_model_without_a_form_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", "debug_deepseek_v3.toml"]) == 4
    assert "has no biases of experts: train with" in capsys.readouterr().err


#: Python of an environment that has torchtitan 0.2.2.
TORCHTITAN = os.environ.get("TITANLITE_TORCHTITAN_PYTHON", "")


@pytest.mark.slow
@pytest.mark.skipif(not TORCHTITAN, reason="TITANLITE_TORCHTITAN_PYTHON names no environment")
@pytest.mark.parametrize("scaling", ["none", "8"])
def test_torchtitan_computes_the_same(scaling, capsys):
    assert parity(f"--torchtitan={TORCHTITAN}", f"--model.rope_scaling={scaling}") == 0
    said = capsys.readouterr().out
    assert re.match(r"llama3 in titanlite and torchtitan 0\.2\.2, ", said)
