"""The first contact of this process with a server: short, with the cause and a way out.

Later reads wait long for a server to come back (`data.retry_seconds`). Before the first step that
would hide a wrong name, a port that refuses, or a machine without a network. So the server of an
http address and the hub are connected to once before they are asked.
"""

from __future__ import annotations

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from titanlite.data import DataError
from titanlite.data.remote import words

#: Remedy if the server of a dataset is not reached.
COPY = (
    "on a machine with a network copy the files (of a data set of the hub by `hf download`), and "
    "give their folder as the path"
)
#: Seconds for a server to be reached.
_SECONDS = 10.0
_PORTS = {"http": 80, "https": 443}
#: The servers that this process has reached.
_reached: set[tuple[str, int]] = set()


def reach(url: str, failed: str, remedy: str) -> None:
    """Connect to the server of a URL, once in this process.

    Raises DataError with `failed` and `remedy` if it is not reached within some seconds.
    """
    problem = contact_problem(url)
    if problem is not None:
        raise DataError(f"{failed}: {problem}; {remedy}")


def contact_problem(url: str) -> str | None:
    """Return why the server of a URL cannot be reached, or None.

    For object stores and behind a proxy the first request tells instead.
    """
    if url.startswith("hf://"):
        try:
            from huggingface_hub import constants
        except ImportError:
            # The first request says so.
            return None
        if constants.HF_HUB_OFFLINE:
            return "the hub is not asked, since HF_HUB_OFFLINE is set"
        url = constants.ENDPOINT
    try:
        address = urlsplit(url)
        server = (address.hostname or "", address.port or _PORTS.get(address.scheme, 0))
    except ValueError:
        return None
    is_proxied = address.scheme in getproxies() and not proxy_bypass(server[0])
    if address.scheme not in _PORTS or server in _reached or is_proxied:
        return None
    try:
        socket.create_connection(server, _SECONDS).close()
    except OSError as error:
        name = f"{address.scheme}://{server[0]}:{server[1]}"
        return f"{name} cannot be reached: {words(error)}"
    _reached.add(server)
    return None
