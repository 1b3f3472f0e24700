"""`titanlite push` in a process of its own, against the hub on loopback."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.hub_server import HubServer
from tests.support.hub_uploads import Uploads
from tests.support.processes import titanlite

#: Tokens of the users that the tests know. No file may hold one.
TOKENS = {
    "hf_planted_ada": "ada",
    "hf_planted_bob": "bob",
}
ADA = "hf_planted_ada"


def make_hub(folder: Path) -> HubServer:
    """Return a hub with these users, and no repository. folder: of nothing."""
    folder.mkdir(exist_ok=True)
    return HubServer(folder, uploads=Uploads(TOKENS))


def variables(hub: HubServer, home: Path, token: str = ADA) -> dict[str, str]:
    """Return the environment of a push. home: of caches."""
    return {**hub.environment(home), "HF_TOKEN": token, "PYTHONWARNINGS": "ignore"}


def push(
    hub: HubServer, home: Path, *words: object, token: str = ADA, code: int = 0, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run `titanlite push` with these words; it must end with this exit code."""
    env = {**variables(hub, home, token), **more}
    done = titanlite("push", *words, env=env, cwd=home)
    assert done.returncode == code, done.stdout + done.stderr
    assert "planted" not in done.stdout + done.stderr
    return done


def uploads_of(hub: HubServer) -> Uploads:
    assert hub.uploads is not None
    return hub.uploads


def leaks(folder: Path) -> list[str]:
    """Return the files below a folder that hold a token.

    git.diff may hold a change of these tests.
    """
    return [
        str(file)
        for file in folder.rglob("*")
        if file.is_file() and file.name != "git.diff" and b"planted" in file.read_bytes()
    ]
