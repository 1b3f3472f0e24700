"""Links in the folder of a run, which may come from somebody else: they could lead to any file."""

from __future__ import annotations

import os
from pathlib import Path

from titanlite.utils import LinkError, not_a_link


def refuse_links(root: Path, path: Path, inside: bool = False) -> None:
    """Raise LinkError where `path` is a link, or a folder between it and `root`.

    `root` may be one, and so may a path that lies elsewhere. inside: refuse links in `path`, too.
    """
    if not path.is_relative_to(root):
        return
    for place in (path, *path.parents)[: len(path.relative_to(root).parts)]:
        if place.is_symlink():
            raise LinkError(place)
    for folder, folders, files in os.walk(path) if inside else ():
        for name in (*folders, *files):
            if os.path.islink(os.path.join(folder, name)):
                raise LinkError(os.path.join(folder, name))


def read_own(path: Path) -> bytes:
    """Return the content of a file. Raises LinkError for a link."""
    with open(path, "rb", opener=not_a_link) as stream:
        return stream.read()
