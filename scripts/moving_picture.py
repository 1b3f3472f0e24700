"""Records a run on a pseudo-terminal and draws it as a moving picture: docs/images/resume.svg.

    python scripts/moving_picture.py docs/images/resume.svg

The run is real: it starts, a rank is killed, the culprit is named, and the same command resumes.
At the end its last checkpoint is compared with that of a run that nobody disturbed. Nothing is
drawn by hand; only waits are shortened. Takes about a minute on two cores. Needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import fcntl
import html
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyte

ROOT = Path(__file__).resolve().parents[1]
COLORS = {
    "default": "#d4d7dd",
    "red": "#e06c75",
    "green": "#98c379",
    "brown": "#e5c07b",  # pyte's name for ANSI's yellow
    "blue": "#61afef",
    "cyan": "#56b6c2",
    "brightblack": "#7d8590",
}
COLUMNS = 144
LINES = 32
#: Pixels of a character and of a line, and the border.
_WIDTH = 7.25
_HEIGHT = 16
_BORDER = 12
#: Seconds that a picture stands: at most, at least, and the last one.
_LONGEST = 1.2
_SHORTEST = 0.1
_LAST = 5.0
#: Seconds between two looks at the terminal.
_LOOK = 0.2
#: Seconds in which each command must end.
_PATIENCE = 600

#: What is typed.
SHOWN = "titanlite train debug_model.toml run.toml --nproc-per-node 2"
#: The file that it names.
RUN = """[job]
dump_folder = "outputs/run"
[training]
steps = 60
[metrics]
log_freq = 4
[validation]
enable = false
[checkpoint]
enable_checkpoint = true
interval = 20
"""


@dataclass
class Recording:
    """Pictures of a terminal, each a list of lines of (colour, text), and seconds it stood."""

    frames: list[tuple[list[list[tuple[str, str]]], float]] = field(default_factory=list)

    def add(self, screen: pyte.Screen, seconds: float) -> None:
        """Add what the screen shows; the same picture as before only stands longer."""
        lines = [list(_runs(screen, y)) for y in range(screen.lines)]
        if self.frames and self.frames[-1][0] == lines:
            self.frames[-1] = (lines, self.frames[-1][1] + seconds)
        else:
            self.frames.append((lines, seconds))

    def lines(self) -> list[str]:
        """Return each line that was shown, once, in the order of their coming."""
        seen: dict[str, None] = {}
        for lines, _ in self.frames:
            for runs in lines:
                seen.setdefault("".join(text for _, text in runs).rstrip())
        return list(filter(None, seen))


def _runs(screen: pyte.Screen, y: int) -> Iterator[tuple[str, str]]:
    """Yield (colour, text) of the neighbours of one colour in a line, without blanks at its end."""
    cells = [screen.buffer[y][x] for x in range(screen.columns)]
    while cells and cells[-1].data == " ":
        cells.pop()
    start = 0
    for place in range(1, len(cells) + 1):
        if place == len(cells) or cells[place].fg != cells[start].fg:
            text = "".join(cell.data for cell in cells[start:place])
            yield COLORS.get(cells[start].fg, COLORS["default"]), text
            start = place


class Terminal:
    """A terminal on which commands run, and the recording of what it shows."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.environment = environment
        self.screen = pyte.HistoryScreen(COLUMNS, LINES, history=10_000)
        self.recording = Recording()
        self._emulator = pyte.ByteStream(self.screen)

    def type(self, text: str) -> None:
        """Show a prompt and what is typed there."""
        self._emulator.feed(b"\x1b[92m$\x1b[0m ")
        self.recording.add(self.screen, 0.6)
        for part in re.findall(r".{1,6}", text):
            self._emulator.feed(part.encode())
            self.recording.add(self.screen, 0.12)
        self._emulator.feed(b"\r\n")

    def run(self, words: list[str], look: Callable[[Terminal], None] = lambda _: None) -> int:
        """Run a command to its end, and return its exit code. look: is called at each picture."""
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        process = subprocess.Popen(
            words,
            cwd=self.folder,
            env=self.environment,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        end = time.monotonic() + _PATIENCE
        drawn = time.monotonic()
        open_ = True
        rest = b""
        while open_:
            if time.monotonic() > end:
                process.kill()
                raise TimeoutError(" ".join(words))
            if select.select([ours], [], [], _LOOK)[0]:
                try:
                    rest += os.read(ours, 65536)
                except OSError:  # what Linux gives when the command has ended
                    open_ = False
                # Whole lines: a path may arrive in two parts.
                end_of_lines = rest.rfind(b"\n") + 1 if open_ else len(rest)
                self._emulator.feed(self._without_places(rest[:end_of_lines]))
                rest = rest[end_of_lines:]
            now = time.monotonic()
            if now >= drawn + _LOOK or not open_:
                self.recording.add(self.screen, now - drawn)
                drawn = now
                look(self)
        os.close(ours)
        return process.wait()

    def _without_places(self, output: bytes) -> bytes:
        """Return what a command wrote, with paths as on the machine of a reader."""
        for place, shown in ((self.folder, "~"), (sys.prefix, ".venv"), (ROOT, "titanlite")):
            output = output.replace(f"{place}".encode(), shown.encode())
        return output

    def shows(self, pattern: str) -> bool:
        """Whether a line of the screen matches."""
        return any(re.search(pattern, line) for line in self.screen.display)


def record(folder: Path) -> Recording:
    """Run the story in a folder; return what its terminal showed."""
    scripts = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TERM": "xterm-256color",
        "OMP_NUM_THREADS": "1",
    }
    for name in ("CI", "NO_COLOR", "KUBERNETES_SERVICE_HOST", "COLUMNS", "LINES"):
        environment.pop(name, None)
    (folder / "run.toml").write_text(RUN)
    titanlite = [sys.executable, "-m", "titanlite"]
    train = [*titanlite, "train", "debug_model.toml", "run.toml", "--nproc-per-node", "2"]
    undisturbed = subprocess.run(
        [*train, "--job.dump_folder=outputs/undisturbed"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert undisturbed.returncode == 0, undisturbed.stderr
    terminal = Terminal(folder, environment)
    killed: list[int] = []

    def kill_rank_1(terminal: Terminal) -> None:
        if not killed and terminal.shows(r" step: (24|28|32) "):
            killed.append(_rank(folder, 1))
            os.kill(killed[0], signal.SIGKILL)

    terminal.type(SHOWN)
    code = terminal.run(train, kill_rank_1)
    assert killed, "the run ended before its rank was killed"
    assert code != 0, "a run that lost a rank ended with 0"
    terminal.type(SHOWN)
    assert terminal.run(train) == 0
    steps = ["outputs/undisturbed/checkpoint/step-60", "outputs/run/checkpoint/step-60"]
    terminal.type(" ".join(["titanlite checkpoint diff", *steps]))
    assert terminal.run([*titanlite, "checkpoint", "diff", *steps]) == 0
    terminal.type("")
    return terminal.recording


def _rank(folder: Path, rank: int) -> int:
    """Return the process of a rank whose working directory is the folder."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes().split(b"\0")
            here = (process / "cwd").resolve() == folder.resolve()
        except OSError:
            continue
        if here and f"LOCAL_RANK={rank}".encode() in variables:
            return int(process.name)
    raise ProcessLookupError(f"no process of rank {rank}")


def draw(recording: Recording) -> str:
    """Return the SVG: all pictures below each other, of which a window shows one at a time."""
    width = round(COLUMNS * _WIDTH) + 2 * _BORDER
    height = LINES * _HEIGHT + 2 * _BORDER
    names: dict[str, str] = {}
    pictures = []
    for number, (lines, _) in enumerate(recording.frames):
        uses = []
        for y, runs in enumerate(lines):
            if not runs:
                continue
            name = names.setdefault(_text(runs), f"l{len(names)}")
            top = number * height + _BORDER + (y + 1) * _HEIGHT - 4
            uses.append(f'<use href="#{name}" y="{top}"/>')
        pictures.append("".join(uses))
    definitions = "\n".join(
        f'<text id="{name}" x="{_BORDER}" xml:space="preserve">{text}</text>'
        for text, name in names.items()
    )
    seconds = [min(max(stood, _SHORTEST), _LONGEST) for _, stood in recording.frames]
    seconds[-1] = _LAST
    whole = sum(seconds)
    passed = 0.0
    keys = []
    for number, stood in enumerate(seconds):
        keys.append(f"{100 * passed / whole:.3f}%{{transform:translateY({-number * height}px)}}")
        passed += stood
    last = -(len(seconds) - 1) * height
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" \
width="{width}" height="{height}" role="img">
<title>A run starts, rank 1 is killed, the same command resumes, and the last checkpoints are \
equal</title>
<style>
text{{font:12px "DejaVu Sans Mono",Menlo,Consolas,monospace;fill:{COLORS["default"]}}}
#film{{animation:play {whole:.1f}s steps(1,end) infinite}}
@keyframes play{{{"".join(keys)}}}
@media (prefers-reduced-motion:reduce){{#film{{animation:none;transform:translateY({last}px)}}}}
</style>
<defs>
{definitions}
</defs>
<rect width="{width}" height="{height}" rx="6" fill="#1b1f27"/>
<g id="film">
{chr(10).join(pictures)}
</g>
</svg>
"""


def _text(runs: list[tuple[str, str]]) -> str:
    """Return the content of a line's `text` element."""
    parts = []
    for color, text in runs:
        escaped = html.escape(text, quote=False)
        if color == COLORS["default"]:
            parts.append(escaped)
        else:
            parts.append(f'<tspan fill="{color}">{escaped}</tspan>')
    return "".join(parts)


def lines_of(picture: str) -> list[str]:
    """Return the lines of text in a picture that `draw` made."""
    found = re.findall(r"<text [^>]*>(.*?)</text>", picture)
    return [html.unescape(re.sub(r"<[^>]+>", "", text)).rstrip() for text in found]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture", type=Path, help="the SVG to write")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        recording = record(Path(folder))
    given.picture.write_text(draw(recording), encoding="utf-8")
    size = given.picture.stat().st_size
    print(f"{given.picture}: {len(recording.frames)} pictures, {size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
