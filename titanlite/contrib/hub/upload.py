"""A repository of the hub, and one upload to it.

No token is an argument here: huggingface_hub takes that of HF_TOKEN or of a login.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titanlite import exit_codes
from titanlite.contrib.hub.card import MARK, README
from titanlite.data.connection_check import contact_problem
from titanlite.data.remote import words

MAIN = "main"
#: Names of what an export may hold: such files of older weights go, and all others stay.
_REPLACED = ["*.safetensors", "*.safetensors.index.json", "adapter_config.json"]


class HubError(RuntimeError):
    """The hub cannot be used for an upload; the text has the cause and what to do."""

    exit_code = exit_codes.CONFIG

    def __init__(self, what: str, error: Exception | None = None) -> None:
        """error: of the hub's client; its text may hold the token."""
        from huggingface_hub import get_token

        reason = "" if error is None else f": {words(error)}"
        super().__init__(f"{what}{reason}".replace(get_token() or "\0", "(removed)"))


def open_repository(repository: str, private: bool | None) -> Any:
    """Return the hub's client for a repository that takes uploads and is made if need be. Raises
    HubError.

    private: None: as its owner has chosen.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, get_token

    problem = contact_problem("hf://")
    if problem is not None:
        raise HubError(f"{problem}; see HF_ENDPOINT, HTTPS_PROXY, HF_HUB_OFFLINE")
    if not get_token():
        raise HubError(
            "an upload needs a token that may write, as HF_TOKEN or by `hf auth login`: "
            "https://huggingface.co/settings/tokens makes one"
        )
    api = HfApi(library_name="titanlite")
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        # The hub answers this question only to those who may write.
        api.preupload_lfs_files(repository, [CommitOperationAdd(README, b"\n")])
    except Exception as error:
        raise HubError(f"{repository} takes no upload of the owner of this token", error) from None
    return api


def upload(
    api: Any, repository: str, branch: str, files: Mapping[str, Path | bytes], title: str
) -> str:
    """Upload files in one commit, in place of older weights; return its URL. Raises HubError.

    The branch is made if need be. A README.md stays unless an upload of titanlite wrote it.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete
    from huggingface_hub.utils import filter_repo_objects

    try:
        if branch != MAIN:
            api.create_branch(repository, branch=branch, exist_ok=True)
        there: Sequence[str] = api.list_repo_files(repository, revision=branch)
        old = filter_repo_objects(there, allow_patterns=_REPLACED, ignore_patterns=[*files, "*/*"])
        operations: list[Any] = [CommitOperationDelete(name) for name in old]
        for name, content in files.items():
            if name == README and name in there:
                card = Path(api.hf_hub_download(repository, README, revision=branch))
                if MARK not in card.read_text(encoding="utf-8", errors="replace"):
                    continue
            source = content if isinstance(content, bytes) else str(content)
            operations.append(CommitOperationAdd(name, source))
        commit = api.create_commit(repository, operations, commit_message=title, revision=branch)
    except Exception as error:
        raise HubError(f"{repository}, branch {branch}, takes no upload", error) from None
    return str(commit.commit_url)
