"""What a run starts from, in words, and what tells whether it goes on as the attempt before did."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite._version import __version__
from titanlite.build import Parts, Text, parameter_counts
from titanlite.checkpoint.load import GROUPS, LoadedState
from titanlite.checkpoint.manifest import CheckpointError
from titanlite.checkpoint.resume_check import FILE, ResumeCheck
from titanlite.config.plans import CheckpointPlan, Plans
from titanlite.config.scan import TOMLDecodeError, loads
from titanlite.config.sections.base import steps_of
from titanlite.data.background import Patience
from titanlite.data.left_out import of_steps, take
from titanlite.data.loader import add_hashes, step_hash
from titanlite.data.packing import PackedDataset
from titanlite.metrics import startup_report as rep
from titanlite.metrics.jsonl import FILE as METRICS
from titanlite.metrics.observer import Observer
from titanlite.metrics.throughput import device_name, total_memory_bytes
from titanlite.optim.schedule import learning_rate
from titanlite.parallel.float8_choice import tokens as micro_batch_tokens
from titanlite.parallel.pipeline import PipelineModel
from titanlite.parallel.world import World
from titanlite.runs import record
from titanlite.runs.provenance import config_changes, config_text
from titanlite.utils import counted, logger

#: Entry of the train state: see `schedule_record`.
SCHEDULE = "schedule"
#: Plans whose every field changes how sums are rounded.
_ROUNDING = ("mesh", "tensor_parallel", "pipeline", "shard", "float8", "activations", "compile")
#: Name of the thread that reads what is only to be hashed.
READER = "titanlite-next-batch"
_POLL_SECONDS = 0.5
_WORDS = {"optimizer": "optimizer", "lr_scheduler": "schedule", "dataloader": "text", "rng": "random generators"}

#: Entries of a checkpoint's train state, and their types.
_STATE = {"tokens_seen": int, "data": dict, "schedule_began": int, "guard": dict}


def check_state(loaded: LoadedState) -> None:
    """Raises CheckpointError unless a checkpoint says, in its train state, where the run goes on."""
    needed = {"tokens_seen", "data"} - ({"data"} if "dataloader" in loaded.left_out else set())
    for name, kind in _STATE.items():
        value = loaded.train.get(name)
        if type(value) is not kind and (name in needed or name in loaded.train):
            raise CheckpointError(
                f"{loaded.folder} does not say where its run goes on: {name} in its train state is {value!r:.60}. Only "
                "its weights can be used: name it as checkpoint.initial_load_path of another run"
            )


def began(plan: CheckpointPlan, loaded: LoadedState | None) -> str:
    """From where a run starts, and why."""
    if not plan.enable:
        return "a fresh run, checkpoints are off"
    asked = f"checkpoint.start = {plan.start}"
    if loaded is None:
        return f"a fresh run ({asked}): no checkpoint to resume in {plan.folder}"
    anew = [_WORDS[name] for name in GROUPS if name in loaded.left_out and name in _WORDS]
    if loaded.origin == "from":
        taken = "its weights" if not loaded.train else f"all it holds{_but(anew)}, at step {loaded.step}"
        why = f"checkpoint.initial_load_path; {plan.folder} has no checkpoint yet"
        return f"a run that starts from {loaded.folder} with {taken} ({why})"
    why = asked if plan.load_step is None else f"checkpoint.load_step = {plan.load_step}"
    if plan.initial_load_path is not None:
        why += "; so checkpoint.initial_load_path is not used"
    return f"resumed from step {loaded.step} in {plan.folder}{_but(anew)} ({why})"


def nothing_to_do(plans: Plans, step: int) -> str:
    """That the checkpoint is of the run's last step, and what to change to train on."""
    key = "training.epochs" if plans.data.epochs else "training.steps (or training.tokens)"
    weights = ""
    if plans.checkpoint.weights_only:
        weights = (
            ". If the weights alone were wanted of it (checkpoint.model_weights_only) and it holds more: `titanlite "
            f"checkpoint convert {plans.checkpoint.folder}/step-{step} TARGET --to hf "
            f"--dtype {plans.checkpoint.weights_only}`"
        )
    return (
        f"nothing to do: the checkpoint in {plans.checkpoint.folder} is of step {step} and the run has "
        f"{counted(plans.train.steps or 0, 'steps')}. To train on, raise {key}; to start anew, give another "
        f"--job.dump_folder or move the checkpoints away{weights}"
    )


def report(plans: Plans, parts: Parts, text: Text, world: World, observer: Observer) -> list[str]:
    """Return the lines of the startup report: what is about to run."""
    c, batch, mesh, schedule = plans.config, plans.batch, plans.mesh, plans.schedule
    parameters = parameter_counts(parts.spec.build_on_meta(parts.args))
    device = device_name(world.device)
    peak_is_given, float8 = c.metrics.peak_tflops is not None, c.float8.enable_float8_linear
    degrees = {"pp": mesh.pipeline, "dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard}
    degrees |= {"cp": mesh.context, "tp": mesh.tensor}
    tokens = micro_batch_tokens(batch, mesh, plans.pipeline)
    rows = [("run", c.job.description)] if c.job.description else []
    versions = {"titanlite": __version__, "torch": torch.__version__, "python": platform.python_version()}
    rows.append(("versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
    rows += rep.model_rows(f"{c.model.name} {c.model.flavor}", parameters)
    rows += rep.compute_rows(
        observer.flops_per_token,
        device,
        world.size,
        total_memory_bytes(world.device),
        observer.peak,
        peak_is_given,
        float8,
    )
    asynchronous = c.experimental.enable_async_tensor_parallel
    rows.append(rep.mesh_row(degrees, world.size, c.training.enable_loss_parallel, asynchronous))
    if isinstance(parts.model, PipelineModel):
        rows.append(rep.pipeline_row(plans.pipeline.schedule, parts.model.layout))
    rows.append(rep.precision_row(c.training))
    if float8:
        rows += rep.float8_rows(c.float8, parts.float8, tokens, plans.compile.model, device)
    rows += [
        rep.sharding_row(
            c.training,
            plans.shard.reshard_after_forward,
            mesh.weight_shards,
            batch.accumulation,
            sum(parameters.values()),
            device,
        ),
        rep.compile_row(c.training.compile, c.compile, mesh.tensor),
    ]
    if parts.kept:
        rows.append(rep.activations_row(c.activation_checkpoint, parts.kept, mesh.tensor, device))
    if c.training.loss_chunks > 1:
        rows.append(rep.loss_row(c.training.loss_chunks, tokens))
    rows += [
        ("tokenizer", plans.tokenizer.path or "bundled"),
        rep.data_row(c.training, c.data, text.train.documents, text.train.tokens_per_epoch),
        *rep.batch_rows(batch.micro_batch_size, batch.accumulation, mesh.dp_degree, batch.seq_len),
        rep.length_row(plans.train.steps, c.training.epochs, batch.tokens_per_step, text.train.tokens_per_epoch),
        rep.optimizer_row(c.optimizer, c.training.max_norm),
        rep.schedule_row(
            warmup_steps=schedule.warmup_steps,
            plateau_steps=schedule.plateau_steps,
            decay_type=schedule.decay_type,
            decay_steps=schedule.decay_steps,
            floor=max(schedule.min_lr_factor * c.optimizer.lr, schedule.min_lr or 0.0),
            total_steps=schedule.total_steps,
        ),
        *rep.guard_rows(c.guard),
        rep.validation_row(c.validation),
        rep.checkpoints_row(c.checkpoint),
        ("metrics to", str(Path(c.job.dump_folder) / METRICS)),
    ]
    if c.metrics.enable_tensorboard:
        rows.append(("TensorBoard to", c.metrics.save_tb_folder))
    if c.checkpoint.enable_checkpoint:
        rows.append(("checkpoints to", c.checkpoint.folder))
    rows += [("note", note) for note in plans.notes] + [("warning", warning) for warning in plans.warnings]
    return rep.startup_report(rows)


def _but(anew: list[str]) -> str:
    return f", but with new {', '.join(anew)}" if anew else ""


def words(loaded: LoadedState | None, plans: Plans, told: Sequence[str]) -> list[str]:
    """The end of the start report: what is `told` besides, how the config differs, from where the run goes on."""
    lines = [*(loaded.notices if loaded else []), *told]
    return [*lines, *_config_lines(loaded, plans, lines), began(plans.checkpoint, loaded)]


def _config_lines(loaded: LoadedState | None, plans: Plans, told: Sequence[str]) -> list[str]:
    """How the config differs from that which the checkpoint to resume was written under, but for what is `told`."""
    if loaded is None or loaded.origin != "resume":
        return []
    changes = config_changes(loaded.config.get("toml"), config_text(plans.config_toml))
    lines = [f"{key}: {change}" for key, change in changes.items()]
    return [
        f"config is not that of the checkpoint: {line}"
        for line in lines
        if not any(t.endswith(f" {line}") for t in told)
    ]


def schedule_record(plans: Plans) -> dict[str, Any]:
    """What the learning rate of every step follows from, for a checkpoint."""
    return {**asdict(plans.schedule), "peak": plans.optimizer.lr}


def schedule_change(loaded: LoadedState, plans: Plans, began: int) -> str | None:
    """How the learning rate goes on otherwise than in the run that wrote the checkpoint; None where it does not.

    began: steps done when the schedule began.
    """
    before, now = loaded.train.get(SCHEDULE), schedule_record(plans)
    if loaded.origin != "resume" or "lr_scheduler" in loaded.left_out or not isinstance(before, dict):
        return None
    changed = {name: before[name] for name, value in now.items() if name in before and before[name] != value}
    peak = changed.get("peak", plans.optimizer.lr)
    schedule = replace(plans.schedule, **{name: value for name, value in changed.items() if name != "peak"})

    def rates(step: int) -> tuple[float, float]:
        new = learning_rate(plans.schedule, plans.optimizer.lr, step - began)
        return learning_rate(schedule, peak, step - began), new

    coming = range(loaded.step + 1, (plans.train.steps or 0) + 1)
    try:
        if not any(old != new for old, new in map(rates, coming[:: max(len(coming) // 1000, 1)])):
            return None
        old, new = rates(loaded.step + 1)
    except (TypeError, ValueError, KeyError):  # of a later version, or damaged: it only serves this comparison
        return f"the learning-rate schedule in {loaded.folder} cannot be compared with this run's: {changed!r:.200}"
    words = [f"{name.replace('_', ' ')} {_number(then)} -> {_number(now[name])}" for name, then in changed.items()]
    keep = ""
    if "total_steps" in changed:
        keep = f"; lr_scheduler.total_steps = {changed['total_steps']} keeps the old length"
    return (
        f"the learning-rate schedule changed since step {loaded.step}: {', '.join(words)}; "
        f"learning rate of step {loaded.step + 1}: {old:.3g} -> {new:.3g}{keep}"
    )


def _number(value: object) -> str:
    return f"{value:.10g}" if isinstance(value, int | float) else str(value).lower()


def begin_record(
    plans: Plans, world: World, loaded: LoadedState | None, step: int, tokens: int
) -> tuple[record.AttemptRecord, list[str]]:
    """Record on rank 0 that an attempt starts at `step` steps and `tokens` tokens; also lines about the one before."""
    return record.begin(
        Path(plans.observe.dump_folder),
        config_toml=plans.config_toml,
        steps=plans.train.steps or 0,
        ranks=world.size,
        device=device_name(world.device),
        description=plans.observe.description,
        step=step,
        tokens=tokens,
        resumed=loaded is not None and loaded.origin == "resume",
        source=loaded.folder if loaded is not None and loaded.origin == "from" else None,
    )


def with_other_skips(loaded: LoadedState, plans: Plans) -> LoadedState:
    """The same, with `data.skip_steps` among its changes where the next batch is another one than was to come for it.

    That key may be changed for a resume.
    """
    text = loaded.config.get("toml")
    size, now = plans.batch.global_batch_size, plans.data.skip_steps
    try:
        before = loads(text)["data"].get("skip_steps", []) if isinstance(text, str) else []
        then = [steps_of(item) for item in before]
    except (TOMLDecodeError, KeyError, ValueError):
        return loaded
    place = loaded.train["data"]["next_sequence"]
    if take(place, size, of_steps(then, size)) == take(place, size, of_steps(now, size)):
        return loaded
    return replace(loaded, changes=(*loaded.changes, "data.skip_steps"))


def next_batch(
    dataset: PackedDataset,
    plans: Plans,
    state: Mapping[str, Any],
    world: World,
    give_up: Callable[[], bool] = lambda: False,
) -> str | None:
    """Hash of the global batch that comes next by a loader's state; the same on any number of ranks.

    All ranks call it together, each hashes a part. None where the data end, or a rank's part has not come some seconds
    after `give_up` says that it is not to be waited for any longer.
    """
    size = plans.batch.global_batch_size
    left_out = of_steps(plans.data.skip_steps, size)
    found: list[str | None] = []

    def read() -> None:
        try:
            found.append(step_hash(dataset, state["next_sequence"], size, world.rank, world.size, left_out))
        except Exception as error:  # the step itself will say so; a save is complete without the hash
            logger.warning(f"the next batch cannot be hashed, so a resume will not compare it: {error}")

    # In a thread: a save must not wait for storage that does not answer.
    reader = threading.Thread(target=read, name=READER, daemon=True)
    reader.start()
    patience = Patience(give_up)
    reader.join(_POLL_SECONDS)
    while reader.is_alive() and not patience.ended():
        reader.join(_POLL_SECONDS)
    part = found[0] if found else None
    parts: list[str | None] = [None] * world.size
    dist.all_gather_object(parts, part)
    whole = [part for part in parts if part is not None]
    return add_hashes(whole) if len(whole) == world.size else None


def rounding_setting(plans: Plans, device: torch.device) -> dict[str, str]:
    """What the rounding of a step's loss and norm depends on, by name."""
    found = {
        "device": device_name(device),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "batch.micro_batch_size": str(plans.batch.micro_batch_size),
        "batch.accumulation": str(plans.batch.accumulation),
        "deterministic": str(plans.train.deterministic),
    }
    for room in _ROUNDING:
        found.update((f"{room}.{name}", str(value)) for name, value in asdict(getattr(plans, room)).items())
    found.pop("compile.cache_dir")
    return found


def resume_check(plans: Plans, world: World) -> ResumeCheck:
    """Rounding apart, which is told from a difference by 1e-4 of the number, or 2e-2 where products are rounded to
    fewer bits, a run that is resumed must go on as before. On CPUs and with deterministic kernels, bit for bit."""
    coarse = plans.shard.param_dtype != "float32" or plans.float8.enable
    return ResumeCheck(
        Path(plans.observe.dump_folder) / FILE,
        world.rank,
        rounding_setting(plans, world.device),
        tolerance=2e-2 if coarse else 1e-4,
        exact=world.device.type == "cpu" or plans.train.deterministic,
    )
