"""Where a run comes from: versions, environment, commit, config.

Nothing here is secret, and nothing may stop a run.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import titanlite
from titanlite import __version__
from titanlite.utils import REMOVED, public

#: Bytes of `git.diff` that are kept.
DIFF_LIMIT = 1 << 20

_LIBRARIES = (
    "torch",
    "torchao",
    "triton",
    "numpy",
    "msgspec",
    "datasets",
    "safetensors",
    "transformers",
    "tiktoken",
    "sentencepiece",
    "tokenizers",
)
_PREFIXES = (
    "CUDA_",
    "CUBLAS_",
    "NVIDIA_VISIBLE_",
    "NCCL_",
    "GLOO_",
    "FI_",
    "UCX_",
    "TORCH",
    "PYTORCH_",
    "TRITON_",
    "OMP_",
    "MKL_",
    "KMP_",
    "SLURM_",
)
_NAMES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "LD_PRELOAD")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "JWT", "AUTH")
_LAUNCH = re.compile(r"--?launch\.environment(?:\.(?P<name>[^=]+))?(?P<value>=.*)?", re.DOTALL)
_LAUNCH_LINE = re.compile(r"^(environment\.)(\S+) = .*$", re.MULTILINE)
_GIT_SECONDS = 30


@functools.cache
def origin() -> dict[str, Any]:
    """Return versions, commit and variables of this process, as in manifests."""
    return {
        "versions": versions(),
        "git": git_state().record,
        "environment": environment(os.environ),
    }


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python and the packages that affect numbers; imports nothing."""
    found = {"titanlite": __version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def launched() -> float | None:
    """Return when this process began, in seconds since 1970; None without a /proc."""
    try:
        # The name in parentheses may contain spaces and parentheses.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return None
    return round(time.time() - age, 3)


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that affect results or speed, without secrets by their names."""
    found = {}
    for name, value in sorted(variables.items()):
        matters = name.startswith(_PREFIXES) or name in _NAMES
        if matters and not is_secret(name):
            found[name] = public(value)
    return found


def command(argv: Sequence[str]) -> list[str]:
    """Return a command line without values of `launch.environment`, URLs' logins and queries."""
    words: list[str] = []
    hide_next = False
    for word in argv:
        if hide_next and not word.startswith("--"):
            words.append(REMOVED)
            continue
        match = _LAUNCH.fullmatch(word)
        hidden = match is not None and (match["name"] is None or is_secret(match["name"]))
        hide_next = hidden and match is not None and match["value"] is None
        if hidden and not hide_next:
            words.append(f"{word.partition('=')[0]}={REMOVED}")
        else:
            words.append(public(word))
    return words


def config_text(toml: str) -> str:
    """Return a resolved config without the secrets in `launch.environment`."""

    def line(match: re.Match[str]) -> str:
        return f'{match[1]}{match[2]} = "{REMOVED}"' if is_secret(match[2]) else match[0]

    return _LAUNCH_LINE.sub(line, toml)


def public_config(toml: str) -> str:
    """Return a resolved config without secrets in `launch.environment` and in URLs."""
    return public(config_text(toml))


def is_secret(name: str) -> bool:
    """Return whether the name of a variable suggests a secret."""
    return any(word in name.upper() for word in _SECRET)


@dataclass(frozen=True)
class GitState:
    """`record`: commit and changes, for attempts.jsonl. `diff`: of tracked files; None: no
    changes.
    """

    record: dict[str, Any]
    diff: bytes | None = None


def git_state(package: Path | None = None) -> GitState:
    """Return commit and changes of the checkout that contains the package.

    The diff is cut after `DIFF_LIMIT` bytes, and its URLs lose their secrets. A failure of git is
    the reason in "unknown" of `record`.
    """
    folder = package or Path(titanlite.__file__).parent
    try:
        # A package installed into an environment inside a checkout does not belong to that
        # checkout.
        _git(folder, "ls-files", "--error-unmatch", "__init__.py")
        commit = _git(folder, "rev-parse", "HEAD").decode().strip()
        dirty = bool(_git(folder, "status", "--porcelain"))
        diff = _git(folder, "diff", "HEAD", "--no-color", "--no-ext-diff", "--no-textconv")
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
        return GitState({"unknown": said.partition("\n")[0] or str(error)})
    shown = public(diff[:DIFF_LIMIT].decode("utf-8", "surrogateescape")).encode(
        "utf-8", "surrogateescape"
    )
    return GitState({"commit": commit, "dirty": dirty}, shown or None)


def _git(folder: Path, *words: str) -> bytes:
    done = subprocess.run(
        ["git", "-C", str(folder), *words],
        capture_output=True,
        check=True,
        timeout=_GIT_SECONDS,
        stdin=subprocess.DEVNULL,
        # Reading must not take the lock that a user's commit waits for.
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
    )
    return done.stdout
