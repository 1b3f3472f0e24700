"""Hashes of files with the name of their kind, `xxh3:…` or `sha256:…`, as manifests and prepared tokens hold them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

#: XXH3 with 128 bits finds damage, at the speed of memory. SHA-256 is for what decides how the rest is read.
FAST_HASH, SAFE_HASH = "xxh3", "sha256"
#: Bytes that are read at a time.
_BLOCK = 8 << 20


def new_hash(algorithm: str) -> Any:
    """Return an object with `update` and `hexdigest`."""
    if algorithm == FAST_HASH:
        import xxhash  # only here: `titanlite --help` and a config's check do without

        return xxhash.xxh3_128()
    return hashlib.blake2b(digest_size=32) if algorithm == "blake2b" else hashlib.new(algorithm)


def digest_of(data: bytes, algorithm: str = SAFE_HASH) -> str:
    """Return the hash of some bytes: `sha256:…`."""
    found = new_hash(algorithm)
    found.update(data)
    return f"{algorithm}:{found.hexdigest()}"


def file_digest(path: Any, algorithm: str = SAFE_HASH, read: Callable[[int], None] = lambda count: None) -> str:
    """Return the hash of a file's content; call `read` with each block's bytes. Raises OSError.

    path: a Path, or one of a store.
    """
    found = new_hash(algorithm)
    view = memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(view):
            found.update(view[:count])
            read(count)
    return f"{algorithm}:{found.hexdigest()}"
