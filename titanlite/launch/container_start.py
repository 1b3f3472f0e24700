"""The first process of a container.

    python -m titanlite.launch.container_start COMMAND [ARGUMENT ...]

It becomes the command. SageMaker starts a container with the command `train`, which stands for the
job that is described below /opt/ml.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from titanlite.dist.count_gpus import count_gpus
from titanlite.launch.efa_environment import network_environment
from titanlite.plan.hardware import INSTANCES
from titanlite.utils import parse_json

#: As SageMaker's own toolkit has it.
_PORT = 7777
#: The part of the toolkit that starts torchrun.
_TOOLKIT = {"SAGEMAKER_TRAINING_MODULE": "sagemaker_pytorch_container.training:main"}


def sagemaker_job(base: Path) -> tuple[list[str], dict[str, str]]:
    """Return command and variables of a SageMaker training job, as its toolkit sets them.

    base: /opt/ml. The hyperparameter `config_file` is the config; others are `section.key`. The
    first host has rank 0. A job with an `entry_point` is left to the toolkit's own `train`.
    """
    config = base / "input" / "config"

    def read(name: str) -> dict[str, Any]:
        file = config / f"{name}.json"
        return parse_json(file.read_bytes()) if file.exists() else {}

    parameters = read("hyperparameters")
    resources = read("resourceconfig")
    instance = resources.get("current_instance_type", "").removeprefix("ml.")
    variables = network_environment(INSTANCES.get(instance))
    if "sagemaker_program" in parameters:
        if shutil.which("train") is None:
            sys.exit("error: an entry_point needs sagemaker-pytorch-training in the image")
        return ["train"], variables | _TOOLKIT
    hosts: list[str] = resources.get("hosts") or ["localhost"]
    here = resources.get("current_host", hosts[0])
    interface = resources.get("network_interface_name")
    if interface:
        variables |= {"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface}
    for name in read("inputdataconfig"):
        variables[f"SM_CHANNEL_{name.upper()}"] = f"{base}/input/data/{name}"
    variables |= {
        "SM_HOSTS": json.dumps(hosts),
        "SM_CURRENT_HOST": here,
        "SM_MODEL_DIR": f"{base}/model",
        "SM_OUTPUT_DIR": f"{base}/output",
    }
    ranks = os.environ.get("NGPU") or str(count_gpus() or 1)
    options = {
        "nnodes": str(len(hosts)),
        "nproc_per_node": ranks,
        "node_rank": str(hosts.index(here)),
        "master_addr": hosts[0],
        "master_port": str(_PORT),
    }
    command = [sys.executable, "-m", "titanlite.torchrun"]
    for name, value in options.items():
        command += [f"--{name}", value]
    command += ["-m", "titanlite", "train"]
    for name, value in sorted(parameters.items()):
        if not name.startswith("sagemaker_"):
            key = "job.config_file" if name == "config_file" else name
            # The SDK writes JSON, other callers plain text.
            with contextlib.suppress(ValueError):
                value = parse_json(value)
            text = value if isinstance(value, str) else json.dumps(value)
            command.append(f"--{key}={'' if value is None else text}")
    return command, variables


def main() -> NoReturn:
    """Become the command of `sys.argv`."""
    words = sys.argv[1:] or ["bash"]
    if words[0] == "train":
        words, variables = sagemaker_job(Path(os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml")))
        for name, value in variables.items():
            os.environ.setdefault(name, value)
    # torchrun would die of SIGUSR1.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # Python itself ignores it.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvp(words[0], words)
    except OSError as error:
        print(f"error: {words[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
