"""The upload side of the hub on loopback: users, repositories with branches, commits.

A `HubServer` with `uploads = Uploads({...})` has it. Repositories are kept in memory. Every file
comes in its commit: the protocol for large files is that of huggingface_hub.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any
from urllib.parse import unquote


@dataclass
class Repository:
    """A repository of a model. branches: name → files of its newest commit."""

    private: bool
    branches: dict[str, dict[str, bytes]]
    #: Messages of all commits.
    messages: list[str] = field(default_factory=list)


@dataclass
class Uploads:
    """Repositories that uploads have made. users: token → name."""

    users: Mapping[str, str]
    repositories: dict[str, Repository] = field(default_factory=dict)

    def make(self, name: str, private: bool = False) -> None:
        self.repositories[name] = Repository(private, {"main": {".gitattributes": b""}})

    def branch(self, name: str, branch: str = "main") -> dict[str, bytes]:
        """Return name → content of the files of a branch."""
        return self.repositories[name].branches[branch]


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class UploadRoutes:
    """Answers of a handler to what a push asks.

    The handler has `answer(body, headers, status)`, `file_content`, `headers` and `hub`.
    """

    hub: Any
    headers: Any
    answer: Any
    file_content: Any

    def serve_uploads(self, path: str, body: bytes) -> None:
        parts = path.strip("/").split("/")
        if path == "/api/validate-yaml":
            self._say({"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif parts[0] == "api":
            self._of_model("/".join(parts[2:4]), parts[4], unquote(parts[5]), body)
        else:
            files = self.hub.uploads.branch("/".join(parts[:2]), unquote(parts[3]))
            content = files[parts[-1]]
            oid = git_hash(content)
            about = {"X-Repo-Commit": oid, "ETag": f'"{oid}"'}
            self.file_content(BytesIO(content), about)

    def _say(self, value: object, status: int = 200) -> None:
        self.answer(json.dumps(value).encode(), {"Content-Type": "application/json"}, status)

    def _is_refused(self, repository: str) -> bool:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        user = self.hub.uploads.users.get(token, "")
        is_refused = repository.partition("/")[0] != user
        if is_refused:
            self._say({"error": "refused"}, 403 if user else 401)
        return is_refused

    def _create(self, asked: Mapping[str, Any]) -> None:
        repository = f"{asked['organization']}/{asked['name']}"
        if self._is_refused(repository):
            return
        known = repository in self.hub.uploads.repositories
        if not known:
            private = bool(asked.get("private")) or asked.get("visibility") == "private"
            self.hub.uploads.make(repository, private)
        self._say({"url": f"{self.hub.url}/{repository}"}, 409 if known else 200)

    def _of_model(self, name: str, verb: str, branch: str, body: bytes) -> None:
        known = self.hub.uploads.repositories[name]
        if self._is_refused(name):
            return
        if verb == "branch":
            known.branches.setdefault(branch, dict(known.branches["main"]))
        files = known.branches[branch]
        answer: object = {}
        if verb == "preupload":
            modes = []
            for asked in json.loads(body)["files"]:
                there = {"path": asked["path"], "uploadMode": "regular", "shouldIgnore": False}
                if asked["path"] in files:
                    there["oid"] = git_hash(files[asked["path"]])
                modes.append(there)
            answer = {"files": modes}
        elif verb == "tree":
            about = {"type": "file", "size": 0}
            answer = [{**about, "path": path, "oid": git_hash(files[path])} for path in files]
        elif verb == "commit":
            for one in map(json.loads, body.splitlines()):
                value = one["value"]
                if one["key"] == "header":
                    known.messages.append(value["summary"])
                elif one["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                else:
                    del files[value["path"]]
            url = f"{self.hub.url}/{name}/commit/{len(known.messages):040}"
            answer = {"success": True, "commitOid": f"{len(known.messages):040}", "commitUrl": url}
        elif verb == "revision":
            answer = {"id": name, "sha": f"{len(known.messages):040}", "siblings": [], "tags": []}
        self._say(answer)
