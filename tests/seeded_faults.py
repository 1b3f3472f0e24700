"""Seeds faults into a copy of titanlite, one after the other, and tells whether the tests
catch each.

    python tests/seeded_faults.py [NAME ...]

A fault that no test catches is a missing quick test. Exit code 1: at least one survived. About ten
seconds a fault.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
#: Seconds for the tests of one fault; a fault that makes ranks wait for each other forever counts
#: as caught.
TIMEOUT = 300.0
HANGS = -1


class Fault(NamedTuple):
    """One fault: text of a file of titanlite that is replaced."""

    name: str
    #: Below `titanlite/`.
    file: str
    #: (old text, new text); each old text occurs once in the file.
    edits: tuple[tuple[str, str], ...]
    #: Tests that catch it, below `tests/`: the quick ones of a file, or one by its name.
    tests: tuple[str, ...]

    def change(self, text: str) -> str:
        for old, new in self.edits:
            text = text.replace(old, new)
        return text


def read_faults(text: str) -> Iterator[Fault]:
    """The faults of `seeded_faults.txt`."""
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith("#")]
        if lines:
            name, file, *tests = lines[0].split()
            changes = re.findall(
                r"((?:^-.*\n)+)((?:^\+.*\n?)+)", "\n".join(lines[1:]), re.MULTILINE
            )
            edits = tuple((plain(old), plain(new)) for old, new in changes)
            yield Fault(name.removesuffix(":"), file, edits, tuple(tests))


def plain(changed: str) -> str:
    """Lines of a patch without their first column."""
    return "\n".join(line[1:] for line in changed.splitlines())


FAULTS = tuple(read_faults(Path(__file__).with_suffix(".txt").read_text()))


def problems_of(fault: Fault, root: Path = ROOT) -> list[str]:
    """Return why a fault cannot be seeded: a test is gone, an old text is not there once, broken
    syntax.
    """
    found = []
    for test in fault.tests:
        file, _, name = test.partition("::")
        tests = root / "tests" / file
        if not tests.is_file() or name.partition("[")[0] not in tests.read_text():
            found.append(f"no tests/{test}")
    path = root / "titanlite" / fault.file
    if not path.is_file():
        return [*found, f"no titanlite/{fault.file}"]
    text = path.read_text()
    counts = ((old, text.count(old)) for old, _ in fault.edits)
    found += [
        f"titanlite/{fault.file} holds {count} times: {old}" for old, count in counts if count != 1
    ]
    try:
        if path.suffix == ".py":
            ast.parse(fault.change(text))
    except SyntaxError as error:
        found.append(f"titanlite/{fault.file} would not be Python: {error}")
    return found


@contextmanager
def seeded(fault: Fault, root: Path) -> Iterator[None]:
    """Seed a fault into the tree `root` inside."""
    path = root / "titanlite" / fault.file
    before = path.read_text()
    path.write_text(fault.change(before))
    try:
        yield
    finally:
        path.write_text(before)


def copy_tree(target: Path) -> None:
    """Copy all files that git knows or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    for name in filter(None, names):
        if os.path.lexists(ROOT / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def run_tests(root: Path, tests: list[str]) -> tuple[int, str]:
    """Run tests in the tree `root`; return pytest's exit code and output."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    if not all("::" in test for test in tests if test != "-x"):
        command += ["-m", "not slow and not soak"]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [*command, *tests],
            cwd=root,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=TIMEOUT + 20 * len(tests),
        )
    except subprocess.TimeoutExpired:
        return HANGS, ""
    return done.returncode, done.stdout


def failures(output: str) -> list[str]:
    return re.findall(r"^(?:FAILED|ERROR) (\S+?\[.*?\](?= - |$)|\S+)", output, re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to seed; none: all")
    options = parser.parse_args()
    known = {fault.name: fault for fault in FAULTS}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"no fault {', '.join(unknown)}")
    faults = [known[name] for name in options.names] or list(FAULTS)
    if problems := [
        f"{fault.name}: {problem}" for fault in faults for problem in problems_of(fault)
    ]:
        print("\n".join(problems), file=sys.stderr)
        return 2
    survived = []
    caught = dict[str, list[str]]()
    with tempfile.TemporaryDirectory(prefix="titanlite-faults-") as folder:
        root = Path(folder)
        copy_tree(root)
        for fault in faults:
            started = time.monotonic()
            tests = [f"tests/{test}" for test in fault.tests]
            with seeded(fault, root):
                code, output = run_tests(root, ["-x", *tests])
            if code == HANGS:
                result = f"caught: the tests did not end within {TIMEOUT:.0f} s"
            elif failed := failures(output):
                caught.setdefault(failed[0], []).append(fault.name)
                result = f"caught by {failed[0]}"
            else:
                survived.append(fault.name)
                result = f"SURVIVED: pytest ended with {code}"
            print(f"{fault.name:42} {time.monotonic() - started:4.0f} s  {result}", flush=True)
        code, output = run_tests(root, list(caught)) if caught else (0, "")
        if code == HANGS:
            raise SystemExit("without a fault the tests that failed do not end")
        for test in failures(output):
            print(f"SURVIVED: {', '.join(caught[test])}: {test} fails without the fault too")
            survived += caught[test]
    print(f"{len(faults) - len(survived)} of {len(faults)} faults caught")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
