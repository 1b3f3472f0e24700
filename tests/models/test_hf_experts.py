"""`model.name = "hf"` with experts: gradients, files and checkpoints of ranks that share them, held
against `transformers` on one rank.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.checkpoints import unequal
from tests.support.hf import TOML
from tests.support.hf_compare import (
    ARCHITECTURES,
    MIXTURES,
    Result,
    alone,
    batch_of,
    differences,
    flags_of,
    on_ranks,
    whole,
)
from tests.support.pool import Pools
from tests.support.steps import train_rows
from tests.support.tiny import KEPT_TOKENS
from tests.support.watch import Operations, Watch
from titanlite import load_config
from titanlite.assembly.model import build_model
from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.hf import open_hf
from titanlite.config.errors import ConfigError
from titanlite.data.loader import Batch
from titanlite.dist.dist_env import DistEnv
from titanlite.models import ShapeError, get_spec
from titanlite.models.hf import args_from_hf
from titanlite.models.mixtral import MixtralArgs
from titanlite.resolve.load import check_config

SPEC = get_spec("hf")
EP = "parallelism__expert_parallel_degree"
TWO = {EP: 2}
FULL = {"activation_checkpoint__mode": "full"}
BY_OP = {
    "activation_checkpoint__mode": "selective",
    "activation_checkpoint__selective_ac_option": "op",
}
REPLICAS = {
    "training__data_parallel_replicate_degree": 2,
    "training__data_parallel_shard_degree": 2,
}
MORE = [
    pytest.param(kind, ranks, keys, marks=pytest.mark.slow)
    for kind, ranks, keys in [
        ("mixtral", 2, TWO),
        ("gpt_oss", 2, TWO),
        ("deepseek_v3", 2, TWO),
        ("olmoe", 2, TWO),
        ("qwen3_moe", 2, {**TWO, **BY_OP, "training__loss_chunks": 2}),
        ("qwen3_moe", 2, {**TWO, "training__compile": "true"}),
        ("gpt_oss", 2, {**TWO, "training__compile": "true"}),
        ("deepseek_v3", 1, {"training__compile": "true"}),
        ("qwen3_moe", 4, TWO),
        ("gpt_oss", 4, {**TWO, **BY_OP}),
        ("gpt_oss", 4, {**TWO, **REPLICAS}),
        ("deepseek_v3", 4, {**TWO, **FULL}),
        ("olmoe", 4, {EP: 4}),
    ]
]
#: Of the loss and of each gradient.
NEAR = 2e-6


def content(kind: str, **entries: Any) -> dict[str, Any]:
    """A config.json with experts."""
    return {"model_type": kind, **MIXTURES[kind], "vocab_size": 192, **entries}


# Gradients


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("kind", "ranks", "keys"),
    [
        ("qwen3_moe", 2, TWO),
        ("gpt_oss", 2, {**TWO, **BY_OP}),
        ("deepseek_v3", 2, {**TWO, **FULL}),
        ("qwen2_moe", 2, {}),
        ("mixtral", 4, TWO),
        *MORE,
    ],
    ids=str,
)
def test_gradients_are_those_of_transformers_on_one_rank(
    pool: Pools, tmp_path: Path, kind: str, ranks: int, keys: dict[str, Any]
) -> None:
    results = pool(ranks).run(on_ranks, flags_of(tmp_path, kind, **keys), False)
    expected = alone(kind, results[0].weights, False)
    assert max(differences(results[0], expected).values()) < NEAR


@pytest.mark.slow
def test_documents_and_experts_of_other_ranks_go_together(pool: Pools, tmp_path: Path) -> None:
    flags = flags_of(tmp_path, "qwen3_moe", data__mask_documents="true", **TWO)
    found = pool(2).run(on_ranks, flags, True)[0]
    expected = alone("qwen3_moe", found.weights, True)
    assert max(differences(found, expected).values()) < NEAR


def _counting(dispatch: Any, rows: list[int]) -> Any:
    """Note the rows that a rank's experts get from `dispatch`."""

    def counted(x: torch.Tensor, counts: torch.Tensor) -> Any:
        result = dispatch(x, counts)
        rows.append(len(result[0]))
        return result

    return counted


def _all_to_the_first(world: DistEnv, flags: list[str]) -> tuple[Result, list[int]]:
    """Do as `on_ranks` with routers of zeros; return the rows that this rank's experts got, too."""
    parts = build_model(load_config(TOML, world.size, flags), world, 192)
    rows: list[int] = []
    for name, module in parts.model.named_modules():
        if name.endswith("mlp.experts"):
            module.exchange.dispatch = _counting(module.exchange.dispatch, rows)
    with torch.no_grad():
        for name, parameter in parts.model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.zero_()
    weights = {name: whole(p) for name, p in parts.model.named_parameters()}
    tokens, labels = (part[world.rank :: world.size] for part in batch_of(False)[:2])
    share = parts.runner.forward_backward([Batch(tokens, labels)], torch.tensor(1.0))
    dist.all_reduce(share)
    gradients = {}
    for name, parameter in parts.model.named_parameters():
        assert parameter.grad is not None, name
        gradients[name] = whole(parameter.grad)
    return Result(float(share) / parts.factors.loss, gradients, weights), rows


@pytest.mark.slow
@pytest.mark.parametrize("keys", [TWO, {**TWO, **FULL}], ids=str)
def test_ties_go_to_one_rank_and_the_other_gets_no_rows(
    pool: Pools, tmp_path: Path, keys: dict[str, Any]
) -> None:
    flags = flags_of(tmp_path, "mixtral", **keys)
    (found, first), (_, second) = pool(2).run(_all_to_the_first, flags)
    expected = alone("mixtral", found.weights, False)
    assert max(differences(found, expected).values()) < NEAR
    every = {a + b for a, b in zip(first, second, strict=True)}
    assert every == {2 * 4 * 32}
    assert 0 in (first[0], second[0])


def _sent(world: DistEnv, flags: list[str]) -> tuple[Counter[tuple[str, str]], int]:
    """Return the all-to-alls of a micro-batch, and how many times the host waits for counts."""
    run = load_config(TOML, world.size, flags)
    parts = build_model(run, world, 192)
    batch = batch_of(False)
    mine = Batch(*(part[world.rank :: world.size] for part in batch[:2]))
    for _ in range(2):  # the first sets FSDP up
        counted: Counter[str] = Counter()
        watch = Watch(functools.partial(_count, counted))
        with Operations() as operations, watch:
            parts.runner.forward_backward([mine], torch.tensor(1.0))
    return operations.sent, counted["titanlite.sizes_on_host.default"]


def _count(counted: Counter[str], operator: Any, args: Any, output: Any) -> None:
    counted[str(operator)] += 1


@pytest.mark.slow
@pytest.mark.parametrize(("keys", "forward"), [({}, 1), (FULL, 2), (BY_OP, 1)], ids=str)
def test_a_layer_reads_counts_once_and_sends_rows_twice_each_way(
    pool: Pools, tmp_path: Path, keys: dict[str, Any], forward: int
) -> None:
    sent, read = pool(2).run(_sent, flags_of(tmp_path, "gpt_oss", **TWO, **keys))[0]
    layers = 2
    moved = {kind: number for (name, kind), number in sent.items() if name == "all_to_all_single"}
    assert moved == {"torch.int64": layers, "torch.float32": layers * (2 * forward + 2)}
    assert read == layers


# Numbers of a model


def test_a_token_counts_the_experts_that_it_uses() -> None:
    args = args_from_hf(content("deepseek_v3"))
    mixture = 3 * 64 * 32
    assert SPEC.experts is not None
    assert SPEC.experts(args) == {"model.layers.1.mlp.experts": 8}
    assert (args.top_k, args.expert_width) == (2, 32)
    fewer = args_from_hf(content("deepseek_v3", num_experts_per_tok=1))
    assert SPEC.flops_per_token(args, 32) - SPEC.flops_per_token(fewer, 32) == 6 * mixture
    assert "model.layers.1.mlp.gate" not in SPEC.linears(args)  # type: ignore[misc]
    assert SPEC.experts(args_from_hf({**ARCHITECTURES["llama"], "model_type": "llama"})) == {}


# Files


def reference(kind: str) -> Any:
    """A model of `transformers` with random weights."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(5)
    config = CONFIG_MAPPING[kind](**MIXTURES[kind], vocab_size=192)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
        for name, buffer in model.named_buffers():
            if name in model.state_dict():
                buffer.normal_()
    return model


@pytest.mark.parametrize("kind", MIXTURES)
def test_the_files_of_save_pretrained_are_read_bit_for_bit(tmp_path: Path, kind: str) -> None:
    model = reference(kind)
    model.save_pretrained(tmp_path)
    args = args_from_hf(json.loads((tmp_path / "config.json").read_text()))
    found = open_hf(tmp_path, SPEC, args)
    state = model.state_dict()
    assert found.parts.keys() == state.keys()
    for name, tensor in state.items():
        assert found.read(name).equal(tensor), name
    again = SPEC.from_hf(SPEC.to_hf(state, args), args)
    assert all(again[name].equal(tensor) for name, tensor in state.items())


def test_matrices_of_other_sizes_in_one_stack_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    reference("mixtral").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    tensors[name] = tensors[name][:-8].contiguous()
    save_file(tensors, file)
    with pytest.raises(
        CheckpointError, match="experts.2.w1.weight is .88, 64., and .*need one shape"
    ):
        open_hf(tmp_path, SPEC, args_from_hf(content("mixtral")))


def _changed(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    from safetensors.torch import load_file, save_file

    reference("mixtral").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


_EXPERT = "model.layers.1.block_sparse_moe.experts.2.w1.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda all_: all_.update({_EXPERT: all_[_EXPERT].bfloat16()}), "need one dtype"),
        (lambda all_: all_.update({_EXPERT: torch.zeros(())}), "is a single number"),
        (
            lambda all_: all_.update(
                {"model.layers.1.mlp.experts.gate_up_proj": torch.zeros(4, 192, 64)}
            ),
            "has both .* one weight",
        ),
    ],
    ids=["another dtype", "a number", "the stack too"],
)
def test_tensors_that_do_not_fit_together_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    _changed(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        open_hf(tmp_path, SPEC, args_from_hf(content("mixtral")))


def test_an_override_wins_over_the_other_name_of_its_entry() -> None:
    found = content("qwen3_moe")
    found["num_local_experts"] = found.pop("num_experts", 8)
    args = args_from_hf(found, {"num_experts": 4, "num_experts_per_tok": 2})
    assert args.skeleton.config.num_experts == 4


def test_more_experts_than_keys_of_16_bits_are_refused() -> None:
    with pytest.raises(ShapeError, match="n_experts must be at most 32767"):
        MixtralArgs(dim=64, n_layers=2, n_heads=4, n_experts=32768)


# Runs

STEPS = 4


def run_flags(folder: Path, kind: str, *more: str, **keys: Any) -> list[str]:
    """Flags of a short run that saves every step."""
    given = {
        "training__batch_size": 1,
        "training__global_batch_size": 4,
        "training__warmup_steps": 1,
        "training__steps": STEPS,
        "lr_scheduler__total_steps": STEPS,
        "metrics__log_freq": 1,
        "model__vocab_size": 2304,
        "checkpoint__enable_checkpoint": "true",
        "checkpoint__interval": 1,
        "checkpoint__keep_latest_k": 0,
        **keys,
    }
    return [*flags_of(folder, kind, **given), KEPT_TOKENS, *more]


def _rows(world: DistEnv, folder: Path, flags: list[str]) -> list[tuple[float, float]]:
    rows = train_rows(world, str(folder / "run"), *flags, config=TOML)
    return [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v3"])
def test_a_checkpoint_of_two_ranks_resumes_exactly_and_on_other_ranks(
    pool: Pools, tmp_path: Path, kind: str
) -> None:
    folders = {}
    for name in ("straight", "resumed", "alone", "four"):
        folders[name] = tmp_path / name
        folders[name].mkdir()
    straight = pool(2).run(_rows, folders["straight"], run_flags(folders["straight"], kind, **TWO))
    saved = folders["straight"] / "run" / "checkpoint"
    for name, ranks, degree in (("resumed", 2, 2), ("alone", 1, 1), ("four", 4, 2)):
        own = folders[name] / "run" / "checkpoint"
        shutil.copytree(saved / "step-2", own / "step-2")
        flags = run_flags(folders[name], kind, **{EP: degree})
        rows = pool(ranks).run(_rows, folders[name], flags)[0]
        if name == "resumed":
            assert rows == straight[0][2:]
            assert unequal(saved / "step-4", own / "step-4") == []
        expected = [number for row in straight[0][2:] for number in row]
        assert [number for row in rows for number in row] == pytest.approx(expected, rel=2e-5)


def _last_row(world: DistEnv, folder: Path, flags: list[str]) -> dict[str, Any]:
    return train_rows(world, str(folder / "run"), *flags, config=TOML)[-1]


@pytest.mark.slow
def test_logs_have_the_load_of_experts_and_no_losses_of_routers(
    pool: Pools, tmp_path: Path
) -> None:
    found = []
    for ranks in (1, 2):
        folder = tmp_path / f"{ranks}"
        folder.mkdir()
        keys = {EP: ranks, "training__steps": 1, "checkpoint__enable_checkpoint": "false"}
        row = pool(ranks).run(_last_row, folder, run_flags(folder, "mixtral", **keys))[0]
        found.append({name: value for name, value in row.items() if name.startswith("experts/")})
    assert found[0] == pytest.approx(found[1])
    layers = [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
    names = ["max_share", "entropy", *(f"max_share/{layer}" for layer in layers)]
    assert set(found[0]) == {f"experts/{name}" for name in names}
    assert 0.25 < found[0]["experts/max_share"] < 0.5
    assert 0.9 < found[0]["experts/entropy"] < 1


def test_an_export_of_two_ranks_is_what_transformers_loads(pool: Pools, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    exports = []
    for name, ranks, degree in (("two", 2, 2), ("one", 1, 1)):
        folder = tmp_path / name
        folder.mkdir()
        keys = {
            EP: degree,
            "training__steps": 1,
            "optimizer__lr": 0.0,
            "checkpoint__last_save_in_hf": "true",
            "checkpoint__last_save_model_weights_only": "true",
        }
        pool(ranks).run(_rows, folder, run_flags(folder, "mixtral", **keys))
        exports.append(folder / "run" / "checkpoint" / "step-1-hf")
    # Nothing was learned: both hold the initial weights.
    assert exports[0].joinpath("model.safetensors").read_bytes() == (
        exports[1].joinpath("model.safetensors").read_bytes()
    )
    model = AutoModelForCausalLM.from_pretrained(exports[0], dtype=torch.float32)
    args = args_from_hf(json.loads((exports[0] / "config.json").read_text()))
    found = open_hf(exports[0], SPEC, args)
    for name, tensor in model.state_dict().items():
        assert found.read(name).equal(tensor), name


# Configs

#: Each names the experts of a token in its own way, or has none of a group.
ROUTED = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")


@pytest.mark.parametrize(
    ("kind", "entries", "words"),
    [
        ("llama4_text", {}, "do not go through the interface of transformers for experts"),
        ("mixtral", {"output_router_logits": True}, "load-balancing loss"),
        ("mixtral", {"intermediate_size": 100}, "multiples of 8"),
        *(
            (kind, {"num_experts_per_tok": count}, "does not run on tensors without data")
            for kind in ROUTED
            for count in (0, 99)
        ),
    ],
)
def test_experts_that_cannot_be_computed_are_refused(
    kind: str, entries: dict[str, Any], words: str
) -> None:
    given = {**MIXTURES.get(kind, ARCHITECTURES["llama"]), "vocab_size": 192, **entries}
    with pytest.raises(ShapeError, match=words):
        args_from_hf({"model_type": kind, **given})


@pytest.mark.parametrize(
    ("kind", "ranks", "keys", "key", "words"),
    [
        ("llama", 2, TWO, EP, "LlamaForCausalLM has no experts that ranks could share"),
        ("mixtral", 8, {EP: 8}, EP, "both data_parallel_shard = 8 and the 4 experts"),
        (
            "mixtral",
            4,
            {**TWO, "training__tensor_parallel_degree": 2},
            "training.tensor_parallel_degree",
            "is not supported by the model hf: its ModelSpec has no tensor_plan",
        ),
        (
            "mixtral",
            2,
            {"experimental__context_parallel_degree": 2},
            "experimental.context_parallel_degree",
            "is not supported by the model hf: its ModelSpec has no context_parallel",
        ),
        (
            "mixtral",
            2,
            {"experimental__pipeline_parallel_degree": 2},
            "experimental.pipeline_parallel_degree",
            "is not supported by the model hf: its ModelSpec has no pipeline_costs",
        ),
        (
            "mixtral",
            2,
            {**TWO, "training__data_parallel_type": "ddp"},
            EP,
            "data_parallel_shard = 1",
        ),
        (
            "mixtral",
            2,
            {**TWO, "activation_checkpoint__mode": "budget", "training__compile": "true"},
            "activation_checkpoint.mode",
            "are not compiled",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, kind: str, ranks: int, keys: dict[str, Any], key: str, words: str
) -> None:
    flags = flags_of(tmp_path, kind, **keys)
    with pytest.raises(ConfigError) as caught:
        check_config([f"--job.config_file={TOML}", *flags], ranks, training=False)
    problems = {problem.key: problem.message for problem in caught.value.problems}
    assert words in problems[key.replace("__", ".")]
