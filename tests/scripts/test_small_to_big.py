"""The config and the tasks of docs/recipes/small-to-big.md."""

from __future__ import annotations

from tests.support.processes import ROOT
from titanlite.data.text_files import iter_records
from titanlite.resolve.load import check_config
from titanlite.runs.lines import read_lines

QUIZ = ROOT / "examples" / "continuations.jsonl"
HELD_OUT = ROOT / "titanlite/data/assets/validation/validation-00000-of-00001.json.gz"


def test_the_file_of_the_page_is_a_config_without_problems() -> None:
    flags = [f"--job.config_file={ROOT}/examples/small_to_big.toml"]
    assert check_config(flags, 1, training=False)[1].eval.tasks


def test_each_answer_continues_its_context_in_the_held_out_text() -> None:
    texts = " ".join(" ".join(record.text.split()) for record in iter_records([HELD_OUT]))
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
