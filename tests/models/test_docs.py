"""docs/models.md, model-shapes.md, add-a-model.md and the README's table of features: examples run;
tables equal the code.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from titanlite.config.errors import ConfigError
from titanlite.models import SPECS, LlamaArgs, get_spec
from titanlite.models.counts import count_active_parameters
from titanlite.models.spec import ModelSpec
from titanlite.resolve.load import check_config

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
MODELS = ROOT / "docs" / "models.md"
TABLES = ROOT / "docs" / "model-shapes.md"
WALK = ROOT / "docs" / "add-a-model.md"
SHOWN = ROOT / "titanlite" / "models" / "qwen3.py"
#: Repositories of Hugging Face's hub with the published weights.
WEIGHTS = {
    "llama2": {size: f"meta-llama/Llama-2-{size.lower()}-hf" for size in ("7B", "13B", "70B")},
    "llama3": {
        **{size: f"meta-llama/Meta-Llama-3-{size}" for size in ("8B", "70B")},
        **{f"3.1-{size}": f"meta-llama/Llama-3.1-{size}" for size in ("8B", "70B", "405B")},
        **{f"3.2-{size}": f"meta-llama/Llama-3.2-{size}" for size in ("1B", "3B")},
    },
    "mistral": {
        **{f"7B-{version}": f"mistralai/Mistral-7B-{version}" for version in ("v0.1", "v0.3")},
        "mathstral-7B": "mistralai/Mathstral-7B-v0.1",
    },
    "mixtral": {size: f"mistralai/Mixtral-{size}-v0.1" for size in ("8x7B", "8x22B")},
    "deepseek_v3": {
        "16B": "deepseek-ai/DeepSeek-V2-Lite",
        "671B": "deepseek-ai/DeepSeek-V3-Base",
    },
    "gpt_oss": {size: f"openai/gpt-oss-{size.lower()}" for size in ("20B", "120B")},
    "llama4": {
        "17Bx16E": "meta-llama/Llama-4-Scout-17B-16E",
        "17Bx128E": "meta-llama/Llama-4-Maverick-17B-128E",
    },
    "olmo2": {
        "1B": "allenai/OLMo-2-0425-1B",
        **{size: f"allenai/OLMo-2-1124-{size}" for size in ("7B", "13B")},
        "32B": "allenai/OLMo-2-0325-32B",
    },
    "olmo3": {"7B": "allenai/Olmo-3-1025-7B", "32B": "allenai/Olmo-3-1125-32B"},
    "gemma3": {
        "270M": "google/gemma-3-270m",
        **{size: f"google/gemma-3-{size.lower()}-pt" for size in ("1B", "4B", "12B", "27B")},
    },
    "qwen3": {size: f"Qwen/Qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")},
    "qwen3_moe": {size: f"Qwen/Qwen3-{size}" for size in ("30B-A3B", "235B-A22B")},
}


def shapes() -> list[tuple[str, list[str], LlamaArgs]]:
    """Family, all flavors of one shape, the shape."""
    found = []
    for family, spec in SPECS.items():
        names: dict[LlamaArgs, list[str]] = {}
        for flavor, args in spec.flavors.items():
            if isinstance(args, LlamaArgs):
                names.setdefault(args, []).append(flavor)
        found += [(family, flavors, args) for args, flavors in names.items()]
    return found


def table(heads: list[str], lines: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in [heads, ["---"] * len(heads), *lines])


def shape_table() -> str:
    heads = [
        "name",
        "flavor",
        "dim",
        "layers",
        "heads",
        "kv heads",
        "head dim",
        "ffn",
        "vocab",
        "RoPE theta",
    ]
    return table(
        [*heads, "scaling", "window", "tied"],
        [
            [f"`{family}`", ", ".join(f"`{name}`" for name in names), *cells(a)]
            for family, names, a in shapes()
        ],
    )


def cells(a: LlamaArgs) -> list[str]:
    head_dim = getattr(a, "qk_head_dim", a.head_dim)
    shape = [str(n) for n in (a.dim, a.n_layers, a.n_heads, a.kv_heads, head_dim, a.ffn_width)]
    scaling = f"{a.rope_scaling.factor:g}" if a.rope_scaling else "no"
    window = "no" if a.window is None else f"{a.window:,}"
    every = getattr(a, "full_every", 0)
    if every:
        window += f" in {every - 1} of {every}"
    return [
        *shape,
        str(a.vocab_size or "tokenizer's"),
        f"{a.rope_theta:,.0f}",
        scaling,
        window,
        "yes" if a.tied else "no",
    ]


def size_table() -> str:
    lines = []
    for family, names, args in shapes():
        if args.vocab_size is None:
            continue
        spec = SPECS[family]
        count = spec.count_parameters(args)
        active = count_active_parameters(args)
        files = next(
            (f"`{WEIGHTS[family][name]}`" for name in names if name in WEIGHTS.get(family, {})), ""
        )
        counts = f"{count:,}" + (f" ({active:,} active)" if active < count else "")
        memory = [f"{width * count / 1e9:,.1f} GB" for width in (2, 16)]
        lines.append(
            [
                f"`{family}` `{names[0]}`",
                counts,
                *memory,
                f"{spec.flops_per_token(args, 8192):,}",
                files,
            ]
        )
    heads = ["model", "parameters", "weights in bf16", "weights, gradients, AdamW"]
    return table([*heads, "FLOPs per token at 8192", "published weights"], lines)


#: Feature → flags that switch it on, on two ranks.
FEATURES = {
    "FSDP": ["--training.data_parallel_shard_degree=2"],
    "TP": ["--training.tensor_parallel_degree=2"],
    "CP": ["--experimental.context_parallel_degree=2"],
    "PP": ["--experimental.pipeline_parallel_degree=2"],
    "EP": ["--parallelism.expert_parallel_degree=2"],
    "float8": ["--float8.enable_float8_linear", "--float8.emulate"],
    "compile": ["--training.compile"],
    "masks": ["--data.mask_documents=true"],
}


def takes(family: str, flags: list[str]) -> bool:
    """Whether a run of the family's smallest model on two ranks takes these flags."""
    model = ["--job.config_file=debug_model.toml", f"--model.name={family}"]
    model.append("--model.flavor=debugmodel")
    if family == "hf":
        model = ["--job.config_file=hf_debug.toml"]
    try:
        check_config([*model, *flags], 2)
    except ConfigError:
        return False
    return True


def feature_table() -> str:
    """Family × feature, as the checks of a config decide it, and as the spec converts weights.

    Families with the same answers share a line.
    """
    families: dict[tuple[bool, ...], list[str]] = {}
    for family, spec in SPECS.items():
        assert takes(family, []), family
        answers = [takes(family, flags) for flags in FEATURES.values()]
        converts = spec.hf_names is not ModelSpec.hf_names
        answers += [converts, converts]
        families.setdefault(tuple(answers), []).append(f"`{family}`")
    lines = []
    for found, names in families.items():
        lines.append([", ".join(names), *("yes" if answer else "–" for answer in found)])
    return table(["", *FEATURES, "HF in", "HF out"], lines)


#: Page and mark → the text between the marks.
PARTS: dict[tuple[Path, str], Callable[[], str]] = {
    (README, "features"): feature_table,
    (TABLES, "shapes"): shape_table,
    (TABLES, "sizes"): size_table,
}


def written(page: Path, mark: str) -> re.Match[str]:
    match = re.search(
        rf"(<!-- {mark}: [^>]* -->\n)(.*?)(<!-- /{mark} -->)", page.read_text(), re.DOTALL
    )
    assert match, f"{page} has no part {mark}"
    return match


def test_generated_parts_equal_the_code():
    for (page, mark), make in PARTS.items():
        assert written(page, mark)[2] == make(), "run: python scripts/generate.py"
    assert all(name in SPECS[family].flavors for family, names in WEIGHTS.items() for name in names)


def test_the_examples_run():
    for page in (MODELS, WALK):
        examples = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        assert len(examples) == 1
        exec(compile(examples[0], str(page), "exec"), {})


def test_a_family_is_one_file_that_a_path_can_name():
    spec = get_spec(f"{SHOWN}:SPEC")
    assert spec.name == "qwen3"
    assert spec.flavors.keys() == SPECS["qwen3"].flavors.keys()


if __name__ == "__main__" and "--write" in sys.argv:
    for (page, mark), make in PARTS.items():
        match = written(page, mark)
        text = page.read_text()
        page.write_text(text[: match.start(2)] + make() + text[match.end(2) :])
