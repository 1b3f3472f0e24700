"""The first contact of this process with a server: short, with the cause and a way out.

Later reads wait long for a server to come back (`data.retry_seconds`), and the libraries of stores
try again by themselves. Before the first step that would hide a wrong name, a port that refuses,
or a machine without a network. So the server is connected to once before it is asked.
"""

from __future__ import annotations

import os
import re
import socket
import time
from concurrent.futures import TimeoutError as NoAnswer
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from titanlite.config.urls import public_name
from titanlite.data import DataError
from titanlite.data.remote import url_to_fs, words
from titanlite.data.threads import Pool, ending

#: Seconds for a server to be reached, and of the first wait between two tries.
_SECONDS = 10.0
_FIRST_WAIT = 1.0
#: Ports of URLs that name none; the host of such a URL is the server.
_PORTS = {"http": 80, "https": 443, "ftp": 21, "sftp": 22, "ssh": 22}
_GOOGLE = "https://storage.googleapis.com"
#: The servers that this process has reached, as https://host:port.
_reached: set[str] = set()


def reach(url: str, failed: str, remedy: str) -> None:
    """Connect to the server of a URL, once in this process.

    Raises DataError that begins with `failed` and ends with `remedy` where it is not reached within
    some seconds.
    """
    problem = contact_problem(url)
    if problem is not None:
        raise DataError(f"{failed}: {problem}; {remedy}")


def fetch_remedy(source: str, key: str) -> str:
    """Return what to do where the server of a text is not reached.

    source: id of the hub, or URL of the text. key: of the config, or SOURCE of a command.
    """
    text = f"on a machine with a network copy the files of {public_name(source)} to a FOLDER"
    if "://" not in source:
        text += f" (`hf download {source} --repo-type dataset --local-dir FOLDER`)"
    if "." not in key:
        return text
    path = re.sub(r"\.name$", ".path", key)
    if path.endswith("dataset"):
        path += "_path"
    return f"{text}, then set {path} to it"


def contact_problem(url: str) -> str | None:
    """Return why the server of a URL cannot be reached; None if it can.

    None also where its address is not known: then the first request tells.
    """
    if _scheme(url) == "hf" and _is_offline():
        return "the hub is not asked, since HF_HUB_OFFLINE is set"
    server = _server_of(url)
    if server is None or server in _reached:
        return None
    problem = _problem(server)
    if problem is None:
        _reached.add(server)
    return problem


def _is_offline() -> bool:
    try:
        from huggingface_hub import constants
    except ImportError:
        # The first request says so.
        return False
    return bool(constants.HF_HUB_OFFLINE)


def _server_of(url: str) -> str | None:
    """Return the address that requests for a URL go to; None: it is not known."""
    scheme = _scheme(url)
    try:
        if scheme in _PORTS:
            return _address(url)
        if scheme == "hf":
            from huggingface_hub import constants

            return _address(constants.ENDPOINT)
        if scheme in ("s3", "s3a"):
            return _address(url_to_fs(url)[0].s3.meta.endpoint_url)
        if scheme in ("gs", "gcs"):
            return _address(_google(scheme))
        if scheme in ("az", "abfs", "abfss"):
            return _address(url_to_fs(url)[0].service_client.url)
    except Exception:
        # The URL or a login is not right, or a package is missing: the first request says so.
        return None
    return None


def _google(scheme: str) -> str:
    """Return where requests for Google's store go to.

    Its file system is not made for that: without a network it looks for a login for long. Raises
    ImportError.
    """
    from fsspec import config, get_filesystem_class

    get_filesystem_class(scheme)
    given = config.conf.get(scheme, {}).get("endpoint_url")
    emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
    if not given and emulator not in ("", "default"):
        given = emulator if "://" in emulator else f"http://{emulator}"
    return given or _GOOGLE


def _scheme(url: str) -> str:
    return url.partition("://")[0].lower()


def _address(url: str) -> str:
    parts = urlsplit(url)
    host = parts.hostname or ""
    if ":" in host:
        host = f"[{host}]"
    return f"{parts.scheme}://{host}:{parts.port or _PORTS[parts.scheme]}"


def _problem(server: str) -> str | None:
    """Return why a server, or its proxy, cannot be reached in `_SECONDS`; None if it can."""
    address = urlsplit(server)
    by = ""
    proxy = getproxies().get(address.scheme)
    if proxy and not proxy_bypass(address.hostname or ""):
        address = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        if address.scheme not in _PORTS:
            return None
        by = f" by the proxy {_address(address.geturl())}"
    target = (address.hostname or "", address.port or _PORTS[address.scheme])
    # The system may look up a name for minutes.
    pool = Pool(1, "titanlite-connect")
    began = time.monotonic()
    wait = _FIRST_WAIT
    while True:
        left = _SECONDS - (time.monotonic() - began)
        try:
            pool.submit(socket.create_connection, target, left).result(left).close()
            return None
        except NoAnswer:
            return f"{server} cannot be reached{by}: no answer in {_SECONDS:.0f} s"
        except (OSError, ValueError) as error:
            if time.monotonic() - began + wait > _SECONDS or ending.is_set():
                return f"{server} cannot be reached{by}: {words(error)}"
        ending.wait(wait)
        wait *= 2
