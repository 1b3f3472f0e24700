"""Several hosts on this machine: network namespaces on one switch, each with its host name and
address.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import environment

# Each program runs in its own mount namespace: `ip netns exec` makes it.
_ENTER = (
    'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; '
    'while [ "$1" != -- ]; do mount --bind "$1" "$2"; shift 2; done; shift; exec "$@"'
)


@dataclass
class Host:
    """One host. All see the same files."""

    name: str
    address: str
    namespace: str
    hosts_file: Path
    #: Its network interface.
    interface: str = "net0"

    def popen(
        self,
        words: Sequence[object],
        env: Mapping[str, str] | None = None,
        mounts: Mapping[str, str] | None = None,
        **more: Any,
    ) -> subprocess.Popen[str]:
        """Start a program here; its process id is that of the result.

        It ends with the hosts at the latest.

        env: variables beside those of `tests.support.processes.environment`. mounts: path on this
        host -> folder that it shows.
        """
        binds = [word for path, folder in (mounts or {}).items() for word in (folder, path)]
        enter = [
            "ip",
            "netns",
            "exec",
            self.namespace,
            "unshare",
            "--uts",
            "bash",
            "-ec",
            _ENTER,
            "-",
        ]
        words = [*enter, self.name, self.hosts_file, *binds, "--", *words]
        variables = environment(GLOO_SOCKET_IFNAME=self.interface, **(env or {}))
        return subprocess.Popen([str(word) for word in words], env=variables, text=True, **more)

    def cut(self) -> None:
        """Take this host's link down."""
        _ip("-n", self.namespace, "link", "set", self.interface, "down")

    def join(self) -> None:
        """Take this host's link up again, with its address."""
        _ip("-n", self.namespace, "link", "set", self.interface, "up")


@contextmanager
def hosts(count: int, name: str = "host") -> Iterator[list[Host]]:
    """Make hosts NAME-1 to NAME-`count`, which resolve each other's names; at the end kill what
    runs there.

    Skips the test, with a warning, on a machine that cannot have them.
    """
    if lacks := _missing():
        message = (
            f"no network namespaces here: {', '.join(lacks)} (apt-get install iproute2; run as "
            "root)"
        )
        warnings.warn(message, stacklevel=1)
        pytest.skip(message)
    switch = f"titanlite-{os.getpid()}-0"
    made = []
    with tempfile.TemporaryDirectory(prefix="titanlite-hosts-") as folder:
        file = Path(folder) / "hosts"
        machines = [
            Host(f"{name}-{i}", f"10.77.0.{i}", switch[:-1] + str(i), file)
            for i in range(1, count + 1)
        ]
        file.write_text(
            "127.0.0.1 localhost\n" + "".join(f"{one.address} {one.name}\n" for one in machines)
        )
        try:
            for namespace in (switch, *(one.namespace for one in machines)):
                _ip("netns", "add", namespace)
                made.append(namespace)
            _ip("-n", switch, "link", "add", "switch", "type", "bridge")
            _ip("-n", switch, "link", "set", "switch", "up")
            for i, one in enumerate(machines):
                port = f"port{i}"
                inside = ("-n", one.namespace)
                _ip(
                    *inside,
                    "link",
                    "add",
                    one.interface,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    port,
                    "netns",
                    switch,
                )
                _ip("-n", switch, "link", "set", port, "master", "switch", "up")
                _ip(*inside, "address", "add", f"{one.address}/24", "dev", one.interface)
                _ip(*inside, "link", "set", "lo", "up")
                one.join()
            yield machines
        finally:
            for namespace in made:
                for pid in _ip("netns", "pids", namespace).split():
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                _ip("netns", "delete", namespace)


def _missing() -> list[str]:
    """Return what this machine lacks for hosts."""
    lacks = [name for name in ("ip", "unshare") if shutil.which(name) is None]
    if lacks or os.getuid() != 0:
        return [*lacks, "the rights of root"] if os.getuid() else lacks
    probe = f"titanlite-{os.getpid()}-probe"
    try:
        _ip("netns", "add", probe)
        _ip("netns", "delete", probe)
    except subprocess.CalledProcessError as error:
        return [f"rights for namespaces ({error.stderr.strip()})"]
    return []


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
