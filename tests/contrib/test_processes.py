"""Commands as child processes: which signal is reported, and what is left behind."""

from __future__ import annotations

from tests.support.processes import ended, python

#: Waits for words in the file of the command's output, and then sends this process a signal.
TWO_SIGNALS = """
import os, signal, sys, threading, time
from pathlib import Path
from titanlite.contrib.processes import Stopped, run, stoppable

console = Path(sys.argv[1])
console.touch()
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored

def send_both():
    for word, number in (("ready", signal.SIGHUP), ("asked", signal.SIGTERM)):
        while word not in console.read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

threading.Thread(target=send_both, daemon=True).start()
try:
    with stoppable():
        run([sys.executable, "-c", sys.argv[2]], console, grace=600)
except Stopped as stop:
    print(stop.name)
"""
#: A command that a request to stop does not end.
STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
print(os.getpid(), "ready", flush=True)
time.sleep(900)
"""


def test_the_first_of_two_signals_is_reported_and_the_second_kills(tmp_path):
    console = tmp_path / "console"
    done = python("-c", TWO_SIGNALS, console, STUBBORN, timeout=300)
    assert (done.returncode, done.stdout) == (0, "SIGHUP\n"), done.stderr
    assert ended(int(console.read_text().split()[0]))
