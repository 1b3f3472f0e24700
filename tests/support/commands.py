"""Commands of titanlite, for tests of many of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from titanlite.checkpoint.manifest import read_manifest
from titanlite.cli.checkpoint_folders import checkpoint_of
from titanlite.cli.eval_losses import config_of, evaluate, read_texts
from titanlite.dist.dist_env import DistEnv
from titanlite.validation import ValidationResult


def commands(parser: argparse.ArgumentParser, name: str = "") -> dict[str, argparse.ArgumentParser]:
    """All commands that have none below them, by their words."""
    below = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not below:
        return {name: parser}
    words = {
        p: word for word, p in reversed(below[0].choices.items())
    }  # the first word of each, not its other names
    return {
        k: v for p, word in words.items() for k, v in commands(p, f"{name} {word}".strip()).items()
    }


Command = Callable[..., tuple[int, str]]


def evaluate_run(world: DistEnv, folder: Path, *flags: str) -> ValidationResult:
    step = checkpoint_of(folder)
    manifest = read_manifest(step)
    run = config_of(step, manifest, None, flags, world.size)
    return evaluate(run, world, *read_texts(run, step, manifest))
