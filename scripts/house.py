#!/usr/bin/env python
"""Print the size and shape of the library beside their limits (docs/architecture.md gives the
reasons).

usage: python scripts/house.py [REPOSITORY] [-v]

A test holds the limits. A higher limit is a decision: docs/log.md gives its reason, and what went
for it. Lines of the library, its core and its reading path are printed without a limit: a limit in
lines was met by denser lines. Size is counted in tokens, and density has limits too. The
figures come from the source (lines, parameters, import circles) and from real runs of one process
on the CPU (stack frames to `loss.backward()`, files that a save passes through, modules that
training imports).
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Most tokens of the files that docs/architecture.md names as those to read first.
READING_TOKENS = 16_000
#: Modules whose functions may take the whole config, or the beginnings of their names.
MAY_TAKE_ALL = (
    "config.",
    "main",
    "assembly.",
    "resolve.",
    "run.",
    "features",
    "plan.",
    "cli.",
    "launch.",
    "contrib.",
)
#: Annotations of parameters that take the whole config.
WHOLE_CONFIG = {"Plans", "LoadedConfig", "Config", "RunConfig", "Derived"}
#: A plain run: the default config on one rank, without checkpoints.
PLAIN_FLAGS = [
    "--job.config_file=debug_model.toml",
    "--training.steps=2",
    "--validation.steps=1",
    "--checkpoint.enable_checkpoint=false",
]
#: Tokens of the files that it imports, and the share of the lines of their functions that do not
#: run, in percent: what a run does not turn on is not imported.
PLAIN_TOKENS, PLAIN_IDLE = 100_000, 23.0
FLAGS = [
    "--job.config_file=debug_model.toml",
    "--training.steps=2",
    "--training.seq_len=64",
    "--training.batch_size=2",
    "--model.overrides.n_layers=1",
    "--training.compile=false",
    "--checkpoint.enable_checkpoint=true",
    "--metrics.enable_tensorboard=false",
]


@dataclass(frozen=True)
class Figure:
    """One figure of the library: its value in words, and each number with its limit."""

    name: str
    text: str
    numbers: Mapping[str, float]
    limits: Mapping[str, float]

    @property
    def holds(self) -> bool:
        return all(self.numbers[name] <= limit for name, limit in self.limits.items())

    @property
    def limit(self) -> str:
        return ", ".join(f"<= {limit:,} {name}".rstrip() for name, limit in self.limits.items())


def main() -> None:
    repository = Path(next((word for word in sys.argv[1:] if word != "-v"), ".")).resolve()
    source, run = Source(repository), traced_run(repository)
    plain = plain_run(repository)
    seconds = config_check_seconds(repository)
    check = Figure("titanlite config check", f"{seconds:.2f} s of CPU", {"s": seconds}, {"s": 0.25})
    figures = [
        *static_figures(source),
        *density_figures(source),
        *room_figures(source),
        *reader_figures(source),
        *run_figures(source, run),
        *plain_figures(source, plain),
        check,
    ]
    width = max(len(figure.name) for figure in figures), max(len(figure.text) for figure in figures)
    for figure in figures:
        mark = "" if figure.holds else "  MISSED"
        print(f"{figure.name:{width[0]}}  {figure.text:{width[1]}}  {figure.limit}{mark}")
    if "-v" in sys.argv:
        for name in ("frames", "save"):
            print(f"{name}: {' '.join(run[name])}")


class Source:
    """The library's files: their syntax trees and lines."""

    def __init__(self, repository: Path) -> None:
        self.library = repository / "titanlite"
        self.texts = texts = {
            path: path.read_text(encoding="utf-8") for path in sorted(self.library.rglob("*.py"))
        }
        self.trees = {path: ast.parse(text) for path, text in texts.items()}
        self.lines = {path: text.count("\n") for path, text in texts.items()}
        self.total = sum(self.lines.values())
        self.tests = [
            path.read_text(encoding="utf-8") for path in (repository / "tests").rglob("*.py")
        ]

    def count(self, names: Iterable[str]) -> int:
        """Return the lines of files, by their paths below the library."""
        return sum(self.lines[self.library / name] for name in names)


def reading_path(library: Path) -> list[str]:
    """Return the files that docs/architecture.md names as those to read first, in its order."""
    page = (library.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition("## Read it in this order\n")[2].partition("\n## ")[0]
    steps = section.rpartition("\n\n")[0]  # the last paragraph is for a second reading
    return re.findall(r"`([\w/]+\.py)`", steps)


def static_figures(source: Source) -> list[Figure]:
    """Return the figures that need no run."""
    library, trees = source.library, source.trees
    large = sorted(
        f"{p.relative_to(library)} {count}" for p, count in source.lines.items() if count > 600
    )
    path = sum(tokens_of(source.texts[library / name]) for name in reading_path(library))
    step = function(trees, "TrainStep", "__call__")
    assert step is not None
    methods, attributes = members(trees, "Trainer")
    whole, doubled = list(takes_whole_config(library, trees)), doubled_keys(library, trees)
    size = {"lines": source.total, "files": len(trees)}
    of_step = {"parameters": parameters(step), "lines": body_lines(step)}
    of_trainer = {"methods": methods, "attributes": attributes}
    return [
        Figure("library", in_words(size), size, {}),
        names_figure("files over 600 lines", large),
        Figure("reading path", f"{path:,} tokens", {"tokens": path}, {"tokens": READING_TOKENS}),
        Figure("training step", in_words(of_step), of_step, {"parameters": 7, "lines": 25}),
        Figure("Trainer", in_words(of_trainer), of_trainer, {"methods": 15, "attributes": 14}),
        names_figure("keys defined twice or more", doubled),
        names_figure("functions that take the whole config", whole),
        names_figure("files in import circles", circles_of(library, trees)),
    ]


#: Kinds of tokens that carry meaning: without strings, comments and layout, neither long lines nor
#: short ones change their number.
TOKENS = (tokenize.NAME, tokenize.OP, tokenize.NUMBER)
BRANCHES = (
    ast.If,
    ast.IfExp,
    ast.For,
    ast.While,
    ast.ExceptHandler,
    ast.With,
    ast.BoolOp,
    ast.comprehension,
    ast.Match,
)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
#: A function that is longer, or branches more often, wants parts with a name each.
LONGEST, MOST_BRANCHES = 60, 15


def density_figures(source: Source) -> list[Figure]:
    """Return the figures of size and density, by tokens and syntax trees."""
    counts = {name: tokens_of(text) for name, text in source.texts.items()}
    tokens = sum(counts.values())
    contrib = source.library / "contrib"
    core = sum(count for path, count in counts.items() if contrib not in path.parents)
    sizes = {"of the library": tokens, "of the core": core}
    of_tests = sum(map(tokens_of, source.tests))
    ratio = round(of_tests / tokens, 3)
    dense = round(tokens / source.total, 2)
    wide = sum(len(row) > 100 for text in source.texts.values() for row in text.splitlines())
    nodes = [node for tree in source.trees.values() for node in ast.walk(tree)]
    shapes = {
        "comprehensions": sum(isinstance(node, COMPREHENSIONS) for node in nodes),
        "ternaries": sum(isinstance(node, ast.IfExp) for node in nodes),
        "tuple = tuple": sum(is_unpacking(node) for node in nodes),
    }
    shares = {name: round(1000 * count / source.total, 1) for name, count in shapes.items()}
    packed = {
        "nested ternaries": sum(is_nested_ternary(node) for node in nodes),
        "starred tuples": sum(is_starred_tuple(node) for node in nodes),
    }
    long = sum(is_long(node) for node in nodes)
    top = len(list(source.library.glob("*.py")))
    limits = {"comprehensions": 22.2, "ternaries": 14.3, "tuple = tuple": 2.0}
    return [
        Figure(
            "tokens", in_words(sizes), sizes, {"of the library": 352_000, "of the core": 320_000}
        ),
        Figure(
            "tokens of tests", f"{of_tests:,}, {ratio} of the library's", {"": ratio}, {"": 0.85}
        ),
        Figure("tokens a line", f"{dense}", {"": dense}, {"": 5.6}),
        Figure("lines over 100 characters", f"{wide}", {"": wide}, {"": 5}),
        Figure("in 1,000 lines", in_words(shares), shares, limits),
        Figure("packed", in_words(packed), packed, {"nested ternaries": 0, "starred tuples": 0}),
        Figure("functions to divide", f"{long}", {"": long}, {"": 0}),
        Figure("files at the top", f"{top}", {"": top}, {"": 13}),
    ]


#: The order of rooms, from the top: a module imports from its own room and from those behind it.
ROOMS = (
    *("__main__", "__init__", "contrib", "cli", "launch", "main", "torchrun", "assembly"),
    *("trainer", "features", "validation", "plan", "resolve", "metrics", "checkpoint", "step"),
    *("parallel", "run", "optim", "regularized_loss", "loss", "models", "data", "dist", "runs"),
    *("callbacks", "config", "doors", "exit_codes", "utils"),
)


def rooms_imported(source: Source) -> Counter[tuple[str, str]]:
    """Count the imports between rooms, lazy ones too, by the room that imports and the other."""
    library = source.library
    names = {module_name(library, path) for path in source.trees}
    found: Counter[tuple[str, str]] = Counter()
    for path, tree in source.trees.items():
        own = room(library, path)
        for module in imports(tree):
            target = module.removeprefix("titanlite.")
            if target not in names:  # a name of a module, not a module
                target = target.rpartition(".")[0]
            other = target.partition(".")[0]
            if target in names and other not in ("", own):
                found[own, other] += 1
    return found


def room_figures(source: Source) -> list[Figure]:
    """Return the figures of the rooms: what stands directly below the package."""
    library = source.library
    imported = rooms_imported(source)
    edges: dict[str, set[str]] = defaultdict(set)
    upward = 0
    for (own, other), count in imported.items():
        edges[own].add(other)
        upward += count * (ROOMS.index(other) < ROOMS.index(own))
    rings = [name for name in edges if name in reachable(edges, name)]
    apart = sum(
        tokens_of(text) for path, text in source.texts.items() if room(library, path) == "contrib"
    )
    of_contrib = [name for name in edges if "contrib" in edges[name]]
    return [
        Figure("imports to a higher room", f"{upward}", {"": upward}, {"": 0}),
        Figure("rooms in a ring", f"{len(rings)} {' '.join(rings)}", {"": len(rings)}, {"": 0}),
        Figure("tokens of contrib", f"{apart:,}", {"": apart}, {"": 34_600}),
        names_figure("rooms that import contrib", of_contrib),
    ]


def reader_figures(source: Source) -> list[Figure]:
    """Return how many names a reader meets: helpers, docstrings, commands, keys."""
    from titanlite.cli.command_table import COMMANDS
    from titanlite.config.keys import keys
    from titanlite.doors import OURS

    private: Counter[str] = Counter()
    called: Counter[str] = Counter()
    words = 0
    for node in (node for tree in source.trees.values() for node in ast.walk(tree)):
        if isinstance(node, ast.Call):
            called[getattr(node.func, "id", getattr(node.func, "attr", ""))] += 1
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            words += len((ast.get_docstring(node) or "").split())
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            private[node.name] += node.name.startswith("_") and not node.name.startswith("__")
    once = sum(count == 1 and called[name] == 1 for name, count in private.items())
    share = round(1000 * once / source.total, 1)
    commands = {"of the core": len(COMMANDS), "of contrib": len(OURS["commands"])}
    known = len(keys())
    return [
        Figure("private functions called once", f"{share} in 1,000 lines", {"": share}, {"": 4.0}),
        Figure("words of docstrings", f"{words:,}", {"": words}, {"": 45_000}),
        Figure("commands", in_words(commands), commands, {"of the core": 14, "of contrib": 6}),
        Figure("keys", f"{known}", {"": known}, {"": 250}),
    ]


def tokens_of(text: str) -> int:
    found = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type in TOKENS for token in found)


def is_unpacking(node: ast.AST) -> bool:
    """Return whether tuples stand on both sides: several assignments in one."""
    if not isinstance(node, ast.Assign):
        return False
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def is_nested_ternary(node: ast.AST) -> bool:
    if not isinstance(node, ast.IfExp):
        return False
    return sum(isinstance(inner, ast.IfExp) for inner in ast.walk(node)) > 1


def is_starred_tuple(node: ast.AST) -> bool:
    return isinstance(node, ast.Starred) and isinstance(node.value, (ast.Tuple, ast.List))


def is_long(node: ast.AST) -> bool:
    """Return whether a function has too many lines or branches."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    branches = sum(isinstance(inner, BRANCHES) for inner in ast.walk(node))
    return lines > LONGEST or branches > MOST_BRANCHES


def run_figures(source: Source, run: dict[str, list[str]]) -> list[Figure]:
    """Return the figures of a `traced_run`."""
    commands = [name for name in run["imported"] if name.startswith("cli/")]
    core = {
        "lines": source.count(run["imported"]),
        "files": len(run["imported"]),
        "of cli/": len(commands),
    }
    frames = {"": len(run["frames"]), "files": len(set(run["frames"]))}
    saved = [name for name in run["save"] if name not in STAND_INS]
    text = f"{len(saved)}, and {len(run['save']) - len(saved)} called by torch alone"
    return [
        Figure("core (imported by a run)", in_words(core), core, {"of cli/": 0}),
        Figure(
            "frames to backward()",
            f"{frames['']} in {frames['files']} files",
            frames,
            {"": 6, "files": 3},
        ),
        Figure("files that a save passes", text, {"": len(saved)}, {"": 10}),
    ]


def plain_figures(source: Source, run: dict[str, list[str]]) -> list[Figure]:
    """Return the figures of a `plain_run`: how much code it loads, and how much of it runs."""
    imported = [source.library / name for name in run["imported"]]
    tokens = sum(tokens_of(source.texts[path]) for path in imported)
    ran = set(run["functions"])
    total = running = 0
    for path in imported:
        for first, lines in functions_of(source.trees[path]):
            total += lines
            if f"{path.relative_to(source.library)}:{first}" in ran:
                running += lines
    idle = round(100 * (1 - running / total), 1)
    text = f"{tokens:,} tokens in {len(imported)} files"
    lines = f"{idle} % of {total:,} lines of functions"
    return [
        Figure("a plain run imports", text, {"tokens": tokens}, {"tokens": PLAIN_TOKENS}),
        Figure("and does not run", lines, {"%": idle}, {"%": PLAIN_IDLE}),
    ]


def functions_of(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """Yield first line and number of lines of each function and method with a body.

    Functions in functions count as a part of them. The first line is that of the first decorator,
    as in a code object.
    """
    todo: list[ast.AST] = [tree]
    while todo:
        for node in ast.iter_child_nodes(todo.pop()):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                todo.append(node)
            elif not is_stub(node):
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                yield first, (node.end_lineno or node.lineno) - first + 1


def is_stub(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function has no body: of a protocol, or of a base class."""
    body = node.body[1:] if ast.get_docstring(node) else node.body
    return all(
        isinstance(one, ast.Pass)
        or (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
        for one in body
    )


def in_words(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in numbers.items())


def names_figure(name: str, found: Sequence[str], allowed: int = 0) -> Figure:
    """Return a figure that should be zero, or at most `allowed`, with the names that are found."""
    text = f"{len(found)} {' '.join(found)}".strip()
    return Figure(name, text, {"": len(found)}, {"": allowed})


def function(trees: dict[Path, ast.Module], owner: str | None, name: str) -> ast.FunctionDef | None:
    """Find a function by name, in a class (`owner`) or at the top of a module."""
    for tree in trees.values():
        scopes = (
            [n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == owner]
            if owner
            else [tree.body]
        )
        for scope in scopes:
            for node in scope:
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    return node
    return None


def parameters(node: ast.FunctionDef | None) -> int:
    if node is None:
        return 0
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len([name for name in names if name != "self"])


def body_lines(node: ast.FunctionDef | None) -> int:
    """Count lines of code: without docstring, comments and blank lines."""
    if node is None:
        return 0
    text = ast.unparse(ast.Module(node.body[1:] if ast.get_docstring(node) else node.body, []))
    return sum(bool(line.strip()) for line in text.splitlines())


def members(trees: dict[Path, ast.Module], name: str) -> tuple[int, int]:
    """Count the methods of a class and the attributes that it sets on self."""
    cls = next(
        n for t in trees.values() for n in t.body if isinstance(n, ast.ClassDef) and n.name == name
    )
    methods = [n for n in cls.body if isinstance(n, ast.FunctionDef)]
    attributes = {
        n.attr
        for n in ast.walk(cls)
        if isinstance(n, ast.Attribute)
        and isinstance(n.ctx, ast.Store)
        and getattr(n.value, "id", "") == "self"
    }
    return len(methods), len(attributes)


def room(library: Path, path: Path) -> str:
    parts = path.relative_to(library).parts
    return parts[0].removesuffix(".py")


def module_name(library: Path, path: Path) -> str:
    """Return a file's name as in imports, without `titanlite.`: "start.fit", "" for the package."""
    parts = path.relative_to(library).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def circles_of(library: Path, trees: dict[Path, ast.Module]) -> list[str]:
    """Return the files that import each other in a circle, imports within functions included."""
    names = {module_name(library, path) for path in trees}
    edges: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees.items():
        name = module_name(library, path)
        for module in imports(tree):
            target = module.removeprefix("titanlite.")
            if target not in names:  # a name of a module, not a module
                target = target.rpartition(".")[0]
            if target and target != name and target in names:
                edges[name].add(target)
    reach = {name: reachable(edges, name) for name in edges}
    return sorted(name for name in reach if name in reach[name])


def reachable(edges: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    todo = list(edges[start])
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += edges.get(name, ())
    return found


def imports(node: ast.AST) -> Iterator[str]:
    """Yield the modules that are imported, also within functions, but not for type checkers
    alone.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.ImportFrom) and child.module:
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        yield from imports(child)


def takes_whole_config(library: Path, trees: dict[Path, ast.Module]) -> Iterator[str]:
    """Yield the functions with a parameter that is the whole config, outside the modules that may
    have one.
    """
    for path, tree in trees.items():
        if module_name(library, path).startswith(MAY_TAKE_ALL):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                    names = {
                        n.id
                        for n in ast.walk(argument.annotation or node.args)
                        if isinstance(n, ast.Name)
                    }
                    if argument.annotation is not None and names & WHOLE_CONFIG:
                        yield f"{room(library, path)}:{node.name}"


def doubled_keys(library: Path, trees: dict[Path, ast.Module]) -> list[str]:
    """Return the keys whose name and literal default stand in a second class, too."""
    fields: dict[tuple[str, str], set[str]] = defaultdict(set)
    sections: set[tuple[str, str]] = set()
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            for item in node.body:
                if (
                    isinstance(item, ast.AnnAssign)
                    and isinstance(item.target, ast.Name)
                    and item.value is not None
                ):
                    if isinstance(item.value, ast.Call):  # a section, or a factory
                        continue
                    key = item.target.id, ast.unparse(item.value)
                    fields[key].add(f"{path.name}:{node.name}")
                    if "sections" in path.as_posix():
                        sections.add(key)
    common = {"False", "True", "None", "0", "0.0", "1", "[]", "{}", "''"}
    return sorted(
        name
        for (name, default) in sections
        if default not in common and len(fields[name, default]) > 1
    )


def config_check_seconds(repository: Path) -> float:
    """Return the least processor time of `titanlite config check` on the default config, in
    seconds, with the compiled modules of an earlier start. Other work on the machine only adds.
    """
    seconds = []
    command = [sys.executable, "-m", "titanlite", "config", "check", "debug_model.toml"]
    with tempfile.TemporaryDirectory() as folder:
        kept = {"PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
        given = {**environment(repository), **kept}
        for _ in range(8):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(command, cwd=repository, env=given, capture_output=True, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    # The first start compiles.
    return min(seconds[1:])


def environment(repository: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}


#: They replace code of torch, and torch's calls pass through them: no reader of a save meets them.
STAND_INS = ("parallel/fsdp_one_rank.py",)


def traced_run(repository: Path) -> dict[str, list[str]]:
    """Train two steps in their own process and return what it passed through.

    frames: our files on the stack at the first `backward()`, outermost first. save: our files that
    ran during the first save. imported: files of the library that the run imported.
    """
    return run_under(TRACER, repository, FLAGS)


def plain_run(repository: Path) -> dict[str, list[str]]:
    """Train two steps of the default config without checkpoints, in a process of one rank.

    imported: files of the library that it imported. functions: `file:line` of those that ran.
    """
    return run_under(PLAIN_TRACER, repository, PLAIN_FLAGS)


def run_under(tracer: str, repository: Path, flags: Sequence[str]) -> dict[str, list[str]]:
    """Run the code of a tracer in its own process; return what it writes: a JSON object."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "trace.json"
        words = [str(repository), str(out), *flags, f"--job.dump_folder={folder}/run"]
        done = subprocess.run(
            [sys.executable, "-c", tracer, *words],
            cwd=repository,
            env=environment(repository),
            capture_output=True,
            text=True,
        )
        if not out.exists():
            sys.exit(f"the traced run failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        found: dict[str, list[str]] = json.loads(out.read_text())
        return found


PLAIN_TRACER = r"""
import json, os, runpy, sys, threading
repository, out, *flags = sys.argv[1:]
library = os.path.join(repository, "titanlite") + os.sep
sys.argv = ["train.py", *flags]
codes = set()
def profile(frame, event, argument):
    if event == "call":
        codes.add(frame.f_code)
leave = os._exit
def finish(code):
    sys.setprofile(None)
    functions = [
        f"{os.path.relpath(one.co_filename, library)}:{one.co_firstlineno}"
        for one in list(codes) if one.co_filename.startswith(library)]
    files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
    imported = {
        os.path.relpath(name, library)
        for name in files if name.startswith(library) and name.endswith(".py")}
    if code == 0:
        with open(out, "w") as file:
            json.dump({"imported": sorted(imported), "functions": sorted(functions)}, file)
    leave(code)
os._exit = finish
threading.setprofile(profile)
sys.setprofile(profile)
runpy.run_path(os.path.join(repository, "train.py"), run_name="__main__")
"""


TRACER = r"""
import json, os, runpy, sys, threading, traceback
repository, out, *flags = sys.argv[1:]
library = os.path.join(repository, "titanlite") + os.sep
sys.argv = ["train.py", *flags]
found = {"frames": [], "save": [], "imported": []}
import torch
backward = torch.Tensor.backward
def traced(self, *args, **kwargs):
    names = [frame.filename for frame in traceback.extract_stack()]
    # The last call counts: the first ones trace a block to learn what it keeps.
    found["frames"] = [os.path.relpath(n, repository) for n in names if n.startswith(library)]
    return backward(self, *args, **kwargs)
torch.Tensor.backward = traced
saved = set()
def profile(frame, event, argument):
    name = frame.f_code.co_filename
    if name.startswith(library):
        saved.add(os.path.relpath(name, library))
import importlib
def watch(module, owner, method):
    cls = getattr(importlib.import_module(module), owner)
    original = getattr(cls, method)
    def wrapped(self, *args, **kwargs):
        threading.setprofile(profile); sys.setprofile(profile)
        try:
            return original(self, *args, **kwargs)
        finally:
            sys.setprofile(None); threading.setprofile(None)
    setattr(cls, method, wrapped)
watch("titanlite.checkpoint.manager", "Checkpointer", "save")
leave = os._exit
def finish(code):
    found["save"] = sorted(saved)
    found["imported"] = sorted(
        os.path.relpath(m.__file__, library) for m in list(sys.modules.values())
        if (getattr(m, "__file__", None) or "").startswith(library) and m.__file__.endswith(".py"))
    open(out, "w").write(json.dumps(found))
    leave(code)
os._exit = finish
runpy.run_path(os.path.join(repository, "train.py"), run_name="__main__")
"""


if __name__ == "__main__":
    main()
