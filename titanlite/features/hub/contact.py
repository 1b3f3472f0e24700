"""The first contact with the hub before an upload: who asks, and whether they may write.

No token is an argument here: huggingface_hub takes that of HF_TOKEN or of a login. No torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from titanlite import exit_codes
from titanlite.data.contact import contact_problem
from titanlite.data.remote import words
from titanlite.utils import pip_install

_TOKENS = "https://huggingface.co/settings/tokens makes one"
#: Statuses of an answer to somebody who may not do it.
_REFUSED = (401, 403)
_MISSING = 404
T = TypeVar("T")


class HubError(RuntimeError):
    """The hub cannot be used for an upload; the text has the cause and what to do."""

    exit_code = exit_codes.CONFIG


@dataclass(frozen=True)
class Access:
    """Who may write, and whether the repository is there; None: the hub was not asked."""

    user: str
    exists: bool | None


def check_access(repository: str) -> Access:
    """Ask the hub who we are and whether we may write; change nothing there.

    repository: OWNER/NAME of a model. Raises HubError where nothing could be uploaded.
    """
    api = hub_api()
    _check_token()
    problem = contact_problem("hf://")
    if problem is not None:
        raise HubError(f"{problem}; see HF_ENDPOINT, HTTPS_PROXY, HF_HUB_OFFLINE")
    user, owners = _who(api)
    exists = _exists(api, repository)
    if exists:
        _try_write(api, repository, user)
    elif repository.partition("/")[0] not in owners:
        raise HubError(
            f"{repository} is not on the hub, and {user} cannot make it: the owners open to this "
            f"token are {', '.join(owners)}"
        )
    return Access(user, exists)


def hub_api() -> Any:
    """Return the client of the hub. Raises HubError without its package."""
    try:
        from huggingface_hub import HfApi
    except ImportError:
        install = pip_install("huggingface_hub")
        raise HubError(f"an upload needs the package huggingface_hub: {install}") from None
    return HfApi(library_name="titanlite")


def current_token() -> str | None:
    """Return the token of HF_TOKEN or of a login; None without one."""
    from huggingface_hub import get_token

    token: str | None = get_token()
    return token


def asked(what: str, call: Callable[[], T]) -> T:
    """Return the answer of the hub to a call. what: for the error. Raises HubError."""
    try:
        return call()
    except HubError:
        raise
    # Its HTTP library has errors, too.
    except Exception as error:
        raise HubError(f"{what}: {without_token(words(error))}") from error


def without_token(text: str) -> str:
    """Return a text without the token, should an error of the hub or of a file hold it."""
    token = current_token()
    return text.replace(token, "(removed)") if token else text


def status_of(error: BaseException | None) -> int | None:
    """Return the HTTP status of an error of huggingface_hub; None: it has none."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _check_token() -> None:
    token = current_token()
    if token is not None:
        if not token.isascii():
            raise HubError(f"the token of HF_TOKEN or of the login has odd characters: {_TOKENS}")
        return
    empty = " (HF_TOKEN is empty)" if os.environ.get("HF_TOKEN") == "" else ""
    raise HubError(
        f"there is no token for the hub{empty}: set HF_TOKEN to one that may write, or log in with "
        f"`hf auth login`; {_TOKENS}"
    )


def _who(api: Any) -> tuple[str, list[str]]:
    """Return the user of the token, and the owners in whose names they may make repositories."""
    try:
        found = asked("the hub does not say whose token this is", api.whoami)
    except HubError as error:
        if status_of(error.__cause__) not in _REFUSED:
            raise
        raise HubError(
            f"the hub does not know the token of HF_TOKEN or of the login: {_TOKENS}"
        ) from None
    user = str(found.get("name", "?"))
    token = (found.get("auth") or {}).get("accessToken") or {}
    if token.get("role") == "read":
        raise HubError(f"the token of {user} may only read: {_TOKENS}, of the type write")
    orgs = [one.get("name") for one in found.get("orgs") or [] if isinstance(one, dict)]
    return user, [user, *(str(name) for name in orgs if name)]


def _exists(api: Any, repository: str) -> bool:
    try:
        asked(f"{repository} cannot be looked at", lambda: api.repo_info(repository))
    except HubError as error:
        # A private one of somebody else has the same answer.
        if status_of(error.__cause__) in (_MISSING, *_REFUSED):
            return False
        raise
    return True


def _try_write(api: Any, repository: str, user: str) -> None:
    """Ask how a file would be uploaded: the hub answers only those who may write."""
    from huggingface_hub import CommitOperationAdd

    probe = CommitOperationAdd("README.md", b"titanlite\n")
    try:
        asked(
            f"{repository} does not take uploads",
            lambda: api.preupload_lfs_files(repository, [probe], revision="main"),
        )
    except HubError as error:
        if status_of(error.__cause__) not in (_MISSING, *_REFUSED):
            raise
        raise HubError(
            f"{user} may not write to {repository}. Name a repository of your own, or take a token "
            f"with write access to it; {_TOKENS}"
        ) from None
