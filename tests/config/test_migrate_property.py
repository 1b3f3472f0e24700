"""Any legal file with later names means the same after migration, and loses no comment."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from titanlite.cli.migrate import migrate_text
from titanlite.config.aliases import ALIASES, VALUE_NAMES, Alias
from titanlite.config.entries import file_entries
from titanlite.config.key_types import base, members, names_beside_paths
from titanlite.config.keys import Key, fits, keys, table_of
from titanlite.config.load import read_text
from titanlite.config.toml import quote
from titanlite.config.unsupported_keys import UNSUPPORTED

HERE = Path("run.toml")
SKIPPED = ("job.config_file", "job.extends", "job.dialect")


def legal_values(key: Key) -> list[Any]:
    found: list[Any] = names_beside_paths(key.type)
    for part in map(base, members(key.type)):
        if get_origin(part) is Literal:
            found += get_args(part)
        elif get_origin(part) is list:
            found += [
                [],
                ["loss"],
                ["layers.1", "# no comment"],
                [3, 4],
                [{"path": "x # y", "weight": 2.0}],
            ]
        else:
            found += {
                bool: [True, False],
                int: [1, 2, 8],
                float: [0.5, 1e-3],
                str: ["x", "3", "a]#b"],
            }.get(part, [])
    later = [old for (name, old) in VALUE_NAMES if name == key.name]
    # A pattern may allow none of them.
    return ([value for value in found if fits(key.type, value)] or [key.default]) + later


def alias_values(alias: Alias) -> list[Any]:
    if alias.convert is None:
        return legal_values(keys()[alias.key])
    if alias.name.endswith("module_fqns_per_model_part"):
        return [[], [["layers.0"], ["layers.1", "layers.2"], ["norm"]]]
    if alias.name.endswith("microbatch_size"):
        return [1, 2, 4]
    if alias.name == "quantize.linear.mx.recipe_name":
        return ["mxfp8_cublas", "mxfp8_cublas_rceil"]
    if alias.own_type == list[str]:
        return [[], ["float8"], ["quantize.linear.mx"]]
    return [True, False]


CHOICES: dict[str, list[tuple[str, Any]]] = {}
for _key in keys().values():
    if _key.name not in SKIPPED and not _key.is_table:
        CHOICES[_key.name] = [(_key.name, value) for value in legal_values(_key)]
for _alias in ALIASES.values():
    CHOICES[_alias.key] += [(_alias.name, value) for value in alias_values(_alias)]
for _name, _foreign in UNSUPPORTED.items():
    CHOICES[_name] = [(_name, value) for value in _foreign.off]
CHOICES["job.dialect"] = [("job.dialect", "2026"), ("job.dialect", "2024")]
CHOICES["model.flavor"] += [
    ("model.flavor", flavor) for flavor in ("debugmodel", "8B", "70B", "405B")
]
CHOICES["model.overrides"] = [("model.overrides.n_layers", 4), ("model.overrides.rope_theta", 1e4)]
RENAMED = sorted({alias.key for alias in ALIASES.values()} | set(UNSUPPORTED) | {"job.dialect"})


@st.composite
def files(draw: st.DrawFn) -> tuple[str, int]:
    """A file with keys under all their names, in all ways in which TOML writes tables, and its
    count of comments.
    """
    chosen = draw(st.lists(st.sampled_from(RENAMED), min_size=1, max_size=8, unique=True))
    chosen += draw(
        st.lists(st.sampled_from(sorted(set(CHOICES) - set(chosen))), max_size=6, unique=True)
    )
    written = [draw(st.sampled_from(CHOICES[name])) for name in draw(st.permutations(chosen))]
    count = 0

    def comment() -> str:
        nonlocal count
        count += 1
        return f"# <{count}> [not.a.header] = 'x'"

    def pair(name: str, value: Any) -> list[str]:
        above = [comment()] if draw(st.booleans()) else []
        blank = [""] if draw(st.booleans()) else []
        tail = f"  {comment()}" if draw(st.booleans()) else ""
        return [*blank, *above, f"{name} = {quote(value)}{tail}"]

    sections: dict[str, list[tuple[str, Any]]] = {}
    for name, value in written:
        section, _, rest = name.partition(".")
        sections.setdefault(section, []).append((rest, value))
    root: list[str] = [comment()] if draw(st.booleans()) else []
    below: list[str] = []
    for section, entries in sections.items():
        style = draw(st.sampled_from(["header", "header", "header", "sub", "dotted", "inline"]))
        if style == "dotted":
            for rest, value in entries:
                root += pair(f"{section}.{rest}", value)
        elif style == "inline":
            root.append(
                f"{section} = "
                f"{{{', '.join(f'{rest} = {quote(value)}' for rest, value in entries)}}} "
                f"{comment()}"
            )
        else:
            groups: dict[str, list[tuple[str, Any]]] = {section: []}
            for rest, value in entries:
                head, _, last = rest.rpartition(".") if style == "sub" else ("", "", rest)
                groups.setdefault(f"{section}.{head}".rstrip("."), []).append((last, value))
            for group, members_ in groups.items():
                below += ["", comment()] if draw(st.booleans()) else []
                below.append(f"[{group}]" + (f" {comment()}" if draw(st.booleans()) else ""))
                for rest, value in members_:
                    below += pair(rest, value)
    return "\n".join([*root, *below]) + "\n", count


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(files())
def test_migrated_file_means_the_same_and_keeps_its_comments(file):
    text, comments = file
    before, problems = read_text(text, HERE)
    assume(not problems)
    migration = migrate_text(text, HERE)
    after, problems = read_text(migration.text, HERE)
    assert problems == []
    for key in keys():
        if key != "job.dialect":
            assert (after.value(key), type(after.value(key))) == (
                before.value(key),
                type(before.value(key)),
            )
    entries, _ = file_entries(migration.text, "run.toml")
    assert [
        entry.name for entry in entries if entry.name not in keys() and not table_of(entry.name)
    ] == []
    found = [int(number) for number in re.findall(r"# <(\d+)>", migration.text)]
    assert sorted(found) == list(range(1, comments + 1))
    assert migrate_text(migration.text, HERE).changes == ()
    assert after.value("job.dialect") == "2024"
