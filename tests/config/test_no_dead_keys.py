"""Every key is read by some code that acts on it."""

from __future__ import annotations

import ast
from pathlib import Path

import titanlite
from titanlite.config.keys import keys, sections
from titanlite.config.not_implemented import NOT_IMPLEMENTED

#: Read while the config is loaded, and tested there; the fourth has no effect.
AT_LOAD = {"job.config_file", "job.extends", "job.dialect", "job.use_for_integration_test"}
#: The one legal value is the default; the others that users know are refused with a reason.
SINGLE = "float8.scaling_type_"
CLASSES = {section.__name__: name for name, section in sections().items()}


def keys_read(tree: ast.AST) -> set[str]:
    """`section.field` for every read through a name or attribute that somewhere in the file holds that section."""
    holders: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation is not None:
            target = node.arg if isinstance(node, ast.arg) else getattr(node.target, "id", "")
            name = ast.unparse(node.annotation).strip("'\"").removesuffix(" | None").rpartition(".")[2]
            if name in CLASSES:
                holders.setdefault(target, set()).add(CLASSES[name])

    def held(node: ast.AST) -> set[str]:
        if isinstance(node, ast.Name):
            return holders.get(node.id, set())
        if isinstance(node, ast.Attribute):
            return {node.attr} if node.attr in sections() else holders.get(node.attr, set())
        return set()

    assignments = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    for node in assignments * 2:  # twice: a name may be assigned from another one assigned further down
        targets = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else node.targets
        values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        for target, value in zip(targets, values, strict=False):
            name = getattr(target, "id", getattr(target, "attr", ""))
            holders.setdefault(name, set()).update(held(value))
    return {
        f"{section}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        for section in held(node.value)
    }


def test_every_key_is_read_by_code_that_acts_on_it() -> None:
    package = Path(titanlite.__file__).parent
    # config/ and fit.py load, check and print keys.
    files = [f for f in package.rglob("*.py") if not {"config", "fit.py"} & set(f.relative_to(package).parts)]
    read = set().union(*(keys_read(ast.parse(file.read_text(encoding="utf-8"))) for file in files))
    assert [key for key in keys() if not (key in read | AT_LOAD | set(NOT_IMPLEMENTED) or key.startswith(SINGLE))] == []


def test_the_registry_of_features_to_come_names_only_keys() -> None:
    assert set(NOT_IMPLEMENTED) <= set(keys())
