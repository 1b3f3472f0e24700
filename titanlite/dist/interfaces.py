"""The interfaces of the network by which other hosts reach this one."""

from __future__ import annotations

import contextlib
import os
import re
import socket

#: Variables that choose interfaces of the network.
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
#: Loopback, and bridges of containers and virtual machines.
_LOCAL_INTERFACE = re.compile(r"lo|docker\d*|br-.*|virbr.*|cni\d*")


def interface_problem(variable: str) -> str:
    """Return why other hosts cannot use the interfaces in `variable`, one of `INTERFACES`; else "".

    If it is not set, gloo takes the address of the host's name, and NCCL prefers one that is not
    local.
    """
    try:
        have = [name for _, name in socket.if_nameindex()]
    except OSError:  # a sandbox may forbid it
        return ""
    reachable = [name for name in have if not _LOCAL_INTERFACE.fullmatch(name)]
    advice = (
        f"set {variable} to one of {', '.join(reachable) or 'the interfaces between the hosts'}"
    )
    value = os.environ.get(variable, "")
    if not value and variable == "GLOO_SOCKET_IFNAME":
        with contextlib.suppress(OSError):
            address = socket.gethostbyname(socket.gethostname())
            if address.startswith("127."):
                return (
                    f"the host's name means {address}, which other hosts cannot reach: {advice}, "
                    "or correct /etc/hosts"
                )
        return ""
    chosen = _chosen_interfaces(variable, value, have) if value else reachable or have
    if not chosen:
        return f"{variable} is {value!r}, but the interfaces are {', '.join(have)}: {advice}"
    if not set(chosen) & set(reachable):
        return (
            f"{variable} is {value!r} and means {', '.join(chosen)}, which other hosts cannot "
            f"reach: {advice}"
        )
    return ""


def _chosen_interfaces(variable: str, value: str, have: list[str]) -> list[str]:
    # NCCL's forms: a list of prefixes, "=" before exact names, "^" before names to leave out.
    is_exact = variable == "GLOO_SOCKET_IFNAME" or "=" in value[:2]
    words = tuple(value.lstrip("^=").split(","))
    named = []
    for interface in have:
        if interface in words if is_exact else interface.startswith(words):
            named.append(interface)
    if value.startswith("^"):
        return [interface for interface in have if interface not in named]
    return named
