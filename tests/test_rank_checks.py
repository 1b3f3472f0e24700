"""Before the first step the odd rank is named; a healthy run passes, with its random numbers and
losses unchanged.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support.processes import TORCHRUN, python
from tests.support.tiny import EIGHT_STEPS
from titanlite.assembly import rank_checks
from titanlite.assembly.rank_checks import RankCheckError, check_ranks
from titanlite.dist.dist_env import DistEnv
from titanlite.dist.interfaces import interface_problem
from titanlite.exit_codes import CONFIG
from titanlite.metrics import throughput
from titanlite.runs import provenance

TOML = '[optimizer]\nlr = 0.001\n[data]\nsource = [{path = "/a", weight = 2.0}]\n'
#: Configs of an odd rank.
CONFIGS = {
    "config": TOML.replace("0.001", "0.002"),
    "paths": (
        f'{TOML.replace("/a", "/home/b")}[checkpoint]\nfolder = "/c"\n[launch]\nenvironment.A_KEY '
        '= "hidden"\n'
    ),
    "name": f'{TOML}[job]\nconfig_file = "/other/place.toml"\n',
}


def _check(
    world: DistEnv, folder: Path, hosts: bool = False, odd: str = "", **options: Any
) -> tuple[list[str], str]:
    """Check the ranks; return warnings and the error.

    hosts: each rank is on another host. odd: of the last rank.
    """
    rank = world.rank
    own = odd if rank == world.size - 1 else ""
    with contextlib.ExitStack() as stack:

        def put(target: Any, name: str, value: Any) -> None:
            stack.enter_context(patch.object(target, name, value))

        if own == "tuned":
            stack.enter_context(patch.dict(os.environ, PYTORCH_TUNABLEOP_ENABLED="1"))
        if hosts:
            put(socket, "gethostname", lambda: f"node-{rank}")
        if own == "version":
            versions = {**provenance.versions(), "torchao": "0.1.0"}
            put(provenance, "versions", lambda: versions)
        elif own == "code":
            package = folder / "package"
            package.mkdir()
            (package / "step.py").write_text("")
            put(rank_checks.titanlite, "__file__", str(package / "__init__.py"))  # type: ignore[attr-defined]
        elif own == "device":
            put(throughput, "_proc_field", lambda *_: "Old CPU")
        elif own in ("bits", "flicker", "tuned"):
            calls = [0]
            real = torch.mm

            def flip(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
                real(a, b, out=out)
                calls[0] += 1
                if own != "flicker" or calls[0] == 3:
                    out.view(torch.int32)[7, 9] ^= 1  # the last bit of one number

            put(torch, "mm", flip)
        elif odd == "folder":
            folder = folder / f"of-{rank}"
            folder.mkdir()
            put(rank_checks, "_FOLDER_SECONDS", 0.1)
        elif own == "late":  # a file that this host sees after a while
            ready = time.monotonic() + 0.5
            real_exists = os.path.exists
            put(os.path, "exists", lambda path: time.monotonic() > ready and real_exists(path))
        try:
            config = CONFIGS.get(own, TOML)
            texts = {"mine": ("2" if own == "text" else "1") * 64}
            return check_ranks(world, config=config, texts=texts, folder=folder, **options), ""
        except RankCheckError as error:
            assert error.exit_code == CONFIG
            return [], str(error)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("odd", ["", "name", "late", "tuned"])
def test_healthy_ranks_pass(pool, tmp_path, odd):
    assert pool(2).run(_check, tmp_path, hosts=True, odd=odd) == [([], "")] * 2
    assert not list(tmp_path.iterdir())


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ("version", ["torchao: 0.18.0 on rank 0 (node-0), 0.1.0 on rank 1 (node-1)"]),
        ("code", ["the ranks differ in the code of titanlite: ", "on rank 1 (node-1)"]),
        (
            "text",
            [
                (
                    "differ in text for mine: 11111111 on rank 0 (node-0), 22222222 on rank 1 "
                    "(node-1). Give"
                )
            ],
        ),
        ("config", ["another config than rank 1 (node-1): optimizer.lr 0.001 -> 0.002"]),
        ("flicker", ["wrong numbers are computed: rank 1 (node-1, local rank 1, CPU ("]),
        (
            "bits",
            [
                "one of these computes wrong numbers: rank 0 (node-0, local rank 0, CPU (",
                "rank 1 (node-1",
            ],
        ),
        (
            "folder",
            [
                "is not shared: rank 0 (node-0) writes there, and rank 1 (node-1) cannot see",
                "job.dump_folder",
            ],
        ),
    ],
)
def test_a_difference_or_a_wrong_result_ends_all_ranks_and_names_the_odd_one(
    pool, tmp_path, odd, words
):
    results = pool(2).run(_check, tmp_path, hosts=True, odd=odd)
    assert results[0] == results[1]
    assert results[0][0] == []
    assert [word for word in words if word not in results[0][1]] == [], results[0][1]
    assert not list(tmp_path.rglob(".ranks-*"))


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ("device", ["different devices: CPU (", "CPU (Old CPU) on rank 1 (node-1)"]),
        (
            "paths",
            ['data.source [{"path": "/a"', 'folder (not set) -> "/c"', '.A_KEY (not set) -> "(r'],
        ),
    ],
)
def test_an_odd_rank_is_named_in_a_warning(pool, tmp_path, odd, words):
    results = pool(2).run(_check, tmp_path, hosts=True, odd=odd, needs_folder=False)
    assert results[0] == results[1]
    assert not results[0][1]
    text = "\n".join(results[0][0])
    assert [word for word in words if word not in text] == [], text


def test_the_majority_tells_which_rank_computes_wrong_numbers(pool, tmp_path):
    _, error = pool(4).run(_check, tmp_path, odd="bits")[0]
    assert "wrong numbers are computed: rank 3 (" in error
    assert "rank 0" not in error


def _state(world: DistEnv, folder: Path) -> bool:
    def state() -> tuple[Any, ...]:
        is_strict = torch.are_deterministic_algorithms_enabled()
        return torch.get_rng_state().tolist(), random.getstate(), is_strict

    before = state()
    check_ranks(world, config=TOML, folder=folder)
    return state() == before


def test_random_generators_stay_as_they_are(pool, tmp_path):
    assert pool(2).run(_state, tmp_path) == [True, True]


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("NCCL_SOCKET_IFNAME", "", ""),
        ("NCCL_SOCKET_IFNAME", "^lo,docker", ""),
        (
            "NCCL_SOCKET_IFNAME",
            "=eth",
            "'=eth', but the interfaces are lo, eth0, docker0: set NCCL_SOCKET_IFNAME to",
        ),
        ("NCCL_SOCKET_IFNAME", "^eth0", "means lo, docker0, which other hosts cannot reach"),
        ("GLOO_SOCKET_IFNAME", "eth0", ""),
        ("GLOO_SOCKET_IFNAME", "eth", "'eth', but the interfaces are lo, eth0, docker0"),
        (
            "GLOO_SOCKET_IFNAME",
            "",
            "the host's name means 127.0.1.1, which other hosts cannot reach",
        ),
    ],
)
def test_interfaces_that_other_hosts_cannot_reach(monkeypatch, variable, value, words):
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "docker0")])
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    found = interface_problem(variable)
    assert words in found
    assert bool(words) == bool(found)


@pytest.mark.soak
def test_a_run_whose_ranks_differ_ends_with_code_2_before_its_model_is_built(tmp_path):
    script = tmp_path / "odd.py"
    script.write_text(
        "import os, sys\nfrom titanlite.main import main\n"
        "main([*sys.argv[1:], *['--optimizer.lr=0.5'] * (os.environ['RANK'] == '1')])\n"
    )
    flags = ["--job.config_file=debug_model.toml", f"--job.dump_folder={tmp_path}/run"]
    words = ["-m", "titanlite.torchrun", *TORCHRUN[2:], script, *flags, *EIGHT_STEPS]
    ended = python(*words)
    assert ended.returncode == CONFIG, ended.stderr
    assert "error: rank 0 has another config than rank 1 (" in ended.stderr
    assert "optimizer.lr 0.003 -> 0.5" in ended.stderr
    assert "Traceback" not in ended.stderr.partition("elastic")[0]
    assert "step:" not in ended.stdout
    # What is not compared is trained: both ranks take the rate of their own.
    trained = python(*words, "--launch.preflight=false", "--training.steps=1")
    assert trained.returncode == 0
    assert " agree, checked in " not in trained.stdout + trained.stderr
