"""Keys of sharding: from the command line to the plan, and what is refused before anything is built."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from titanlite import app, exit_codes
from titanlite.build import Text, check_units
from titanlite.config.errors import ConfigError
from titanlite.config.load import load
from titanlite.config.plans import Plans, ShardPlan
from titanlite.config.resolve import resolve
from titanlite.config.unbuilt import without_effect


def plans(*flags: str, world_size: int = 4) -> Plans:
    return resolve(load(flags), world_size=world_size)


@pytest.mark.parametrize(
    ("words", "units"),
    [
        (["size"], "size"),
        (["root"], "root"),
        (["Attention,FeedForward"], ("Attention", "FeedForward")),
        (["Attention", "FeedForward"], ("Attention", "FeedForward")),
        (['["Block"]'], ("Block",)),
    ],
)
def test_units_are_a_kind_or_classes(words: list[str], units: Any) -> None:
    assert plans("--training.fsdp_units", *words).shard.units == units


def test_every_key_of_sharding_reaches_the_plan() -> None:
    resolved = plans(
        "--training.fsdp_units=size",
        "--training.fsdp_min_params=5000",
        "--training.prefetch=2",
        "--training.enable_cpu_offload",
        "--training.gradient_sync=every",
        "--training.reshard_after_forward=2",
        "--training.mixed_precision_param=float32",
        "--training.mixed_precision_reduce=bfloat16",
    )
    assert resolved.shard == ShardPlan("float32", "bfloat16", 2, "every", "size", 5000, 2, True)
    assert resolved.warnings == ()


@pytest.mark.parametrize("key", ["mixed_precision_param", "mixed_precision_reduce"])
def test_float16_is_refused_with_the_reason(key: str) -> None:
    with pytest.raises(ConfigError, match="float16 needs loss scaling, which titanlite does not do; take bfloat16"):
        load([f"--training.{key}=float16"])


def test_an_empty_list_of_classes_is_refused() -> None:
    with pytest.raises(ConfigError, match='expected one of "block", "root", "size" or a list of strings'):
        load(["--training.fsdp_units=[]"])


def test_nothing_is_gathered_ahead_of_everything() -> None:
    with pytest.raises(
        ConfigError, match='prefetch: is 1, but training.fsdp_units = "root" gathers everything at once'
    ):
        load(["--training.prefetch=1", "--training.fsdp_units=root"])


@pytest.mark.parametrize("flags", [[], ["--training.data_parallel_type=ddp"]])
def test_prefetch_of_whole_weights_warns(flags: list[str]) -> None:
    ranks = 4 if flags else 1
    (warning,) = plans("--training.prefetch=2", *flags, world_size=ranks).warnings
    assert warning.startswith("training.prefetch = 2 has no effect: every rank holds whole weights")


def test_a_least_size_without_units_by_size_has_no_effect() -> None:
    assert without_effect(load(["--training.fsdp_min_params=5"])) == ["training.fsdp_min_params"]
    assert without_effect(load(["--training.fsdp_min_params=5", "--training.fsdp_units=size"])) == []


def test_inductors_cache_has_no_effect_on_another_backend() -> None:
    flags = ["--training.compile", "--compile.cache_dir=somewhere"]
    assert without_effect(load(flags)) == []
    assert without_effect(load([*flags, "--compile.backend=aot_eager"])) == ["compile.cache_dir"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--training.fsdp_units=size"], "training.fsdp_min_params: no unit has 100,000,000 parameters or more: Llama"),
        (
            ["--training.fsdp_units=Attention", "--training.compile"],
            "training.fsdp_units: makes layers.0.attention a unit, but training.compile makes one graph of the block",
        ),
        (
            ["--training.fsdp_units=Linear", "--activation_checkpoint.selective_ac_option=op"],
            "makes layers.0.attention.wq a unit, but activation_checkpoint.selective_ac_option",
        ),
        (
            ["--training.fsdp_units=Attention", "--activation_checkpoint.offload"],
            "makes layers.0.attention a unit, but activation_checkpoint.offload would send its gathered weights",
        ),
    ],
)
def test_units_that_do_not_fit_the_model_are_refused(flags: list[str], message: str) -> None:
    text = cast(Text, SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=512)))
    with pytest.raises(ConfigError, match=message):
        check_units(plans(*flags), text)
    check_units(plans("--training.fsdp_units=Attention"), text)
    check_units(plans("--training.fsdp_units=Block", "--training.compile"), text)


def test_a_class_that_the_model_lacks_ends_a_run_before_any_process_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("a process group was made"))
    code = app.run(["--training.fsdp_units=Blok", "--training.seq_len=64", f"--job.dump_folder={tmp_path}"])
    assert code == exit_codes.CONFIG
    message = (
        "training.fsdp_units: no unit can be made of Blok; classes of Llama with parameters: Attention (8), Block (8)"
    )
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
