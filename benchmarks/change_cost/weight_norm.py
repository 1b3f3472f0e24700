"""Check of weight_norm.md: `python benchmarks/change_cost/weight_norm.py [TREE]`."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

from checking import (
    PIPELINE,
    REPLICAS,
    TENSOR,
    is_near,
    records,
    require,
    require_keys,
    train,
)

KEY = "--metrics.weight_norm"
STEPS = "--training.steps=3"
LAYOUTS = {
    "one rank": (1, ()),
    "FSDP 2": (2, ()),
    "replicas 2": (2, (REPLICAS,)),
    "TP 2": (2, (TENSOR,)),
    "FSDP 2, TP 2": (4, (TENSOR,)),
    "PP 2": (2, (PIPELINE,)),
}


def main() -> None:
    require_keys(KEY)
    alone: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        for number, (layout, (ranks, flags)) in enumerate(LAYOUTS.items()):
            folder = Path(name) / str(number)
            rows = train(folder, ranks, KEY, STEPS, *flags, recorder="Weights")
            squares: dict[int, dict[str, float]] = {}
            for rank in records(folder):
                for step, one in rank.items():
                    squares.setdefault(step, {}).update(one)
            require([row["step"] for row in rows] == [1, 2, 3], f"{layout}: a step is missing")
            alone = alone or [row["weight_norm"] for row in rows]
            for row, of_one in zip(rows, alone, strict=True):
                found = row.get("weight_norm", 0.0)
                wanted = math.sqrt(sum(squares[row["step"]].values()))
                where = f"{layout}, step {row['step']}: weight_norm is {found}"
                require(is_near(found, wanted, 1e-6), f"{where}, not {wanted}")
                require(is_near(found, of_one, 1e-5), f"{where}, on one rank {of_one}")
            require(len({row["weight_norm"] for row in rows}) == 3, f"{layout}: it stands still")
        rows = train(Path(name) / "off", 1, STEPS)
        require(not any("weight_norm" in row for row in rows), "it is logged by default")
    print(f"right: {', '.join(LAYOUTS)}, and off by default")


if __name__ == "__main__":
    main()
