import subprocess
import sys

import pytest

import titanlite


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
