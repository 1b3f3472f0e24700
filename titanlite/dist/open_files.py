"""The limit of open files of a process."""

from __future__ import annotations

import contextlib
import resource
import socket

from titanlite.dist import ParallelismError

#: gloo's groups of all ranks: the default one, those of a mesh, of saves, of asynchronous saves.
#: Other files.
_GROUPS = 4
_FILES = 256


def raise_file_limit(wanted: int) -> int:
    """Let this process and its children open `wanted` files, or the hard limit; return the
    limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # systems have further limits
            higher = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (higher, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def allow_files(ranks: int) -> None:
    """Raise the limit of open files: gloo has a socket per rank and group.

    Raises ParallelismError if the hard limit is too low.
    """
    needed = _FILES + _GROUPS * ranks
    # The process that serves the store has connections to all as well.
    limit = raise_file_limit(2 * needed)
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise ParallelismError(
            f"a process on {socket.gethostname()} may open {limit:,} files, but {ranks:,} ranks "
            f"need {needed:,}: gloo connects each to all others in {_GROUPS} groups. Raise the "
            "hard limit (ulimit -Hn): LimitNOFILE in the service of slurmd or containerd, "
            "/etc/security/limits.conf, or docker run --ulimit nofile"
        )
