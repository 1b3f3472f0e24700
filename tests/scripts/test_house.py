"""The limits of the library's size and shape, and of sentences."""

from __future__ import annotations

import re
from typing import Any

import pytest

from scripts import moving_picture
from tests.support.processes import ROOT, python
from tests.support.scripts import load_script


@pytest.fixture(scope="module")
def house() -> Any:
    return load_script("house")


def missed(figures: list[Any]) -> list[str]:
    return [
        f"{figure.name}: {figure.text}, limit {figure.limit}"
        for figure in figures
        if not figure.holds
    ]


def test_the_library_keeps_its_limits(house):
    source = house.Source(ROOT)
    figures = [*house.static_figures(source), *house.density_figures(source)]
    figures += [*house.room_figures(source), *house.reader_figures(source)]
    assert not missed(figures)


@pytest.mark.slow
def test_a_run_keeps_its_limits(house):
    run = house.traced_run(ROOT)
    assert run["frames"]
    assert run["save"]
    assert "trainer.py" in run["imported"]
    assert not missed(house.run_figures(house.Source(ROOT), run))


#: What a run imports when it turns it on: packages, and files.
OFF = [
    "config/trust_claims",
    "config/descriptions",
    "config/dialect",
    "config/value_problems",
    "config/own_functions",
    "config/unknown_keys",
    "config/variables",
    "resolve/weights_shape",
    "checkpoint/async_save",
    "checkpoint/dcp_files",
    "checkpoint/hf",
    "checkpoint/load",
    "checkpoint/manager",
    "checkpoint/manifest",
    "checkpoint/store_paths",
    "checkpoint/retention",
    "checkpoint/schedule",
    "checkpoint/state_dict",
    "data/chat",
    "data/mixtures",
    "data/text_function",
    "data/phases",
    "data/remote",
    "data/stream",
    "data/token_files",
    "data/zstd_reader",
    "features/activation_offload",
    "features/async_tp",
    "features/context",
    "features/ema",
    "features/experts",
    "features/loss_chunks",
    "features/pipeline",
    "metrics/boards",
    "metrics/nan_finder",
    "metrics/profiler",
    "models/experts",
    "models/hf",
    "models/linears",
    "models/mistral",
    "models/mixtral",
    "models/qwen3",
    "models/qwen3_moe",
    "models/yarn",
    "optim/adamw",
    "optim/gated",
    "optim/in_backward",
    "optim/muon",
    "optim/custom",
    "parallel/activation_checkpoint",
    "parallel/compile",
    "parallel/divided_loss",
    "dist/interfaces",
    "dist/run_store",
    "parallel/tensor",
    "parallel/fsdp_groups",
    "plan",
    "runs/attempts",
    "assembly/rank_checks",
    "assembly/phase_resize",
    "assembly/saves",
    "assembly/error_exit",
    "assembly/own_callbacks",
    "assembly/schedule_change",
    "checkpoint/trainer_save",
    "dist/count_gpus",
    "dist/open_files",
    "dist/parent_death",
    "metrics/compile_report",
    "metrics/hang_report",
    "metrics/run_boards",
    "metrics/timeouts",
    "metrics/watchdog",
    "runs/config_changes",
    "runs/read_jsonl",
    "runs/text_tables",
    "cli",
    "models/generate",
    "regularized_loss",
    "checkpoint/resume",
    "optim/spikes",
    "dist/stopped_state",
    "data/damaged_tokens_callback",
    "checkpoint/verify_resume",
]


@pytest.mark.slow
def test_a_plain_run_imports_nothing_that_it_does_not_turn_on(house):
    run = house.plain_run(ROOT)
    assert {"assembly/build.py", "trainer.py", "validation.py"} <= set(run["imported"])
    found = [
        name
        for name in run["imported"]
        if name.removesuffix(".py") in OFF or name.startswith(tuple(f"{one}/" for one in OFF))
    ]
    assert not found
    present = {*ROOT.glob("titanlite/*"), *ROOT.glob("titanlite/*/*")}
    known = {path.relative_to(ROOT / "titanlite").with_suffix("").as_posix() for path in present}
    assert set(OFF) <= known, "all of these are there"
    assert not missed(house.plain_figures(house.Source(ROOT), run))


def test_a_circle_a_large_file_and_a_whole_config_are_found(house, tmp_path):
    library = tmp_path / "titanlite"
    library.mkdir()
    (library / "guard.py").write_text("from titanlite.loss import x\n" + "\n" * 500)
    text = "def loss(run: RunConfig):\n    from titanlite.guard import y\n"
    (library / "loss.py").write_text(text)
    source = house.Source(tmp_path)
    assert source.total == 503
    assert house.circles_of(library, source.trees) == ["guard", "loss"]
    assert list(house.takes_whole_config(library, source.trees)) == ["loss:loss"]


def test_the_page_lists_the_rooms_in_their_order(house):
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+) \|", page.partition("## The rooms")[2], re.MULTILINE)
    named = [
        re.sub(r"\.py$|/$", "", name) for row in rows for name in re.findall(r"`([^`]+)`", row)
    ]
    listed = [name for name in named if name in house.ROOMS]
    # The two that the package itself has import all of it.
    assert listed[: len(house.ROOMS) - 2] == [name for name in house.ROOMS if "__" not in name]


def test_the_picture_of_the_rooms_shows_the_imports_of_today(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    drawn = (ROOT / "docs" / "images" / "rooms.svg").read_text(encoding="utf-8")
    wanted = load_script("rooms_picture").picture(ROOT)
    assert drawn == wanted, "run: python scripts/generate.py"


# Sentences


@pytest.mark.slow
def test_few_sentences_are_long():
    prose = load_script("prose")
    found = prose.sentences_of(ROOT)
    page = str(ROOT / "docs" / "metrics.md")
    few = python("scripts/prose.py", page).stdout
    own = [one for one in found if one.place == "docs/metrics.md"]
    assert f" of {len(own):,} sentences" in few
    for kind, limit in prose.LIMITS.items():
        assert sum(sentence.kind == kind for sentence in found) > 500
        assert prose.share_of_long(found, kind) <= limit, f"python scripts/prose.py lists {kind}"


# docs/images/resume.svg


PICTURE = ROOT / "docs" / "images" / "resume.svg"


def _sign(line: str) -> str:
    """Return the first words of a line without its time, numbers and names of this machine."""
    line = re.sub(r"^[\d-]+ [\d:]+ ", "", line)
    line = re.sub(r" ?\(.*?\)", "", line)
    line = re.sub(r"/\S+", "PATH", line)
    line = re.sub(r"[\d.,]+", "9", line)
    return " ".join(line.split()[:3])


def _signs(lines: list[str]) -> set[str]:
    """Return the signs of lines of the log and of errors, not of their second halves."""
    dated = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S"
    return {_sign(line) for line in lines if re.match(rf"{dated}|rank \d|error: |all \d", line)}


def test_the_picture_names_no_place_of_the_machine_that_drew_it():
    text = "".join(moving_picture.lines_of(PICTURE.read_text()))
    places = re.findall(r"(?<![\w.~/-])/\w[\w.-]*/", text)
    # That of the machine on which torch was built is in gloo's messages.
    assert set(places) <= {"/__w/"}, places


@pytest.mark.soak
def test_its_run_still_prints_these_lines(tmp_path, monkeypatch):
    # A smaller model prints the same, but for numbers. Its steps take long enough for a look at
    # those in which a rank is killed.
    smaller = "[model.overrides]\nn_layers = 2\n[training]\nbatch_size = 2\n"
    run = moving_picture.RUN
    assert run.count("[training]\n") == 1
    monkeypatch.setattr(moving_picture, "RUN", run.replace("[training]\n", smaller))
    recording = moving_picture.record(tmp_path)
    drawn = moving_picture.draw(recording)
    assert set(moving_picture.lines_of(drawn)) == set(recording.lines())
    shown = _signs(moving_picture.lines_of(PICTURE.read_text()))
    assert shown - _signs(recording.lines()) == set(), (
        "run: python scripts/moving_picture.py docs/images/resume.svg"
    )
