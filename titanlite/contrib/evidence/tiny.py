"""A tiny copy of a config: the same features and kinds of layers, with small numbers."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

from titanlite.config.data_sections import Data, DataSource
from titanlite.config.dataset_registry import BUNDLED_IDS, BUNDLED_TOKENIZER_NAME, hub_text
from titanlite.config.loaded import LoadedConfig
from titanlite.config.sections import AUTO_FILTER, Checkpoint, Config
from titanlite.data.dataset_sources import held_out_texts, training_texts
from titanlite.resolve.load import resolve, smallest_world
from titanlite.run.config import RunConfig
from titanlite.run.derive import degrees_of, derive
from titanlite.runs.config_changes import config_changes

#: Steps of each run, and the last one before another run goes on from its checkpoint.
STEPS = 12
HALF = 6
#: Ranks at most, unless there are more GPUs or the degrees need more.
RANKS = 4
#: Largest arguments of a model; the last part has the names of `transformers`.
_MOST = {
    "dim": 64,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 16,
    "ffn_dim": 128,
    "n_experts": 4,
    "top_k": 2,
    "expert_width": 32,
    "n_groups": 2,
    "top_groups": 1,
    "n_dense_layers": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "full_every": 2,
    "nope_every": 2,
    "sparse_step": 2,
    "window": 32,
    "chunk": 32,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_LAYERS = ("n_layers", "num_hidden_layers")
_PIPELINE = "experimental.pipeline_parallel_degree"
_EXPERTS = "parallelism.expert_parallel_degree"
_RESHARD = "training.reshard_after_forward"
#: Sections without a part in the numbers of a run.
_IDLE = ("eval", "launch", "ladder", "profiling", "memory_estimation")
_SMALL = {
    "training.steps": STEPS,
    "training.tokens": None,
    "training.epochs": None,
    "training.seq_len": 64,
    "training.global_batch_size": -1,
    "training.warmup_steps": 2,
    "lr_scheduler.unit": "steps",
    "lr_scheduler.warmup_ratio": None,
    "lr_scheduler.total_steps": None,
    "data.phase": [],
    "data.skip_steps": [],
    "validation.enable": True,
    "validation.freq": STEPS,
    "validation.first": False,
    "validation.steps": 2,
    "validation.seq_len": 64,
    "metrics.log_freq": 1,
    "metrics.enable_tensorboard": False,
    "metrics.enable_wandb": False,
    "metrics.trackers": [],
    "experimental.pipeline_parallel_split_points": [],
    "float8.min_features": 0,
}
#: Keys of `[checkpoint]` that stay.
_SAVES = ("async_mode", "verify", "verify_saves")
#: Keys of `[data]` that name a text or its fields.
_TEXT = ("source", "subset", "split", "format", "streaming", "lanes", "chat_template")
_FIELDS = ("text_key", "prompt_key", "completion_key", "messages_key")
#: Key that a machine cannot have → key and value in its place; others are switched off.
_INSTEAD: dict[str, tuple[str, Any]] = {
    "float8.enable_float8_linear": ("float8.emulate", True),
    "float8.recipe_name": ("float8.emulate", True),
    "compile.backend": ("training.compile", False),
}


@dataclass(frozen=True)
class TinyCopy:
    """A tiny config, and what it has not of the one that it is a copy of."""

    config: LoadedConfig
    run: RunConfig
    #: "old -> new" by key.
    changes: dict[str, str]
    #: Key of a feature that does not run here → reason.
    left_out: dict[str, str]

    @property
    def ranks(self) -> int:
        return self.run.mesh.world_size


def tiny_copy(config: LoadedConfig, most: int, folder: str, gpus: int = 0) -> TinyCopy:
    """Return the copy of a config. Raises ConfigError.

    most: ranks, unless the degrees of parallelism need more. folder: of its runs.
    """
    config, whole = resolve(config)
    small = config.without(_IDLE)
    d = small.sections
    changes = {**_SMALL, **_saves(), **_texts(d), **_model(d, whole)}
    if smallest_world(small) > most:
        degrees = {**degrees_of(d), _EXPERTS: d.parallelism.expert_parallel_degree}
        changes |= {key: 2 for key, degree in degrees.items() if degree > 2}
        if isinstance(d.training.reshard_after_forward, int):
            changes[_RESHARD] = 2
    if d.lora.rank:
        changes["checkpoint.initial_load_path"] = os.path.join(folder, "base", "checkpoint")
    small = small.changed(changes)
    ranks = smallest_world(small)
    if -1 in degrees_of(small.sections).values() and 2 * ranks <= most:
        ranks *= 2
    if ranks > gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        small = small.changed({"debug.deterministic": True})
    small, left_out = _for_machine(_with_batch(small, ranks), ranks)
    small, run = resolve(small, ranks)
    on = {feature.key for feature in run.features.on}
    for feature in whole.features.on:
        if feature.key not in on:
            left_out.setdefault(feature.key, "the tiny copy does without it")
    return TinyCopy(small, run, config_changes(config.to_toml(), small.to_toml()), left_out)


def _saves() -> dict[str, Any]:
    plain = Checkpoint(enable_checkpoint=True, interval=1)
    names = [name for name in plain.__struct_fields__ if name not in _SAVES]
    return {f"checkpoint.{name}": getattr(plain, name) for name in names}


def _texts(d: Config) -> dict[str, Any]:
    """Return the bundled text for one that is not on this machine."""
    kind = "c4"
    if any(getattr(d.data, name) for name in _FIELDS[1:]) or d.training.dataset == "sft_test":
        kind = "sft"
    changes: dict[str, Any] = {}
    if not all(map(_is_here, training_texts(d.training, d.data).values())):
        changes = {f"data.{name}": getattr(Data(), name) for name in (*_TEXT, *_FIELDS)}
        changes |= {"training.dataset": f"{kind}_test", "training.dataset_path": None}
    if changes or not all(map(_is_here, held_out_texts(d.validation).values())):
        changes |= dict.fromkeys(f"validation.{name}" for name in ("dataset_path", "split"))
        changes |= {"validation.dataset": f"{kind}_validation", "validation.format": None}
        changes["validation.sources"] = []
    return changes


def _is_here(source: DataSource) -> bool:
    if source.path is not None:
        return os.path.exists(source.path)
    return hub_text(source.name or "") is None


def _model(d: Config, run: RunConfig) -> dict[str, Any]:
    args = run.model_args(BUNDLED_IDS)
    shape = json.loads(args.config) if d.model.name == "hf" else asdict(args)
    most = {**_MOST, **dict.fromkeys(_LAYERS, 2)}
    if run.mesh.pipeline > 1:
        # Two stages on each rank, for all schedules.
        most |= dict.fromkeys(_LAYERS, 2 * min(run.mesh.pipeline, RANKS))
    if shape.get("n_kv_heads") == shape.get("n_heads"):
        most["n_kv_heads"] = most["n_heads"]
    overrides = dict(d.model.overrides)
    for name, value in most.items():
        if isinstance(shape.get(name), int) and shape[name] > value:
            overrides[name] = value
    changes: dict[str, Any] = {"model.overrides": overrides}
    if not os.path.exists(d.model.tokenizer_path):
        overrides.pop("vocab_size", None)
        changes["model.tokenizer_path"] = BUNDLED_TOKENIZER_NAME
        changes["model.vocab_size"] = BUNDLED_IDS
    if d.mup.base_dim:
        changes |= {"mup.base_dim": 32, "mup.base": {}}
    filters = [name for name in d.float8.filter_fqns if name != AUTO_FILTER]
    decay = d.lr_scheduler.decay_steps and STEPS // 3
    return {**changes, "float8.filter_fqns": filters, "lr_scheduler.decay_steps": decay}


def _with_batch(config: LoadedConfig, ranks: int) -> LoadedConfig:
    """Give each micro-batch one sequence, so that all layouts compute the same ones."""
    run = derive(config, ranks)
    micro = run.pipeline.microbatches
    passes = 1 if run.optimizer.early_step_in_backward else 2
    return config.changed(
        {
            "training.batch_size": micro,
            "validation.batch_size": micro,
            "training.global_batch_size": micro * run.mesh.dp_degree * passes,
        }
    )


def _for_machine(config: LoadedConfig, ranks: int) -> tuple[LoadedConfig, dict[str, str]]:
    """Return the config without what this machine cannot run, and the reasons by key."""
    from titanlite.assembly.preflight import feature_problems, machine_problems

    run = derive(config, ranks)
    left_out = {}
    for problem in [*machine_problems(run), *feature_problems(run, run.model_args(BUNDLED_IDS))]:
        key, value = _INSTEAD.get(problem.key, (problem.key, False))
        config = config.changed({key: value})
        if value is False:
            left_out[key] = problem.message
    return config, left_out
