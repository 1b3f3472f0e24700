"""Runs a command on a pseudo-terminal and draws what a person would see there: docs/images/live.png
is made with it.

    python scripts/terminal_picture.py live.png --until ' 45/60 ' -- ./run_llama_train.sh
        --training.steps 60

Needs the `dev` extra and a Chromium or Chrome, which draws the page; CHROMIUM names another one.
"""

from __future__ import annotations

import argparse
import fcntl
import html
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

import pyte
from PIL import Image

COLORS = {
    "default": "#d4d7dd",
    "red": "#e06c75",
    "green": "#98c379",
    "brown": "#e5c07b",  # pyte's name for ANSI's yellow
    "blue": "#61afef",
    "cyan": "#56b6c2",
    "brightblack": "#7d8590",
}
_LINE_HEIGHT, _CHARACTER_WIDTH, _BORDER = 18, 7.8242, 14
_STYLE = f"""
body {{ margin: 0; background: #1b1f27; }}
pre {{ margin: {_BORDER}px; font: 13px/{_LINE_HEIGHT}px "DejaVu Sans Mono", monospace;
  color: {COLORS["default"]}; }}
"""


def watch(command: list[str], columns: int, lines: int, until: str) -> pyte.Screen:
    """The screen when `until` stands on it (then the command is interrupted), or when the command
    ends.
    """
    child, terminal = pty.fork()
    if not child:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        os.environ["TERM"] = "xterm-256color"
        os.execvp(command[0], command)
    screen = pyte.Screen(columns, lines)
    emulator = pyte.ByteStream(screen)
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # what Linux gives when the command has ended
            break
        emulator.feed(data)
        if until and any(until in f" {row} " for row in screen.display):
            os.kill(child, signal.SIGINT)
            break
    while True:  # the command may still have something to say before it ends
        try:
            if not os.read(terminal, 65536):
                break
        except OSError:
            break
    os.waitpid(child, 0)
    return screen


def page(screen: pyte.Screen) -> str:
    """The screen as an HTML page."""
    rows = []
    for y in range(screen.lines):
        cells = [screen.buffer[y][x] for x in range(screen.columns)]
        spans = [
            f'<span style="color:{COLORS[cell.fg]}">{html.escape(cell.data)}</span>'
            for cell in cells
        ]
        rows.append("".join(spans))
    return (
        f"<!doctype html><meta charset=utf-8><style>{_STYLE}</style><pre>"
        + "\n".join(rows)
        + "</pre>"
    )


def draw(page_text: str, columns: int, lines: int, picture: Path) -> None:
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        sys.exit(
            f"none of {', '.join(names)} is installed; CHROMIUM names another browser of that kind"
        )
    size = (
        f"{int(columns * _CHARACTER_WIDTH) + 2 * _BORDER + 1},{lines * _LINE_HEIGHT + 2 * _BORDER}"
    )
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "page.html"
        source.write_text(page_text, encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={size}"]
        subprocess.run(
            [browser, *options, f"--screenshot={picture.resolve()}", source.as_uri()], check=True
        )
    with Image.open(picture) as image:
        few_colors = image.convert("P", palette=Image.Palette.ADAPTIVE, colors=256)
    few_colors.save(picture, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture", type=Path, help="the PNG to write")
    parser.add_argument(
        "--until",
        default="",
        help="take the picture when this stands on the screen; default: at the end",
    )
    parser.add_argument("--columns", type=int, default=110)
    parser.add_argument("--lines", type=int, default=36)
    parser.add_argument("command", nargs="+", help="after --")
    given = parser.parse_args()
    screen = watch(given.command, given.columns, given.lines, given.until)
    draw(page(screen), given.columns, given.lines, given.picture)


if __name__ == "__main__":
    main()
