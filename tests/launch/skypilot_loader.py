"""Prints what SkyPilot itself reads from task files: PYTHON tests/launch/skypilot_loader.py FILE…

PYTHON has SkyPilot (pip install skypilot==0.14.1 in an environment of its own: it has about 90
dependencies). `tests/launch/skypilot_tasks.json` is its output for deploy/examples/skypilot/*.yaml.
It needs no cloud and no network: a folder of the process gets a catalog of one machine type.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

_CATALOG = """\
InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,\
AvailabilityZone,Arch
p5.48xlarge,H100,8,192,2048,,98.32,30.0,us-east-1,us-east-1a,x86_64
p4de.24xlarge,A100-80GB,8,96,1152,,40.97,20.0,us-east-1,us-east-1a,x86_64
"""


def read(sky: Any, file: Path) -> dict[str, Any]:
    """Return what SkyPilot's loader understands of a task file."""
    config = yaml.safe_load(file.read_text())
    # As `sky jobs launch --secret NAME` gives them.
    values = [(name, "value") for name in config.get("secrets", {})]
    task = sky.Task.from_yaml_config(config, secrets_overrides=values)
    (resources,) = task.resources
    mounts = {
        path: [storage.source, storage.mode.value] for path, storage in task.storage_mounts.items()
    }
    return {
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "name": task.name,
        "nodes": task.num_nodes,
        "workdir": task.workdir,
        "accelerators": resources.accelerators,
        "instance_type": resources.instance_type,
        "region": resources.region,
        "image": resources.image_id,
        "spot": resources.use_spot,
        "recovery": resources.job_recovery,
        "mounts": mounts,
        "variables": sorted(task.envs),
        "secrets": sorted(task.secrets),
        "setup": task.setup,
    }


def main(files: list[str]) -> None:
    with tempfile.TemporaryDirectory() as home:
        os.environ["HOME"] = home
        os.environ["SKYPILOT_DISABLE_USAGE_COLLECTION"] = "1"
        catalog = Path(home, ".sky", "catalogs", "v8", "aws")
        catalog.mkdir(parents=True)
        (catalog / "vms.csv").write_text(_CATALOG)
        sky = importlib.import_module("sky")
        tasks = {Path(file).name: read(sky, Path(file)) for file in files}
        json.dump({"version": sky.__version__, "tasks": tasks}, sys.stdout, indent=1, default=str)
        print()


if __name__ == "__main__":
    main(sys.argv[1:])
