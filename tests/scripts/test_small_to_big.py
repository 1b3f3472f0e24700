"""docs/recipes/small-to-big.md as it stands: muP, sweep, ladder, the run, its tasks, its export."""

from __future__ import annotations

import gzip
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.scripts.test_recipes import Done, follow, lay_out, read_recipe, refuse_failures
from tests.support.hub_uploads import Uploads
from tests.support.processes import ROOT
from tests.support.pushes import leaks, make_hub, uploads_of, variables
from titanlite.cli.loading import add_arguments, load_model
from titanlite.cli.parser import Parser
from titanlite.resolve.load import check_config
from titanlite.runs.lines import read_lines, read_metrics

QUIZ = ROOT / "examples" / "continuations.jsonl"
HELD_OUT = "titanlite/data/assets/validation/validation-00000-of-00001.json.gz"
RUN = "outputs/big"
#: The story takes two idle cores a quarter of an hour. It may take 40 minutes.
SECONDS = 2400
#: How far two best rates may lie apart and count as one.
SAME = 1.4


@dataclass(frozen=True)
class Story:
    """The page's commands, as they ended in `folder`."""

    folder: Path
    done: dict[str, Done]
    uploads: Uploads

    def output(self, word: str) -> str:
        """The output of `titanlite WORD …`."""
        return next(
            end.output for line, end in self.done.items() if line.startswith(f"titanlite {word} ")
        )

    def json(self, *path: str) -> Any:
        return json.loads(self.folder.joinpath(*path).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("story")
    home = folder / "home"
    home.mkdir()
    with make_hub(folder / "hub") as hub:
        commands = lay_out(read_recipe("small-to-big"), folder, {})
        done = follow(commands, folder, SECONDS, **variables(hub, home))
    refuse_failures(done)
    return Story(folder, done, uploads_of(hub))


@pytest.mark.soak
def test_activations_change_alike_at_all_widths_with_mup_alone(story: Story) -> None:
    row = r"^(.+?) +(yes|no) .* ([+-][\d.]+)$"
    slopes: dict[str, dict[str, float]] = {"yes": {}, "no": {}}
    for kind, mup, slope in re.findall(row, story.output("mup check"), re.MULTILINE):
        slopes[mup][kind.strip()] = float(slope)
    assert set(slopes["yes"]) == {
        "embedding",
        "attention",
        "feed-forward",
        "residual",
        "target logits",
    }
    assert max(map(abs, slopes["yes"].values())) <= 0.25
    for kind in ("attention", "feed-forward", "residual"):
        assert slopes["no"][kind] > 0.5, kind


def _best_rates(results: Any) -> dict[tuple[int, int], float]:
    """The best rate of each width and base width, by a parabola over the logarithm of the rate."""
    losses: dict[tuple[int, int], dict[float, float]] = {}
    for run in results["runs"]:
        values = run["values"]
        if run["state"] == "done":
            place = (values["dim"], values["base_dim"])
            losses.setdefault(place, {})[values["lr"]] = run["loss"]
    best = {}
    for place, found in losses.items():
        rates = sorted(found)
        middle = rates.index(min(rates, key=found.__getitem__))
        assert 0 < middle < len(rates) - 1, (place, found)
        three = rates[middle - 1 : middle + 2]
        a, b, _ = np.polyfit(np.log(three), [found[rate] for rate in three], 2)
        best[place] = math.exp(-b / 2 / a)
    return best


@pytest.mark.soak
def test_the_best_rate_of_the_small_width_is_that_of_the_large_one_with_mup_alone(
    story: Story,
) -> None:
    best = _best_rates(story.json(f"{RUN}-sweep", "results.json"))
    small, wide, plain = best[32, 32], best[128, 32], best[128, 0]
    assert 1 / SAME < wide / small < SAME, best
    assert not 1 / SAME < plain / small < SAME, best
    head = r"^dim +n_heads +ffn_dim +base_dim +lr +loss "
    assert re.search(head, story.output("sweep"), re.MULTILINE)
    # The rate of the file is that of the small width.
    text = (ROOT / "examples" / "small_to_big.toml").read_text(encoding="utf-8")
    (written,) = re.findall(r"^lr = ([\d.]+)$", text, re.MULTILINE)
    assert 1 / SAME < float(written) / small < SAME


@pytest.mark.soak
def test_the_ladder_predicts_the_run_that_follows(story: Story) -> None:
    found = story.json(f"{RUN}-ladder", "points.json")["prediction"]
    rows = read_metrics(story.folder / RUN / "metrics.jsonl")
    measured = [row["validation_loss"] for row in rows if "validation_loss" in row][-1]
    assert found["low"] <= measured <= found["high"], (found, measured)
    assert found["loss"] == pytest.approx(measured, rel=0.05), (found, measured)
    points = story.json(f"{RUN}-ladder", "points.json")["points"]
    assert len(points) == 15
    assert found["parameters"] > 4 * max(point["parameters"] for point in points)
    assert "this file: 459.4K parameters, 2.2M tokens, loss " in story.output("ladder")


@pytest.mark.soak
def test_tasks_of_the_run_are_those_of_its_checkpoint(story: Story) -> None:
    figures: dict[int, dict[str, float]] = {}
    for row in read_metrics(story.folder / RUN / "metrics.jsonl"):
        own = {name: value for name, value in row.items() if name.startswith("eval/")}
        if own:
            figures[row["step"]] = own
    assert sorted(figures) == [1050, 2100]
    names = [name for name in figures[2100] if name.endswith(("/acc", "/bits_per_byte"))]
    assert len(names) == 2
    accuracy, bits = sorted(names, key=lambda name: name.endswith("bits_per_byte"))
    assert figures[2100][bits] < figures[1050][bits] < 8
    # Four answers: chance has a quarter.
    assert figures[2100][accuracy] > 0.3
    again = {}
    for task, found in story.json("outputs", "eval.json")["results"].items():
        again |= {f"eval/{task}/{name.split(',')[0]}": value for name, value in found.items()}
    assert {name: again[name] for name in figures[2100]} == figures[2100]


@pytest.mark.soak
def test_the_export_has_the_logits_of_the_checkpoint_in_transformers(story: Story) -> None:
    from transformers import AutoModelForCausalLM

    assert "they are equal" in story.output("export")
    parser = Parser()
    add_arguments(parser)
    tokenizer = story.folder / "outputs" / "tokenizer"
    words = [story.folder / RUN, "--device=cpu", f"--tokenizer={tokenizer}"]
    loaded = load_model(parser.parse_args(list(map(str, words))))
    assert loaded.step == 2100
    theirs = AutoModelForCausalLM.from_pretrained(
        story.folder / "exported" / "big", dtype=torch.float32
    )
    ids = torch.tensor([loaded.tokenizer.encode("In the beginning God created", bos=True)])
    with torch.no_grad():
        difference = (loaded.model(ids) - theirs(ids).logits).abs().max()
    assert difference < 1e-5


@pytest.mark.soak
def test_the_hub_has_the_bytes_of_the_export_and_a_card(story: Story) -> None:
    branch = story.uploads.branch("ada/small-to-big")
    export = story.folder / "exported" / "big"
    files = {file.name: file.read_bytes() for file in export.iterdir()}
    assert {name: branch[name] for name in files} == files
    assert any(name.endswith(".safetensors") for name in files)
    rows = read_metrics(story.folder / RUN / "metrics.jsonl")
    measured = [row["validation_loss"] for row in rows if "validation_loss" in row][-1]
    card = branch["README.md"].decode()
    assert f"{measured:.4f}" in card
    assert "continuations" in card
    assert leaks(story.folder / "outputs") == []


def test_the_file_of_the_page_is_a_config_without_problems() -> None:
    flags = [f"--job.config_file={ROOT}/examples/small_to_big.toml"]
    assert check_config(flags, 1, training=False)[1].eval.tasks


def test_each_answer_continues_its_context_in_the_held_out_text() -> None:
    texts = " ".join(" ".join(json.loads(line)["text"].split()) for line in _lines(ROOT / HELD_OUT))
    questions = read_lines(QUIZ)
    assert len(questions) == 64
    answers = set()
    for question in questions:
        choices = question["choices"]
        assert len(set(choices)) == 4
        right = choices[question["answer"]]
        found = [f"{question['context']} {choice}" in texts for choice in choices]
        assert found == [choice == right for choice in choices], question
        answers.add(question["answer"])
    assert answers == {0, 1, 2, 3}


def _lines(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return list(file)
