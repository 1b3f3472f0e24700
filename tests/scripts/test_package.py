import re
import subprocess
import sys
from pathlib import Path

import pytest

import titanlite

ROOT = Path(__file__).resolve().parents[2]


def test_importing_the_package_is_quick_and_loads_no_torch() -> None:
    script = (
        "import sys, time; began = time.perf_counter(); import titanlite; seconds = time.perf_counter() - began; "
        "assert 'torch' not in sys.modules; titanlite.exit_codes.CONFIG; assert 'torch' not in sys.modules; "
        "print(seconds)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.5


def test_rooms_are_attributes_and_nothing_else_is() -> None:
    assert titanlite.config.__name__ == "titanlite.config" and "observe" in dir(titanlite)
    with pytest.raises(AttributeError, match="no attribute 'modles'"):
        _ = titanlite.modles


def test_what_is_installed_for_training_is_imported_somewhere_and_looked_for_in_an_active_environment() -> None:
    listed = re.search(r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    assert listed is not None
    needed = set(re.findall(r'^ +"([a-z]+)', listed[1], re.M))
    code = "".join(path.read_text() for path in (ROOT / "titanlite").rglob("*.py"))
    assert needed >= {"torch", "numpy"}
    assert not {name for name in needed if not re.search(rf"^ *(import|from) (torch\.utils\.)?{name}\b", code, re.M)}
    script = (ROOT / "scripts" / "setup_env.sh").read_text()
    looked_for = re.search(r'^_RUN_MODULES="(.*)"', script, re.M)
    assert looked_for is not None and set(looked_for[1].split()) == needed - {"tomli"} | {"titanlite"}
