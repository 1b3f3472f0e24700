"""Branches of a repository, and the run that their weights are of, by the card. No torch."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from titanlite.checkpoint.manifest import Manifest
from titanlite.features.hub.contact import HubError, asked, hub_api
from titanlite.runs import HUB
from titanlite.runs.links import read_own
from titanlite.runs.read import Run
from titanlite.utils import atomic_write

README = "README.md"
#: The lines of a card that hold what a push writes.
BEGIN = "<!-- titanlite {run}: a push writes all down to the end marker anew -->"
END = "<!-- titanlite: end -->"
REGION = re.compile(
    r"<!-- titanlite (?P<run>[0-9a-z]+): [^\r\n]* -->\r?\n.*?<!-- titanlite: end -->", re.DOTALL
)
_WEIGHTS = ("*.safetensors", "*.bin", "*.pth", "*.gguf")
#: Its name in the manifests of checkpoints, among the services that record the run.
TRACKER = "hub"
#: The file of a run's name beside its waiting exports.
_OWN = "run"
_ID = re.compile(r"[0-9a-z]+")
_STEP = re.compile(r"step-\d+")


def run_id(run: Run | None) -> str:
    """Return the name of a run, the same through all its attempts; "none" where none is
    recorded.
    """
    started = run.started if run is not None else None
    if started is None:
        return "none"
    return hashlib.sha256(f"{started:.3f}".encode()).hexdigest()[:12]


def own_id(folder: Path | None, manifest: Manifest | None, run: Run | None) -> str:
    """Return the name of a run by all that may tell it.

    folder: of the run, where uploads wait. manifest: of one of its checkpoints. A run on another
    machine may have neither its folder nor its record there, but it has its checkpoints.
    """
    if manifest is not None and TRACKER in manifest.trackers:
        return manifest.trackers[TRACKER]
    if folder is not None:
        with contextlib.suppress(OSError):
            noted = read_own(folder / HUB / _OWN).decode(errors="replace").strip()
            if _ID.fullmatch(noted):
                return noted
    return run_id(run)


def keep_id(folder: Path, name: str) -> None:
    """Note the name of a run in its folder. Raises OSError."""
    (folder / HUB).mkdir(parents=True, exist_ok=True)
    atomic_write(folder / HUB / _OWN, f"{name}\n")


def run_of(readme: str) -> str | None:
    """Return the run that a README.md says its weights are of; None: no push wrote it."""
    found = REGION.search(readme)
    return found["run"] if found else None


def heads(repository: str) -> dict[str, str]:
    """Return the newest commit of each branch of a repository. Raises HubError."""
    api = hub_api()
    refs = asked(f"{repository} cannot be read", lambda: api.list_repo_refs(repository))
    return {branch.name: branch.target_commit for branch in refs.branches}


def read_branch(repository: str, branch: str) -> tuple[list[str], str]:
    """Return the names of all files of a branch, and its README.md ("" without one).

    Raises HubError.
    """
    api = hub_api()
    what = f"{repository}, branch {branch}, cannot be read"
    names: list[str] = asked(what, lambda: api.list_repo_files(repository, revision=branch))
    if README not in names:
        return names, ""
    with tempfile.TemporaryDirectory(prefix="titanlite-push-") as folder:
        path = asked(
            what,
            lambda: api.hf_hub_download(repository, README, revision=branch, local_dir=folder),
        )
        return names, Path(path).read_text(encoding="utf-8", errors="replace")


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a file's name fits one of these patterns, and is in no folder."""
    return "/" not in name and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def refuse_others(
    repository: str, branch: str, names: Sequence[str], readme: str, own: str
) -> None:
    """Raise HubError where a branch holds weights that are not of the run `own`."""
    weights = [name for name in names if matches(name, _WEIGHTS)]
    owner = run_of(readme)
    if not weights or owner == own:
        return
    whose = "of another run" if owner is not None else "that no push of titanlite wrote"
    raise HubError(
        f"the branch {branch} of {repository} holds weights {whose} ({weights[0]}): name another "
        "repository or another branch, or replace them by `titanlite push --force`"
    )


def refuse_used(repository: str, own: str) -> None:
    """Raise HubError where a run could not push to a repository that is there.

    own: the run's name; "none" before it has begun, when branches of steps are of other runs.
    """
    known = heads(repository)
    if "main" in known:
        refuse_others(repository, "main", *read_branch(repository, "main"), own)
    steps = sorted(name for name in known if _STEP.fullmatch(name))
    if own == "none" and steps:
        raise HubError(
            f"{repository} holds steps of another run (branch {steps[-1]}), and this one begins: "
            "name another repository"
        )
