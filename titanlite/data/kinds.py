"""The kinds of files that hold text, and the names of files beside them that hold none.

`KINDS` is the only table of kinds: the lists of a folder, the readers and the errors follow it.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Format = Literal["auto", "json", "parquet", "arrow", "csv", "text", "source"]


class Kind(NamedTuple):
    """One kind of file."""

    #: In messages.
    name: str
    #: Ends of names, in small letters. Each may end with one of `COMPRESSED` too.
    suffixes: tuple[str, ...]
    #: Its reader in `formats`.
    reader: Format
    #: Beside records, which are rows or lines, such a file is about the data and not a part of it.
    describes_records: bool = False

    @property
    def has_records(self) -> bool:
        """Whether a file holds many documents."""
        return self.reader not in WHOLE


#: Readers that make a whole file one document.
WHOLE: tuple[Format, ...] = ("text", "source")
#: Of source code: language → ends of names, in small letters. docs/cli.md has the same list.
LANGUAGES: dict[str, tuple[str, ...]] = {
    "Assembly": (".asm", ".s"),
    "C": (".c", ".h"),
    "C#": (".cs",),
    "C++": (".cc", ".cpp", ".cxx", ".hh", ".hpp", ".hxx"),
    "CMake": (".cmake",),
    "CSS": (".css", ".less", ".scss"),
    "CUDA": (".cu", ".cuh"),
    "Clojure": (".clj",),
    "Dart": (".dart",),
    "Elixir": (".ex", ".exs"),
    "Erlang": (".erl",),
    "Fortran": (".f", ".f90", ".f95"),
    "Go": (".go",),
    "HTML": (".htm", ".html"),
    "Haskell": (".hs",),
    "Java": (".java",),
    "JavaScript": (".cjs", ".js", ".jsx", ".mjs"),
    "Julia": (".jl",),
    "Kotlin": (".kt", ".kts"),
    "Lisp": (".el", ".lisp", ".scm"),
    "Lua": (".lua",),
    "OCaml": (".ml", ".mli"),
    "PHP": (".php",),
    "Perl": (".pl", ".pm"),
    "Protocol Buffers": (".proto",),
    "Python": (".py", ".pyi", ".pyx"),
    "R": (".r",),
    "Ruby": (".rb",),
    "Rust": (".rs",),
    "SQL": (".sql",),
    "Scala": (".scala",),
    "settings": (".cfg", ".ini", ".toml", ".yaml", ".yml"),
    "Shell": (".bash", ".sh", ".zsh"),
    "Swift": (".swift",),
    "TeX": (".tex",),
    "TypeScript": (".ts", ".tsx"),
    "Verilog": (".sv", ".v"),
    "Vue": (".vue",),
    "XML": (".xml",),
    "Zig": (".zig",),
}
KINDS = (
    Kind("JSON lines", (".json", ".jsonl", ".ndjson"), "json"),
    Kind("parquet", (".parquet",), "parquet"),
    Kind("arrow", (".arrow",), "arrow"),
    Kind("CSV", (".csv", ".tsv"), "csv"),
    Kind("plain text", (".txt", ".text"), "text"),
    Kind("Markdown", (".md", ".markdown"), "text", describes_records=True),
    Kind("reStructuredText", (".rst",), "text", describes_records=True),
    *(Kind(language, suffixes, "source") for language, suffixes in LANGUAGES.items()),
)
COMPRESSED = (".gz", ".zst")
#: Ends of the names of all kinds.
ENDINGS = tuple(
    suffix + packed for kind in KINDS for suffix in kind.suffixes for packed in ("", *COMPRESSED)
)

#: Of a data set: why → names (regular expressions for names in small letters, without the end of
#: compression).
_NO_TEXT = {
    "about the data": re.compile(
        r"dataset_infos?.*\.json|dataset_dict\.json|state\.json|croissant.*\.json"
        r"|(requirements([-_]\w+)?|cmakelists|robots|(md5|sha\d+)sums?|checksums?)\.(txt|text)"
    ),
    "cache of datasets": re.compile(r"cache-[0-9a-f]+(_\d+_of_\d+)?\.arrow"),
}
#: Names of documentation in plain text or markup, alone or with one more word: LICENSE-MIT.txt,
#: README_zh.md.
_DOCUMENTATION = re.compile(
    r"(readme|licen[sc]es?|copying|changelog|citations?|contributing|code[-_]of[-_]conduct|dataset[-_]?card)"
    r"([-_.][\w.]+)?",
    re.IGNORECASE,
)
#: Words that are also subjects of texts: they count in capitals alone.
_DOCUMENTATION_IN_CAPITALS = re.compile(
    r"(NOTICE|HISTORY|CHANGES|AUTHORS|CONTRIBUTORS|MAINTAINERS|SECURITY|COPYRIGHT|DISCLAIMER|TODO)([-_.][\w.]+)?"
)


def kind_of_name(name: str) -> Kind | None:
    """Return the kind that the name of a file stands for; None for other names."""
    base = _without_compression(name.lower())
    return next((kind for kind in KINDS if base.endswith(kind.suffixes)), None)


def ending_of(name: str) -> str:
    """Return the end of a name that tells kind and compression, as `.jsonl.gz`; "" for
    other names.
    """
    lower = name.lower()
    found = [ending for ending in ENDINGS if lower.endswith(ending)]
    if not found:
        return ""
    longest = max(found, key=len)
    return name[-len(longest) :]


def is_hidden(path: str) -> bool:
    """Return whether programs that read folders of data leave a file out, by its path below the
    folder. Names of source code may begin with `_`, as `__init__.py`.
    """
    parts = path.split("/")
    kind = kind_of_name(parts[-1])
    signs = "." if kind is not None and kind.reader == "source" else (".", "_")
    return any(part.startswith(signs) for part in parts)


def why_no_text(path: str) -> str | None:
    """Return why a file is none of the text of a folder, by its path below it; None: it is text."""
    if is_hidden(path):
        return "hidden"
    name = path.rpartition("/")[2]
    base = _without_compression(name.lower())
    for reason, names in _NO_TEXT.items():
        if names.fullmatch(base):
            return reason
    kind = kind_of_name(name)
    if kind is None:
        return "other kinds of files"
    stem = name[: len(name) - len(ending_of(name))]
    is_documentation = _DOCUMENTATION.fullmatch(stem) or _DOCUMENTATION_IN_CAPITALS.fullmatch(stem)
    if kind.reader == "text" and is_documentation:
        return "documentation"
    return None


def _without_compression(name: str) -> str:
    for packed in COMPRESSED:
        name = name.removesuffix(packed)
    return name
