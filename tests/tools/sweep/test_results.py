"""What a sweep makes of its runs: the table, the best point, the picture, the files."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from titanlite.config.entries import Entry
from titanlite.config.errors import Source
from titanlite.config.loaded import LoadedConfig
from titanlite.config.sections import Config
from titanlite.tools.sweep.folder import (
    PLAN,
    Plan,
    read_plan,
    strangers,
    write_plan,
    write_results,
)
from titanlite.tools.sweep.members import Member, MemberResult, SweepError
from titanlite.tools.sweep.picture import picture
from titanlite.tools.sweep.points import Point, sweep_of
from titanlite.tools.sweep.table import best_of, families, groups_of, notes, table

KEYS = ("model.overrides.dim", "optimizer.lr", "training.seed")
SVG = "{http://www.w3.org/2000/svg}"


def point(dim: int, rate: float, seed: int) -> Point:
    name = f"dim={dim},lr={rate:g},seed={seed}"
    values = dict(zip(KEYS, (dim, rate, seed), strict=True))
    return Point(Member(name, [f"--{key}={value}" for key, value in values.items()]), values)


POINTS = [
    point(dim, rate, seed) for dim in (32, 64) for rate in (1e-3, 1e-2, 0.1) for seed in (0, 1)
]
#: By dim and rate: the losses of both seeds. nan: it diverged; None: it failed.
LOSSES = {
    (32, 1e-3): (4.0, 4.2),
    (32, 1e-2): (3.0, 3.2),
    (32, 0.1): (3.4, 3.6),
    (64, 1e-3): (3.7, 3.9),
    (64, 1e-2): (2.9, 2.95),
    (64, 0.1): (1.0, float("nan")),
}


def plan(points: list[Point] = POINTS, metric: str = "validation_loss") -> Plan:
    return Plan("widths.toml", metric, KEYS, tuple(points))


def result(one: Point) -> MemberResult:
    dim, rate, seed = (one.values[key] for key in KEYS)
    loss = LOSSES[dim, rate][seed]
    state = "done" if loss == loss else "diverged"
    return MemberResult(
        one.member.name,
        tuple(one.member.flags),
        state,
        steps=8,
        training_loss=loss - 0.5,
        last_loss=loss - 0.5,
        validation_loss=loss,
        best_validation_loss=loss - 0.1,
        seconds=2.0,
        tokens=1000,
        reason="step 3: loss nan. The rest" if state == "diverged" else "",
    )


RESULTS = [result(one) for one in POINTS]


def test_the_table_has_mean_and_spread_over_seeds_and_marks_the_best() -> None:
    groups = groups_of(plan(), RESULTS)
    best = best_of(groups)
    assert best is not None
    assert best.values == {"model.overrides.dim": 64, "optimizer.lr": 1e-2}
    made = table(plan(), groups, best)
    assert list(made.columns) == [
        "",
        "dim",
        "lr",
        "seeds",
        "validation loss",
        "training loss",
        "tokens",
        "time",
        "state",
    ]
    assert len(made.rows) == 6
    # The standard deviation of 2.9 and 2.95 is 0.05 / sqrt(2).
    assert made.rows[4] == [
        "*",
        "64",
        "0.01",
        "2 of 2",
        "2.9250 ± 0.0354",
        "2.4250",
        "2.0K",
        "4.0s",
        "done",
    ]
    assert [row[0] for row in made.rows].count("*") == 1


def test_a_point_with_a_run_that_diverged_is_not_the_best() -> None:
    groups = groups_of(plan(), RESULTS)
    row = table(plan(), groups, best_of(groups)).rows[5]
    assert row[3:5] == ["1 of 2", "1.0000"]
    assert row[-1] == "1 done, 1 diverged"


def test_notes_name_the_best_of_each_width_and_what_went_wrong() -> None:
    groups = groups_of(plan(), RESULTS)
    lines = notes(plan(), groups, best_of(groups), Path("out"))
    assert lines == [
        "best: dim = 64, lr = 0.01, validation loss 2.9250 ± 0.0354",
        "    dim = 32: best lr 0.01, by a parabola 0.0164",
        "    dim = 64: best lr 0.01",
        "dim=64,lr=0.1,seed=1 diverged after step 8: step 3: loss nan",
    ]


def test_the_parabola_is_the_one_through_the_best_point_and_its_neighbours() -> None:
    groups = groups_of(plan(), RESULTS)
    a, b, _ = np.polyfit(np.log([1e-3, 1e-2, 0.1]), [4.1, 3.1, 3.5], 2)
    lines = notes(plan(), groups, best_of(groups), Path("out"))
    assert f"by a parabola {math.exp(-b / 2 / a):.3g}" in lines[1]
    # Of width 64 a neighbour has diverged.
    assert "parabola" not in lines[2]
    narrow = POINTS[:6]
    lines = notes(plan(narrow), groups[:3], best_of(groups[:3]), Path("out"))
    assert lines[1] == "    best lr by a parabola 0.0164"


def test_lines_are_named_by_the_keys_that_tell_them_apart() -> None:
    heads = {32: 4, 64: 8}
    points = []
    for one in POINTS:
        dim = one.values[KEYS[0]]
        with_heads = {"training.steps": 8, KEYS[0]: dim, "model.overrides.n_heads": heads[dim]}
        points.append(replace(one, values=with_heads | one.values))
    keys = ("training.steps", KEYS[0], "model.overrides.n_heads", *KEYS[1:])
    groups = groups_of(replace(plan(points), keys=keys), RESULTS)
    assert list(families(groups, "optimizer.lr")) == ["dim = 32", "dim = 64"]


def test_a_best_value_at_the_edge_is_told() -> None:
    points = [one for one in POINTS if one.values["optimizer.lr"] != 1e-3]
    some = plan(points)
    groups = groups_of(some, [result(one) for one in points])
    lines = notes(some, groups, best_of(groups), Path("out"))
    assert "its optimizer.lr is the lowest of all: a lower one may be better" in lines


def test_another_base_model_is_no_better_setting_at_an_edge() -> None:
    points = []
    for one in POINTS:
        values = {"mup.base_dim": one.values[KEYS[0]], **one.values}
        del values[KEYS[0]]
        points.append(replace(one, values=values))
    some = replace(plan(points), keys=("mup.base_dim", *KEYS[1:]))
    groups = groups_of(some, RESULTS)
    lines = notes(some, groups, best_of(groups), Path("out"))
    assert lines[0].startswith("best: base_dim = 64, lr = 0.01")
    assert not any("of all" in line for line in lines)


def test_a_failed_run_is_named_with_its_last_lines_and_unfinished_ones_are_counted() -> None:
    results = [
        replace(RESULTS[0], state="failed", reason="exit code 1", last_lines=("Error: boom",)),
        *(replace(one, state="unfinished") for one in RESULTS[1:]),
    ]
    groups = groups_of(plan(), results)
    lines = notes(plan(), groups, best_of(groups), Path("out"))
    assert lines == [
        "no point has all its runs done, so none is the best",
        "dim=32,lr=0.001,seed=0 failed after step 8: exit code 1",
        "    Error: boom",
        "    its output: out/dim=32,lr=0.001,seed=0/console.log",
        "11 of 12 runs are not finished: start the sweep again",
    ]


def test_the_metric_decides_which_point_is_the_best() -> None:
    by_training = plan(metric="training_loss")
    results = [replace(one, training_loss=5.0) for one in RESULTS]
    results[0] = replace(results[0], training_loss=1.0)
    results[1] = replace(results[1], training_loss=1.0)
    best = best_of(groups_of(by_training, results))
    assert best is not None
    assert best.values == {"model.overrides.dim": 32, "optimizer.lr": 1e-3}
    assert "training loss" in table(by_training, groups_of(by_training, results), best).columns


def drawn(results: list[MemberResult], some: Plan | None = None) -> ElementTree.Element | None:
    chosen = some or plan()
    groups = groups_of(chosen, results)
    text = picture(chosen, groups, best_of(groups))
    return None if text is None else ElementTree.fromstring(text)


def test_the_picture_has_a_curve_for_each_width_on_a_logarithmic_axis() -> None:
    svg = drawn(RESULTS)
    assert svg is not None
    lines = svg.findall(f"{SVG}g")
    assert [line.findall(f"{SVG}text")[-1].text for line in lines] == ["dim = 32", "dim = 64"]
    dots = lines[0].findall(f"{SVG}circle[@class='dot']")[:3]
    x = [float(dot.attrib["cx"]) for dot in dots]
    y = [float(dot.attrib["cy"]) for dot in dots]
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.2)
    # The mean losses are 4.1, 3.1 and 3.5, and higher ones stand higher.
    assert (y[1] - y[0]) / (y[1] - y[2]) == pytest.approx(1.0 / 0.4, rel=0.01)
    assert dots[1][0].text == "dim = 32, lr = 0.01: 3.1000 ± 0.1414, 2 seeds"


def test_the_picture_marks_the_best_and_what_diverged() -> None:
    svg = drawn(RESULTS)
    assert svg is not None
    rings = [ring for ring in svg.iter(f"{SVG}circle") if ring.attrib["class"] == "best"]
    second = svg.findall(f"{SVG}g")[1]
    dot = second.findall(f"{SVG}circle[@class='dot']")[1]
    assert [(ring.attrib["cx"], ring.attrib["cy"]) for ring in rings] == [
        (dot.attrib["cx"], dot.attrib["cy"])
    ]
    crosses = second.findall(f"{SVG}path[@class='cross']")
    assert [cross[0].text for cross in crosses] == ["dim = 64, lr = 0.1: diverged"]
    texts = [text.text for text in svg.iter(f"{SVG}text")]
    assert "× diverged" in texts
    assert "best: dim = 64, lr = 0.01, validation loss 2.9250" in texts


def test_a_loss_far_above_the_others_does_not_flatten_them() -> None:
    results = [
        replace(one, validation_loss=900.0) if "dim=32,lr=0.1" in one.name else one
        for one in RESULTS
    ]
    svg = drawn(results)
    assert svg is not None
    texts = [text.text for text in svg.iter(f"{SVG}text")]
    assert "900" in texts
    assert any(text and "▲ higher than shown" in text for text in texts)
    assert "600" not in texts


def test_the_picture_is_light_or_dark_and_escapes_names() -> None:
    hostile = replace(plan(), title="<script>&")
    groups = groups_of(hostile, RESULTS)
    text = picture(hostile, groups, best_of(groups))
    assert text is not None
    assert "@media (prefers-color-scheme: dark)" in text
    assert "<script>" not in text
    assert "&lt;script&gt;&amp;" in text


def test_without_a_number_that_varies_or_a_loss_there_is_no_picture() -> None:
    names = Plan("a.toml", "training_loss", ("optimizer.name",), ())
    points = tuple(
        Point(Member(f"name={name}", []), {"optimizer.name": name}) for name in ("AdamW", "Muon")
    )
    some = replace(names, points=points)
    assert drawn([replace(RESULTS[0], name=one.member.name) for one in points], some) is None
    assert drawn([replace(one, state="unfinished") for one in RESULTS]) is None


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_plan(plan(), tmp_path)
    assert read_plan(tmp_path) == plan()
    before = (tmp_path / PLAN).stat().st_mtime_ns
    write_plan(plan(), tmp_path)
    assert (tmp_path / PLAN).stat().st_mtime_ns == before


def test_no_file_has_a_secret_of_a_url(tmp_path: Path) -> None:
    secret = "https://user:hunter2@host/data?X-Amz-Signature=abc"
    table = Entry(
        "sweep", {"training.dataset_path": [secret], "optimizer.lr": [1e-3, 1e-2]}, Source("file")
    )
    found = sweep_of(LoadedConfig(Config(), sweep=table))
    some = Plan("a-sweep", "training_loss", tuple(found.keys), tuple(found.points))
    results = [replace(RESULTS[0], name=one.name, flags=tuple(one.flags)) for one in found.members]
    write_plan(some, tmp_path)
    text = (tmp_path / PLAN).read_text() + write_results(some, results, "", tmp_path)
    assert "host/data" in text
    for part in ("hunter2", "X-Amz-Signature=abc", "Signature_abc"):
        assert part not in text + found.members[0].name
    assert secret in found.members[0].flags[0]


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"points": [{"name": "../../x", "flags": [], "values": {}}]}, "is no name of a member"),
        ({"metric": "name"}, "'name' is no metric"),
        ({"keys": ["optimizer.name"]}, "a point lacks a key"),
        ({"points": 3}, "damaged"),
    ],
)
def test_a_damaged_plan_is_refused(change: dict[str, object], wanted: str, tmp_path: Path) -> None:
    write_plan(plan(), tmp_path)
    tree = json.loads((tmp_path / PLAN).read_text())
    (tmp_path / PLAN).write_text(json.dumps({**tree, **change}))
    with pytest.raises(SweepError, match=wanted):
        read_plan(tmp_path)


def test_a_folder_without_a_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match=r"is no folder of a sweep: it has no sweep\.json"):
        read_plan(tmp_path)


def test_runs_of_another_sweep_in_the_folder_are_named(tmp_path: Path) -> None:
    for name in ("dim=32,lr=0.001,seed=0", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "member.json").write_text("{}")
    assert strangers(plan(), tmp_path) == ["old"]
