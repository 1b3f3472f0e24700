"""The containers of a PyTorchJob, as network namespaces, under the rules of Kubeflow's operator."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch.namespaces import Host
from tests.support.processes import ROOT
from tests.support.train_runs import rows, unequal
from titanlite.cli.launch import prepare
from titanlite.launch import kubernetes as launch_kubernetes
from titanlite.runs.lines import read_lines

STEPS = 9
FLAGS = [
    "--job.config_file=debug_model.toml",
    f"--training.steps={STEPS}",
    "--training.seq_len=64",
    "--training.batch_size=2",
    "--metrics.log_freq=1",
    "--no-validation.enable",
    "--checkpoint.enable_checkpoint",
    "--checkpoint.interval=2",
    "--launch.image=none",
    "--launch.nodes=2",
    "--launch.gpus_per_node=1",
    "--launch.cpu",
]
SLOW = "--job.callbacks=tests.launch.slow_steps:SlowSteps"


class Operator:
    """Makes the pods of a PyTorchJob, and replaces those that end with 128 or more."""

    def __init__(self, machines: list[Host], folder: Path, *flags: str) -> None:
        volume = f'--launch.volumes={{"claim" = "{folder.parent}"}}'
        job = prepare([*FLAGS, volume, f"--job.dump_folder={folder}", *flags])
        self.folder = folder
        manifests = [yaml.safe_load(text) for text in launch_kubernetes.files(job).values()]
        self.config = folder.parent / "config.toml"
        self.config.write_text(manifests[0]["data"]["config.toml"])
        self.name = manifests[1]["metadata"]["name"]
        self.spec = manifests[1]["spec"]
        self.machines = machines
        with machines[0].hosts_file.open("a") as file:
            for i, machine in enumerate(machines):
                machine.name = f"{self.name}-worker-{i}"
                file.write(f"{machine.address} {machine.name}\n")
        self.codes: list[int] = []
        self.pods = [self._start(i) for i in range(len(machines))]

    def _start(self, index: int) -> subprocess.Popen[str]:
        container = self.spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
        elastic = self.spec["elasticPolicy"]
        variables: dict[str, Any] = {one["name"]: one["value"] for one in container["env"]} | {
            "HOSTNAME": f"{self.name}-worker-{index}",
            # As pkg/controller.v1/pytorch/elastic.go of the operator has them.
            "PET_RDZV_ENDPOINT": f"{self.name}-worker-0:23456",
            "PET_RDZV_BACKEND": elastic["rdzvBackend"],
            "PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}",
            "PET_MAX_RESTARTS": elastic["maxRestarts"],
        }
        words = [
            str(self.config) if word == "/etc/titanlite/config.toml" else word
            for word in container["args"]
        ]
        with (self.folder.parent / f"pod-{index}.log").open("a") as log:
            env = {name: str(value) for name, value in variables.items()}
            return self.machines[index].popen(words, env=env, cwd=ROOT, stdout=log, stderr=log)

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
    machines: list[Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    plain = Operator(machines, tmp_path / "a" / "run")
    assert plain.run() == "Succeeded" and plain.codes == [], plain.log()
    disturbed = Operator(machines, tmp_path / "b" / "run", SLOW)
    assert disturbed.run(kill_rank_of_second_pod, evict_first_pod) == "Succeeded", disturbed.log()
    # Each disturbance ends both pods. A new one may also meet the torchrun that is about to end,
    # and is replaced again.
    assert set(disturbed.codes) == {138}
    assert len(disturbed.codes) >= 4
    assert "SIGTERM: stopping" in disturbed.log()
    assert [row[0] for row in rows(disturbed.folder)] == list(range(1, STEPS + 1))
    assert unequal(plain.folder, disturbed.folder, STEPS) == []


@pytest.mark.slow
def test_an_error_of_the_config_fails_the_job(
    machines: list[Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    operator = Operator(machines, tmp_path / "run", "--training.dataset_path=/nowhere/text.jsonl")
    assert operator.run() == "Failed" and operator.codes == [2], operator.log()
