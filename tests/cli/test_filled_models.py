"""Every command that fills a model gives it all that a checkpoint holds, buffers too.

The weights begin as a checkpoint of random numbers. They go through `export`, which `push` calls.
Each result is loaded as by `eval` and `sample`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import write_weights
from tests.support.llamas import relative
from titanlite.checkpoint.hf_files import hf_form
from titanlite.cli.argument_parser import Parser
from titanlite.cli.hub.export_weights import convert
from titanlite.cli.loading import add_arguments, load_model
from titanlite.data.tokenizer import BUNDLED_TOKENIZER
from titanlite.models import SPECS, get_spec, resolve_args
from titanlite.models.args import as_record

VOCABULARY = 2304
TOKENS = torch.randint(VOCABULARY, (1, 48), generator=torch.Generator().manual_seed(1))
SIZES = {"n_layers": 3, "dim": 64, "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 96}
BIASED = {"bias_update": 0.001}
#: Family → arguments beside `SIZES`. Only DeepSeek-V3 has a name for biases in `transformers`.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3, as published": ("deepseek_v3", {"score": "sigmoid", "q_lora_rank": 24}),
    "deepseek_v3, tied": ("deepseek_v3", {"score": "sigmoid", "tied": True}),
    "qwen3_moe, biases": ("qwen3_moe", BIASED),
    "gpt_oss, biases": ("gpt_oss", BIASED),
    "llama4, biases": ("llama4", BIASED),
    **{name: (name, {}) for name in ("llama3", "mixtral", "olmo3", "gemma3")},
}


def random_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Random values of each tensor that a checkpoint holds, large enough to matter."""
    state = {}
    for number, (name, tensor) in enumerate(model.state_dict().items()):
        generator = torch.Generator().manual_seed(number)
        noise = torch.randn(tensor.shape, generator=generator)
        is_matrix = tensor.ndim > 1
        state[name] = noise * tensor.size(-1) ** -0.5 if is_matrix else 0.3 * noise
    return state


def written(root: Path, family: str, args: Any) -> torch.Tensor:
    """Write random weights as step 3 in a folder; return the logits of torch's own way to load."""
    model = get_spec(family).build(args).eval()
    model.load_state_dict(random_state(model))  # a tied head is the last of both
    write_weights(root, model, {"model": as_record(family, args)})
    with torch.no_grad():
        logits: torch.Tensor = model(TOKENS)
    return logits


def logits_of(path: Path) -> torch.Tensor:
    """Return what `eval` and `sample` compute."""
    parser = Parser()
    add_arguments(parser)
    words = [str(path), "--device=cpu", f"--tokenizer={BUNDLED_TOKENIZER}"]
    logits: torch.Tensor = load_model(parser.parse_args(words)).model(TOKENS)
    return logits


def exported(path: Path, target: Path, dtype: str | None = None) -> Path:
    """Export weights as `export` and `push` do; the logits are compared there."""
    lines: list[str] = []
    convert(path, target, "hf", dtype, report=lines.append)
    assert "logits of 64 tokens" in lines[0] and "transformers" in lines[0]
    return target


def theirs(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(TOKENS).logits
    return logits


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("case", CASES)
def test_every_family(tmp_path, case):
    family, own = CASES[case]
    fields = SPECS[family].args_class.__dataclass_fields__
    known = {name: value for name, value in {**SIZES, **own}.items() if name in fields}
    args = resolve_args(family, "debugmodel", known, tokenizer_size=VOCABULARY, max_seq_len=64)
    expected = written(tmp_path / "first", family, args)
    first = tmp_path / "first" / "step-3"
    paths = [first]
    try:
        hf_form(get_spec(family), args)
    except ValueError:
        assert "bias_update" in repr(args)
    else:
        folder = exported(first, tmp_path / "hf")
        assert relative(theirs(folder), expected) < 1e-5
        exported(folder, tmp_path / "rounded", "bfloat16")
        paths += [folder, exported(folder, tmp_path / "again")]
    for path in paths:
        assert relative(logits_of(path), expected) < 1e-5, path
