#!/usr/bin/env python
"""Check every TOML file below a folder, as `titanlite config check` does: one line a file.

usage: python scripts/check_configs.py FOLDER [--ranks N] [--keys FILE]

A line tells what a run of the file trains, or the first reason why it is refused. With a checkout
of torchtitan 0.2.2 as the folder it shows how its files are read. The exit code is 0 where every
file is right, 2 where one is refused. --keys also writes the keys and values of all files as JSON,
without their descriptions and comments; tests/config/torchtitan_files.json was made so.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from titanlite.config.errors import ConfigError
from titanlite.config.load import read_text
from titanlite.config.toml import TOMLDecodeError, loads
from titanlite.resolve.load import resolve, smallest_world
from titanlite.run.config import RunConfig

REFUSED = 2
#: What a file says of itself, and no key of a run.
_WORDS = ("job.description",)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, help="ranks (default: the fewest that fit)")
    parser.add_argument("--keys", type=Path, help="JSON file for the keys of all files")
    arguments = parser.parse_args()
    paths = sorted(arguments.folder.rglob("*.toml"))
    paths = [path for path in paths if is_config(path.read_text(encoding="utf-8"))]
    refused = 0
    for path in paths:
        text = path.read_text(encoding="utf-8")
        verdict = checked(text, path, arguments.ranks)
        refused += isinstance(verdict, str)
        shown = verdict if isinstance(verdict, str) else described(verdict)
        print(f"{path.relative_to(arguments.folder)}: {shown}")
    print(f"{len(paths)} files, {refused} refused")
    if arguments.keys:
        texts = {str(path.relative_to(arguments.folder)): path.read_text() for path in paths}
        arguments.keys.write_text(keys_of(texts), encoding="utf-8")
    return REFUSED if refused else 0


def is_config(text: str) -> bool:
    """Return whether a text may be a config: other TOML files of a project have no model."""
    try:
        return "model" in loads(text)
    except TOMLDecodeError:
        return True


def checked(text: str, path: Path, ranks: int | None = None) -> RunConfig | str:
    """Return the run of a config text, or its first problem in words."""
    config, problems = read_text(text, path)
    if problems:
        return first(ConfigError(problems))
    try:
        return resolve(config, ranks or smallest_world(config))[1]
    except ConfigError as error:
        return first(error)


def first(error: ConfigError) -> str:
    problem = error.problems[0]
    text = ": ".join(filter(None, [problem.key, problem.message]))
    more = len(error.problems) - 1
    return f"refused: {text} ({more} more)" if more else f"refused: {text}"


def described(run: RunConfig) -> str:
    """Return what a run trains: the model, its layers, batch and schedule."""
    batch = run.batch
    schedule = run.schedule
    args = run.model_args()
    layers = getattr(args, "n_layers", None)
    model = run.model.title if layers is None else f"{run.model.title}, {layers} layers"
    size = f"{batch.global_batch_size} x {batch.seq_len} tokens on {run.mesh.world_size} ranks"
    return f"{model}, {size}, warm-up {schedule.warmup_steps}, {schedule.decay_type} decay"


def keys_of(texts: dict[str, str]) -> str:
    """Return the keys of files as JSON: what most have under `common`, then what differs."""
    files = {name: flat(loads(text)) for name, text in texts.items()}
    common = {}
    for key in dict.fromkeys(key for keys in files.values() for key in keys):
        values = Counter(json.dumps(keys[key]) for keys in files.values() if key in keys)
        value, count = values.most_common(1)[0]
        if count > len(files) / 2:
            common[key] = json.loads(value)
    found: dict[str, Any] = {}
    for name, keys in files.items():
        differs = {key: value for key, value in keys.items() if common.get(key) != value}
        without = [key for key in common if key not in keys]
        found[name] = {"keys": differs, "without": without}
    lines = [f'"common": {json.dumps(common)}']
    rows = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in found.items()]
    lines.append('"files": {\n' + ",\n".join(rows) + "\n}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def flat(tree: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Return the values of all tables by their full names."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        full = f"{above}{name}"
        if isinstance(value, dict):
            found |= flat(value, f"{full}.")
        elif full not in _WORDS:
            found[full] = value
    return found


if __name__ == "__main__":
    raise SystemExit(main())
