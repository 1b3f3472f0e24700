"""Files to a branch of a repository of the hub, in one commit that replaces older weights there.

Large files go up one by one before the commit. The hub knows content by its hash, so a file that
it has is not sent again. A second try goes on where the first one ended. `upload_large_folder`,
which older releases of huggingface_hub have, takes no message and leaves half a model on the
branch while it works.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.cli.push.card import Card, merged
from titanlite.features.hub.branches import README, heads, matches, read_branch, refuse_others
from titanlite.features.hub.contact import HubError, asked, hub_api
from titanlite.utils import human_bytes, say

#: Names of what an export may hold; files of other names on a branch stay.
_OURS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "adapter_config.json",
    "config.json",
    "generation_config.json",
    "loss.svg",
    "train.toml",
)


@dataclass(frozen=True)
class Parcel:
    """What goes to a branch."""

    #: Name in the repository → a file, or its content.
    files: Mapping[str, Path | bytes]
    card: Card
    message: str
    #: README.md of a pushed folder; "": it has none.
    readme: str = ""


def make_repository(repository: str, private: bool | None) -> None:
    """Make the repository of a model unless it is there. Raises HubError."""
    api = hub_api()
    asked(
        f"{repository} cannot be made",
        lambda: api.create_repo(repository, private=private, exist_ok=True),
    )


def push_branch(repository: str, branch: str, parcel: Parcel, force: bool) -> Any:
    """Upload files to a branch, which is made if it is not there; return the commit.

    force: replace weights of another run. Raises HubError.
    """
    from huggingface_hub import CommitOperationDelete

    api = hub_api()
    known = heads(repository)
    is_new = branch not in known
    # A new branch begins as main is.
    begin = "main" if is_new else branch
    # A push of somebody else from here on makes the commit fail.
    head = known[begin]
    names, readme = read_branch(repository, begin)
    if not (is_new or force):
        refuse_others(repository, branch, names, readme, parcel.card.run_id)
    files = dict(parcel.files)
    files[README] = merged(parcel.card, readme, parcel.readme).encode()
    operations = _additions(api, repository, branch, files, begin)
    for name in names:
        if name not in files and matches(name, _OURS):
            operations.append(CommitOperationDelete(name))
    if is_new:
        # Not before: where an upload was cut short, a branch with the files of main would be there,
        # perhaps of another run.
        asked(
            f"the branch {branch} of {repository} cannot be made",
            lambda: api.create_branch(repository, branch=branch, revision=head, exist_ok=True),
        )
    return asked(
        f"{repository}, branch {branch}, takes no commit",
        lambda: api.create_commit(
            repository,
            operations,
            commit_message=parcel.message,
            revision=branch,
            parent_commit=head,
            num_threads=1,
        ),
    )


def _additions(
    api: Any, repository: str, branch: str, files: Mapping[str, Path | bytes], begin: str
) -> list[Any]:
    """Return the files for a commit; those that are large are uploaded now.

    begin: the branch itself, or the one that it begins from.
    """
    from huggingface_hub import CommitOperationAdd

    additions = []
    for name, content in sorted(files.items()):
        source = content if isinstance(content, bytes) else str(content)
        additions.append(CommitOperationAdd(name, source))
    large = [one for one in additions if not isinstance(one.path_or_fileobj, bytes)]
    left = sum(one.upload_info.size for one in large)
    for number, one in enumerate(large, 1):
        size = one.upload_info.size
        say(
            f"{branch}: {number} of {len(large)}: {one.path_in_repo}, {human_bytes(size)}, "
            f"{human_bytes(left)} left"
        )
        left -= size
        send = functools.partial(
            api.preupload_lfs_files, repository, [one], revision=begin, free_memory=False
        )
        asked(f"{one.path_in_repo} cannot be uploaded to {repository}", send)
        if one._should_ignore:  # the client would leave it out of the commit
            raise HubError(
                f"a .gitignore in {repository}, branch {begin}, leaves out {one.path_in_repo}: "
                "delete it on the hub"
            )
    return additions
