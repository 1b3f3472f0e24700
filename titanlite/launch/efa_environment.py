"""Variables that the network of an AWS instance type needs; `titanlite.plan.hardware` has the table
of types.
"""

from __future__ import annotations

from titanlite.plan.hardware import Instance


def network_environment(instance: Instance | None, *, efa: bool = True) -> dict[str, str]:
    """Return the variables of NCCL and libfabric for an instance type; None: none are known.

    efa: with those of EFA; a single machine needs none.
    """
    if instance is None:
        return {}
    # Sockets carry the start-up and, without EFA, all traffic: not over loopback, nor over a
    # container's bridge.
    variables = {"NCCL_SOCKET_IFNAME": "^lo,docker,veth"}
    if instance.efa and efa:
        variables["FI_PROVIDER"] = "efa"
        # Huge pages break the fork of data workers.
        variables["FI_EFA_USE_HUGE_PAGE"] = "0"
    if instance.rdma and efa:
        variables["FI_EFA_USE_DEVICE_RDMA"] = "1"
    return variables
