"""The containers of a PyTorchJob, as processes, under the rules of Kubeflow's operator."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from tests.launch.slurm_jobs import LAUNCH, RUN, STEPS, until_step
from tests.support.pool import free_port
from tests.support.processes import ROOT, environment
from tests.support.train_runs import rows, unequal
from titanlite.cli.launch import prepare
from titanlite.launch import kubernetes as launch_kubernetes

FLAGS = [
    *RUN,
    *LAUNCH,
    "--checkpoint.interval=2",
    "--launch.image=none",
    "--launch.environment.STEP_SECONDS=0.25",
    "--launch.environment.GLOO_SOCKET_IFNAME=lo",
]


@pytest.mark.soak
def test_a_killed_rank_and_an_evicted_pod_lead_to_the_undisturbed_weights(
    undisturbed, tmp_path, monkeypatch
):
    monkeypatch.chdir(ROOT)
    run, log = tmp_path / "run", tmp_path / "log"
    volume = f'--launch.volumes={{"claim" = "{tmp_path}"}}'
    files = launch_kubernetes.files(prepare([*FLAGS, volume, f"--job.dump_folder={run}"]))
    config_map, job = (yaml.safe_load(text) for text in files.values())
    (tmp_path / "config.toml").write_text(config_map["data"]["config.toml"])
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    words = [word.replace("/etc/titanlite", str(tmp_path)) for word in container["args"]]
    elastic = job["spec"]["elasticPolicy"]
    variables = {one["name"]: one["value"] for one in container["env"]} | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        # As pkg/controller.v1/pytorch/elastic.go of the operator has them.
        "PET_RDZV_ENDPOINT": f"localhost:{free_port()}",
        "PET_RDZV_BACKEND": elastic["rdzvBackend"],
        "PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}",
        "PET_MAX_RESTARTS": str(elastic["maxRestarts"]),
    }

    def start(number):
        own = environment(**variables, HOSTNAME=f"{job['metadata']['name']}-worker-{number}")
        with log.open("a") as out:
            return subprocess.Popen(words, env=own, cwd=ROOT, stdout=out, stderr=out)

    pods = [start(0), start(1)]
    until_step(run, 3)
    for file in Path(f"/proc/{pods[1].pid}/task").glob("*/children"):
        for rank in file.read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(rank), signal.SIGKILL)
    is_evicted = False
    end = time.monotonic() + 900
    while any(pod.poll() != 0 for pod in pods):
        assert time.monotonic() < end, log.read_text()
        for number, pod in enumerate(pods):
            if pod.poll():
                # The operator replaces pods that end with 128 or more.
                assert pod.returncode == 138, log.read_text()
                pods[number] = start(number)
        if not is_evicted and '"step": 6,' in (run / "metrics.jsonl").read_text():
            pods[0].terminate()
            is_evicted = True
        time.sleep(0.1)
    assert "by SIGTERM on rank" in log.read_text()
    assert rows(run) == rows(undisturbed)
    assert unequal(undisturbed, run, STEPS) == []
