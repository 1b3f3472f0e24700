"""Every TOML file of torchtitan's releases 0.1.0 to 0.2.2 is read, or refused for a reason.

torchtitan_files.json has the keys and values of those files, written by `python
scripts/check_configs.py FOLDER --keys`, where each folder in FOLDER is a release.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.processes import python
from titanlite.config.dialect import LATER_MODELS
from titanlite.config.errors import ConfigError
from titanlite.config.load import read_text
from titanlite.config.toml import quote
from titanlite.optim.schedule import learning_rate
from titanlite.resolve.load import check_config, resolve, smallest_world
from titanlite.run.config import RunConfig

FLUX = "flux/train_configs/debug_model.toml"
FOUND: dict[str, Any] = json.loads((Path(__file__).parent / "torchtitan_files.json").read_text())
COMMON: dict[str, Any] = FOUND["common"]
FILES: dict[str, dict[str, Any]] = FOUND["files"]
#: What matters of the config.json that files for a model of transformers name by its id on the hub.
QWEN3_4B = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000000,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
#: A part of a file's name → why the file is refused.
REFUSED = {
    "/flux/": "model.name: .*makes images",
    "/vlm/": "model.name: .*reads images",
    "/llama3_ft/": "fault_tolerance.enable: true is not supported",
    "deepseek_v2.toml": "model.name: .*prototype of torchtitan 0.1.0",
    # torch's 1F1B refuses it in torchtitan, too.
    "llama4_17bx128e.toml": "1F1B needs one for each of the 4 stages",
}


def keys_of(name: str) -> dict[str, Any]:
    entry = FILES[name]
    kept = {key: value for key, value in COMMON.items() if key not in entry["without"]}
    return kept | entry["keys"]


def text_of(name: str) -> str:
    return "".join(f"{key} = {quote(value)}\n" for key, value in keys_of(name).items())


HERE = Path("run.toml")


def shown(text: str) -> str:
    """What `titanlite config show --changed` prints of a file."""
    return read_text(text, HERE)[0].to_toml(defaults=False)


def run_of(text: str, ranks: int = 0) -> RunConfig:
    config, problems = read_text(text, HERE)
    if problems:
        raise ConfigError(problems)
    return resolve(config, ranks or smallest_world(config))[1]


#: File that is refused → why.
REASONS = {name: reason for name in FILES for part, reason in REFUSED.items() if part in name}


#: (`model.name`, `model.flavor`) there → parameters of torchtitan 0.2.2's own model, which its code
#: built on the meta device.
SIZES = {
    ("llama3", "debugmodel"): 6_163_712,
    ("llama3", "8B"): 8_030_261_248,
    ("llama3", "70B"): 70_553_706_496,
    ("llama3", "405B"): 405_853_388_800,
    ("qwen3", "debugmodel"): 31_987_968,
    ("qwen3", "0.6B"): 596_049_920,
    ("qwen3", "1.7B"): 1_720_574_976,
    ("qwen3", "4B"): 4_022_468_096,
    ("qwen3", "8B"): 8_190_735_360,
    ("qwen3", "14B"): 14_768_307_200,
    ("qwen3", "32B"): 32_762_123_264,
    ("qwen3", "debugmodel_moe"): 315_758_848,
    ("qwen3", "30B-A3B"): 30_532_122_624,
    ("qwen3", "235B-A22B"): 235_093_634_560,
    ("deepseek_v3", "debugmodel"): 33_014_016,
    ("deepseek_v3", "debugmodel_flex_attn"): 33_014_016,
    ("deepseek_v3", "16B"): 15_706_484_224,
    ("deepseek_v3", "236B"): 235_741_434_880,
    ("deepseek_v3", "671B"): 671_026_404_352,
    ("llama4", "debugmodel"): 15_017_216,
    ("llama4", "17bx16e"): 107_769_861_120,
    ("llama4", "17bx128e"): 400_711_848_960,
    ("gpt_oss", "debugmodel"): 183_397_920,
    ("gpt_oss", "20b"): 20_914_757_184,
    ("gpt_oss", "120b"): 116_829_156_672,
}


@pytest.fixture(autouse=True)
def _model_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the model of transformers that files name into the working directory."""
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "Qwen" / "Qwen3-4B-Instruct-2507" / "config.json"
    config.parent.mkdir(parents=True)
    config.write_text(json.dumps(QWEN3_4B))


def model_text(name: str, flavor: str, rest: str = "") -> str:
    """A file of torchtitan 0.2.x for a model."""
    model = f'[model]\nname = "{name}"\nflavor = "{flavor}"\n'
    return f"{model}[training]\nlocal_batch_size = 1\n{rest}"


def model_run(name: str, flavor: str, seq_len: int = 2048) -> RunConfig:
    return run_of(model_text(name, flavor, f"seq_len = {seq_len}\n"))


@pytest.mark.parametrize("model", SIZES, ids="-".join)
def test_a_model_has_as_many_parameters_as_in_torchtitan(model):
    run = model_run(*model)
    args = run.model_args()
    if "debugmodel" in model[1]:
        # gpt_oss has the vocabulary of the large ones there.
        args = replace(args, vocab_size=201088 if model[0] == "gpt_oss" else 2048)
    assert run.spec.count_parameters(args) == SIZES[model]


@pytest.mark.parametrize("flavor", ["16B", "671B"])
def test_rope_of_deepseek_is_scaled_beyond_4096_tokens_alone(flavor):
    """0.2.2, models/deepseek_v3/model/model.py: neither YaRN nor mscale up to the original
    length.
    """
    short = model_run("deepseek_v3", flavor, 4096).model_args()
    assert short.rope_scaling is None
    assert short.score_factor == 1
    long = model_run("deepseek_v3", flavor, 4097).model_args()
    mscale = 1.0 if flavor == "671B" else 0.7
    assert long.score_factor == pytest.approx((0.1 * mscale * math.log(40) + 1) ** 2)
    assert (long.rope_scaling.factor, long.rope_scaling.beta_fast) == (40, 32)
    # 1e-5 for blocks and latents. The last norm has none, and torch then takes that of float32.
    assert (long.norm_eps, long.latent_norm_eps) == (1e-5, 1e-5)
    assert long.last_norm_eps == torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (("qwen3", "30B-A3B"), ("softmax", True, 1.0, 1, 8, 128, 0, 0.0, range(48))),
        # The same numbers as a softmax of all, divided by the sum of the chosen.
        (("gpt_oss", "20b"), ("softmax_of_chosen", True, 1.0, 1, 4, 32, 0, 1e-3, range(24))),
        (("llama4", "17bx128e"), ("sigmoid", False, 1.0, 1, 1, 128, 1, 1e-3, range(1, 48, 2))),
        (("deepseek_v3", "16B"), ("softmax", False, 1.0, 1, 6, 64, 2, 1e-3, range(1, 27))),
        (("deepseek_v3", "671B"), ("sigmoid", True, 2.5, 8, 8, 256, 1, 1e-3, range(3, 61))),
    ],
)
def test_routers_are_those_of_torchtitan(model, wanted):
    """Scores, whether they are divided by their sum, scale, groups, experts of a token, all, shared
    ones, the step of the biases, and the blocks with experts. There is no auxiliary loss.
    """
    args = model_run(*model).model_args()
    sparse = [index for index in range(args.n_layers) if args.of_block(index).n_experts]
    block = args.of_block(sparse[0])
    found = (block.score, block.norm_topk, block.route_scale, block.n_groups, block.top_k)
    found += (block.n_experts, block.n_shared_experts, block.bias_update)
    assert (*found, sparse) == (*wanted[:-1], list(wanted[-1]))
    assert block.aux_loss == 0
    assert block.scales_input == (model[0] == "llama4")


@pytest.mark.parametrize("flavor", ["17bx16e", "17bx128e"])
def test_attention_of_llama4_is_that_of_torchtitan(flavor):
    """Its flavors without "irope" have RoPE everywhere, neither chunks nor norms of q and k."""
    args = model_run("llama4", flavor).model_args()
    scaling = args.rope_scaling
    if flavor == "17bx128e":
        assert scaling is None
    else:
        factors = (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor)
        assert (*factors, scaling.original_context) == (16, 1, 1, 8192)
    for index in range(args.n_layers):
        block = args.of_block(index)
        assert block.rotary is not None and not block.chunk and not block.unit_qk


def rate_of(keys: dict[str, Any], step: int) -> float:
    """Learning rate of a step, counted from 1, of a linear decay to 0 in torchtitan 0.2.2.

    components/lr_scheduler.py: linear_warmup_stable_decay, with a virtual step after the last.
    """
    total = keys["training.steps"]
    warmup = keys["lr_scheduler.warmup_steps"]
    decay = min(round(total * keys.get("lr_scheduler.decay_ratio", 1)), total - warmup)
    if step <= warmup:
        return keys["optimizer.lr"] * step / warmup
    return keys["optimizer.lr"] * min(1.0, (total + 1 - step) / decay)


@pytest.mark.parametrize("name", [name for name in FILES if name not in REASONS])
def test_a_text_file_of_torchtitan_is_right_and_means_the_same_when_it_is_shown(name):
    keys = keys_of(name)
    run = run_of(text_of(name))
    assert run.batch.seq_len == keys["training.seq_len"]
    assert run.batch.micro_batch_size == keys["training.local_batch_size"]
    assert run.schedule.warmup_steps == keys["lr_scheduler.warmup_steps"]
    assert run.schedule.total_steps == keys["training.steps"]
    assert run.schedule.decay_type == keys.get("lr_scheduler.decay_type", "linear")
    assert run.schedule.style == "titan-0.2"
    if run.schedule.decay_type == "linear" and not run.schedule.min_lr_factor:
        warmup = keys["lr_scheduler.warmup_steps"]
        for step in (1, warmup, warmup + 1, warmup + 2, run.steps // 2, run.steps):
            rate = learning_rate(run.schedule, run.optimizer.lr, step)
            assert rate == pytest.approx(rate_of(keys, step), rel=1e-12), step
    assert (run.optimizer.lr, run.optimizer.eps) == (keys["optimizer.lr"], keys["optimizer.eps"])
    assert run.mesh.tensor == keys["parallelism.tensor_parallel_degree"]
    assert run.mesh.expert == keys.get("parallelism.expert_parallel_degree", 1)
    again = run_of(shown(text_of(name)))
    assert again.model == run.model
    assert (again.batch, again.schedule, again.mesh) == (run.batch, run.schedule, run.mesh)


@pytest.mark.parametrize(
    ("flavor", "entries"),
    [
        ("debugmodel", (256, 768, 2, 16, 16, 16)),
        ("full", (4096, 11008, 32, 32, 8, 128)),
    ],
)
def test_a_model_of_transformers_has_the_entries_that_its_flavor_replaces_in_torchtitan(
    flavor, entries
):
    """0.2.2, experiments/transformers_modeling_backend: the flavor's arguments are laid over the
    config.json.
    """
    (name,) = (n for n in FILES if fnmatch(n, f"0.2.2*/transformers_*configs/{flavor[:4]}*"))
    args = run_of(text_of(name)).model_args()
    config = json.loads(args.config)
    names = [*QWEN3_4B][1:7]
    assert tuple(config[name] for name in names) == entries
    assert args.skeleton.config.rope_parameters["rope_theta"] == 10000
    assert args.skeleton.config.rms_norm_eps == 1e-5
    assert args.skeleton.config.tie_word_embeddings


@pytest.mark.parametrize("name", REASONS)
def test_another_file_of_torchtitan_is_refused_for_its_reason_alone(name):
    with pytest.raises(ConfigError) as error:
        run_of(text_of(name))
    assert len(error.value.problems) == 1
    assert error.match(REASONS[name])


def test_the_script_shows_each_file_of_a_folder_and_counts_the_refused(tmp_path):
    folder = "0.2.2/torchtitan/models"
    names = [f"{folder}/{name}" for name in ("llama3/train_configs/llama3_8b.toml", FLUX)]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text_of(name))
    done = python("scripts/check_configs.py", tmp_path, "--ranks", "64")
    assert done.returncode == 2, done.stderr
    flux, llama, count = done.stdout.splitlines()
    assert f"{FLUX}: refused: model.name:" in flux
    assert llama.endswith(
        "llama3 3.1-8B, 32 layers, 64 x 8192 tokens on 64 ranks, warm-up 200, linear decay"
    )
    assert count == "2 files, 1 refused"


#: Mixtures of torchtitan's files, with degrees of experts and products that its ranks take.
BOTH = {
    "0.2.2/torchtitan/models/deepseek_v3/train_configs/deepseek_v3_16b.toml": (8, 2),
    "0.2.2/torchtitan/models/llama4/train_configs/llama4_17bx16e.toml": (16, 8),
}


@pytest.mark.parametrize("name", BOTH)
def test_tensor_parallel_ranks_share_experts_where_torchtitan_leaves_them_whole(name):
    """`expert_tensor_parallel_degree = 1`: experts are shared by parts of the ranks of data, and by
    all tensor-parallel ranks. Other values divide each expert, which titanlite does not.
    """
    expert, tensor = BOTH[name]
    own = [line for line in text_of(name).splitlines() if "_parallel_degree" not in line]
    text = (
        "\n".join(own)
        + f"""
parallelism.expert_parallel_degree = {expert}
parallelism.tensor_parallel_degree = {tensor}
"""
    )
    run = run_of(text + "parallelism.expert_tensor_parallel_degree = 1\n")
    assert (run.mesh.expert, run.mesh.tensor) == (expert, tensor)
    assert run.mesh.world_size == max(expert, tensor)
    assert run_of(shown(text)).mesh == run.mesh
    with pytest.raises(ConfigError, match="experts are not divided by tensor parallelism"):
        run_of(text + f"parallelism.expert_tensor_parallel_degree = {tensor}\n")


# Spellings of two versions


#: Files of autumn 2024, by flavor; "gpus", "dim" and "layers" are what torchtitan trains them with.
OF_2024: dict[str, dict[str, Any]] = {
    "debugmodel": dict(
        family="llama3",
        gpus=8,
        dim=256,
        layers=8,
        batch=8,
        seq_len=2048,
        lr=8e-4,
        warmup=2,
        steps=10,
        tensor=1,
    ),
    "70B": dict(
        family="llama2",
        gpus=64,
        dim=8192,
        layers=80,
        batch=16,
        seq_len=4096,
        lr=1.5e-4,
        warmup=200,
        steps=1000,
        tensor=8,
    ),
    "405B": dict(
        family="llama3",
        gpus=128,
        dim=16384,
        layers=126,
        batch=2,
        seq_len=8192,
        lr=8e-5,
        warmup=600,
        steps=3000,
        tensor=8,
    ),
}


def text_of_2024(flavor: str) -> str:
    """A file as it was shipped."""
    file = OF_2024[flavor]
    mode = "none" if flavor == "debugmodel" else "full"
    float8 = str(flavor == "405B").lower()
    snapshot = Path(__file__).parent / "snapshots" / "torchtitan_2024.toml"
    return snapshot.read_text().format(**file, flavor=flavor, mode=mode, float8=float8)


def trained(run: RunConfig) -> tuple[object, ...]:
    """Return the settings that must not depend on a file's spelling."""
    return run.model, run.batch, run.schedule, run.optimizer, run.mesh, run.profiling, run.float8


@pytest.mark.parametrize("flavor", OF_2024)
def test_a_file_of_2024_gives_its_model_schedule_and_batch(flavor):
    file = OF_2024[flavor]
    run = run_of(text_of_2024(flavor), file["gpus"])
    args = run.model_args()
    assert (args.dim, args.n_layers) == (file["dim"], file["layers"])
    # On purpose: the 405B was published with scaling.
    assert (args.rope_scaling is None) == (flavor != "405B")
    assert args.rope_theta == (1e4 if file["family"] == "llama2" else 5e5)
    assert run.batch.global_batch_size == file["batch"] * file["gpus"] // file["tensor"]
    assert run.batch.tokens_per_step == run.batch.global_batch_size * file["seq_len"]
    # tests/optim/test_optim.py has its rates.
    schedule = run.schedule
    assert (schedule.warmup_steps, schedule.total_steps) == (file["warmup"], file["steps"])
    assert (schedule.decay_type, schedule.style) == ("linear", "titan")
    assert run.optimizer.lr == file["lr"]
    for again in (run.toml, shown(text_of_2024(flavor))):
        assert trained(run_of(again, file["gpus"])) == trained(run), "the saved and the shown one"


def test_a_run_from_a_later_file_says_at_its_start_what_that_means():
    later = "0.2.2/torchtitan/models/llama3/train_configs/debug_model.toml"
    notes = "\n".join(note.text for note in run_of(text_of(later), 8).notes)
    assert (
        'model.flavor "debugmodel" of torchtitan 0.2.x is "3.1-debugmodel": 6 layers and RoPE '
        "scaled by 8"
    ) in notes
    assert (
        'the warm-up of torchtitan 0.2.x is n / W at step n: lr_scheduler.style = "titan-0.2"'
        in notes
    )
    assert not any("0.2.x" in note.text for note in run_of(text_of_2024("debugmodel"), 8).notes)


def test_models_of_the_later_dialect_are_what_their_notes_say():
    for (name, there), later in LATER_MODELS.items():
        config, problems = read_text(model_text(name, there), HERE)
        assert not problems
        notes = "\n".join(note.text for note in config.notes)
        assert f'model.flavor "{there}" of torchtitan 0.2.x is "{later.flavor}"' in notes
        assert later.difference in notes
        for key, value in later.settings.items():
            assert dict(config.entries())[key] == value
            assert config.source(key).kind == "dialect"
            assert key in notes


@pytest.mark.parametrize("flavor", ["debugmodel_flex_attn", "8B_varlen"])
def test_a_flavor_with_masked_attention_is_the_plain_one_within_documents(flavor):
    text = model_text("llama3", flavor)
    run = run_of(text, 1)
    plain = run_of(model_text("llama3", flavor.partition("_")[0]), 1)
    assert run.model_args() == plain.model_args()
    assert run.data.mask_documents
    assert not plain.data.mask_documents
    assert trained(run_of(shown(text), 1)) == trained(run)
    assert not run_of(f"{text}[data]\nmask_documents = false\n", 1).data.mask_documents
    with pytest.raises(ConfigError, match=f'llama3 has no flavor "{flavor}"'):
        run_of(text.replace("local_batch_size", "batch_size"), 1)


def test_what_a_person_says_of_the_model_wins_over_the_file_s_dialect(tmp_path):
    def args(model, *flags):
        (tmp_path / "run.toml").write_text(f'[job]\ndialect = "2026"\n[model]\n{model}\n')
        argv = [f"--job.config_file={tmp_path}/run.toml", *flags]
        return check_config(argv, training=False)[1].model_args()

    assert args('rope_scaling = "none"\noverrides.n_layers = 8') == args(
        'name = "llama3"\nflavor = "debugmodel"\nrope_scaling = "none"\noverrides.n_layers = 8'
    )
    assert args('rope_scaling = "none"').rope_scaling is None
    assert args("overrides.n_layers = 8").n_layers == 8
    assert args("", "--model.flavor=8B") == args('flavor = "8B"') == args('flavor = "3.1-8B"')
    assert args('name = "llama2"').n_layers == 8


def test_a_later_file_over_an_older_one_keeps_its_model_when_it_is_shown(tmp_path):
    (tmp_path / "base.toml").write_text('[model]\nflavor = "8B"\n')
    top = 'job.extends = ["base.toml"]\n[training]\nlocal_batch_size = 4\n'
    config, _ = read_text(top, tmp_path / "run.toml")
    assert config.value("model.flavor") == "3.1-8B"
    text = config.to_toml(defaults=False)
    assert 'flavor = "3.1-8B"' in text
    assert read_text(text, tmp_path / "run.toml")[0].value("model.flavor") == "3.1-8B"
