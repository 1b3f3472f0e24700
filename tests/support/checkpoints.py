"""A tiny run that saves and resumes, for the ranks of a pool; and small checkpoints that no run has
written.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.support.harness import Run, batches, build_tiny, full, moments_of, stepper
from tests.support.pool import Pools
from titanlite.checkpoint.manager import Checkpointer
from titanlite.checkpoint.manifest import CheckpointError, Manifest, digest_of
from titanlite.checkpoint.retention import begin, publish
from titanlite.checkpoint.store_paths import AnyPath, entries
from titanlite.cli.hub.compare_checkpoints import Contents, compare
from titanlite.config.sections import Checkpoint
from titanlite.dist.dist_env import DistEnv
from titanlite.models.args import as_record

STEPS = 20
TOKENS, LABELS = batches(STEPS, 8, 16, 192)
RUN = Run(TOKENS, LABELS, [3e-3] * STEPS)
PRINTS = {"model": "m", "tokenizer": "t", "data": "d"}
SHARD = b"1234"
MANIFEST = Manifest(
    step=5,
    fingerprints={"model": "m"},
    tensors={"model.w": ["float32", [2]]},
    files={"shard": 4},
    hashes={"shard": digest_of(SHARD)},
    train={"next_sequence": 40},
    versions={"titanlite": "0"},
    world_size=2,
    created=0.0,
)


def options(folder: object, **fields: Any) -> Checkpoint:
    return Checkpoint(enable_checkpoint=True, folder=str(folder), **fields)


def write(root: AnyPath, *steps: int, **fields: Any) -> None:
    """Publish checkpoints of one small file each."""
    for step in steps:
        folder = begin(root, step)
        (folder / "shard").write_bytes(SHARD)
        publish(folder, replace(MANIFEST, step=step, **fields))


def write_weights(root: Path, model: torch.nn.Module, about: dict[str, Any]) -> Path:
    """Write a model's weights as step 3, in this process; about: as for `Checkpointer`."""
    with DistEnv.open("cpu") as world:
        saver = Checkpointer(options(root), world, {}, about)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        saver.save(3, model, optimizer, {}, weights_only="float32")
        saver.close()
    return root / "step-3"


def names(root: AnyPath) -> list[str]:
    return sorted(entries(root))


def flip(path: AnyPath, where: float = 0.5) -> None:
    """Change one bit of a file, at a fraction of its length."""
    content = bytearray(path.read_bytes())
    content[int(where * len(content))] ^= 1
    path.write_bytes(bytes(content))


def unequal(left: AnyPath, right: AnyPath) -> list[str]:
    """Return the names of tensors that two checkpoints do not have alike, bit for bit."""
    return [
        one.name
        for one in compare(Contents(left), Contents(right))
        if one.elements or one.left != one.right
    ]


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """The same tensors under the same names, bit for bit."""
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def train(
    world: DistEnv,
    run: Run,
    folder: object,
    first: int,
    last: int,
    prints: dict[str, str] = PRINTS,
    draw: bool = False,
    every: int = 0,
    state: dict[str, Any] | None = None,
    expected: dict[str, Any] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """Steps first … last of `run`, resumed from `folder` when first > 1, saved there at the end.

    every: also save after so many steps. state: also in the train state. fields: of the section
    `checkpoint`.
    """
    model, optimizer, take = stepper(world, run, loss_function=run.builder(world).loss())
    torch.manual_seed(100 + world.rank)
    checkpointer = Checkpointer(options(folder, **fields), world, prints)
    try:
        loaded = checkpointer.load(model, optimizer, expected)
        assert (loaded.step if loaded else 0) == first - 1
        losses = []
        draws = []
        for step in range(first, last + 1):
            losses.append(take(step, run.rates[step - 1], step - 1).loss.item())
            if draw:
                draws.append(torch.rand(()).item())
            if step == last or (every and step % every == 0):
                checkpointer.save(
                    step, model, optimizer, {"next_sequence": 8 * step, **(state or {})}
                )
        checkpointer.wait()
    finally:
        checkpointer.close()
    return {
        "losses": losses,
        "weights": {n: full(p) for n, p in model.named_parameters()},
        "state": moments_of(model, optimizer),
        "draws": draws,
        "loaded": loaded,
    }


def load(world: DistEnv, run: Run, root: object, **fields: Any) -> dict[str, Any]:
    """Return the checkpoint that a run loads, or its error and if its weights are unchanged."""
    model, optimizer, _ = build_tiny(world, run)
    before = {name: full(p) for name, p in model.named_parameters()}
    about = {"model": as_record(run.family, run.args)}
    checkpointer = Checkpointer(options(root, **fields), world, PRINTS, about)
    error = ""
    loaded = None
    try:
        loaded = checkpointer.load(model, optimizer)
    except CheckpointError as failure:
        error = str(failure)
    finally:
        checkpointer.close()
    weights = {name: full(p) for name, p in model.named_parameters()}
    same = all(torch.equal(weights[name], weight) for name, weight in before.items())
    return {"loaded": loaded, "error": error, "weights": weights, "untouched": same}


def hand_on(world: DistEnv, run: Run, source: object, target: object) -> int:
    """Load a checkpoint into a model with other weights, and save it again as it is; return its
    step.
    """
    model, optimizer, _ = build_tiny(world, run)
    reader, writer = (Checkpointer(options(folder), world, PRINTS) for folder in (source, target))
    loaded = reader.load(model, optimizer)
    assert loaded is not None
    writer.save(loaded.step, model, optimizer, loaded.train)
    reader.close()
    writer.close()
    return loaded.step


def refusal(world: DistEnv, *args: Any, **kwargs: Any) -> str:
    """Return the error that `train` ends with."""
    try:
        train(world, *args, **kwargs)
    except CheckpointError as error:
        return str(error)
    raise AssertionError("it was not refused")


def edit(folder: Path, **changes: object) -> None:
    """Change a manifest as a bad disk would."""
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def sign(folder: Path, **changes: object) -> None:
    """Change a manifest as a wrong program would: its hash is right."""
    edit(folder, **changes)
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    content.pop("digest")
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({**content, "digest": digest_of(text.encode())}))


def two_and_two(pool: Pools, run: Run, folder: Path) -> dict[str, Any]:
    """Train steps 1 and 2, and 3 and 4 after a resume.

    Losses, state and checkpoint must equal those of four steps in a row, which are returned. The
    two parts save in `run` below the folder.
    """
    straight: dict[str, Any] = pool(2).run(train, run, folder / "straight", 1, 4)[0]
    first = pool(2).run(train, run, folder / "run", 1, 2)[0]
    second = pool(2).run(train, run, folder / "run", 3, 4)[0]
    assert [*first["losses"], *second["losses"]] == straight["losses"]
    assert_equal(second["state"], straight["state"])
    assert unequal(folder / "run" / "step-4", folder / "straight" / "step-4") == []
    return straight
