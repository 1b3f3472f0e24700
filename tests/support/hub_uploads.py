"""The upload side of the hub on loopback: users, repositories with branches, large files, commits.

A `HubServer` with `uploads = Uploads({...})` has it. Repositories are kept in memory; `branch`
gives the content of one.
"""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any
from urllib.parse import unquote

#: What every new repository holds.
_ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
#: Ends of names of large files, whatever their length.
_LARGE = (".safetensors", ".bin")


@dataclass
class User:
    """Whom a token is of. role: read or write."""

    name: str
    role: str = "write"


@dataclass
class Commit:
    """A state of a branch."""

    oid: str
    files: dict[str, bytes]
    message: str = ""


@dataclass
class Repository:
    """A repository of a model. branches: the commits of each, oldest first."""

    private: bool
    branches: dict[str, list[Commit]]


@dataclass
class Uploads:
    """Repositories that uploads have made. users: token → user."""

    users: Mapping[str, User]
    repositories: dict[str, Repository] = field(default_factory=dict)
    #: SHA-256 → content of each large file that is there in whole.
    objects: dict[str, bytes] = field(default_factory=dict)
    #: Name of each large file whose bytes came, by their hash, in order.
    puts: list[str] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def make(self, name: str, private: bool = False) -> Repository:
        """Make a repository with the first commit of the hub."""
        first = Commit(self.next_oid(), {".gitattributes": _ATTRIBUTES}, "initial commit")
        self.repositories[name] = Repository(private, {"main": [first]})
        return self.repositories[name]

    def next_oid(self) -> str:
        return hashlib.sha1(str(next(self._numbers)).encode()).hexdigest()

    def branch(self, name: str, branch: str = "main") -> dict[str, bytes]:
        """Return name → content of the files of a branch."""
        return self.repositories[name].branches[branch][-1].files

    def messages(self, name: str, branch: str = "main") -> list[str]:
        """Return the messages of a branch's commits."""
        return [commit.message for commit in self.repositories[name].branches[branch]]


def is_large(name: str) -> bool:
    return name.endswith(_LARGE)


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class UploadRoutes:
    """Answers of a handler to what a push asks. `serve` returns False for what it does not know.

    The handler has `answer(body, headers, status)`, `headers`, `command`, `path` and `hub`.
    """

    hub: Any
    headers: Any
    command: str
    answer: Any
    file_content: Any

    def serve_uploads(self, path: str, body: bytes) -> bool:
        """Answer a request if it is one of these."""
        parts = path.strip("/").split("/")
        if path == "/api/whoami-v2":
            self._whoami()
        elif path == "/api/validate-yaml":
            self._say({"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif parts[:2] == ["api", "models"] and len(parts) >= 4:
            self._of_model(f"{parts[2]}/{parts[3]}", parts[4:], body)
        elif path.endswith(".git/info/lfs/objects/batch"):
            self._batch(path.strip("/").partition(".git/")[0], json.loads(body))
        elif parts[0] == "lfs":
            self._large_file(parts[1:], body)
        elif "resolve" in parts and "/".join(parts[:2]) in self._uploads.repositories:
            self._resolve("/".join(parts[:2]), unquote(parts[3]), "/".join(parts[4:]))
        else:
            return False
        return True

    @property
    def _uploads(self) -> Uploads:
        uploads: Uploads = self.hub.uploads
        return uploads

    def _user(self) -> User | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return self._uploads.users.get(token)

    def _say(self, value: object, status: int = 200) -> None:
        self.answer(json.dumps(value).encode(), {"Content-Type": "application/json"}, status)

    def _error(self, code: str, status: int) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": code} if code else {}
        self.answer(b'{"error": "refused"}', headers, status)

    def _may_write(self, repository: str) -> bool:
        user = self._user()
        owner = repository.partition("/")[0]
        return user is not None and user.role == "write" and owner == user.name

    def _whoami(self) -> None:
        user = self._user()
        if user is None:
            return self._error("", 401)
        token = {"accessToken": {"displayName": "token", "role": user.role}}
        return self._say({"type": "user", "name": user.name, "orgs": [], "auth": token})

    def _create(self, asked: Mapping[str, Any]) -> None:
        owner = asked.get("organization")
        user = self._user()
        if user is None:
            return self._error("", 401)
        repository = f"{owner or user.name}/{asked['name']}"
        if not self._may_write(repository):
            return self._error("", 403)
        url = f"{self.hub.url}/{repository}"
        if repository in self._uploads.repositories:
            return self._say({"error": "You already created this model repo", "url": url}, 409)
        private = bool(asked.get("private")) or asked.get("visibility") == "private"
        self._uploads.make(repository, private)
        return self._say({"url": url, "name": repository})

    def _of_model(self, repository: str, verb: list[str], body: bytes) -> None:
        known = self._uploads.repositories.get(repository)
        reads = self.command in ("GET", "HEAD")
        if known is None or (known.private and not self._may_write(repository)):
            return self._error("RepoNotFound", 401 if self._user() is None else 404)
        if not reads and verb[0] != "paths-info" and not self._may_write(repository):
            return self._error("", 403)
        revision = unquote(verb[1]) if len(verb) > 1 else "main"
        if verb and verb[0] == "branch":
            return self._branch(known, revision, json.loads(body or b"{}"))
        if revision not in known.branches:
            return self._error("RevisionNotFound", 404)
        commits = known.branches[revision]
        if verb and verb[0] == "preupload":
            return self._preupload(commits[-1], json.loads(body))
        if verb and verb[0] == "commit":
            return self._commit(repository, commits, body)
        if verb and verb[0] == "tree":
            return self._say([_entry(*one) for one in sorted(commits[-1].files.items())])
        if verb and verb[0] == "paths-info":
            files = commits[-1].files
            return self._say([_entry(p, files[p]) for p in self._asked(body) if p in files])
        names = [{"rfilename": name} for name in sorted(commits[-1].files)]
        about = {"id": repository, "sha": commits[-1].oid, "siblings": names, "tags": []}
        return self._say({**about, "private": known.private, "downloads": 0, "likes": 0})

    def _asked(self, body: bytes) -> list[str]:
        try:
            return list(json.loads(body)["paths"])
        except ValueError:
            pairs = [part.partition(b"=") for part in body.split(b"&")]
            return [unquote(value.decode()) for name, _, value in pairs if name == b"paths"]

    def _branch(self, known: Repository, name: str, asked: Mapping[str, Any]) -> None:
        if name in known.branches:
            return self._error("", 409)
        start = asked.get("startingPoint", known.branches["main"][-1].oid)
        oids = [commit.oid for commit in known.branches["main"]]
        known.branches[name] = known.branches["main"][: oids.index(start) + 1]
        return self._say({})

    def _preupload(self, head: Commit, asked: Mapping[str, Any]) -> None:
        files = []
        for one in asked["files"]:
            name = one["path"]
            patterns = head.files.get(".gitignore", b"").decode().split()
            ignored = any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
            found: dict[str, Any] = {"path": name, "shouldIgnore": ignored}
            found["uploadMode"] = "lfs" if is_large(name) else "regular"
            if name in head.files:
                content = head.files[name]
                digest = hashlib.sha256(content).hexdigest()
                found["oid"] = digest if is_large(name) else git_hash(content)
            files.append(found)
        self._say({"files": files})

    def _batch(self, repository: str, asked: Mapping[str, Any]) -> None:
        if not self._may_write(repository):
            return self._error("", 403)
        objects = []
        for one in asked["objects"]:
            oid, size = one["oid"], one["size"]
            found: dict[str, Any] = {"oid": oid, "size": size}
            if oid not in self._uploads.objects:
                # Signed, as those of a store are.
                whole = f"{self.hub.url}/lfs/whole/{oid}?X-Amz-Signature=f00"
                verify = f"{self.hub.url}/lfs/verify"
                found["actions"] = {"upload": {"href": whole}, "verify": {"href": verify}}
            objects.append(found)
        return self._say({"transfer": "basic", "objects": objects})

    def _large_file(self, parts: list[str], body: bytes) -> None:
        """Keep a large file, if it is what it says, or tell whether it is there."""
        uploads = self._uploads
        if parts[0] == "whole":
            uploads.puts.append(parts[1])
            if hashlib.sha256(body).hexdigest() != parts[1]:
                return self._say({"error": "wrong content"}, 400)
            uploads.objects[parts[1]] = body
            return self._say({})
        asked = json.loads(body)
        content = uploads.objects.get(asked["oid"])
        right = content is not None and len(content) == asked["size"]
        return self._say({}, 200 if right else 404)

    def _commit(self, repository: str, commits: list[Commit], body: bytes) -> None:
        files = dict(commits[-1].files)
        message = ""
        for line in body.splitlines():
            one = json.loads(line)
            value = one["value"]
            if one["key"] == "header":
                message = value["summary"]
                parent = value.get("parentCommit")
                if parent is not None and parent != commits[-1].oid:
                    return self._say({"error": "A commit has happened since."}, 412)
            elif one["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif one["key"] == "lfsFile":
                if value["oid"] not in self._uploads.objects:
                    return self._say({"error": "LFS pointer without its file"}, 400)
                files[value["path"]] = self._uploads.objects[value["oid"]]
            elif one["key"] == "deletedFile":
                del files[value["path"]]
        commits.append(Commit(self._uploads.next_oid(), files, message))
        url = f"{self.hub.url}/{repository}/commit/{commits[-1].oid}"
        return self._say({"success": True, "commitOid": commits[-1].oid, "commitUrl": url})

    def _resolve(self, repository: str, revision: str, name: str) -> None:
        known = self._uploads.repositories[repository]
        commits = known.branches.get(revision)
        for branch in known.branches.values():
            commits = commits or [one for one in branch if one.oid == revision]
        if not commits:
            return self._error("RevisionNotFound", 404)
        head = commits[-1]
        if name not in head.files:
            return self.answer(
                b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": head.oid}, 404
            )
        content = head.files[name]
        oid = hashlib.sha256(content).hexdigest() if is_large(name) else git_hash(content)
        return self.file_content(BytesIO(content), {"X-Repo-Commit": head.oid, "ETag": f'"{oid}"'})


def _entry(path: str, content: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "file", "path": path, "size": len(content)}
    found["oid"] = git_hash(content)
    if is_large(path):
        digest = hashlib.sha256(content).hexdigest()
        found["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
    return found
