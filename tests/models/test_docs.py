"""docs/models.md: its example runs and its table equals the code (`… tests/models/test_docs.py --write` renews it)."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from titanlite.models import SHAPES, LlamaArgs, count_parameters, flops_per_token

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TABLE = re.compile(r"(<!-- shapes: .*? -->\n)(.*?)(<!-- /shapes -->)", re.DOTALL)


def table() -> str:
    """One row for each shape, with all the flavors that name it."""
    heads = ["name", "flavor", "dim", "layers", "heads", "kv heads", "ffn", "vocab", "RoPE theta", "scaling", "tied"]
    lines = [[*heads, "parameters", "FLOPs per token at 8192"], ["---"] * 13]
    for family, flavors in SHAPES.items():
        names: dict[LlamaArgs, list[str]] = {}
        for flavor, args in flavors.items():
            names.setdefault(args, []).append(f"`{flavor}`")
        lines += [[f"`{family}`", ", ".join(n), *cells(args)] for args, n in names.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def cells(a: LlamaArgs) -> list[str]:
    shape = [str(n) for n in (a.dim, a.n_layers, a.n_heads, a.kv_heads, a.ffn_width)]
    scaling = f"{a.rope_scaling.factor:g}" if a.rope_scaling else "no"
    rope = [f"{a.rope_theta:,.0f}", scaling, "yes" if a.tied else "no"]
    if a.vocab_size is None:
        return [*shape, "tokenizer's", *rope, "", ""]
    return [*shape, str(a.vocab_size), *rope, f"{count_parameters(a):,}", f"{flops_per_token(a, 8192):,}"]


def test_the_table_of_shapes_equals_the_code() -> None:
    match = TABLE.search(PAGE.read_text())
    assert match and match[2] == table(), "run: python tests/models/test_docs.py --write"


def test_the_example_runs() -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) == 1
    exec(compile(examples[0], str(PAGE), "exec"), {})


if __name__ == "__main__" and "--write" in sys.argv:
    PAGE.write_text(TABLE.sub(lambda m: m[1] + table() + m[3], PAGE.read_text()))
