"""Copies of local saves on another machine, over a slow link that is cut in mid-copy.

The machines are network namespaces. The rest of the run goes over another link.
"""

from __future__ import annotations

import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.local_tier import LocalTier
from tests.launch.namespaces import Host
from tests.support.processes import ROOT
from tests.support.train_runs import batches, rows, train, unequal

STEPS = 12
#: The step whose copy is cut.
CUT = 6
LINK = "copies0"
FLAGS = [
    "--job.config_file=debug_model.toml",
    "--model.overrides.dim=64",
    "--model.overrides.n_layers=2",
    "--model.overrides.n_heads=4",
    f"--training.steps={STEPS}",
    "--training.seq_len=32",
    "--training.batch_size=1",
    "--training.global_batch_size=4",
    "--metrics.log_freq=1",
    "--no-validation.enable",
    "--checkpoint.enable_checkpoint",
    f"--checkpoint.interval={STEPS}",
    "--checkpoint.async_mode=async",
]

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def linked(machines: list[Host]) -> Iterator[list[Host]]:
    """Both machines, with a second link of 1 MB/s."""
    if shutil.which("tc") is None:
        pytest.skip("no tc here (apt-get install iproute2)")
    spaces = [machine.namespace for machine in machines]
    ends = ["type", "veth", "peer", "name", LINK, "netns", spaces[1]]
    _run("ip", "-n", spaces[0], "link", "add", LINK, *ends)
    shape = ["root", "tbf", "rate", "8mbit", "burst", "64kbit", "latency", "400ms"]
    for number, space in enumerate(spaces, 1):
        _run("ip", "-n", space, "address", "add", f"10.78.0.{number}/24", "dev", LINK)
        _set_link(machines[number - 1], "up")
        _run("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", LINK, *shape)
    yield machines
    _run("ip", "-n", spaces[0], "link", "delete", LINK)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    codes, output = train([*FLAGS, f"--job.dump_folder={folder}"], 2, folder / "console")
    assert codes == [0, 0], output
    return folder


class Run:
    """A run on two machines, of which each has a disk."""

    def __init__(self, machines: list[Host], folder: Path) -> None:
        self.machines = machines
        self.folder = folder
        self.disk = folder / "disk"
        self.disk.mkdir(parents=True)
        for node in (0, 1):
            (folder / f"node-{node}").mkdir()

    def start(self, link: str = LINK, patience: float = 300) -> list[subprocess.Popen[str]]:
        words = [
            *(sys.executable, "-m", "tests.support.linked", *FLAGS),
            f"--job.dump_folder={self.folder}",
            f"--checkpoint.local_folder={self.disk}",
            "--checkpoint.local_interval=2",
            "--checkpoint.local_copies=1",
        ]
        both = []
        for rank, machine in enumerate(self.machines):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": self.machines[0].address,
                "MASTER_PORT": "29511",
                "LINK": link,
                "PATIENCE": str(patience),
                "RUN": str(self.folder),
                "CUDA_VISIBLE_DEVICES": "",
            }
            mounts = {str(self.disk): str(self.folder / f"node-{rank}")}
            with open(self.folder / f"output.{rank}", "a") as out:
                both.append(
                    machine.popen(words, variables, mounts, stdout=out, stderr=out, cwd=ROOT)
                )
        return both

    def output(self) -> str:
        return "".join((self.folder / f"output.{rank}").read_text() for rank in (0, 1))

    def until_copying(self, both: list[subprocess.Popen[str]]) -> None:
        """Wait until both machines are in the middle of the copy that is to be cut."""
        file = self.folder / "copying"
        self.until(both, lambda: file.exists() and file.read_text().split().count(str(CUT)) == 2)
        time.sleep(0.5)

    def until(self, both, done) -> None:
        end = time.monotonic() + 300
        while not done():
            assert time.monotonic() < end, self.output()
            assert all(one.poll() is None for one in both), self.output()
            time.sleep(0.02)

    def equals(self, other: Path) -> None:
        assert rows(self.folder) == rows(other)
        assert batches(self.folder, 2) == batches(other, 2)
        assert unequal(self.folder, other, STEPS) == []


def test_a_link_that_is_cut_in_mid_copy_and_comes_back_only_costs_time(
    linked: list[Host], undisturbed: Path, tmp_path: Path
) -> None:
    run = Run(linked, tmp_path / "run")
    both = run.start()
    run.until_copying(both)
    _set_link(linked[1], "down")
    time.sleep(4)
    _set_link(linked[1], "up")
    assert [one.wait(300) for one in both] == [0, 0], run.output()
    assert f"local save of step {CUT} written" in run.output()
    assert "no local save was written" not in run.output()
    run.equals(undisturbed)


def test_after_a_link_that_is_cut_in_mid_copy_for_good_the_run_goes_on(
    linked: list[Host], undisturbed: Path, tmp_path: Path
) -> None:
    run = Run(linked, tmp_path / "run")
    both = run.start(patience=3)
    run.until_copying(both)
    _set_link(linked[1], "down")
    try:
        run.until(both, lambda: f"step {CUT}: no local save was written" in run.output())
        _kill(both)
        # Without its second machine's disk it has the copies on the first.
        shutil.rmtree(run.folder / "node-1")
        (run.folder / "node-1").mkdir()
        expected = LocalTier(2, 2, 1, random.Random(0)).newest(run.folder)
        assert expected in (CUT - 2, CUT + 2)
        both = run.start("net0", patience=3)
        assert [one.wait(300) for one in both] == [0, 0], run.output()
    finally:
        _kill(both)
        _set_link(linked[1], "up")
    resumed = re.findall(r"resumed from step (\d+)", run.output())
    assert resumed == [str(expected)], run.output()
    run.equals(undisturbed)


def _kill(both: list[subprocess.Popen[str]]) -> None:
    for one in both:
        one.send_signal(signal.SIGKILL)
        one.wait()


def _set_link(machine: Host, state: str) -> None:
    _run("ip", "-n", machine.namespace, "link", "set", LINK, state)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
