"""`titanlite mup check`: slopes with muP and without, and the verdict."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from titanlite.cli.main import main
from titanlite.config.errors import ConfigError
from titanlite.config.model_sections import Optimizer
from titanlite.config.sections import Mup
from titanlite.contrib.lab.mup.command import measure
from titanlite.contrib.lab.mup.coordinates import Task
from titanlite.contrib.lab.mup.models import Models, models_of
from titanlite.contrib.lab.mup.verdict import LIMIT, Line, verdict
from titanlite.features.mup.rules import Rules
from titanlite.models import SPECS

WIDTHS = (64, 128, 256)


def models(family: str, mup: Mup = Mup(), **changes: Any) -> Models:  # noqa: B008 (immutable)
    args = replace(SPECS[family].flavors["debugmodel"], vocab_size=256, **changes)
    return models_of(replace(args, n_layers=2), mup, WIDTHS)


def lines_of(family: str, optimizer: str, found: Models) -> list[Line]:
    """Slopes on tokens of which some are frequent, as in text."""
    generator = torch.Generator().manual_seed(0)
    shares = 1 / torch.arange(1.0, 257.0)
    rows = torch.multinomial(shares, 4 * 17, replacement=True, generator=generator).view(4, 17)
    batches = [(row[None, :-1], row[None, 1:]) for row in rows]
    settings = Optimizer(name=optimizer, lr=2e-3, no_decay_on_norms=True)
    return measure(Task(SPECS[family], settings, batches, torch.device("cpu")), found, seeds=3)


def slopes(lines: list[Line], mup: bool) -> dict[str, float]:
    return {line.kind: line.slope for line in lines if line.mup == mup}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("family", "optimizer", "mup", "changes"),
    [
        ("llama3", "AdamW", Mup(), {}),
        ("llama3", "Muon", Mup(), {}),
        # Heads get wider, and not more.
        ("llama3", "AdamW", Mup(64, {"n_heads": 4}), {"n_heads": 4, "tied": True}),
        ("mixtral", "AdamW", Mup(), {}),
        pytest.param("gpt_oss", "AdamW", Mup(), {}, marks=pytest.mark.slow),
    ],
)
def test_changes_do_not_depend_on_the_width_and_do_without(family, optimizer, mup, changes):
    lines = lines_of(family, optimizer, models(family, mup, **changes))
    flat = slopes(lines, mup=True)
    assert max(map(abs, flat.values())) < LIMIT, flat
    assert verdict(lines)[0]
    steep = slopes(lines, mup=False)
    assert steep["attention"] > 0.9 and steep["feed-forward"] > 1.2 and steep["residual"] > 0.5
    # Weights of a tied head are so small that they soon have no part of what they were.
    assert steep["target logits"] > 0.4 or changes.get("tied")
    assert steep.get("router", 1.0) > 0.4
    assert ("router" in flat) == (family != "llama3")


@pytest.mark.slow
def test_a_wrong_rate_is_found(monkeypatch):
    right = Rules.factors

    def wrong(self, name, muon=False):
        found = right(self, name, muon)
        return found if found.rate == 1 else found._replace(rate=found.rate**0.5)

    monkeypatch.setattr(Rules, "factors", wrong)
    lines = lines_of("llama3", "AdamW", models("llama3"))
    good, told = verdict(lines)
    assert not good and "FAILED" in told[0]
    assert slopes(lines, mup=True)["feed-forward"] > LIMIT


def test_a_check_that_sees_nothing_says_so():
    lines = [Line("logits", mup, WIDTHS, [1.0, 1.0, 1.0]) for mup in (True, False)]
    good, told = verdict(lines)
    assert good and "raise optimizer.lr" in told[1]


def test_models_differ_in_width_alone():
    found = models("llama3", Mup(64, {"n_heads": 4, "n_layers": 1}), n_heads=4, ffn_dim=512)
    assert {width: (one.n_heads, one.ffn_dim) for width, one in found.of.items()} == {
        64: (4, 128),
        128: (4, 256),
        256: (4, 512),
    }
    assert found.base == found.of[64]
    args = SPECS["llama3"].flavors["8B"]
    # Its heads have 128 numbers, and four of them share a key head.
    assert models_of(args, Mup(), ()).widths == [512, 1024, 2048]
    with pytest.raises(ConfigError, match="--widths 128,256"):
        models_of(args, Mup(), (64, 128))


CHECK = ["mup", "check", "debug_model.toml", "--widths", "64,128", "--model.overrides.n_layers=1"]


@pytest.mark.slow
def test_the_command_prints_slopes_and_ends_by_the_verdict(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(CHECK) == 0
    shown = capsys.readouterr().out
    assert "OK: with muP every slope is within 0.25 of 0" in shown
    rows = [line.split() for line in shown.splitlines() if line.startswith("feed-forward")]
    assert [row[1] for row in rows] == ["yes", "no"]
    assert abs(float(rows[0][4])) < LIMIT < float(rows[1][4])
    assert "from base dim 64: AdamW, rate 0.003, 4 steps of 16 tokens" in shown
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--widths=24,48"], "no whole number at dim = 24"),
        (["--mup.base_dim=24"], "no whole number at dim = 24"),
    ],
)
def test_what_the_command_refuses(words, shown, capsys):
    assert main(["mup", "check", "debug_model.toml", *words]) == 2
    assert shown in capsys.readouterr().err
