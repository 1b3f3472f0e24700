"""The records of a finished run, compared with each other and with its data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.loaded import RESUME
from titanlite.checkpoint.manifest import Manifest, root_of, step_folder, steps_in
from titanlite.cli.checkpoint_folders import verify
from titanlite.config import trust
from titanlite.config.load import read_text
from titanlite.contrib.evidence.checks import IDLE, NOT_RUN, Check, Skipped, made
from titanlite.resolve.load import resolve
from titanlite.runs import ATTEMPTS
from titanlite.runs.read import Run, read_run
from titanlite.runs.read_jsonl import read_lines
from titanlite.runs.record import CONFIG

#: Name of a comparison, and its two values.
Pairs = Iterator[tuple[str, object, object]]
#: Step → manifest of its checkpoint.
Saves = dict[int, Manifest]


def checks(folder: Path) -> Iterator[Check]:
    """Yield each check of a run when it is done. Raises RunError for a folder that is no run."""
    run = read_run(folder)
    saves: Saves = {}
    yield compared("saves", "Checkpoints are as they were written.", _read_saves(run, saves))
    record = "The run is done, and its record is whole and fits its checkpoints."
    yield compared("record", record, _record(run, saves))
    resumes = "Each resume went on with the batch that was to come."
    yield compared("resumes", resumes, _resumes(run, saves))
    data = "The data still give the batches behind checkpoints."
    yield compared("data", data, _data(run, saves))


def _read_saves(run: Run, saves: Saves) -> Pairs:
    try:
        root = root_of(run.folder)
    except CheckpointError as error:
        raise Skipped(NOT_RUN, str(error)) from None
    for step in steps_in(root):
        manifest, problems = verify(step_folder(root, step))
        yield f"step {step}", problems, []
        if manifest is not None:
            saves[step] = manifest


def _record(run: Run, saves: Saves) -> Pairs:
    yield "state", run.state, "done"
    yield "last step", run.step, run.steps
    yield "damaged lines", run.problems, ()
    seen = {row["step"]: row.get("tokens_seen") for row in run.training}
    yield "order of steps", [row["step"] for row in run.training], sorted(seen)
    names = {attempt.get("config", CONFIG) for attempt in run.attempts}
    configs = [(run.folder / name).read_text(encoding="utf-8") for name in names]
    for step, manifest in saves.items():
        yield f"config of step {step}", manifest.config.get("toml") in configs, True
        if step in seen:
            yield f"tokens after step {step}", seen[step], manifest.train["tokens_seen"]


def _resumes(run: Run, saves: Saves) -> Pairs:
    began = [str(attempt.get("began")) for attempt in run.attempts]
    resumed = [text for text in began if text.startswith("resumed from step ")]
    told = [one for one in read_lines(run.folder / ATTEMPTS) if one["event"] == "resume"]
    if not resumed:
        raise Skipped(IDLE, "it was never resumed")
    yield "verdicts", [f"resumed from step {one['step']}" for one in told], resumed
    for one in told:
        yield f"verdict at step {one['step']}", one["verified"], True
        if manifest := saves.get(one["step"]):
            yield f"batch of step {one['step'] + 1}", one["next_batch"], _next(manifest)


def _data(run: Run, saves: Saves) -> Pairs:
    from titanlite.assembly.datasets import read_training_text
    from titanlite.data.batch_hash import step_hash
    from titanlite.data.skip_ranges import ranges_of_steps
    from titanlite.data.tokenizer import load_tokenizer

    path = run.folder / CONFIG
    toml = path.read_text(encoding="utf-8")
    config, problems = read_text(toml, path, (), trust.foreign(False))
    ranks = run.attempts[-1].get("ranks")
    own = resolve(config, ranks, problems, machine=True, texts=True)[1]
    text = read_training_text(own, load_tokenizer(own.model.tokenizer_path, own.model.name))
    if own.data.phase or text.state_dict():
        raise Skipped(NOT_RUN, "streams and phases are not read again")
    skip = ranges_of_steps(own.data.skip_steps, own.course)
    for step, manifest in saves.items():
        if told := _next(manifest):
            first = manifest.train["data"]["next_sequence"]
            found = step_hash(text, first, own.course.size(step + 1).rows, skip=skip)
            yield f"batch of step {step + 1}", found, told


def _next(manifest: Manifest) -> str | None:
    """Return the hash of the batch behind a checkpoint."""
    return (manifest.train.get(RESUME) or {}).get("next_batch")


def compared(name: str, claim: str, pairs: Pairs) -> Check:
    """Make a check of pairs, one or more, which must be equal."""

    def do(check: Check) -> bool:
        found = list(pairs)
        if not found:
            raise Skipped(NOT_RUN, "there is nothing to compare")
        wrong = [
            f"{name}: {one!s:.200} and {other!s:.200}" for name, one, other in found if one != other
        ]
        check.left, check.right = f"pairs: {len(found)}", f"different: {len(wrong)}"
        check.note = "; ".join(wrong)
        return not wrong

    return made(name, claim, do)
