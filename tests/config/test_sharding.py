"""Keys of sharding: accepted values, and values refused before the build."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from titanlite import exit_codes
from titanlite.build import check_model
from titanlite.config.errors import ConfigError
from titanlite.config.load import load
from titanlite.derive import RunConfig
from titanlite.fit import fitted
from titanlite.main import run


def run_of(*flags: str) -> RunConfig:
    return fitted(load(flags), 4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--training.fsdp_units=size"], "training.fsdp_min_params: no FSDP group has 100,000,000 parameters or more"),
        (
            ["--training.fsdp_units=Attention", "--training.compile"],
            "training.fsdp_units: makes layers.0.attention an FSDP group, but training.compile makes one graph",
        ),
        (
            ["--training.fsdp_units=Linear", "--activation_checkpoint.selective_ac_option=op"],
            "makes layers.0.attention.wq an FSDP group, but activation_checkpoint.selective_ac_option",
        ),
        (
            ["--training.fsdp_units=Attention", "--activation_checkpoint.offload"],
            "makes layers.0.attention an FSDP group, but activation_checkpoint.offload would send its gathered weights",
        ),
    ],
)
def test_units_that_do_not_fit_the_model_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_model(run_of(*flags), 512)
    check_model(run_of("--training.fsdp_units=Attention"), 512)
    check_model(run_of("--training.fsdp_units=Block", "--training.compile"), 512)


def test_a_class_that_the_model_lacks_ends_a_run_before_any_process_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("a process group was made"))
    code = run(["--training.fsdp_units=Blok", "--training.seq_len=64", f"--job.dump_folder={tmp_path}"])
    assert code == exit_codes.CONFIG
    message = "training.fsdp_units: no FSDP group can be made of Blok; classes of Llama with parameters: Att"
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
