"""A tiny copy of a config: the same features and kinds of layers, with small numbers."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

from titanlite.config.data_sections import Data
from titanlite.config.dataset_registry import BUNDLED_IDS, BUNDLED_TOKENIZER_NAME
from titanlite.config.loaded import LoadedConfig
from titanlite.config.sections import AUTO_FILTER, Config
from titanlite.config.toml import loads
from titanlite.data.dataset_sources import held_out_texts, is_of_hub, training_texts
from titanlite.resolve.load import resolve, smallest_world
from titanlite.run.config import RunConfig
from titanlite.run.derive import degrees_of, derive
from titanlite.runs.config_changes import config_changes, config_values
from titanlite.runs.provenance import public_config

#: Steps of each run, and the last one before another run goes on from its checkpoint.
STEPS = 12
HALF = 6
#: Ranks at most, unless there are more GPUs or the degrees need more.
RANKS = 4
#: Largest arguments of a model; the last line has the names of `transformers`.
_MOST = loads("""
dim = 64
n_layers = 2
n_heads = 4
n_kv_heads = 2
head_dim = 16
ffn_dim = 128
n_experts = 4
top_k = 2
expert_width = 32
n_groups = 2
top_groups = 1
n_dense_layers = 1
q_lora_rank = 32
kv_lora_rank = 32
qk_nope_head_dim = 16
qk_rope_head_dim = 8
v_head_dim = 16
full_every = 2
nope_every = 2
sparse_step = 2
window = 32
chunk = 32
# of transformers
hidden_size = 64
num_hidden_layers = 2
intermediate_size = 128
num_attention_heads = 4
num_key_value_heads = 2
""")
#: Sections whose other keys have no part in the numbers of a run.
_IDLE = (
    "eval",
    "launch",
    "ladder",
    "profiling",
    "metrics",
    "checkpoint",
)
_SMALL = config_values(f"""
[training]
steps = {STEPS}
seq_len = 64
global_batch_size = -1
warmup_steps = 2
[lr_scheduler]
unit = "steps"
[data]
phase = []
skip_steps = []
[validation]
enable = true
freq = {STEPS}
first = false
steps = 2
seq_len = 64
[metrics]
log_freq = 1
[checkpoint]
enable_checkpoint = true
interval = 1
[experimental]
pipeline_parallel_split_points = []
[float8]
min_features = 0
""")
#: Keys of `[data]` that name a text, its files or fields.
_OF_TEXTS = {*Data.__struct_fields__} - {"seed", "shuffle", "packing", "mask_documents"}
_LENGTHS = (
    "training.tokens",
    "training.epochs",
    "lr_scheduler.warmup_ratio",
    "lr_scheduler.total_steps",
)
#: Changes for features that only GPUs have.
_ON_CPU = {"float8.emulate": True, "experimental.enable_async_tensor_parallel": False}


@dataclass(frozen=True)
class TinyCopy:
    """A tiny config, and how it differs from the one that it is a copy of."""

    config: LoadedConfig
    run: RunConfig
    #: "old -> new" by key.
    changes: dict[str, str]
    #: Keys of features that do not run here.
    left_out: set[str]


def tiny_copy(config: LoadedConfig, most: int, folder: str, gpus: int = 0) -> TinyCopy:
    """Return the copy of a config. Raises ConfigError.

    most: ranks, unless the degrees of parallelism need more. folder: of its runs.
    """
    config, whole = resolve(config)
    d = config.sections
    changes = {**_SMALL, **dict.fromkeys(_LENGTHS), **_texts(d), **_model(d, whole)}
    changes["checkpoint.async_mode"] = d.checkpoint.async_mode
    if d.lora.rank:
        changes["checkpoint.initial_load_path"] = os.path.join(folder, "base", "checkpoint")
    if smallest_world(config) > most:
        degrees = {**degrees_of(d), "parallelism.expert_parallel_degree": whole.mesh.expert}
        changes |= {key: 2 for key, degree in degrees.items() if degree > 2}
        if isinstance(d.training.reshard_after_forward, int):
            changes["training.reshard_after_forward"] = 2
    small = config.without(_IDLE).changed(changes)
    ranks = smallest_world(small)
    if -1 in degrees_of(small.sections).values() and 2 * ranks <= most:
        ranks *= 2
    small = small.changed(_ON_CPU if ranks > gpus else {"debug.deterministic": True})
    small, run = resolve(small.changed(_batch(derive(small, ranks))), ranks)
    left_out = {feature.key for feature in whole.features.on}
    left_out -= {"eval.tasks", "checkpoint.hub", *(feature.key for feature in run.features.on)}
    texts = [public_config(one.to_toml()) for one in (config, small)]
    return TinyCopy(small, run, config_changes(*texts), left_out)


def _texts(d: Config) -> dict[str, Any]:
    """Return the bundled texts where one of the config is not on this machine."""
    texts = {**training_texts(d.training, d.data), **held_out_texts(d.validation)}
    if all(os.path.exists(one.path or ".") and not is_of_hub(one) for one in texts.values()):
        return {}
    kind = "sft" if d.data.messages_key or d.data.prompt_key else "c4"
    plain = {f"data.{name}": getattr(Data(), name) for name in _OF_TEXTS}
    paths = dict.fromkeys(("training.dataset_path", "validation.dataset_path", "validation.split"))
    names = {"training.dataset": f"{kind}_test", "validation.dataset": f"{kind}_validation"}
    return {**plain, **paths, **names, "validation.sources": [], "validation.format": None}


def _model(d: Config, run: RunConfig) -> dict[str, Any]:
    args = run.model_args(BUNDLED_IDS)
    shape = json.loads(args.config) if d.model.name == "hf" else asdict(args)
    most = dict(_MOST)
    if run.mesh.pipeline > 1:
        # Two stages on each rank, for all schedules.
        most["n_layers"] = most["num_hidden_layers"] = 2 * min(run.mesh.pipeline, RANKS)
    if shape.get("n_kv_heads") == shape.get("n_heads"):
        most["n_kv_heads"] = most["n_heads"]
    overrides = dict(d.model.overrides)
    for name, value in most.items():
        if isinstance(shape.get(name), int) and shape[name] > value:
            overrides[name] = value
    changes: dict[str, Any] = {
        "model.overrides": overrides,
        "float8.filter_fqns": [name for name in d.float8.filter_fqns if name != AUTO_FILTER],
        "lr_scheduler.decay_steps": d.lr_scheduler.decay_steps and STEPS // 3,
    }
    if not os.path.exists(d.model.tokenizer_path):
        overrides.pop("vocab_size", None)
        changes["model.tokenizer_path"] = BUNDLED_TOKENIZER_NAME
        changes["model.vocab_size"] = BUNDLED_IDS
    if d.mup.base_dim:
        changes |= {"mup.base_dim": 32, "mup.base": {}}
    return changes


def _batch(run: RunConfig) -> dict[str, int]:
    """Return micro-batches of one sequence, so that all layouts compute the same ones."""
    micro = run.pipeline.microbatches
    passes = 1 if run.optimizer.early_step_in_backward else 2
    sizes = dict.fromkeys(("training.batch_size", "validation.batch_size"), micro)
    return {**sizes, "training.global_batch_size": micro * run.mesh.dp_degree * passes}
