"""`titanlite train`: what torchrun is given, and what is refused before."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT, python
from titanlite import exit_codes
from titanlite.cli import train
from titanlite.cli.main import main
from titanlite.dist.process_settings import TUNABLES


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Run the command up to torchrun; return its command line, or an error's code."""
    for name in ("signal", "pthread_sigmask"):
        monkeypatch.setattr(f"signal.{name}", lambda *_: None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for name in ("NGPU", "LOG_RANK", "FORCE_COLOR", "NO_COLOR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)

    class Started(BaseException):
        pass

    def execv(_: str, words: list[str]) -> None:
        raise Started(" ".join(words[1:]))

    monkeypatch.setattr(os, "execv", execv)

    def start(*words: str) -> str | int:
        try:
            return main(["train", *words])
        except Started as started:
            return str(started)

    return start


#: In a folder of PYTHONPATH: sends SIGTERM to the process of torchrun as soon as Python has
#: started.
_SITE = """
import os, signal, sys
if "titanlite.torchrun" in sys.orig_argv:
    os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("when", ["in the check", "while torchrun's Python starts"])
def test_a_stop_before_torchrun_listens_ends_with_code_5(tmp_path, when):
    if when == "in the check":
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\nkill -TERM $PPID\nsleep 0.2\n")
        program.chmod(0o755)
    else:
        (tmp_path / "sitecustomize.py").write_text(_SITE)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    variables = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PATH": path}
    words = ["-m", "titanlite", "train", "debug_model.toml", "--nproc=2"]
    done = python(*words, f"--job.dump_folder={tmp_path}/run", env=variables)
    assert done.returncode == exit_codes.PREEMPTED, done.stderr
    assert done.stderr == "stopped: SIGTERM before the first step\n"


def test_the_command_line_of_torchrun(start, monkeypatch):
    monkeypatch.setenv("NGPU", "3")
    monkeypatch.setenv("LOG_RANK", "0,2")
    given = start("debug_model.toml", "--job.description", "two words")
    assert given.startswith(
        "-m titanlite.torchrun --nproc_per_node 3 --rdzv_backend c10d --rdzv_endpoint localhost:0 "
    )
    assert "--local-ranks-filter 0,2 --role rank --tee 3 --log-dir " in given
    assert given.endswith(
        " -m titanlite train --job.config_file debug_model.toml --job.description two words"
    )
    assert "--nproc_per_node 4 " in start("debug_model.toml", "--nproc", "4")


def test_one_of_several_machines(start, monkeypatch, capsys):
    given = start(
        "debug_model.toml", "--nproc=1", "--nnodes=2", "--node-rank=1", "--master=10.0.0.1"
    )
    assert "--nnodes 2 --node_rank 1 --master_addr 10.0.0.1 --master_port 29400 --local" in given
    assert "rdzv" not in given
    assert start("debug_model.toml", "--nproc=1", "--nnodes=2") == exit_codes.CONFIG
    wrong = ["--nproc=1", "--nnodes=2", "--master=a", "--node-rank=2"]
    assert start("debug_model.toml", *wrong) == exit_codes.CONFIG
    fit = ["debug_model.toml", "--nproc=1", "--master=a", "--training.tensor_parallel_degree=2"]
    assert start(*fit) == exit_codes.CONFIG  # one rank
    assert "--nnodes 2" in start(*fit, "--nnodes=2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert start("debug_model.toml", "--nproc=2") == exit_codes.CONFIG
    assert "torchrun" in capsys.readouterr().err


def test_section_launch(start, monkeypatch, capsys):
    several = ["debug_model.toml", "--nproc=1", "--launch.nodes=2"]
    assert start(*several) == exit_codes.CONFIG
    assert "set launch.system to submit it" in capsys.readouterr().err
    assert "--nnodes 2" in start(*several, "--nnodes=2", "--master=a")
    assert "rdzv_endpoint localhost:0" in start(*several, "--nnodes=1")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    variables = ["--launch.environment.NCCL_DEBUG=INFO", "--launch.environment.HF_TOKEN=(removed)"]
    start("debug_model.toml", "--nproc=1", *variables)
    assert (os.environ["NCCL_DEBUG"], os.environ["HF_TOKEN"]) == ("INFO", "s3cret")


def test_rank_0_alone_has_the_terminal_to_itself(start, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "--local-ranks-filter 0 --redirects 1:3,2:3 --log-dir " in start(
        "debug_model.toml", "--nproc=3"
    )
    assert "--local-ranks-filter 0 -m titanlite train" in start("debug_model.toml", "--nproc=1")
    monkeypatch.setenv("LOG_RANK", "1")
    assert "--local-ranks-filter 1 --role rank --tee 3 " in start("debug_model.toml", "--nproc=3")
    assert os.environ.pop("FORCE_COLOR") == "1"


def test_one_rank_per_visible_gpu(start, monkeypatch, tmp_path, capsys):
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\nfor i in 0 1 2 3; do echo "GPU $i: NVIDIA"; done\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "--nproc_per_node 4 " in start("debug_model.toml")
    assert "OMP_NUM_THREADS" not in os.environ
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    assert "--nproc_per_node 2 " in start("debug_model.toml")
    monkeypatch.setenv("NGPU", "5")
    assert start("debug_model.toml") == exit_codes.CONFIG
    assert "2 GPU(s)" in capsys.readouterr().err
    assert start() == exit_codes.CONFIG
    assert "no file and no key is given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [("NGPU", "0", "NGPU: expected an integer"), ("LOG_RANK", "2", "from 0 to 0")],
)
def test_wrong_settings_are_named(start, monkeypatch, capsys, name, value, text):
    monkeypatch.setenv("NGPU", "1")
    monkeypatch.setenv(name, value)
    assert start("debug_model.toml") == exit_codes.CONFIG
    assert text in capsys.readouterr().err


def test_it_submits_to_the_system_of_the_config(start, monkeypatch, tmp_path, capsys):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\necho 17\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    job = ["--launch.system=slurm", "--launch.nodes=2", "--launch.gpus_per_node=1"]
    job.append(f"--job.dump_folder={tmp_path}/run")
    assert start("debug_model.toml", *job) == exit_codes.DONE
    assert "job 17 is submitted: 2 x 1 ranks" in capsys.readouterr().out
    assert (tmp_path / "words").read_text() == f"--parsable {tmp_path}/run/launch/job.sbatch\n"


@pytest.mark.parametrize(
    "gpus, own, chosen",
    [(0, {}, TUNABLES), (0, {"MALLOC_ARENA_MAX": "1"}, None), (1, {}, None)],
    ids=str,
)
def test_ranks_on_cpus_get_settings_of_malloc_unless_the_user_chose(
    start, monkeypatch, gpus, own, chosen
):
    kept = {name: os.environ[name] for name in ("PATH", "TMPDIR")}
    monkeypatch.setattr(os, "environ", kept | own)
    monkeypatch.setattr(train, "count_gpus", lambda: gpus)
    assert "--nproc_per_node" in start("debug_model.toml", "--nproc=1")
    assert os.environ.get("GLIBC_TUNABLES") == chosen
