"""Where a run comes from: versions, environment, commit. Nothing here is a secret, and nothing here may stop a run."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import titanlite
from titanlite._version import __version__

#: Bytes of `git.diff` that are kept.
DIFF_LIMIT = 1 << 20
REMOVED = "(removed)"

_LIBRARIES = (
    *("torch", "torchao", "triton", "numpy", "msgspec", "datasets", "safetensors", "transformers"),
    *("tiktoken", "sentencepiece", "tokenizers"),
)
_PREFIXES = (
    *("CUDA_", "CUBLAS_", "NVIDIA_VISIBLE_", "NCCL_", "GLOO_", "FI_", "UCX_"),
    *("TORCH", "PYTORCH_", "TRITON_", "OMP_", "MKL_", "KMP_", "SLURM_"),
)
_NAMES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "LD_PRELOAD")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "JWT", "AUTH")
_LOGIN = re.compile(r"(://)[^/@\s]+@")
_LAUNCH = re.compile(r"--?launch\.environment(?:\.(?P<name>[^=]+))?(?P<value>=.*)?", re.DOTALL)
_LAUNCH_LINE = re.compile(r"^(environment\.)(\S+) = .*$", re.MULTILINE)
_GIT_SECONDS = 10
_UNTRACKED_SHOWN = 50


def versions() -> dict[str, str]:
    """titanlite, Python and the libraries that numbers may depend on, as installed; nothing is imported."""
    found = {"titanlite": __version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def is_secret(name: str) -> bool:
    """Whether a variable of this name may hold what must not be written down."""
    return any(word in name.upper() for word in _SECRET)


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that change what a run does or how fast; never one whose name speaks of a secret."""
    return {
        name: without_login(value)
        for name, value in sorted(variables.items())
        if (name.startswith(_PREFIXES) or name in _NAMES) and not is_secret(name)
    }


def without_login(text: str) -> str:
    """`https://user:password@host` without user and password."""
    return _LOGIN.sub(rf"\1{REMOVED}@", text)


def command(argv: Sequence[str]) -> list[str]:
    """A command line as it may be written down: secrets given through `launch.environment` are removed."""
    words: list[str] = []
    hide_next = False
    for word in argv:
        if hide_next and not word.startswith("--"):
            words.append(REMOVED)
            continue
        match = _LAUNCH.fullmatch(word)
        hidden = match is not None and (match["name"] is None or is_secret(match["name"]))
        hide_next = hidden and match is not None and match["value"] is None
        words.append(f"{word.partition('=')[0]}={REMOVED}" if hidden and not hide_next else without_login(word))
    return words


def config_text(toml: str) -> str:
    """A resolved config as it may be written down: secrets in `launch.environment` are removed."""

    def line(match: re.Match[str]) -> str:
        return f'{match[1]}{match[2]} = "{REMOVED}"' if is_secret(match[2]) else match[0]

    return _LAUNCH_LINE.sub(line, toml)


@dataclass(frozen=True)
class GitState:
    """`record` is for run.json; `diff` the changes to tracked files, None where there are none."""

    record: dict[str, Any]
    diff: bytes | None = None


def git_state(package: Path | None = None) -> GitState:
    """Commit and changes of the checkout that the package is run from.

    Not a checkout, or git cannot say: `record` holds the reason under "unknown".
    """
    folder = package or Path(titanlite.__file__).parent
    try:
        # A package installed into an environment inside somebody's checkout is not of that checkout.
        _git(folder, "ls-files", "--error-unmatch", "__init__.py")
        commit = _git(folder, "rev-parse", "HEAD").decode().strip()
        changes = _git(folder, "status", "--porcelain=v1", "-z").decode(errors="replace").split("\0")
        diff = _git(folder, "diff", "HEAD", "--no-color", "--no-ext-diff", "--no-textconv")
    except (OSError, subprocess.SubprocessError) as error:
        return GitState({"unknown": _reason(error)})
    untracked = [change[3:] for change in changes if change.startswith("?? ")]
    record: dict[str, Any] = {"commit": commit, "dirty": bool(diff or untracked)}
    if untracked:
        record["untracked"] = untracked[:_UNTRACKED_SHOWN]
        if len(untracked) > _UNTRACKED_SHOWN:
            record["untracked_not_named"] = len(untracked) - _UNTRACKED_SHOWN
    if len(diff) > DIFF_LIMIT:
        record["diff_cut"] = f"git.diff holds the first {DIFF_LIMIT:,} of {len(diff):,} bytes"
        diff = diff[:DIFF_LIMIT].rpartition(b"\n")[0] + b"\n"
    return GitState(record, diff or None)


def _git(folder: Path, *words: str) -> bytes:
    done = subprocess.run(
        ["git", "-C", str(folder), *words],
        capture_output=True,
        check=True,
        timeout=_GIT_SECONDS,
        stdin=subprocess.DEVNULL,
        # Reading must not take the lock that somebody's commit waits for.
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
    )
    return done.stdout


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "git is not installed"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"git did not answer within {_GIT_SECONDS} s"
    said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()
    if said and ("not a git repository" in said[0] or "did not match any file" in said[0]):
        return "the package is not run from a checkout"
    return said[0] if said else str(error)
