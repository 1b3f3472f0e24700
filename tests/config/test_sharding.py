"""Keys of sharding: from the command line to the plan, and what is refused before anything is built."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist
from titanlite.config.plans import Plans
from titanlite.config.resolve import resolve
from titanlite.config.unbuilt import without_effect
from titanlite.observe.report import start_report

from titanlite import app, exit_codes
from titanlite.build import Text, check_units
from titanlite.config.errors import ConfigError
from titanlite.config.load import load


def plans(*flags: str, world_size: int = 4) -> Plans:
    return resolve(load(flags), world_size=world_size)


@pytest.mark.parametrize(
    ("words", "units"),
    [
        (["size"], "size"),
        (["Attention,FeedForward"], ["Attention", "FeedForward"]),
        (["Attention", "FeedForward"], ["Attention", "FeedForward"]),
        (['["Block"]'], ["Block"]),
    ],
)
def test_units_are_a_kind_or_classes(words: list[str], units: Any) -> None:
    assert load(["--training.fsdp_units", *words]).dialect.training.fsdp_units == units


@pytest.mark.parametrize("flag", ["mixed_precision_param=float16", "mixed_precision_reduce=float16", "fsdp_units=[]"])
def test_values_that_no_run_has_are_refused(flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([f"--training.{flag}"])
    assert [problem.key for problem in caught.value.problems] == [f"training.{flag.partition('=')[0]}"]


@pytest.mark.parametrize(
    ("key", "on"),
    [
        ("--training.fsdp_min_params=5", ["--training.fsdp_units=size"]),
        ("--compile.cache_dir=somewhere", ["--training.compile"]),
    ],
)
def test_keys_of_what_is_off_have_no_effect(key: str, on: list[str]) -> None:
    assert without_effect(load([key])) == [key[2:].partition("=")[0]]
    assert without_effect(load([key, *on])) == []


def test_inductors_cache_has_no_effect_on_another_backend() -> None:
    flags = ["--training.compile", "--compile.cache_dir=somewhere", "--compile.backend=aot_eager"]
    assert without_effect(load(flags)) == ["compile.cache_dir"]


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


def _report(*flags: str, device: str = "CPU (some model)") -> str:
    lines = start_report(
        plans("--training.batch_size=2", "--training.global_batch_size=16", *flags, world_size=2),
        parameters={"all": 8_030_261_248},
        flops_per_token=1,
        device=device,
        world_size=2,
        versions={},
        tokenizer="",
        documents=1,
        tokens_per_epoch=1,
        memory_bytes=0,
        peak_flops=None,
        folders={},
    )
    (line,) = (line for line in lines if line.startswith("sharding "))
    return line.removeprefix("sharding").strip()


def test_the_start_report_says_what_sharding_costs() -> None:
    kept = "whole gradients kept until the last micro-batch: 4 bytes x 8,030,261,248 parameters = 29.9 GiB per rank"
    assert _report() == (
        f"units of each block; freed after forward but for the last two; {kept} (training.gradient_sync)"
    )
    assert "kept until" not in _report("--training.gradient_sync=every")
    assert "kept until" not in _report("--training.data_parallel_type=ddp"), "they are whole in any case"
    assert "2 bytes x 8,030,261,248" in _report("--training.mixed_precision_reduce=bfloat16")
    assert _report(
        "--training.fsdp_units=A,B", "--training.prefetch=3", "--training.reshard_after_forward=2"
    ).startswith("units of each A and B; after forward sharded over 2 ranks; gathered 3 ahead; ")


def test_the_start_report_says_that_offload_does_nothing_on_a_cpu() -> None:
    assert _report("--training.enable_cpu_offload").endswith("offload to host memory is without effect on a CPU")
    on_gpu = _report("--training.enable_cpu_offload", device="NVIDIA H100")
    assert on_gpu.endswith("parameters, gradients and optimizer state in host memory")


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
