"""Low-rank adapters: gradients as PEFT's, a base that stays, checkpoints of adapters alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.adapters import (
    ALPHA,
    LINEARS,
    RANK,
    VOCABULARY,
    base_folder,
    merged_weights,
    our_name,
    outcome_seen,
    peft_folder,
    peft_gradients,
    run_flags,
    train_seen,
)
from tests.support.checkpoints import assert_equal
from tests.support.commands import evaluate_run
from tests.support.harness import equal_states
from tests.support.hf import TOML
from tests.support.hf_compare import sizes_of
from tests.support.llamas import assert_near, relative
from tests.support.pool import Pools
from tests.support.tiny import KEPT_TOKENS
from tests.support.watch import GATHER, REDUCE, Sent, Wire
from tests.support.whole_runs import losses_of, make_trainer
from titanlite import exit_codes
from titanlite.assembly.build import build
from titanlite.assembly.datasets import read_datasets
from titanlite.checkpoint.manifest import CheckpointError, read_manifest
from titanlite.cli.hub.compare_checkpoints import Contents, our_logits
from titanlite.cli.hub.export_weights import convert, open_source
from titanlite.cli.main import main
from titanlite.config.load import load_file as load_config_file
from titanlite.dist.dist_env import DistEnv
from titanlite.resolve.load import resolve
from titanlite.trainer import Trainer


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_folder(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    return peft_folder(tmp_path_factory.mktemp("peft"), base)


ONE_EACH = "--training.batch_size=1"
COMPILED = ["--training.compile", "--compile.backend=aot_eager"]
BY_OP = ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"]
WAYS: dict[str, tuple[int, list[str]]] = {
    "FSDP 2": (2, []),
    "loss in chunks": (2, ["--training.loss_chunks=3"]),
    "micro-batches": (2, [ONE_EACH]),
    "compiled, recomputed by operator": (1, [*COMPILED, *BY_OP]),
    "HSDP 2 x 2": (4, ["--training.data_parallel_replicate_degree=2", ONE_EACH]),
    "CP 2": (2, ["--experimental.context_parallel_degree=2", "--training.batch_size=4"]),
}


@pytest.fixture(scope="module")
def run_in(
    pool: Pools, tmp_path_factory: pytest.TempPathFactory, base: Path, adapters: Path
) -> Callable[[str], list[dict[str, Any]]]:
    """What ranks saw in two steps from PEFT's adapters, taken once in each way."""

    @cache
    def run(way: str) -> list[dict[str, Any]]:
        ranks, more = WAYS[way]
        folder = tmp_path_factory.mktemp("run")
        flags = run_flags(base, f"--lora.adapter={adapters}", "--training.steps=2", *more)
        return pool(ranks).run(train_seen, str(folder), *flags)

    return run


@pytest.fixture(scope="module")
def of_peft(base: Path, run_in: Callable[[str], Any]) -> tuple[dict[str, Any], float]:
    """Gradients and loss of PEFT, of the first batch of a run."""
    found = run_in("FSDP 2")
    return peft_gradients(base, [batch for one in found for batch in one["batches"]])


def changed(found: dict[str, Any]) -> set[str]:
    """The parameters that a run has trained."""
    start = found["start"]
    return {name for name, tensor in found["end"].items() if not torch.equal(tensor, start[name])}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_peft(run_in, of_peft, way):
    """Gradients, loss and what changes."""
    expected, loss = of_peft
    found = run_in(way)
    assert len(expected) == 28
    assert_near(found[0]["gradients"], expected, 2e-6)
    assert found[0]["rows"][0]["loss"] == pytest.approx(loss, abs=2e-6)
    for one in found:
        assert one["held"] == len(one["adapters"])
        assert changed(one) == one["adapters"]


@pytest.mark.slow
def test_a_new_adapter_changes_no_bit(pool, tmp_path, base):
    flags = run_flags(base, "--training.steps=4")
    found = pool(2).run(train_seen, str(tmp_path / "a"), *flags)[0]
    whole = pool(2).run(train_seen, str(tmp_path / "b"), *flags, "--lora.rank=0")[0]
    assert found["rows"][0]["loss"] == whole["rows"][0]["loss"]
    assert found["rows"][3]["loss"] != whole["rows"][3]["loss"]
    assert sorted(found["without"]) == sorted(set(found["start"]) - found["adapters"])
    again = pool(1).run(train_seen, str(tmp_path / "c"), *flags, "--training.batch_size=4")[0]
    for name in found["adapters"]:
        assert torch.equal(again["start"][name], found["start"][name]), name


RESUMED = ["--training.steps=6", "--lora.dropout=0.2", "--checkpoint.interval=3"]


@pytest.mark.slow
def test_a_resume_is_exact(pool, tmp_path, base):
    flags = run_flags(base, *RESUMED, "--activation_checkpoint.mode=full")
    straight = pool(2).run(train_seen, str(tmp_path / "a"), *flags)[0]
    pool(2).run(train_seen, str(tmp_path / "b"), *flags, "--training.steps=3")
    resumed = pool(2).run(train_seen, str(tmp_path / "b"), *flags)[0]
    assert not straight["error"] and not resumed["error"]
    assert losses_of(resumed["rows"]) == losses_of(straight["rows"])
    assert_equal(resumed["end"], straight["end"])


def test_a_checkpoint_holds_adapters_alone(pool, tmp_path, base):
    found = pool(2).run(train_seen, str(tmp_path), *run_flags(base, "--training.steps=2"))[0]
    folder = tmp_path / "checkpoint" / "step-2"
    manifest = read_manifest(folder)
    weights = {name for name in manifest.tensors if name.startswith("model.")}
    assert weights == {f"model.{name}" for name in found["adapters"]}
    moments = {name for name in manifest.tensors if name.startswith("optimizer.state.")}
    assert len(moments) == 3 * len(weights)
    assert manifest.config["lora"]["base"]["path"] == str(base)
    assert len(manifest.config["lora"]["base"]["tensors"]) == 21
    assert torch.equal(
        Contents(folder).read("model.layers.1.attention.wq.lora_b"),
        found["end"]["layers.1.attention.wq.lora_b"],
    )


def changed_base(base: Path, folder: Path, name: str) -> Path:
    """Copy the base with another number in this weight."""
    shutil.copytree(base, folder)
    weights = load_file(folder / "model.safetensors")
    weights[name].view(-1)[3] += 0.125
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
def test_another_base_is_refused(pool, tmp_path, base):
    flags = run_flags(base, "--training.steps=2")
    pool(1).run(train_seen, str(tmp_path / "run"), *flags)
    other = changed_base(base, tmp_path / "other", "model.norm.weight")
    moved = [*flags, "--training.steps=3"]
    found = pool(1).run(
        train_seen, str(tmp_path / "run"), *moved, f"--checkpoint.initial_load_path={other}"
    )[0]
    assert found["code"] == exit_codes.CHECKPOINT
    assert "base: " in found["error"] and "no key allows it" in found["error"]
    found = pool(1).run(train_seen, str(tmp_path / "run"), *moved, "--lora.rank=0")[0]
    assert found["code"] == exit_codes.CHECKPOINT and "none here" in found["error"]


# Other programs' files


@pytest.fixture(scope="module")
def trained(pool: Pools, tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """A run of three steps whose adapters changed something."""
    folder = tmp_path_factory.mktemp("trained")
    flags = run_flags(base, "--training.steps=3", "--optimizer.ema_decay=0.5")
    found = pool(2).run(train_seen, str(folder), *flags)[0]
    assert not found["error"]
    return folder


def test_an_export_is_the_base_with_what_adapters_add(tmp_path, base, trained):
    convert(trained, tmp_path / "hf", "hf")
    contents = Contents(trained / "checkpoint" / "step-3")
    merged = load_file(tmp_path / "hf" / "model.safetensors")
    before = load_file(base / "model.safetensors")
    assert merged.keys() == before.keys()
    for name, weight in before.items():
        ours = our_name(f"base_model.model.{name}").removesuffix(".weight")
        expected = weight
        if "_proj" in name:
            down = contents.read(f"model.{ours}.lora_a")
            up = contents.read(f"model.{ours}.lora_b")
            expected = weight + ALPHA / RANK * (up @ down)
            assert not torch.equal(merged[name], weight), name
        assert torch.equal(merged[name], expected), name
    convert(trained, tmp_path / "ema", "hf", ema=True)
    averaged = load_file(tmp_path / "ema" / "model.safetensors")
    one = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(averaged[one], merged[one])


def test_adapters_of_peft_are_sources_too(tmp_path, base, adapters):
    convert(adapters, tmp_path / "hf", "hf", base=base)
    found = load_file(tmp_path / "hf" / "model.safetensors")
    for name, tensor in merged_weights(base).items():
        assert relative(found[name], tensor) < 1e-6, name
    convert(adapters, tmp_path / "again", "peft", base=base)
    assert equal_files(adapters, tmp_path / "again")


def equal_files(one: Path, other: Path) -> bool:
    return equal_states(
        *(load_file(folder / "adapter_model.safetensors") for folder in (one, other))
    )


def test_the_base_must_be_the_right_one(tmp_path, base, trained):
    with pytest.raises(CheckpointError, match="give --base PATH|name them with --base PATH"):
        moved = tmp_path / "peft"
        convert(trained, moved, "peft")
        config = json.loads((moved / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = "somebody/model"
        (moved / "adapter_config.json").write_text(json.dumps(config))
        convert(moved, tmp_path / "a", "hf")
    other = changed_base(base, tmp_path / "other", "model.layers.1.mlp.up_proj.weight")
    with pytest.raises(CheckpointError, match="layers.1.feed_forward.w3.weight is not the weight"):
        convert(trained, tmp_path / "b", "hf", base=other)
    assert not (tmp_path / "b").exists()
    with pytest.raises(CheckpointError, match="holds whole weights"):
        convert(base, tmp_path / "c", "peft")


@pytest.mark.parametrize(
    ("entry", "value", "shown"),
    [
        ("use_dora", True, "use_dora is True"),
        ("peft_type", "IA3", "peft_type is 'IA3'"),
        ("r", 5, "and r is 5"),
        ("lora_alpha", None, "lora_alpha"),
    ],
)
def test_other_kinds_of_adapters_are_refused(tmp_path, base, adapters, entry, value, shown):
    folder = tmp_path / "peft"
    shutil.copytree(adapters, folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), entry: value}))
    with pytest.raises(CheckpointError, match="adapter_") as refused:
        convert(folder, tmp_path / "hf", "hf", base=base)
    assert shown in str(refused.value)


@pytest.mark.slow
def test_a_run_takes_only_its_own_kind_of_adapters(pool, tmp_path, base, adapters, trained):
    flags = [*run_flags(base, "--training.steps=1"), f"--lora.adapter={adapters}"]
    found = pool(1).run(train_seen, str(tmp_path / "a"), *flags, "--lora.alpha=7")[0]
    assert "alpha: 6.0 there, 7.0 here" in found["error"], found["error"]
    found = pool(1).run(train_seen, str(tmp_path / "b"), *flags, f"--lora.adapter={base}")[0]
    assert "lora.adapter: " in found["error"]
    # Those of another run of ours, and of its folder.
    found = pool(1).run(train_seen, str(tmp_path / "c"), *flags, f"--lora.adapter={trained}")[0]
    step = Contents(trained / "checkpoint" / "step-3")
    name = "layers.0.attention.wo.lora_b"
    assert torch.equal(found["start"][name], step.read(f"model.{name}")) and not found["error"]


# With other features


def _sent(world: DistEnv, folder: str, *flags: str) -> list[Sent]:
    """Take a step; the collectives of FSDP."""
    parts = make_trainer(world, folder, *flags).parts
    seen: list[Sent] = []
    with Wire(seen.append):
        parts.train_step(parts.loader.next_step(), 1, 1e-3)
    parts.close()
    return [sent for sent in seen if sent.name in (GATHER, REDUCE)]


@pytest.mark.slow
def test_adapters_alone_are_reduced(pool, tmp_path, base):
    flags = run_flags(base, "--training.steps=1", "--no-checkpoint.verify_saves")
    found = pool(2).run(_sent, str(tmp_path), *flags)[0]
    linears = {(64, 64): 2, (64, 32): 2, (64, 256): 3}
    adapters = sum(count * RANK * (a + b) for (a, b), count in linears.items())
    assert [sent.bytes_in for sent in found if sent.name == REDUCE] == [4 * adapters] * 2
    assert max(sent.bytes_out for sent in found) >= 4 * 2304 * 64, "the base is gathered"


@pytest.mark.slow
def test_documents_and_averages(pool, tmp_path, base):
    flags = run_flags(
        base,
        "--training.steps=4",
        "--data.mask_documents",
        "--optimizer.ema_decay=0.5",
        "--validation.enable",
        "--validation.ema",
        "--checkpoint.model_weights_only",
        "--checkpoint.export_ema",
        "--checkpoint.interval=2",
    )
    found = pool(2).run(train_seen, str(tmp_path), *flags)[0]
    assert not found["error"]
    held_out = [row["validation_loss"] for row in found["rows"] if "validation_loss" in row]
    assert pool(2).run(evaluate_run, tmp_path)[0].all.loss == held_out[-1]
    whole = run_flags(tmp_path, "--lora.rank=0")
    refused = pool(2).run(train_seen, str(tmp_path / "whole"), *whole)[0]
    assert "holds adapters alone" in refused["error"]
    full_one = read_manifest(tmp_path / "checkpoint" / "step-2").tensors
    averages = {name for name in full_one if name.startswith("ema.")}
    assert averages == {f"ema.{name}" for name in found["adapters"]}
    last = read_manifest(tmp_path / "checkpoint" / "step-4")
    assert last.weights_only and last.tensors.keys() == {f"model.{n}" for n in found["adapters"]}


def test_commands_take_adapters(tmp_path, base, trained, capsys):
    sample = ["sample", str(trained), "Once upon", "--temperature=0", "--max-tokens=4"]
    code, out = run_command([*sample, "--json"], capsys)
    assert code == 0
    assert run_command(["export", str(trained), str(tmp_path / "merged")], capsys)[0] == 0
    merged = ["sample", str(tmp_path / "merged"), *sample[2:], "--json"]
    _, other = run_command(merged, capsys)
    assert json.loads(out)["samples"] == json.loads(other)["samples"]
    none = [*sample, "--base", str(tmp_path / "none")]
    assert run_command(none, capsys)[0] == exit_codes.CHECKPOINT


def run_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    code = main(words)
    return code, capsys.readouterr().out


#: A small Mixtral, and how two ranks share it.
MIXTRAL = [
    "--model.overrides.n_kv_heads=2",
    "--model.overrides.n_experts=4",
    "--model.overrides.ffn_dim=64",
    "--model.overrides.aux_loss=0",
]
SHARED = ["--parallelism.expert_parallel_degree=2", "--training.batch_size=2"]


@pytest.mark.slow
def test_experts_that_ranks_share(pool, tmp_path):
    model = ["--model.name=mixtral", "--checkpoint.enable_checkpoint", *MIXTRAL]
    model += ["--no-validation.enable", "--training.max_norm=1e9"]
    model += ["--training.batch_size=4", "--training.global_batch_size=4"]
    pool(1).run(train_seen, str(tmp_path / "base"), *model, "--training.steps=1")
    flags = [
        *model,
        "--lora.rank=4",
        f"--checkpoint.initial_load_path={tmp_path}/base",
        "--training.steps=3",
    ]
    one = pool(1).run(train_seen, str(tmp_path / "one"), *flags)[0]
    two = pool(2).run(train_seen, str(tmp_path / "two"), *flags, *SHARED)[0]
    assert not one["error"] and not two["error"]
    for row, other in zip(one["rows"], two["rows"], strict=True):
        assert other["loss"] == pytest.approx(row["loss"], abs=2e-5)
    for name, gradient in one["gradients"].items():
        if "lora_b" in name:
            assert relative(two["gradients"][name], gradient) < 5e-6, name
    for found in (one, two):
        assert changed(found) == found["adapters"]


TARGETS = LINEARS[:4]
KIND = "qwen3_moe"


def mixture_folder(folder: Path) -> Path:
    """A model with random weights, as `transformers` saves it."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {**sizes_of(KIND), "vocab_size": VOCABULARY, "initializer_range": 0.1}
    AutoModelForCausalLM.from_config(CONFIG_MAPPING[KIND](**sizes)).save_pretrained(folder)
    return folder


def _train_hf(world: DistEnv, folder: str, flags: list[str]) -> dict[str, Any]:
    config = load_config_file(TOML, [*flags, f"--job.dump_folder={folder}"])
    run = resolve(config, world.size)[1]
    return outcome_seen(Trainer(build(run, world, read_datasets(run))), folder)


def plain_name(theirs: str) -> str:
    """Our name of a parameter of PEFT's adapters."""
    name = theirs.removeprefix("base_model.model.")
    for letter in "AB":
        name = name.replace(f"lora_{letter}.default.weight", f"lora_{letter.lower()}")
    return name


def test_gradients_are_those_of_peft_which_computes_what_the_run_has_trained(pool, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = mixture_folder(tmp_path / "base")
    adapters = peft_folder(tmp_path / "peft", base, TARGETS)
    flags = [flag for flag in run_flags(base) if "overrides" not in flag]
    flags += [f"--model.hf_config={base}", f"--lora.adapter={adapters}", KEPT_TOKENS]
    flags += [f"--lora.targets={','.join(TARGETS)}", "--training.seq_len=32"]
    flags += ["--training.steps=2", "--training.warmup_steps=1", "--metrics.log_freq=1"]
    found = pool(2).run(_train_hf, str(tmp_path / "run"), flags)
    assert not found[0]["error"]
    batches = [batch for one in found for batch in one["batches"]]
    expected, loss = peft_gradients(base, batches, TARGETS, plain_name)
    assert found[0]["rows"][0]["loss"] == pytest.approx(loss, abs=2e-6)
    assert_near(found[0]["gradients"], expected, 2e-6)
    assert changed(found[0]) == expected.keys()
    convert(tmp_path / "run", tmp_path / "trained", "peft")
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(plain, tmp_path / "trained")
    source = open_source(tmp_path / "run")
    tokens = batches[0][0]
    with torch.no_grad():
        ours = [our_logits(source.family, source.args, source.read, row[None]) for row in tokens]
        assert relative(model(tokens).logits, torch.cat(ours)) < 1e-6
