"""docs/add-a-feature.md: its package, installed by pip, adds a command and a feature with a key."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT, python

PAGE = (ROOT / "docs" / "add-a-feature.md").read_text(encoding="utf-8")
CONFIG = """
[job]
extends = ["debug_model.toml"]
[training]
steps = 3
seq_len = 64
global_batch_size = 4
batch_size = 2
[model.overrides]
n_layers = 1
[validation]
enable = false
[metrics]
log_freq = 1
enable_tensorboard = false
"""
#: A service that another package tracks runs with.
TRACKER = """
from titanlite.metrics.tracker_base import Tracker

class Lines(Tracker):
    key = "lines"

    def send(self, rows):
        with open(self.run.folder / "lines", "w") as file:
            for step, values in rows:
                print(step, values["loss_metrics/global_avg_loss"], file=file)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder into which pip has installed the package of the page."""
    folder = tmp_path_factory.mktemp("page")
    for text, language, block in re.findall(r"(.*?)^```(\w+)\n(.*?)^```$", PAGE, re.S | re.M):
        (*_, named) = re.findall(r"`([\w/]+\.(?:py|toml))`", text) or [""]
        if named:
            file = folder / "package" / named
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block, encoding="utf-8")
        else:
            (folder / "noise.toml").write_text(f"{CONFIG}{block}", encoding="utf-8")
        assert language in ("python", "toml")
    words = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", folder]
    done = python("-m", "pip", "install", *words, folder / "package", cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "lines.py").write_text(TRACKER)
    (folder / "lines-1.dist-info").mkdir()
    (folder / "lines-1.dist-info" / "METADATA").write_text("Name: lines\nVersion: 1\n")
    points = "[titanlite.trackers]\nlines = lines:Lines\n"
    (folder / "lines-1.dist-info" / "entry_points.txt").write_text(points)
    return folder


def run(site: Path, *words: object) -> Any:
    """Run the command beside the package."""
    return python("-m", "titanlite", *words, cwd=site, env={"PYTHONPATH": f"{ROOT}:{site}"})


def losses(site: Path, dump: Path, *flags: str) -> tuple[list[float], str]:
    """Train; return the losses and the output."""
    done = run(site, "train", "noise.toml", f"--job.dump_folder={dump}", *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (dump / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines], done.stdout


@pytest.mark.slow
def test_the_feature_of_the_page_trains_and_is_not_there_when_it_is_off(site, tmp_path):
    off, _ = losses(site, tmp_path / "off", "--gradient_noise.variance=0")
    on, report = losses(site, tmp_path / "on", "--metrics.trackers=lines")
    # The noise comes with the first update, so the first loss is without it.
    assert on[0] == off[0]
    assert on[1:] != pytest.approx(off[1:], abs=1e-3)
    assert "gradient noise  variance 0.01 at step 1" in re.sub("  +", "  ", report)
    tracked = (tmp_path / "on" / "lines").read_text().splitlines()
    assert tracked == [f"{step} {loss}" for step, loss in enumerate(on, 1)]
    assert "[gradient_noise]\nvariance = 0.01" in (tmp_path / "on" / "config.toml").read_text()


def test_its_command_runs_its_keys_are_explained_and_wrong_values_are_refused(site):
    done = run(site, "noise", "noise.toml")
    assert float(done.stdout.split()[1]) == pytest.approx((0.01 / 3**0.55) ** 0.5, rel=1e-3)
    done = run(site, "config", "explain", "gradient_noise.variance")
    assert "Variance of the noise at the first step" in done.stdout
    assert "a number >= 0" in done.stdout
    noise = ["--gradient_noise.variance=-1", "--gradient_noise.varance=1"]
    early = ["--optimizer.early_step_in_backward", "--training.max_norm=1e9"]
    for flags, messages in (
        (noise, ["variance: expected a number >= 0", "nearest: gradient_noise.variance"]),
        (early, ["excludes optimizer.early_step_in_backward"]),
    ):
        done = run(site, "config", "check", "noise.toml", *flags)
        assert done.returncode == 2
        assert [message for message in messages if message not in done.stderr] == []
    done = python("-m", "titanlite", "config", "check", site / "noise.toml")
    assert done.returncode == 2
    assert "[gradient_noise]: unknown section" in done.stderr, "without the package"


def test_a_package_that_cannot_be_imported_harms_what_names_it_alone(tmp_path):
    """Also one whose command has the name of a command of the core."""
    (tmp_path / "broken.py").write_text("import there_is_no_such_module\n")
    (tmp_path / "broken-1.dist-info").mkdir()
    (tmp_path / "broken-1.dist-info" / "METADATA").write_text("Name: broken\nVersion: 1\n")
    points = "[titanlite.commands]\nthin = broken:add\ntrain = broken:add\n"
    points += "[titanlite.features]\nthin = broken:Thin\n[titanlite.trackers]\nthin = broken.a:B\n"
    (tmp_path / "broken-1.dist-info" / "entry_points.txt").write_text(points)
    listed = run(tmp_path, "--help")
    assert listed.returncode == 0
    assert re.search(r"^ +thin +of the package broken", listed.stdout, re.M)
    for flag, message in (
        ("--thin.freq=1", "[thin]: broken:Thin cannot be imported: ModuleNotFoundError"),
        ("--metrics.trackers=thin", "needs broken.a, which cannot be imported: ModuleNotFound"),
    ):
        done = run(tmp_path, "config", "check", "debug_model.toml", flag)
        assert done.returncode == 2
        assert message in done.stderr
    assert run(tmp_path, "config", "check", "debug_model.toml").returncode == 0
