"""Check of nested_text.md: `python benchmarks/change_cost/nested_text.py [TREE]`."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

from checking import SMALL, command, is_accepted, require, require_keys, require_same_losses, train

FORMAT, PATH = "--data.format=nested", "--data.text_path=document.body"
SAVES = ("--checkpoint.enable_checkpoint", "--checkpoint.interval=100")
STREAMED = ("--data.streaming=true", "--data.shuffle_buffer=16")


def write(folder: Path, records: list[Any]) -> str:
    """Write two files of JSON lines, and return the flag that names their folder."""
    folder.mkdir()
    half = len(records) // 2
    for name, part in (("a.jsonl", records[:half]), ("b.jsonl", records[half:])):
        lines = [json.dumps(record) + "\n" for record in part]
        (folder / name).write_text("".join(lines))
    return f"--training.dataset_path={folder}"


def nested(text: Any) -> dict[str, Any]:
    return {"id": 7, "text": "not this", "document": {"text": "nor this", "body": text}}


def main() -> None:
    require_keys(FORMAT, PATH)
    require(not is_accepted(FORMAT), "format nested is taken without text_path")
    require(not is_accepted("--data.format=json", PATH), "text_path is taken with another format")
    draw = random.Random(5)
    texts = ["".join(draw.choices("etaoin shrdlu", k=draw.randint(80, 800))) for _ in range(120)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = write(folder / "plain", [{"text": text} for text in texts])
        ours = (FORMAT, PATH, write(folder / "nested", [nested(text) for text in texts]))
        for kind, flags in (("tokenized", ("--data.streaming=false",)), ("streamed", STREAMED)):
            flags = (*flags, *SAVES)
            wanted = train(folder / f"{kind}-plain", 2, plain, *flags, "--training.steps=6")
            train(folder / kind, 2, *ours, *flags, "--training.steps=3")
            rows = train(folder / kind, 2, *ours, *flags, "--training.steps=6")
            losses = [{key: row[key] for key in ("step", "loss", "grad_norm")} for row in wanted]
            require_same_losses(kind, rows, losses, 0.0)
        for number, wrong in enumerate(
            ({"document": {"title": "a"}}, nested(7), {"document": "a"})
        ):
            bad = write(folder / f"bad{number}", [*map(nested, texts[:9]), wrong, nested(texts[9])])
            for flags in (("--data.streaming=false",), STREAMED):
                done = command(
                    *("train", "debug_model.toml", "--nproc-per-node", "1", *SMALL),
                    *(FORMAT, PATH, bad, *flags, "--training.steps=50"),
                    f"--job.dump_folder={folder}/bad",
                )
                said = done.stdout + done.stderr
                require(done.returncode != 0, f"{wrong} is taken")
                for word in ("b.jsonl", "document.body", "5"):
                    require(word in said, f"the error of {wrong} has no {word}:\n{said[-1500:]}")
    print("right: tokenized, streamed, resumed, and the errors")


if __name__ == "__main__":
    main()
