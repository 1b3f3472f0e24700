"""The kinds of files that hold text, and the names of files beside them that hold none.

`KINDS` is the only table of kinds: the lists of a folder, the readers and the errors follow it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from titanlite.config.data_sections import Format as Format


class Kind(NamedTuple):
    """One kind of file."""

    #: Name in messages.
    name: str
    #: Ends of names, in small letters. Each may end with .gz or .zst too.
    suffixes: tuple[str, ...]
    #: Its reader in `formats`.
    reader: Format
    #: Beside records, which are rows or lines, such a file is about the data and not a part of it.
    describes_records: bool = False

    @property
    def has_records(self) -> bool:
        return self.reader not in WHOLE


#: Readers that make a whole file one document.
WHOLE: tuple[Format, ...] = ("text", "source")
#: Ends of the names of source code, in small letters. docs/cli.md has the same list.
_SOURCE = """
.asm .bash .c .cc .cfg .cjs .clj .cmake .cpp .cs .css .cu .cuh .cxx .dart .el .erl .ex .exs
.f .f90 .f95 .go .h .hh .hpp .hs .htm .html .hxx .ini .java .jl .js .jsx .kt .kts .less
.lisp .lua .mjs .ml .mli .php .pl .pm .proto .py .pyi .pyx .r .rb .rs .s .scala .scm .scss
.sh .sql .sv .swift .tex .toml .ts .tsx .v .vue .xml .yaml .yml .zig .zsh
"""
SOURCE_SUFFIXES = tuple(_SOURCE.split())
KINDS = (
    Kind("JSON lines", (".json", ".jsonl", ".ndjson"), "json"),
    Kind("parquet", (".parquet",), "parquet"),
    Kind("arrow", (".arrow",), "arrow"),
    Kind("plain text", (".txt", ".text"), "text"),
    Kind("Markdown", (".md", ".markdown"), "text", describes_records=True),
    Kind("reStructuredText", (".rst",), "text", describes_records=True),
    Kind("source code", SOURCE_SUFFIXES, "source"),
)
_BY_SUFFIX = {suffix: kind for kind in KINDS for suffix in kind.suffixes}
_ENDING = re.compile(rf"({'|'.join(map(re.escape, _BY_SUFFIX))})(\.gz|\.zst)?$")

#: Lower-case names of files that describe a dataset, or that `datasets` caches.
_ABOUT_DATA = re.compile(
    r"(dataset_infos?.*\.json|dataset_dict\.json|state\.json|croissant.*\.json"
    r"|(requirements([-_]\w+)?|cmakelists|robots|(md5|sha\d+)sums?|checksums?)\.(txt|text)"
    r"|cache-[0-9a-f]+(_\d+_of_\d+)?\.arrow)(\.gz|\.zst)?"
)
#: Names of documentation in plain text or markup, alone or with one more word: LICENSE-MIT.txt,
#: README_zh.md.
_DOCUMENTATION = re.compile(
    r"(readme|licen[sc]es?|copying|changelog|citations?|contributing|code[-_]of[-_]conduct|dataset[-_]?card)"
    r"[-_.][\w.]+",
    re.IGNORECASE,
)
#: Words that are also subjects of texts: they count in capitals alone.
_DOCUMENTATION_IN_CAPITALS = re.compile(
    r"(NOTICE|HISTORY|CHANGES|AUTHORS|CONTRIBUTORS|MAINTAINERS|SECURITY|COPYRIGHT|DISCLAIMER|TODO)[-_.][\w.]+"
)


def kind_of_name(name: str) -> Kind | None:
    """Return the kind of text that a file's name stands for."""
    found = _ENDING.search(name.lower())
    return _BY_SUFFIX[found[1]] if found else None


def is_csv(name: str) -> bool:
    """Return whether a name is CSV or TSV, perhaps compressed."""
    return kind_of_name(name) is None and bool({"csv", "tsv"} & {*name.lower().split(".")[1:]})


def is_hidden(path: str) -> bool:
    """Return whether readers of data folders leave a file out, by its path below the folder.

    Source code may begin with `_`, as `__init__.py`.
    """
    parts = path.split("/")
    kind = kind_of_name(parts[-1])
    signs = "." if kind is not None and kind.reader == "source" else (".", "_")
    return any(part.startswith(signs) for part in parts)


def why_no_text(path: str) -> str | None:
    """Return why a path below a folder is no text, or None."""
    if is_hidden(path):
        return "hidden"
    name = path.rpartition("/")[2]
    if _ABOUT_DATA.fullmatch(name.lower()):
        return "about the data"
    kind = kind_of_name(name)
    if is_csv(name):
        return "CSV, for which docs/data.md has a command"
    if kind is None:
        return "other kinds of files"
    is_documentation = _DOCUMENTATION.fullmatch(name) or _DOCUMENTATION_IN_CAPITALS.fullmatch(name)
    if kind.reader == "text" and is_documentation:
        return "documentation"
    return None
