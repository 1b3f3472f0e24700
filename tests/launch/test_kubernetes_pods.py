"""The containers of a PyTorchJob, as processes, under the rules of Kubeflow's operator."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch.slurm_jobs import LAUNCH, RUN, STEPS
from tests.support.pool import free_port
from tests.support.processes import ROOT, environment
from tests.support.train_runs import rows, unequal
from titanlite.cli.launch import prepare
from titanlite.launch import kubernetes as launch_kubernetes
from titanlite.runs.lines import read_lines

FLAGS = [
    *RUN,
    *LAUNCH,
    "--checkpoint.interval=2",
    "--launch.image=none",
    "--launch.environment.STEP_SECONDS=0.25",
    "--launch.environment.GLOO_SOCKET_IFNAME=lo",
]


class Operator:
    """Makes the pods of a PyTorchJob, and replaces those that end with 128 or more."""

    def __init__(self, folder: Path, *flags: str) -> None:
        volume = f'--launch.volumes={{"claim" = "{folder.parent}"}}'
        job = prepare([*FLAGS, volume, f"--job.dump_folder={folder}", *flags])
        self.folder = folder
        manifests = [yaml.safe_load(text) for text in launch_kubernetes.files(job).values()]
        self.config = folder.parent / "config.toml"
        self.config.write_text(manifests[0]["data"]["config.toml"])
        self.name = manifests[1]["metadata"]["name"]
        self.spec = manifests[1]["spec"]
        self.port = free_port()
        self.codes: list[int] = []
        self.pods = [self._start(i) for i in (0, 1)]

    def _start(self, index: int) -> subprocess.Popen[str]:
        container = self.spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
        elastic = self.spec["elasticPolicy"]
        variables: dict[str, Any] = {one["name"]: one["value"] for one in container["env"]} | {
            "HOSTNAME": f"{self.name}-worker-{index}",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            # As pkg/controller.v1/pytorch/elastic.go of the operator has them.
            "PET_RDZV_ENDPOINT": f"localhost:{self.port}",
            "PET_RDZV_BACKEND": elastic["rdzvBackend"],
            "PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}",
            "PET_MAX_RESTARTS": elastic["maxRestarts"],
        }
        words = [
            str(self.config) if word == "/etc/titanlite/config.toml" else word
            for word in container["args"]
        ]
        with (self.folder.parent / f"pod-{index}.log").open("a") as log:
            env = environment(**{name: str(value) for name, value in variables.items()})
            return subprocess.Popen(words, env=env, cwd=ROOT, stdout=log, stderr=log, text=True)

    def run(self, *disturbances: Any) -> str:
        """Run the job to its end; return its condition.

        disturbances: called one after another until they are true.
        """
        waiting = list(disturbances)
        end = time.monotonic() + 900
        while True:
            assert time.monotonic() < end, self.log()
            if waiting and waiting[0](self):
                waiting.pop(0)
            for index, pod in enumerate(self.pods):
                if pod.poll() is None or pod.returncode == 0:
                    continue
                self.codes.append(pod.returncode)
                if pod.returncode < 128:  # restartPolicy: ExitCode
                    return "Failed"
                self.pods[index] = self._start(index)
            if all(pod.returncode == 0 for pod in self.pods):
                return "Succeeded"
            time.sleep(0.1)

    def log(self) -> str:
        """Return the logs of all pods."""
        return "".join(file.read_text() for file in sorted(self.folder.parent.glob("pod-*.log")))

    def at(self, step: int) -> bool:
        """Whether the run has logged a step."""
        file = self.folder / "metrics.jsonl"
        return file.exists() and any(row.get("step") == step for row in read_lines(file))


def _children(pid: int) -> list[int]:
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in files for child in file.read_text().split()]


def kill_rank_of_second_pod(operator: Operator) -> bool:
    if not operator.at(3):
        return False
    for pid in _children(operator.pods[1].pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return True


def evict_first_pod(operator: Operator) -> bool:
    if not operator.at(6):
        return False
    operator.pods[0].terminate()
    return True


@pytest.mark.soak
def test_a_killed_rank_and_an_evicted_pod_lead_to_the_undisturbed_weights(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    operator = Operator(tmp_path / "run")
    assert operator.run(kill_rank_of_second_pod, evict_first_pod) == "Succeeded", operator.log()
    # Each disturbance ends both pods. A new one may also meet the torchrun that is about to end,
    # and is replaced again.
    assert set(operator.codes) == {138}
    assert len(operator.codes) >= 4
    assert "by SIGTERM on rank" in operator.log()
    assert rows(operator.folder) == rows(undisturbed)
    assert unequal(undisturbed, operator.folder, STEPS) == []


@pytest.mark.slow
def test_an_error_of_the_config_fails_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    operator = Operator(tmp_path / "run", "--training.dataset_path=/nowhere/text.jsonl")
    assert operator.run() == "Failed" and operator.codes == [2], operator.log()
