"""benchmarks/card.py: its figures by hand, and the cards in docs/cards, which are those of their
numbers.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import card
from tests.support.processes import ROOT

CARDS = sorted((ROOT / "docs" / "cards").glob("*.json"))
BEGAN = {
    "event": "start",
    "attempt": 1,
    "time": "2026-11-30T10:00:00.000+00:00",
    "began": "fresh",
    "step": 0,
    "ranks": 1,
    "device": "NVIDIA H200",
    "command": ["train.py", "--job.config_file=debug_model.toml", "--job.dump_folder=/somewhere"],
    "git": {"commit": "0123456789abcdef", "dirty": True},
    "versions": {"torch": "2.13.0"},
}
CONFIG = (ROOT / "train_configs" / "debug_model.toml").read_text()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    speeds = [1, 2, 3, 4, 1000, 1400, 1200, 1100, 1300]
    rows = [
        {"step": n, "time": n, "loss": 9.5 - n, "tps": tps, "memory_gib": n % 4}
        for n, tps in enumerate(speeds, 1)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "attempts.jsonl").write_text(json.dumps(BEGAN) + "\n")
    (tmp_path / "config.toml").write_text(CONFIG)
    return tmp_path


def test_a_card_shows_spread_losses_and_the_formula_with_its_numbers(run):
    page = run / "cards" / "x.md"
    cells = {"a": card.figures(run), "b": {}}
    lines = card.write(page, cells, {"title": "x", "gradients": ["g"]}).splitlines()
    assert lines[0] == "# x on NVIDIA H200"
    # The speeds of steps 5 to 9; 4 sequences of 128 tokens.
    rows = {
        "tokens in a step": 512,
        "tokens/s and device: median": "1,200",
        "lower quartile": "1,100",
        "upper quartile": "1,300",
        "slowest step": "1,000",
        "peak memory of a rank, GiB": 3,
        "loss, step 5": 4.5,
        "loss, last step": 0.5,
    }
    for title, value in rows.items():
        assert f"| {title} | {value} | not run |" in lines
    # 6 x the 6,294,784 weights without the embedding's 589,824; 12 x 6 layers x 256 x 128 tokens;
    # 989 TFLOP/s.
    assert (cells["a"]["FLOPs of weights"], cells["a"]["FLOPs of attention"]) == (
        6 * (6_294_784 - 589_824),
        12 * 6 * 256 * 128,
    )
    formula = "1,200 × (0.03423 + 0.002359) GFLOP = 0.04391 TFLOP/s, 0.00444 % of 989 TFLOP/s"
    assert f"- a: {formula}" in lines
    assert lines[lines.index("## Gradients of the first step") + 2] == "- g"
    assert "- a: 2026-11-30, commit 0123456789ab with local changes" in lines
    assert card.commit_of({"unknown": "not a git repository"}) == "unknown"
    assert "- a: `train.py --job.config_file=debug_model.toml`" in lines
    # A later call keeps what it does not name.
    assert card.write(page, {"a": {}}, {}).splitlines() == lines
    assert "| tokens in a step | 512 | not run | 512 |" in card.write(page, {"c": cells["a"]}, {})


def test_a_run_of_too_few_steps_has_no_speed(run):
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 1, "tps": 5}))
    assert card.figures(run) == {"steps": 1}


def test_the_hash_of_a_config_is_that_of_its_values(run):
    file = run / "config.toml"
    first = card.config_hash(file)
    file.write_text("# A comment.\n" + CONFIG.replace('"./outputs/debug_model"', '"elsewhere"'))
    assert card.config_hash(file) == first
    file.write_text(CONFIG.replace("lr = 3e-3", "lr = 3.1e-3"))
    assert card.config_hash(file) != first


@pytest.mark.parametrize("store", CARDS, ids=lambda store: store.stem)
def test_a_card_is_the_page_of_its_numbers_and_listed(store):
    text = card.text_of(json.loads(store.read_text()))
    assert store.with_suffix(".md").read_text() == text
    assert f"]({store.stem}.md)" in (store.parent / "README.md").read_text()
