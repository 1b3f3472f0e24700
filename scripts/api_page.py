#!/usr/bin/env python
"""Write docs/api.md: signatures and docstrings of the names that titanlite makes public.

usage: python scripts/api_page.py > docs/api.md

It reads the source, so it needs neither torch nor an installation. A test compares the page.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "titanlite"
WIDTH = 88
#: Heading → its names, in the order in which a program uses them.
GROUPS = {
    "A run": (
        "load_config RunConfig DistEnv read_datasets Datasets check_ranks build TrainingComponents "
        "Trainer StopSignal"
    ),
    "A step": (
        "TrainStep StepResult PlainRunner FiniteGuard BadStepError ReplicationFactors Batch "
        "to_device validate"
    ),
    "Text": "generate",
    "Callbacks": "Callback Figures RunEnd",
    "Checkpoints": "Checkpointer LoadedState",
    "Models": "ModelSpec Init Size Cost",
    "Changes of a module": (
        "apply_float8 apply_tp apply_cp apply_ac apply_compile apply_fsdp groups_by_class"
    ),
    "Optimizers": "AnyPrecisionAdamW",
    "Sections of the config": "ActivationCheckpoint Checkpoint Optimizer",
}
#: Their fields are keys, which another page explains.
SECTIONS = set(GROUPS["Sections of the config"].split())
HEAD = """\
# API reference

Generated from the docstrings by `python scripts/generate.py`; do not edit.

Import these names with `from titanlite import …`. Everything else may change between versions.
How to use them: [library.md](library.md).

| name | what it is |
|---|---|
"""
TYPES = """\
## Other types in signatures

A program seldom makes these itself. Import them from their modules.

| type | module |
|---|---|
"""

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Public:
    """One public name: its module and its definition."""

    name: str
    module: str
    lines: list[str]
    source: ast.Module
    node: ast.ClassDef | Function

    @property
    def doc(self) -> str:
        return ast.get_docstring(self.node) or ""


def main() -> None:
    sys.stdout.write(page())


def page() -> str:
    """Return the page. Raises ValueError if `GROUPS` lacks a public name, or has another one."""
    public = {one.name: one for one in public_names()}
    grouped = [name for names in GROUPS.values() for name in names.split()]
    if sorted(grouped) != sorted(public):
        raise ValueError(f"GROUPS has other names: {set(grouped) ^ set(public)}")
    rows = [f"| `{name}` | {first_sentence(public[name].doc)} |" for name in grouped]
    parts = [HEAD + "\n".join(rows)]
    for title, names in GROUPS.items():
        parts.append(f"## {title}")
        for name in names.split():
            parts += entry(public[name])
    types = other_types(list(public.values()))
    parts.append(TYPES + "\n".join(f"| `{name}` | `{types[name]}` |" for name in sorted(types)))
    return "\n\n".join(parts) + "\n"


def public_names() -> Iterator[Public]:
    """Yield the names that `titanlite/__init__.py` imports for type checkers."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not node.module or node.module[0] == "_":
            continue
        if not node.module.startswith("titanlite."):
            continue
        file = PACKAGE.parent / f"{node.module.replace('.', '/')}.py"
        if not file.is_file():
            file = file.with_suffix("") / "__init__.py"
        text = file.read_text(encoding="utf-8")
        source = ast.parse(text)
        known = {
            one.name: one for one in source.body if isinstance(one, (ast.ClassDef, *FUNCTIONS))
        }
        for alias in node.names:
            yield Public(alias.name, node.module, text.splitlines(), source, known[alias.name])


def first_sentence(doc: str) -> str:
    text = " ".join(doc.partition("\n\n")[0].split())
    return re.split(r"(?<=\.) ", text)[0].replace("|", "\\|")


def entry(one: Public) -> Iterator[str]:
    """Yield the parts of a name's entry: heading, signature, text, members."""
    yield f"### {one.name}"
    node = one.node
    if not isinstance(node, ast.ClassDef):
        yield fence(signature(node, node.name))
        yield from markdown(one.doc, arguments(node))
        return
    if one.name in SECTIONS:
        yield from markdown(one.doc)
        yield "Its fields are the keys of its section: [config-keys.md](config-keys.md)."
        return
    made = next((part for part in node.body if getattr(part, "name", "") == "__init__"), None)
    if isinstance(made, FUNCTIONS):
        yield fence(signature(made, node.name, skip_first=True))
        yield from markdown(one.doc, arguments(made))
        yield from markdown(ast.get_docstring(made) or "", arguments(made))
    else:
        own = fields(node)
        if own:
            rows = "".join(f"    {ast.unparse(field)},\n" for field in own)
            yield fence(f"{node.name}(\n{rows})")
        yield from markdown(one.doc, [ast.unparse(field.target) for field in own])
        yield from texts_of_fields(own, one.lines)
    for part in node.body:
        if isinstance(part, FUNCTIONS) and shown(part.name):
            yield from member(part)


def shown(name: str) -> bool:
    return not name.startswith("_") or name == "__call__"


def fields(node: ast.ClassDef) -> list[ast.AnnAssign]:
    found = [part for part in node.body if isinstance(part, ast.AnnAssign)]
    return [field for field in found if shown(ast.unparse(field.target))]


def texts_of_fields(own: list[ast.AnnAssign], lines: list[str]) -> Iterator[str]:
    """Yield a list of the fields that have a comment above."""
    found = [(ast.unparse(field.target), comment_above(lines, field.lineno)) for field in own]
    rows = [f"- `{name}`: {text}" for name, text in found if text]
    if rows:
        yield "\n".join(rows)


def comment_above(lines: list[str], number: int) -> str:
    """Return the text of the `#: ` comment that ends above a line."""
    rows: list[str] = []
    for line in reversed(lines[: number - 1]):
        if not line.strip().startswith("#: "):
            break
        rows.insert(0, line.strip()[3:])
    return " ".join(rows)


def member(node: Function) -> Iterator[str]:
    """Yield a method's signature and text; a property has its type alone."""
    marks = {ast.unparse(mark) for mark in node.decorator_list}
    if any(mark.endswith("overload") or mark.endswith(".setter") for mark in marks):
        return
    is_property = "property" in marks or "cached_property" in marks
    if is_property and node.returns:
        yield fence(f"{node.name}: {ast.unparse(node.returns)}")
    else:
        yield fence(signature(node, node.name, skip_first="staticmethod" not in marks))
    yield from markdown(ast.get_docstring(node) or "", arguments(node))


def signature(node: Function, name: str, *, skip_first: bool = False) -> str:
    """Return `name(arguments) -> type`, one argument a line where one line is too long."""
    given = node.args
    if skip_first:  # self or cls
        given = ast.arguments(
            given.posonlyargs,
            given.args[1:],
            given.vararg,
            given.kwonlyargs,
            given.kw_defaults,
            given.kwarg,
            given.defaults,
        )
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{name}({ast.unparse(given)}){returns}"
    if len(line) <= WIDTH:
        return line
    rows = "".join(f"    {part},\n" for part in split_arguments(ast.unparse(given)))
    return f"{name}(\n{rows}){returns}"


def split_arguments(text: str) -> list[str]:
    """Divide arguments at the commas outside of brackets."""
    parts = [""]
    depth = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def arguments(node: Function) -> list[str]:
    given = node.args
    return [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


def fence(code: str) -> str:
    return f"```python\n{code}\n```"


def markdown(doc: str, names: Sequence[str] = ()) -> Iterator[str]:
    """Yield the paragraphs of a docstring; what follows `name: ` of an argument is a list item."""
    for block in doc.split("\n\n"):
        rows = block.splitlines()
        if rows and rows[0].strip() in ("Args:", "Attributes:"):
            rows = [row[4:] for row in rows[1:]]
        elif rows and all(row.startswith("    ") for row in rows):
            yield fence("\n".join(row[4:] for row in rows))
            continue
        if rows:
            yield paragraph(rows, names)


def paragraph(rows: list[str], names: Sequence[str]) -> str:
    """Join the rows of a paragraph. An argument begins an item, an indented `word: ` one below it.

    What is raised is a separate paragraph.
    """
    starts = "|".join(names) or "(?!)"
    lines = [""]
    for row in rows:
        deeper = re.match(r"    +(\w+): +(.*)", row)
        if deeper:
            lines.append(f"    - `{deeper[1]}`: {deeper[2]}")
            continue
        for text in re.split(rf"(?<=\. )(?=(?:{starts}): |Raises [A-Z`])", row.strip()):
            named = re.match(rf"({starts}): +(.*)", text)
            if named:
                if not lines[-1].startswith(("- ", "    - ")):
                    lines.append("")
                lines.append(f"- `{named[1]}`: {named[2]}")
            elif text.startswith("Raises ") and lines[-1].rstrip().endswith((".", "")):
                lines += ["", text]
            else:
                lines[-1] += f" {text}"
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in lines)).strip()


def other_types(public: list[Public]) -> dict[str, str]:
    """Return the types of titanlite that signatures name and that are not public, with their
    modules.
    """
    found = {}
    for one in public:
        known = types_of(one)
        if one.name in SECTIONS:  # types of keys are on the page of keys
            known = classes_of(one)
        for word in words_of(one.node):
            if word in known:
                found[word] = known[word]
    names = {one.name for one in public}
    return {name: module for name, module in found.items() if name not in names}


def classes_of(one: Public) -> dict[str, str]:
    return {node.name: one.module for node in one.source.body if isinstance(node, ast.ClassDef)}


def types_of(one: Public) -> dict[str, str]:
    """Return each type that the module of a name has, with the module that defines it."""
    known = classes_of(one)
    for node in one.source.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            alias = node.targets[0].id
            if alias[0].isupper() and "TypeVar" not in ast.unparse(node.value):
                known[alias] = one.module
    for node in ast.walk(one.source):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("titanlite."):
            known.update({alias.name: str(node.module) for alias in node.names})
    return known


def words_of(node: ast.ClassDef | Function) -> set[str]:
    """Return the names in the annotations of a function, or of a class's public members."""
    own = node.body if isinstance(node, ast.ClassDef) else [node]
    annotations: list[ast.expr | None] = []
    for part in own:
        if isinstance(part, ast.AnnAssign) and shown(ast.unparse(part.target)):
            annotations.append(part.annotation)
        is_shown = isinstance(part, FUNCTIONS) and (shown(part.name) or part.name == "__init__")
        if isinstance(part, FUNCTIONS) and is_shown:
            given = part.args
            arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs]
            arguments += [one for one in (given.vararg, given.kwarg) if one]
            annotations += [argument.annotation for argument in arguments if argument.arg[0] != "_"]
            annotations.append(part.returns)
    texts = [ast.unparse(annotation) for annotation in annotations if annotation]
    return {word for text in texts for word in re.findall(r"[A-Za-z_]\w*", text)}


if __name__ == "__main__":
    main()
