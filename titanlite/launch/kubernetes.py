"""A manifest for Kubernetes: Kubeflow's PyTorchJob or TrainJob."""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from titanlite import exit_codes
from titanlite.config.dataset_registry import BUNDLED_TOKENIZER_NAME
from titanlite.config.errors import Problem, refuse
from titanlite.config.toml import quote_key
from titanlite.config.urls import is_url
from titanlite.launch.efa_environment import network_environment
from titanlite.launch.job import CONFIG, Job, LaunchError, limit_seconds, render
from titanlite.runs.config_changes import config_values
from titanlite.runs.provenance import is_secret
from titanlite.utils import public

FILE = "job.yaml"
CONFIG_FILE = "config.yaml"
#: Folder of the config in a pod.
_CONFIG_FOLDER = "/etc/titanlite"
#: 128 and the number of SIGUSR1: Kubeflow's operator replaces a pod that ends with 128 or more.
_RESTART_CODE = 138
#: From the end of the ranks to that of the container.
_SPARE_SECONDS = 30
#: Variables that the pods have by themselves.
_IN_PODS = r"(PET|KUBERNETES)_\w+|HOME|HOSTNAME|PATH|USER"
_VARIABLE = re.compile(r"(?<!\$)\$\{(\w+)\}")
#: Keys of data that the pods read.
_PATHS = (
    "model.tokenizer_path",
    "training.dataset_path",
    "validation.dataset_path",
    "checkpoint.initial_load_path",
    "lora.adapter",
)
#: Pods of a job, by the label of its kind.
_LABELS = {
    "PyTorchJob": "training.kubeflow.org/job-name",
    "TrainJob": "jobset.sigs.k8s.io/jobset-name",
}
#: CPUs of a rank with a GPU: its main thread, and those that load data, launch collectives and
#: write checkpoints.
_CPUS = 2
#: The label by which Kueue finds the queue of a job.
_QUEUE = "kueue.x-k8s.io/queue-name"


def files(job: Job) -> dict[str, str]:
    """Return the manifests by their names in the job's folder. Raises ConfigError."""
    launch = job.launch
    name = _name(job)
    refuse(list(_problems(job)))
    kind = launch.kind
    gpus = not launch.cpu
    fabric = job.instance if launch.nodes > 1 and gpus else None
    # The operator gives the rest of the rendezvous in the environment; of a TrainJob all of it.
    torchrun = ["python", "-m", "titanlite.torchrun"]
    if kind != "TrainJob":
        torchrun += ["--nproc_per_node", str(job.ranks)]
    cpus = launch.cpu_request or str(_CPUS * job.ranks if gpus else job.ranks)
    amounts = {"cpu": cpus, "memory": launch.memory_request}
    values = {
        "name": name,
        "folder": _folder(job),
        "run_folder": job.run.job.dump_folder,
        "ranks": job.ranks,
        "gpus": gpus,
        "efa": fabric.efa if fabric else 0,
        "node_type": launch.instance_type,
        "container": "node" if kind == "TrainJob" else "pytorch",
        "words": [*torchrun, "-m", "titanlite", "train", f"{_CONFIG_FOLDER}/{CONFIG}"],
        "environment": {
            # So that a log shows each step when it is done.
            "PYTHONUNBUFFERED": "1",
            # Time for a checkpoint after SIGTERM, before torchrun kills its ranks.
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(launch.notice_seconds),
            exit_codes.RESTART_VARIABLE: str(_RESTART_CODE),
            **({"OMP_NUM_THREADS": "1"} if launch.cpu else network_environment(fabric)),
            **launch.environment,
        },
        "grace_seconds": launch.notice_seconds + _SPARE_SECONDS,
        "requests": {name: asked for name, asked in amounts.items() if asked not in ("", "0")},
        "shm_size": "" if launch.shm_size == "0" else launch.shm_size,
        "labels": launch.labels,
        "annotations": launch.annotations,
        "deadline": limit_seconds(launch.time_limit),
        "volumes": [
            # Names of claims are longer than those of volumes may be, and two can become one.
            (f"volume-{number}", source, path)
            for number, (source, path) in enumerate(launch.volumes.items())
        ],
        "config_folder": _CONFIG_FOLDER,
        "config_file": CONFIG,
        "config": job.config,
        "kind": kind,
    }
    names = ("nodes", "image", "namespace", "queue", "max_restarts", "token_secret")
    values |= {name: getattr(launch, name) for name in names}
    return {
        CONFIG_FILE: render("configmap.yaml.jinja", job, values),
        FILE: render("kubernetes.yaml.jinja", job, values),
    }


def _folder(job: Job) -> str:
    return shlex.quote(str(job.folder))


def _name(job: Job) -> str:
    """Return a host name with room for that of a pod; two run folders have two."""
    name = re.sub(r"[^a-z0-9-]+", "-", job.name)
    if not name[0].isalpha():
        name = f"run-{name}"
    start = name[:33].strip("-")
    return f"{start}-{hashlib.sha256(bytes(job.folder.parent)).hexdigest()[:6]}"


def _problems(job: Job) -> Iterator[Problem]:
    launch = job.launch
    values = config_values(job.run.toml)
    found = [*_values_of_others(job, values)]
    for name in launch.environment:
        # A tokenizer's settings are no secrets.
        if is_secret(name) and not name.startswith("TOKENIZERS_"):
            hint = (
                f"kubectl create secret generic NAME --from-literal={name}=…, and "
                'launch.token_secret = "NAME"'
            )
            found.append((f"launch.environment.{name}", "all readers of the manifest see it", hint))
    for kind, table in (("labels", launch.labels), ("annotations", launch.annotations)):
        if _QUEUE in table:
            key = f"launch.{kind}.{quote_key(_QUEUE)}"
            found.append((key, "is the label of launch.queue", "set launch.queue"))
    if not launch.image:
        hint = "name the image that deploy/Dockerfile makes, in a registry of the cluster"
        found.append(("launch.image", "a pod needs a container image", hint))
    for source, path in launch.volumes.items():
        if path[:1] != "/" or not re.fullmatch(r"/.*|[a-z0-9]([-a-z0-9.]*[a-z0-9])?", source):
            message = f"{source!r} = {path!r} is not a claim, or a path of the nodes, and a folder"
            found.append(("launch.volumes", message, 'as in {"fsx-claim" = "/fsx"}'))
    for key, message, hint in (*found, *_unmounted(job, str(values["checkpoint.folder"]))):
        yield Problem("does-not-fit", key, message, hint)


def _values_of_others(job: Job, values: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield variables that the pods lack, and URLs that readers of the manifest must not see."""
    # The names of the secret's variables are not known here.
    in_pods = r"\w+" if job.launch.token_secret else _IN_PODS
    for key, value in values.items():
        text = json.dumps(value, default=str)
        for name in dict.fromkeys(_VARIABLE.findall(text)):
            if name not in job.launch.environment and not re.fullmatch(in_pods, name):
                message = f"the containers have no environment variable {name}"
                hint = f"set launch.environment.{name}, or write $${{ for a literal ${{"
                yield key, message, hint
        if public(text) != text:
            message = "all readers of the manifest see the login or signature of its URL"
            hint = "write the URL as ${NAME}, a variable of the secret launch.token_secret"
            yield key, message, hint


def _unmounted(job: Job, checkpoints: str) -> Iterator[tuple[str, str, str]]:
    sources = {path: source for source, path in job.launch.volumes.items()}
    # A path of a node ends with it, and other nodes do not see it.
    paths = [path for path, source in sources.items() if not source.startswith("/")]
    folder = job.run.job.dump_folder
    folders = {"job.dump_folder": folder}
    variables = job.launch.environment
    checkpoints = _VARIABLE.sub(lambda match: variables.get(match[1], match[0]), checkpoints)
    if job.run.checkpoint.enable_checkpoint and not is_url(checkpoints):
        folders["checkpoint.folder"] = posixpath.join(folder, checkpoints)
    for key, text in folders.items():
        place = PurePosixPath(posixpath.normpath(text))
        around = [path for path in sources if place.is_relative_to(path)]
        # The innermost mount holds a folder.
        if max(around, key=len, default="") not in paths:
            message = (
                f"{str(place)!r} is not on a volume of the pods ({', '.join(paths) or 'none'}): "
                "checkpoints would end with the pod"
            )
            hint = (
                'set launch.volumes, as {"fsx-claim" = "/fsx"}, and a folder below one of its paths'
            )
            yield key, message, hint


def warnings(job: Job) -> list[str]:
    """Return a warning for each relative path of data."""
    values = config_values(job.run.toml)
    found = []
    for key in _PATHS:
        path = values.get(key)
        if path == BUNDLED_TOKENIZER_NAME:
            continue
        if isinstance(path, str) and path and not is_url(path) and path[0] not in "/~$":
            hint = "pods look for it below /workspace, not on a volume"
            found.append(f"{key} = {path!r} is relative: {hint}")
    return found


def advice(job: Job) -> str:
    """Return how to submit the manifest, follow, stop and continue the job."""
    return "\n".join([f"submit it with: kubectl apply -f {_folder(job)}", *_next(job)])


def _next(job: Job) -> list[str]:
    return [
        *follow(job),
        f"start it again when it has ended: kubectl replace --force -f {_folder(job)}",
        f"remove it: kubectl delete -f {_folder(job)}",
    ]


def follow(job: Job) -> list[str]:
    """Return how to follow, stop and continue the job."""
    launch = job.launch
    name = _name(job)
    kubectl = "kubectl"
    if launch.namespace:
        kubectl += f" -n {launch.namespace}"

    kind: str = launch.kind

    def suspend(value: bool) -> str:
        spec: dict[str, Any] = {"suspend": value}
        patch = json.dumps({"spec": spec if kind == "TrainJob" else {"runPolicy": spec}})
        return f"{kubectl} patch {kind.lower()} {name} --type=merge -p {shlex.quote(patch)}"

    logs = f"{kubectl} logs -f --prefix --max-log-requests={launch.nodes} -l {_LABELS[kind]}={name}"
    return [
        f"follow it with: {logs}",
        f"stop it with a checkpoint: {suspend(True)}",
        f"continue it: {suspend(False)}",
    ]


def submit(job: Job) -> str:
    """Submit the manifests; return what to do next. Raises LaunchError."""
    if shutil.which("kubectl") is None:
        raise LaunchError(
            f"kubectl is not installed here; run kubectl apply -f {_folder(job)} where it is"
        )
    words = ["kubectl", "apply", "-f", str(job.folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchError(f"kubectl did not take {job.folder}: {done.stderr.strip()}")
    return "\n".join([done.stdout.strip(), *_next(job)])
