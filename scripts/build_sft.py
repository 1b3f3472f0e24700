"""Write the bundled prompts and completions (sft_test, sft_validation): simple questions with one
right answer.

    python scripts/build_sft.py

The output is the same byte for byte each time. Every sixth pair is held out.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "titanlite" / "data" / "assets" / "sft"

CAPITALS = (
    "Austria Vienna, Belgium Brussels, Bulgaria Sofia, Canada Ottawa, China Beijing, Cuba Havana, "
    "Denmark Copenhagen, Egypt Cairo, Finland Helsinki, France Paris, Germany Berlin, Ghana "
    "Accra, Greece Athens, Hungary Budapest, Iceland Reykjavik, India Delhi, Ireland Dublin, "
    "Italy Rome, Japan Tokyo, Kenya Nairobi, Nepal Kathmandu, Norway Oslo, Peru Lima, Poland "
    "Warsaw, Portugal Lisbon, Romania Bucharest, Russia Moscow, Spain Madrid, Sweden Stockholm, "
    "Turkey Ankara"
)
OPPOSITES = (
    "big small, hot cold, high low, long short, light dark, open closed, early late, fast slow, "
    "hard soft, old new, rich poor, full empty, strong weak, wet dry, near far, left right, true "
    "false, day night, up down, first last, good bad, happy sad, clean dirty, loud quiet, thick "
    "thin, deep shallow, heavy light, wide narrow, war peace, friend enemy"
)
PLURALS = (
    "man men, woman women, child children, foot feet, tooth teeth, mouse mice, goose geese, ox "
    "oxen, leaf leaves, wolf wolves, knife knives, life lives, city cities, story stories, box "
    "boxes, church churches, hero heroes, day days, book books, tree trees"
)


def pairs() -> list[tuple[str, str]]:
    """Return questions and answers in the order of their hashes."""
    found = [(f"What is {a} plus {b}?", str(a + b)) for a in range(1, 10) for b in range(1, 10)]
    found += [(f"What is {a} minus {b}?", str(a - b)) for a in range(2, 15) for b in range(1, a, 2)]
    for question, answers in (
        ("What is the capital of {}?", CAPITALS),
        ("What is the opposite of {}?", OPPOSITES),
        ("What is the plural of {}?", PLURALS),
    ):
        found += [
            (question.format(a), b) for a, b in (pair.split() for pair in answers.split(", "))
        ]
    return sorted(found, key=lambda pair: hashlib.sha256(pair[0].encode()).digest())


def main() -> None:
    lines = [
        json.dumps({"prompt": f"Question: {q}\nAnswer:", "completion": f" {a}"}) + "\n"
        for q, a in pairs()
    ]
    for name, part in (
        ("train", [line for i, line in enumerate(lines) if i % 6]),
        ("validation", lines[::6]),
    ):
        (FOLDER / name).mkdir(parents=True, exist_ok=True)
        (FOLDER / name / f"{name}.jsonl").write_text("".join(part))
        print(f"{name}: {len(part)} pairs")


if __name__ == "__main__":
    main()
