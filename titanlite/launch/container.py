"""The first process of a container.

    python -m titanlite.launch.container COMMAND [ARGUMENT ...]

It passes SIGTERM, SIGINT and SIGUSR1 on, collects ended processes and ends with the command's exit
code. SageMaker starts a container with the command `train`, which stands for the job that is
described below /opt/ml.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from titanlite.dist.process import count_gpus
from titanlite.launch.instances import network_environment
from titanlite.plan.hardware import INSTANCES
from titanlite.utils import parse_json

#: As SageMaker's own toolkit has it.
_PORT = 7777
#: Seconds between two looks for a process that listens to SIGUSR1.
_POLL_SECONDS = 0.2


def run(words: list[str]) -> int:
    """Run a command to its end; return its exit code, or 128 plus the number of its signal."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGCHLD)
    # A blocked signal waits for sigwait: none is lost, not even for process 1, which the kernel
    # shields from others.
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    # torchrun would die of SIGUSR1. A program starts with it ignored, until a worker listens to it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    python_ignores = (signal.SIGPIPE, signal.SIGXFSZ)
    try:
        child = os.posix_spawnp(
            words[0], words, os.environ, setsigmask=[], setsigdef=python_ignores
        )
    except OSError as error:
        print(f"error: {words[0]}: {error.strerror}", file=sys.stderr)
        return 127
    notice_is_due = False
    while True:
        came = (
            signal.sigtimedwait(numbers, _POLL_SECONDS)
            if notice_is_due
            else signal.sigwaitinfo(numbers)
        )
        number = came.si_signo if came is not None else 0
        if number == signal.SIGCHLD:
            if (code := _collect(child)) is not None:
                return code if code >= 0 else 128 - code
        elif number in (signal.SIGTERM, signal.SIGINT):
            _send(number, [child])
        if number == signal.SIGUSR1 or notice_is_due:
            # While Python starts, no worker listens. The notice is kept until one does.
            listeners = _listeners(child, signal.SIGUSR1)
            _send(signal.SIGUSR1, listeners)
            notice_is_due = not listeners


def _send(number: int, processes: Iterable[int]) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _collect(child: int) -> int | None:
    """Collect all ended processes, so that no zombie stays; return the code of `child` if it is one
    of them.
    """
    code = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def _listeners(first: int, number: int) -> list[int]:
    """Return the processes that have a handler for a signal, of a process and all that it has
    started.
    """
    parents = dict[int, int]()
    handles = set[int]()
    for file in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            fields = dict(line.split(":\t", 1) for line in file.read_text().splitlines())
            pid = int(file.parent.name)
            parents[pid] = int(fields["PPid"])
            if int(fields["SigCgt"], 16) >> (number - 1) & 1:
                handles.add(pid)
    found = [first]
    for one in found:
        found += [pid for pid, parent in parents.items() if parent == one]
    return [pid for pid in found if pid in handles]


def sagemaker_job(base: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment variables of a SageMaker training job, as its toolkit
    sets them.

    base: /opt/ml. The hyperparameter `config_file` is the config; others are `section.key`. The
    first host has rank 0.
    """
    config = base / "input" / "config"

    def read(name: str) -> dict[str, Any]:
        file = config / f"{name}.json"
        return parse_json(file.read_bytes()) if file.exists() else {}

    resources = read("resourceconfig")
    hosts: list[str] = resources.get("hosts") or ["localhost"]
    here = resources.get("current_host", hosts[0])
    instance = resources.get("current_instance_type", "").removeprefix("ml.")
    variables = network_environment(INSTANCES.get(instance))
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
    for name, value in sorted(read("hyperparameters").items()):
        if not name.startswith("sagemaker_"):
            key = "job.config_file" if name == "config_file" else name
            command.append(f"--{key}={_hyperparameter(value)}")
    return command, variables


def _hyperparameter(value: Any) -> str:
    """Return a hyperparameter as a word of a command line; null is an empty word."""
    # The SDK writes JSON, other callers plain text.
    with contextlib.suppress(ValueError):
        value = parse_json(value)
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def main() -> int:
    """Run the command of `sys.argv`; return its exit code."""
    words = sys.argv[1:]
    if words[:1] == ["train"]:
        words, variables = sagemaker_job(Path(os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml")))
        os.environ.update(
            {name: value for name, value in variables.items() if name not in os.environ}
        )
    return run(words or ["bash"])


if __name__ == "__main__":
    sys.exit(main())
