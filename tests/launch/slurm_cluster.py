"""A real Slurm of three nodes on this machine: munge, slurmctld and their slurmd on loopback, in
one folder.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.processes import environment, until

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")

# cred_expire also is how long a requeued job waits; the default is two minutes.
_CONF = """
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/munge/sock,cred_expire=5
SlurmctldPort={port}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/linear
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
KillWait=20
SlurmdTimeout={patience}
{nodes}
PartitionName=main Default=YES Nodes=ALL MaxTime=INFINITE State=UP
"""
_NODE = (
    "NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=2000 "
    "State=UNKNOWN"
)
#: Two of a job, and a spare one.
_NODES = 3


@dataclass
class Cluster:
    """The running daemons."""

    root: Path
    environment: dict[str, str]
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *words: str) -> None:
        """Start a daemon in the foreground."""
        with open(self.root / "log" / f"{name}.out", "ab") as out:
            self.daemons[name] = subprocess.Popen(
                words, env=self.environment, stdout=out, stderr=out
            )

    def start_node(self, name: str) -> None:
        """Start the daemon of a node, such as n1."""
        self.start(name, "slurmd", "-D", "-N", name)

    def run(self, *words: str) -> str:
        """Run a command of Slurm's; return its output."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def field(self, job: str, name: str) -> str:
        """Return a field of `scontrol show job`."""
        text = self.run("scontrol", "show", "job", job)
        return next(word.partition("=")[2] for word in text.split() if word.startswith(f"{name}="))

    def wait(self, job: str, *states: str, seconds: float = 600) -> str:
        """Wait until a job is in one of the states; return it."""
        until(lambda: self.field(job, "JobState") in states, seconds)
        return self.field(job, "JobState")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@contextmanager
def cluster(root: Path, patience: int) -> Iterator[Cluster]:
    """Start a cluster below `root`, and end it.

    patience: seconds until Slurm takes a node for lost; its own default is 300.
    """
    nodes = [f"n{number}" for number in range(1, _NODES + 1)]
    for name in ("munge", "state", "log", *(f"spool/{node}" for node in nodes)):
        (root / name).mkdir(parents=True, mode=0o755)
    key = root / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    host, (port, *ports) = socket.gethostname(), _free_ports(1 + _NODES)
    lines = [
        _NODE.format(number=number, host=host, port=one) for number, one in enumerate(ports, 1)
    ]
    conf = root / "slurm.conf"
    places = {"root": root, "host": host, "port": port, "nodes": "\n".join(lines)}
    conf.write_text(_CONF.format(**places, patience=patience))
    path = os.environ["PATH"] + ":/usr/sbin"
    slurm = Cluster(root, environment(PATH=path, SLURM_CONF=str(conf)))
    try:
        munge = root / "munge"
        files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
        slurm.start(
            "munged", "munged", "--foreground", "--force", f"--socket={munge / 'sock'}", *files
        )
        slurm.start("slurmctld", "slurmctld", "-D", "-i")
        for node in nodes:
            slurm.start_node(node)
        idle = ("sinfo", "--Node", "--states=idle", "--format=%N")
        until(lambda: len(_listed(slurm, *idle)) == _NODES)
        yield slurm
    finally:
        for job in _listed(slurm, "squeue", "--format=%i"):
            subprocess.run(["scancel", job], env=slurm.environment, check=False, timeout=300)
        for name in reversed(slurm.daemons):
            slurm.daemons[name].terminate()
        for daemon in slurm.daemons.values():
            try:
                daemon.wait(60)
            except subprocess.TimeoutExpired:
                daemon.kill()


def _listed(slurm: Cluster, *words: str) -> list[str]:
    """Return the words that a command of Slurm's lists: none while no daemon answers."""
    done = subprocess.run(
        [*words, "--noheader"],
        env=slurm.environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return done.stdout.split()


def missing() -> list[str]:
    """Return what this machine lacks for a cluster."""
    path = os.environ["PATH"] + ":/usr/sbin"
    lacks = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    return lacks if os.getuid() == 0 else [*lacks, "the rights of root"]
