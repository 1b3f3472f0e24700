"""Config → plans: what depends on two sections or on the number of ranks is derived here, once."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from msgspec.structs import asdict

from titanlite.config import mapped, plans
from titanlite.config.advice import batch_advice, choices, divisors, some
from titanlite.config.context import context_problems
from titanlite.config.errors import ConfigError, Problem
from titanlite.config.keys import describe
from titanlite.config.loaded import LoadedConfig
from titanlite.config.not_implemented import without_effect
from titanlite.config.pipeline import pipeline_plan, pipeline_problems
from titanlite.config.run_sections import Section
from titanlite.config.toml import quote, quote_key
from titanlite.utils import counted

Shapes = Mapping[str, Mapping[str, object]]


def resolve(
    config: LoadedConfig,
    *,
    world_size: int,
    shapes: Shapes | None = None,
    total_sequences: int | None = None,
) -> plans.Plans:
    """What a run of this config on `world_size` ranks does.

    shapes: model family → flavor → arguments (a dataclass); None leaves names and overrides unchecked.
    total_sequences: packed sequences in all epochs of the text. A run in epochs has no length without it:
    `TrainPlan.steps` and `SchedulePlan.total_steps` are then None, and the schedule's other numbers provisional.

    Raises ConfigError with every problem.
    """
    resolved, problems = draft(config, world_size=world_size, shapes=shapes, total_sequences=total_sequences)
    if problems:
        raise ConfigError(problems)
    return resolved


def draft(
    config: LoadedConfig,
    *,
    world_size: int,
    shapes: Shapes | None = None,
    total_sequences: int | None = None,
    earlier: Sequence[Problem] = (),
) -> tuple[plans.Plans, list[Problem]]:
    """As `resolve`, with the problems beside the plans instead of an error; the plans hold if there are none.

    earlier: what is known to be wrong already; mere consequences of it are not reported.
    """
    work = _Work(config, world_size, list(earlier))
    work.warn()
    if shapes is not None:
        work.check_model(shapes)
    mesh = work.mesh()
    # Degrees that do not fit make every number of data-parallel ranks below a guess.
    work.earlier += work.problems
    work.check_reshard(mesh)
    work.check_prefetch(mesh)
    work.problems += independent(context_problems(config, mesh), work.earlier, config)
    batch = work.batch(mesh)
    pipeline = work.pipeline(mesh, batch)
    steps = work.steps(batch, total_sequences)
    schedule = work.schedule(steps)
    work.name_idle_keys()
    d = config.sections
    resolved = plans.Plans(
        config=mapped.resolved(d),
        model=work.model(),
        tokenizer=work.tokenizer(),
        data=mapped.data_plan(d),
        batch=batch,
        mesh=mesh,
        tensor_parallel=plans.TensorParallelPlan(
            loss_parallel=d.training.enable_loss_parallel,
            asynchronous=d.experimental.enable_async_tensor_parallel,
        ),
        pipeline=pipeline,
        shard=work.shard(mesh),
        float8=mapped.float8_plan(d),
        activations=work.activations(shapes),
        compile=mapped.compile_plan(d),
        loss=plans.LossPlan(d.training.loss_chunks),
        optimizer=mapped.optimizer_plan(d),
        schedule=schedule,
        train=plans.TrainPlan(
            steps=steps,
            seed=d.training.seed,
            gc_freq=d.training.gc_freq,
            deterministic=d.debug.deterministic,
            deterministic_warn_only=d.debug.deterministic_warn_only,
        ),
        guard=plans.GuardPlan(**asdict(d.guard)),
        validation=mapped.validation_plan(d),
        checkpoint=mapped.checkpoint_plan(d),
        comm=plans.CommPlan(**asdict(d.comm), trace_folder=mapped.below(d.job.dump_folder, "comm_traces")),
        stall=mapped.stall_plan(d),
        observe=mapped.observe_plan(d),
        profile=mapped.profile_plan(d),
        config_toml=config.to_toml(),
        notes=(*config.notes, *work.notes),
        warnings=tuple(work.warnings),
    )
    return resolved, work.problems


def smallest_world(config: LoadedConfig) -> int:
    """The fewest ranks on which the degrees of parallelism fit."""
    if config.sections.checkpoint.create_seed_checkpoint:
        return 1
    degrees = _degrees(config)
    reshard, shard = config.sections.training.reshard_after_forward, "training.data_parallel_shard_degree"
    if isinstance(reshard, int) and degrees[shard] == -1:
        degrees[shard] = reshard
    return math.prod(max(degree, 1) for degree in degrees.values())


def _degrees(config: LoadedConfig) -> dict[str, int]:
    """The dimensions of the mesh by key; one of the data-parallel ones may be -1 for the ranks left over."""
    d = config.sections
    replicate, shard = d.training.data_parallel_replicate_degree, d.training.data_parallel_shard_degree
    if d.training.data_parallel_type == "ddp":
        replicate, shard = replicate if replicate > 1 else -1, 1
    return {
        "training.data_parallel_replicate_degree": replicate,
        "training.data_parallel_shard_degree": shard,
        "training.tensor_parallel_degree": d.training.tensor_parallel_degree,
        "experimental.pipeline_parallel_degree": d.experimental.pipeline_parallel_degree,
        "experimental.context_parallel_degree": d.experimental.context_parallel_degree,
    }


@dataclass
class _Work:
    """One resolution: the notes, warnings and problems gathered on the way."""

    config: LoadedConfig
    world_size: int
    #: What is known to be wrong already.
    earlier: list[Problem]
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def problem(self, key: str, message: str, hint: str = "", others: Sequence[str] = ()) -> None:
        """Note a problem, unless it only follows from an earlier one; others: keys that it weighs besides its own."""
        problem = Problem(self.config.place(key), key, message, hint, (key, *others))
        self.problems += independent([problem], self.earlier, self.config)

    def warn(self) -> None:
        """What a user should know but that stops nothing."""
        if self.config.sections.job.use_for_integration_test:
            self.warnings.append("job.use_for_integration_test has no effect")

    def name_idle_keys(self) -> None:
        """What was written but belongs to something that is off."""
        idle = [key for key in without_effect(self.config) if not self._off_beside(key)]
        # Who asks for a detail of float8 means to have it, and a run in bf16 looks like any other.
        if float8 := [key for key in idle if key.startswith("float8.")]:
            self.warnings.append(
                "products are not in float8 (float8.enable_float8_linear = false), and what is said of them has "
                f"no effect: {', '.join(float8)}"
            )
        if rest := [key for key in idle if key not in float8]:
            self.notes.append(f"no effect, as what they belong to is off: {', '.join(rest)}")

    def _off_beside(self, key: str) -> bool:
        """Whether the file that has a key also says that its section is off: who reads one reads the other."""
        section = key.partition(".")[0]
        switch = {"checkpoint": "enable_checkpoint", "validation": "enable"}.get(section)
        here, there = self.config.source(key), self.config.source(f"{section}.{switch}")
        return here.kind == there.kind == "file" and here.file == there.file

    # The model

    def check_model(self, shapes: Shapes) -> None:
        """Names of family and flavor, and the fields and types of the overrides."""
        model = self.config.sections.model
        flavors = shapes.get(model.name)
        if flavors is None:
            self.problem("model.name", f"no model {quote(model.name)}", choices(model.name, shapes))
            return
        arguments = flavors.get(model.flavor)
        if arguments is None:
            message = f"{model.name} has no flavor {quote(model.flavor)}"
            self.problem("model.flavor", message, choices(model.flavor, flavors), ["model.name"])
            return
        if not is_dataclass(arguments):
            raise TypeError(f"shapes[{model.name!r}][{model.flavor!r}] must be a dataclass, got {type(arguments)}")
        names = [f.name for f in fields(arguments)]
        hints = typing.get_type_hints(type(arguments))
        for name, value in model.overrides.items():
            key = f"model.overrides.{quote_key(name)}"
            if name not in names:
                message = f"{model.name} has no argument {quote(name)}"
                self.problem(key, message, choices(name, names), ["model.name"])
            elif not _fits(value, hints[name]):
                self.problem(key, f"expected {describe(hints[name])}, got {quote(value)}", others=["model.name"])

    def model(self) -> plans.ModelPlan:
        d = self.config.sections
        overrides: dict[str, Any] = dict(d.model.overrides)
        if d.model.rope_scaling is not None:
            scaling = d.model.rope_scaling
            overrides["rope_scaling"] = asdict(scaling) if isinstance(scaling, Section) else scaling
        longest = max(d.training.seq_len, mapped.validation_plan(d).seq_len if d.validation.enable else 0)
        return plans.ModelPlan(
            name=d.model.name,
            flavor=d.model.flavor,
            overrides=tuple(sorted(overrides.items())),
            norm_type=d.model.norm_type,
            max_seq_len=longest,
            vocab_size=d.model.vocab_size,
        )

    def tokenizer(self) -> plans.TokenizerPlan:
        d = self.config.sections
        if d.model.name != "llama2":
            return plans.TokenizerPlan(d.model.tokenizer_path)
        if d.model.tokenizer_path is None:
            self.notes.append("tokenizer: the bundled sentencepiece model, the kind that llama2 goes with")
        return plans.TokenizerPlan(d.model.tokenizer_path, bundled="sentencepiece")

    # Ranks and batches

    def mesh(self) -> plans.MeshPlan:
        if self.config.sections.checkpoint.create_seed_checkpoint:
            return self.mesh_of_seed()
        degrees = _degrees(self.config)
        copies = self.config.sections.training.data_parallel_type == "ddp"
        replicate_key, shard_key = list(degrees)[:2]
        names = {key: key.rpartition(".")[2].removesuffix("_degree") for key in degrees}
        fixed = {key: degree for key, degree in degrees.items() if degree != -1}
        product = math.prod(fixed.values())
        equation = [f"{names[key]} {degree}" for key, degree in fixed.items() if degree != 1]
        open_key = next((key for key, degree in degrees.items() if degree == -1), None)
        rest, remainder = divmod(self.world_size, product)
        if open_key is not None and not remainder:
            degrees[open_key] = rest
            divisors = "".join(f" / {part}" for part in equation)
            why = ' (data_parallel_type = "ddp")' if copies else ""
            self.notes.append(
                f"{names[open_key]} = {rest}: the ranks left over, {counted(self.world_size, 'ranks')}{divisors}{why}"
            )
        elif open_key is not None or product != self.world_size:
            relation = "which does not divide" if open_key is not None else "which is not"
            given = [key for key, degree in degrees.items() if degree != 1 and self.config.is_given(key)]
            all_left = f"set {replicate_key} = 1" if copies else f"set {shard_key} = -1"
            self.problem(
                given[-1] if given else shard_key,
                f"the degrees do not fit the ranks: {' * '.join(equation) or 'all degrees 1'} = {product}, {relation} "
                f"the world size {self.world_size}",
                f"run on {counted(product, 'ranks')}, or on a multiple of it"
                if open_key is not None
                else f"run on {counted(product, 'ranks')}, or {all_left} for the ranks left over",
                [*degrees, "training.data_parallel_type"],
            )
        replicate, shard = max(degrees[replicate_key], 1), max(degrees[shard_key], 1)
        return plans.MeshPlan(
            world_size=self.world_size,
            dp_replicate=replicate,
            dp_shard=shard,
            context=degrees["experimental.context_parallel_degree"],
            tensor=degrees["training.tensor_parallel_degree"],
            pipeline=degrees["experimental.pipeline_parallel_degree"],
        )

    def mesh_of_seed(self) -> plans.MeshPlan:
        """A seed checkpoint holds whole tensors, which any mesh can load: one process makes it."""
        if self.world_size > 1:
            self.problem(
                "checkpoint.create_seed_checkpoint",
                f"is made by one process, and there are {self.world_size}",
                "start it with `python train.py …` and the same config, whatever its degrees of parallelism",
            )
        self.notes.append("one process, whatever the degrees of parallelism: it makes a seed checkpoint and ends")
        return plans.MeshPlan()

    def check_reshard(self, mesh: plans.MeshPlan) -> None:
        """`fully_shard` keeps the weights sharded over a factor of the ranks that share one copy of them."""
        wanted = self.config.sections.training.reshard_after_forward
        if not isinstance(wanted, int) or mesh.weight_shards % wanted == 0:
            return
        fitting = divisors(mesh.weight_shards)[1:]
        numbers = f"{some(fitting)}, or " if fitting else ""
        which = "data_parallel_shard" + (" * context_parallel" if mesh.context > 1 else "")
        self.problem(
            "training.reshard_after_forward",
            f"is {wanted}, which does not divide the {mesh.weight_shards} ranks that share one copy of the weights "
            f"({which})",
            f'these work: {numbers}"default", "always" or "never"',
            [*_degrees(self.config), "training.data_parallel_type"],
        )

    def check_prefetch(self, mesh: plans.MeshPlan) -> None:
        """Where nothing is gathered, nothing is gathered ahead."""
        ahead = self.config.sections.training.prefetch
        if ahead and mesh.weight_shards == 1:
            self.warnings.append(
                f"training.prefetch = {ahead} has no effect: every rank holds whole weights (data_parallel_shard = 1)"
            )

    def batch(self, mesh: plans.MeshPlan) -> plans.BatchPlan:
        training, ranks = self.config.sections.training, mesh.dp_degree
        micro, wanted = training.batch_size, training.global_batch_size
        at_once, width = micro * ranks, counted(ranks, "data-parallel ranks")
        if wanted == -1:
            accumulation = 1
            self.notes.append(f"global batch = {counted(at_once, 'sequences')}: batch_size {micro} * {width}")
        else:
            accumulation = max(wanted // at_once, 1)
            if wanted % at_once:
                self.problem(
                    "training.global_batch_size",
                    f"is {wanted}, not a multiple of batch_size {micro} * {width} = {at_once}",
                    batch_advice(wanted, micro, ranks),
                    ["training.batch_size", "training.data_parallel_type", *_degrees(self.config)],
                )
            else:
                self.notes.append(
                    f"accumulation = {counted(accumulation, 'micro-batches')}: global_batch_size {wanted} / "
                    f"(batch_size {micro} * {width})"
                )
        total = at_once * accumulation
        tokens = total * training.seq_len
        self.notes.append(f"tokens per step = {tokens:,}: {counted(total, 'sequences')} * seq_len {training.seq_len}")
        return plans.BatchPlan(micro, accumulation, total, training.seq_len, tokens)

    def pipeline(self, mesh: plans.MeshPlan, batch: plans.BatchPlan) -> plans.PipelinePlan:
        found = pipeline_problems(self.config, mesh, batch.accumulation)
        self.problems += independent(found, self.earlier, self.config)
        if mesh.pipeline == 1:
            return plans.PipelinePlan()
        plan = pipeline_plan(self.config, mesh)
        total = plan.microbatches * batch.accumulation
        self.notes.append(
            f"pipeline micro-batches per step = {total}: {plan.microbatches} of each batch of {batch.micro_batch_size} "
            f"sequences * accumulation {batch.accumulation}"
        )
        return plan

    # The length of the run and the schedule

    def steps(self, batch: plans.BatchPlan, total_sequences: int | None) -> int | None:
        training = self.config.sections.training
        if training.tokens is not None:
            steps = math.ceil(training.tokens / batch.tokens_per_step)
            self.notes.append(
                f"steps = {steps}: training.tokens {training.tokens:,} / {batch.tokens_per_step:,} tokens per step, "
                "rounded up"
            )
            return steps
        if training.epochs is not None:
            if total_sequences is None:
                self.notes.append(f"steps follow from {counted(training.epochs, 'epochs')} once the text is counted")
                return None
            left_out = self._left_out(batch.global_batch_size, total_sequences)
            steps = math.ceil((total_sequences - left_out) / batch.global_batch_size)
            less = f" less {left_out} left out (data.skip_steps)" if left_out else ""
            self.notes.append(
                f"steps = {steps}: {counted(total_sequences, 'sequences')} in {counted(training.epochs, 'epochs')}"
                f"{less} / {counted(batch.global_batch_size, 'sequences')} per step, rounded up"
            )
            return steps
        return training.steps

    def _left_out(self, global_batch: int, total_sequences: int) -> int:
        """Sequences of the text that `data.skip_steps` leaves out."""
        position = found = 0
        for first, last in mapped.data_plan(self.config.sections).skip_steps:
            begin, end = max((first - 1) * global_batch, position), min(last * global_batch, total_sequences)
            found, position = found + max(end - begin, 0), max(position, end)
        return found

    def schedule(self, steps: int | None) -> plans.SchedulePlan:
        s, training = self.config.sections.lr_scheduler, self.config.sections.training
        total = steps if s.total_steps is None else s.total_steps
        if s.total_steps is not None and steps is not None and s.total_steps != steps:
            self.notes.append(f"the schedule is {s.total_steps} steps long (lr_scheduler.total_steps), the run {steps}")
        shape: dict[str, Any] = {
            "decay_type": "linear" if s.decay_type == "plateau" else s.decay_type,
            "min_lr_factor": s.min_lr_factor,
            "min_lr": s.min_lr,
            "style": s.style,
        }
        if total is None:
            warmup = 0 if s.warmup_ratio is not None else training.warmup_steps
            return plans.SchedulePlan(total_steps=None, warmup_steps=warmup, decay_steps=s.decay_steps, **shape)
        whole = (lambda steps: steps) if s.style == "fsdp" else round  # the AWS samples take fractions of steps
        warmup = training.warmup_steps
        if s.warmup_ratio is not None:
            warmup = whole(s.warmup_ratio * total)
            self.notes.append(f"warm-up = {counted(warmup, 'steps')}: warmup_ratio {s.warmup_ratio} * {total} steps")
        if warmup > total:
            long = counted(warmup, "steps")
            self.warnings.append(f"the warm-up of {long} is shortened to {total}: the schedule is no longer")
            warmup = total
        decay = s.decay_steps
        if s.decay_ratio is not None:
            decay = round(s.decay_ratio * total)
            last = counted(decay, "steps")
            self.notes.append(f"decay = the last {last}: decay_ratio {s.decay_ratio} * {total} steps")
        if decay is not None and decay > total - warmup:
            self.warnings.append(
                f"the decay of {counted(decay, 'steps')} is shortened to {total - warmup}: the {total} steps of the "
                f"schedule less {warmup} of warm-up"
            )
            decay = total - warmup
        plateau = None
        if s.plateau_ratio is not None:
            plateau = whole(s.plateau_ratio * total)
            long = counted(plateau, "steps")
            self.notes.append(f"plateau = {long}: plateau_ratio {s.plateau_ratio} * {total} steps")
            if plateau > total - warmup:
                self.warnings.append(f"the plateau of {long} is shortened to {total - warmup:.10g}")
                plateau = total - warmup
        return plans.SchedulePlan(
            total_steps=total, warmup_steps=warmup, decay_steps=decay, plateau_steps=plateau, **shape
        )

    def shard(self, mesh: plans.MeshPlan) -> plans.ShardPlan:
        training = self.config.sections.training
        words: dict[str | int, bool | None] = {"default": None, "always": True, "never": False}
        given = training.reshard_after_forward
        reshard: bool | int | None = given if isinstance(given, int) else words[given]
        if mesh.pipeline > 1:
            gathered = mesh.dp_shard * mesh.context > 1
            if reshard is None:
                reshard = False
                if gathered:
                    self.notes.append(
                        "weights stay gathered for the whole step (reshard_after_forward): each pipeline micro-batch "
                        "would gather them again"
                    )
            elif reshard is not False and gathered:
                self.warnings.append(
                    f"training.reshard_after_forward = {quote(training.reshard_after_forward)} gathers the weights "
                    "again for each pipeline micro-batch"
                )
        return plans.ShardPlan(
            param_dtype=training.mixed_precision_param,
            reduce_dtype=training.mixed_precision_reduce,
            reshard_after_forward=reshard,
            gradient_sync=training.gradient_sync,
            units=tuple(training.fsdp_units) if isinstance(training.fsdp_units, list) else training.fsdp_units,
            min_params=training.fsdp_min_params,
            prefetch=training.prefetch,
            cpu_offload=training.enable_cpu_offload,
        )

    def activations(self, shapes: Shapes | None) -> plans.ActivationCheckpointPlan:
        d = self.config.sections
        ac = d.activation_checkpoint
        if ac.mode == "budget":
            return plans.ActivationCheckpointPlan("budget", memory_budget=ac.memory_budget, offload=ac.offload)
        if ac.mode != "selective":
            return plans.ActivationCheckpointPlan(ac.mode, offload=ac.offload)
        if ac.selective_ac_option == "op":
            return plans.ActivationCheckpointPlan("op", offload=ac.offload)
        every, option = int(ac.selective_ac_option), "activation_checkpoint.selective_ac_option"
        shape = (shapes or {}).get(d.model.name, {}).get(d.model.flavor)
        blocks = d.model.overrides.get("n_layers", getattr(shape, "n_layers", every))
        if isinstance(blocks, int) and every > blocks:
            message = f'"{every}" recomputes one block of each {every}, but the model has {blocks}'
            if self.config.is_given(option) or self.config.is_given("activation_checkpoint.mode"):
                advice = f'give a number up to {blocks}, or "op", or set activation_checkpoint.mode = "none"'
                others = ["model.name", "model.flavor", "model.overrides.n_layers", "activation_checkpoint.mode"]
                self.problem(option, message, advice, others)
            else:
                self.notes.append(f"{option} = {message}: all activations are kept")
            return plans.ActivationCheckpointPlan(offload=ac.offload)
        return plans.ActivationCheckpointPlan("every", every=every, offload=ac.offload)


def independent(found: Iterable[Problem], earlier: Iterable[Problem], config: LoadedConfig) -> list[Problem]:
    """Those of `found` that are no mere consequence of an earlier problem.

    A wrong key is left at what lies below it, usually its default, so that later checks can run at all: what they say
    about such a key, or about keys that a file which cannot be read may set, is not worth a user's time.
    """
    doubts = {key for problem in earlier for key in problem.keys}
    a_file_is_lost = bool(doubts & {"job.config_file", "job.extends"})

    def doubtful(key: str) -> bool:
        if any(doubt == key or doubt.startswith(f"{key}.") for doubt in doubts):
            return True
        return not config.is_given(key) and (a_file_is_lost or key.partition(".")[0] in doubts)

    return [problem for problem in found if not any(map(doubtful, problem.keys))]


def _fits(value: Any, hint: Any) -> bool:
    """Whether a TOML value suits an annotation; an integer suits a float, a boolean only a boolean.

    Annotations that are no plain type (a table of its own) are left to the model.
    """
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) else (hint,)
    plain = {bool, int, float, str, type(None)}
    if not set(options) <= plain:
        return True
    if isinstance(value, bool):
        return bool in options
    if isinstance(value, int):
        return int in options or float in options
    if isinstance(value, float):
        return float in options and math.isfinite(value)
    return type(value) in options
