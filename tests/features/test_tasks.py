"""Tasks in a run: their figures are those of `titanlite eval` on any ranks, training does not
notice them, and a broken task ends nothing.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import Pools
from tests.support.processes import ROOT, python
from tests.support.ranks import train
from tests.support.refusals import refusal
from tests.support.task_files import (
    SHORT,
    TEXTS,
    evaluated,
    flags_of,
    scores_of,
    task_run,
    with_and_without,
    write_files,
)
from tests.support.tiny import TWENTY_STEPS
from tests.support.whole_runs import losses_of, make_trainer, outcome_of, scalars, train_run
from titanlite import exit_codes
from titanlite.cli.runs import _as_json
from titanlite.config.claims import config_claims
from titanlite.config.idle_keys import idle_keys
from titanlite.config.load import load
from titanlite.data import DataError
from titanlite.data.tokenizer import load_tokenizer
from titanlite.dist.dist_env import DistEnv
from titanlite.features.tasks.own_files import ChoiceTask, read_own
from titanlite.features.tasks.scoring import windows
from titanlite.runs.read import read_run


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_figures_are_those_of_the_command_on_any_ranks_and_training_does_not_notice(
    pool: Pools, tmp_path: Path, ranks: int
) -> None:
    files = write_files(tmp_path)
    found = pool(ranks).run(with_and_without, str(tmp_path / "run"), flags_of(*files))[0]
    scores = scores_of(found["rows"])
    assert sorted(scores) == [2, 4]
    assert sorted(scores[4]) == ["eval/held/bits_per_byte", "eval/quiz/acc", "eval/quiz/acc_norm"]
    assert scores[2] != scores[4]
    assert scores[4] == evaluated(tmp_path / "run" / "checkpoint" / "step-4", *files)
    said = [line for line in found["said"] if "bits_per_byte" in line][-1]
    assert said.split() == ["held", "bits_per_byte", f"{scores[4]['eval/held/bits_per_byte']:.4f}"]


LAYOUTS = {
    "tensor": ("tp 2", 2, ["--training.tensor_parallel_degree=2"]),
    "tensor, loss in chunks": (
        "tp 2",
        2,
        ["--training.tensor_parallel_degree=2", "--training.loss_chunks=3"],
    ),
    "context": ("cp 2", 2, ["--experimental.context_parallel_degree=2"]),
    "pipeline": (
        "pp 2",
        2,
        [
            "--experimental.pipeline_parallel_degree=2",
            "--experimental.pipeline_parallel_microbatches=2",
        ],
    ),
    "pipeline of two ranks each": (
        "tp 2",
        4,
        [
            "--experimental.pipeline_parallel_degree=2",
            "--training.tensor_parallel_degree=2",
            "--experimental.pipeline_parallel_schedule=Interleaved1F1B",
            "--model.overrides.n_layers=4",
            "--training.loss_chunks=2",
        ],
    ),
    "replicas": ("dp_replicate 2", 4, ["--training.data_parallel_replicate_degree=2"]),
    "experts": (
        "2 ranks divide the experts",
        2,
        [
            "--model.name=mixtral",
            "--model.overrides.n_kv_heads=2",
            "--model.overrides.ffn_dim=64",
            "--parallelism.expert_parallel_degree=2",
        ],
    ),
    "weights gathered in each pass": (
        "dp_shard 2",
        2,
        ["--training.reshard_after_forward=always"],
    ),
    "compiled": ("dp_shard 2", 2, ["--training.compile", "--compile.backend=aot_eager"]),
    "loss in chunks": (
        "dp_shard 1",
        1,
        ["--training.loss_chunks=3", "--activation_checkpoint.mode=full"],
    ),
    "averaged weights": ("dp_shard 2", 2, ["--optimizer.ema_decay=0.5", "--eval.ema"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_figures_are_those_of_the_command_in_every_layout(
    pool: Pools, tmp_path: Path, layout: str
) -> None:
    files = write_files(tmp_path)
    mesh, ranks, flags = LAYOUTS[layout]
    found = pool(ranks).run(with_and_without, str(tmp_path / "run"), flags_of(*files), *flags)[0]
    assert any("mesh" in line and mesh in line for line in found["said"])
    scores = scores_of(found["rows"])
    averaged = ("--ema",) if layout == "averaged weights" else ()
    checkpoint = tmp_path / "run" / "checkpoint" / "step-4"
    expected = evaluated(checkpoint, *files, flags=averaged)
    assert scores[4].keys() == expected.keys()
    for name, value in expected.items():
        exact = name.endswith(("acc", "acc_norm"))
        assert scores[4][name] == (value if exact else pytest.approx(value, rel=1e-6)), name
    if averaged:
        assert scores[4] != evaluated(checkpoint, *files)
    assert not any("compiled" in line and "again" in line for line in found["said"])


FLOAT8 = [
    "--float8.enable_float8_linear",
    "--float8.emulate",
    "--float8.enable_fsdp_float8_all_gather",
    "--float8.precompute_float8_dynamic_scale_for_fsdp",
]


@pytest.mark.slow
def test_training_in_float8_does_not_notice_tasks(pool: Pools, tmp_path: Path) -> None:
    files = write_files(tmp_path)
    found = pool(2).run(with_and_without, str(tmp_path / "run"), flags_of(*files), *FLOAT8)[0]
    assert sorted(scores_of(found["rows"])) == [2, 4]


class _Broken:
    """A task whose code fails on rank 0, the first time after a pass of all ranks."""

    name = "broken"

    def __init__(self) -> None:
        self.runs = 0

    def run(self, scorer: Any) -> dict[str, float]:
        self.runs += 1
        if self.runs == 1:
            scorer.likelihoods([([1], [2, 3])])
            scorer._sent -= 60  # of work without a pass
            assert list(scorer.waiting("abc")) == ["a", "b", "c"]
        raise KeyError("target")


def _broken_run(world: DistEnv, folder: str, *flags: str) -> dict[str, Any]:
    trainer = make_trainer(world, folder, *SHORT, *flags)
    tasks = task_run(trainer)
    broken = _Broken()
    if world.rank == 0:
        tasks._tasks = [broken, *tasks._tasks]
    phases: list[str] = []
    tell = trainer.phase
    trainer.phase = lambda name: (phases.append(name), tell(name))[1]  # type: ignore[method-assign]
    found = outcome_of(trainer, folder)
    found["phases"] = [name for name in phases if name == "evaluate"]
    return {**found, "runs": broken.runs, "training": trainer.parts.model.training}


@pytest.mark.slow
def test_a_task_that_fails_on_one_rank_is_told_once_and_ends_nothing(
    pool: Pools, tmp_path: Path
) -> None:
    quiz, _ = write_files(tmp_path)
    bare = pool(2).run(train_run, str(tmp_path / "bare"), *SHORT)[0]
    first, second = pool(2).run(_broken_run, str(tmp_path / "run"), *flags_of(quiz))
    assert (first["code"], second["code"]) == (0, 0)
    assert losses_of(first["rows"]) == losses_of(bare["rows"])
    assert sorted(scores_of(first["rows"])) == [2, 4]
    assert first["runs"] == 2
    # Twice the begin, requests of the questions and the end; once a pass of the broken, and a wait.
    assert len(first["phases"]) == len(second["phases"]) == 2 * 3 + 2
    assert first["training"] and second["training"]
    (said,) = [line for line in first["said"] if "broken" in line]
    assert said == (
        "step 2: the task broken failed, training continues without it: KeyError: 'target'"
    )


def _stopped_run(
    world: DistEnv, folder: str, step: int, trains: bool, *flags: str
) -> dict[str, Any]:
    """The last rank is asked to stop in the evaluation of a step, or while it trains in it."""
    trainer = make_trainer(world, folder, *SHORT, *flags)

    def strike(model: Any, given: Any) -> None:
        is_here = model.training == trains and trainer.step == step
        if is_here and world.rank == world.size - 1:
            trainer.stop.request("a test")

    trainer.parts.model.register_forward_pre_hook(strike)
    return outcome_of(trainer, folder)


@pytest.fixture(scope="module")
def whole(pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run with tasks that nothing stops."""
    folder = tmp_path_factory.mktemp("whole")
    flags = flags_of(*write_files(folder))
    found: dict[str, Any] = pool(2).run(train_run, str(folder / "run"), *SHORT, *flags)[0]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("step", "trains"), [(2, False), (4, False), (1, True)])
def test_a_stop_leaves_the_tasks_to_the_resumed_run_which_runs_them_once(
    pool: Pools, tmp_path: Path, whole: dict[str, Any], step: int, trains: bool
) -> None:
    files = write_files(tmp_path)
    flags = flags_of(*files)
    folder = str(tmp_path / "run")
    stopped = pool(2).run(_stopped_run, folder, step, trains, *flags)[0]
    assert stopped["code"] == exit_codes.PREEMPTED
    assert sorted(scores_of(stopped["rows"])) == ([2] if step == 4 else [])
    assert any("were interrupted" in line for line in stopped["said"]) is not trains
    # Ranks learn of a stop in a step with the next one.
    assert stopped["step"] == (2 if trains else step)
    resumed = pool(2).run(train_run, folder, *SHORT, *flags)[0]
    assert scores_of(resumed["rows"]) == scores_of(whole["rows"])
    assert losses_of(resumed["rows"]) == losses_of(whole["rows"])
    kept = _without_manifest(tmp_path / "run" / "checkpoint")
    again = pool(2).run(train_run, folder, *SHORT, *flags)[0]
    assert again["rows"] == resumed["rows"]
    assert not any("tasks at" in line for line in again["said"])
    assert any("nothing to do" in line for line in again["said"])
    assert _without_manifest(tmp_path / "run" / "checkpoint") == kept


def _without_manifest(checkpoints: Path) -> dict[str, tuple[int, bytes]]:
    """Time and content of each file of tensors."""
    found = {}
    for path in checkpoints.glob("step-*/*"):
        if path.name != "manifest.json":
            name = str(path.relative_to(checkpoints))
            found[name] = (path.stat().st_mtime_ns, path.read_bytes())
    return found


@pytest.mark.slow
def test_after_a_kill_in_an_evaluation_the_next_start_does_it_again(tmp_path: Path) -> None:
    files = write_files(tmp_path)
    words = [
        "--job.config_file=debug_model.toml",
        *TWENTY_STEPS,
        *SHORT,
        "--checkpoint.interval=1",
        *flags_of(*files),
    ]
    for name in ("killed", "killed", "whole"):
        main = "titanlite.main"
        if name == "killed" and not (tmp_path / name).exists():
            main = "tests.support.task_files"
        folder = f"--job.dump_folder={tmp_path / name}"
        codes, said = train([*words, folder], 2, tmp_path / f"{name}.log", main=main)
        if main == "titanlite.main":
            assert codes == [0, 0], said
        else:
            assert codes[1] == -9
            assert not (tmp_path / name / "checkpoint" / "step-4").exists()
    rows = {name: _rows(tmp_path / name) for name in ("killed", "whole")}
    assert scores_of(rows["killed"]) == scores_of(rows["whole"])
    assert losses_of(rows["killed"]) == losses_of(rows["whole"])


def _rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_tensorboard_has_the_figures_and_speed_does_not_count_them(
    pool: Pools, tmp_path: Path
) -> None:
    files = write_files(tmp_path)
    flags = [*flags_of(*files, freq=3), "--no-eval.at_end", "--metrics.enable_tensorboard"]
    found = pool(2).run(_slow_run, str(tmp_path / "run"), *flags)[0]
    (scores,) = scores_of(found["rows"]).values()
    (board,) = (tmp_path / "run" / "tb").iterdir()
    shown = scalars(board)
    assert {name: shown[name][0] for name in scores} == {
        name: (3, pytest.approx(value)) for name, value in scores.items()
    }
    assert not [name for name in shown if "eval_seconds" in name]
    (row,) = [row for row in found["rows"] if row["step"] == 4 and "loss" in row]
    (seconds,) = [row["eval_seconds"] for row in found["rows"] if "eval_seconds" in row]
    assert seconds > 3 > row["seconds_per_step"]


def _slow_run(world: DistEnv, folder: str, *flags: str) -> dict[str, Any]:
    import time

    trainer = make_trainer(world, folder, *SHORT, *flags)
    tasks = task_run(trainer)
    if world.rank == 0:
        run = tasks._tasks[0].__class__.run

        class Slow(tasks._tasks[0].__class__):  # type: ignore[misc]
            def run(self, scorer: Any) -> Any:
                time.sleep(3)
                return run(self, scorer)

        object.__setattr__(tasks._tasks[0], "__class__", Slow)
    return outcome_of(trainer, folder)


# Figures, by another way


def test_bits_per_byte_is_the_loss_of_all_tokens_in_bits(pool: Pools, tmp_path: Path) -> None:
    _, held = write_files(tmp_path)
    found = pool(1).run(_loss_by_hand, str(tmp_path / "run"), *flags_of(held))[0]
    value = scores_of(found["rows"])[4]["eval/held/bits_per_byte"]
    assert value == pytest.approx(found["by hand"], rel=1e-6)


def _loss_by_hand(world: DistEnv, folder: str, *flags: str) -> dict[str, Any]:
    """Bits per byte of the last weights: windows of 32 tokens, one forward pass each."""
    import torch
    from torch.nn import functional as F

    trainer = make_trainer(world, folder, *SHORT, *flags)
    found = outcome_of(trainer, folder)
    tokenizer = load_tokenizer()
    nats = 0.0
    size = 0
    for text in TEXTS:
        ids = [tokenizer.bos_id, *tokenizer.encode(text)]
        size += len(text.encode("utf-8"))
        done = 1
        while done < len(ids):
            end = min(done + 32, len(ids))
            part = torch.tensor(ids[max(end - 33, 0) : end])
            with torch.no_grad():
                logits = trainer.parts.model(part[None, :-1])[0]
            nats += F.cross_entropy(
                logits[done - end :], part[done - end :], reduction="sum"
            ).item()
            done = end
    return {**found, "by hand": nats / math.log(2) / size}


@pytest.mark.parametrize("length", [0, 1, 4, 5, 8, 9, 23])
def test_windows_ask_for_each_id_once_with_a_full_context(length: int) -> None:
    ids = list(range(100, 100 + length))
    found = list(windows(ids, 7, limit=4))
    assert [one for _, asked in found for one in asked] == ids
    for before, asked in found:
        assert before and len(before) + len(asked) <= 5
    whole = [7, *ids]
    for before, asked in found[1:]:
        assert len(before) + len(asked) == 5
        end = whole.index(asked[-1]) + 1
        assert [*before, *asked] == whole[end - 5 : end]


@pytest.mark.slow
def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "evaluation.md").read_text()
    (section,) = re.findall(r"^```toml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    quiz, held = re.findall(r"^```json\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "quiz.jsonl").write_text(quiz)
    (tmp_path / "held-out.jsonl").write_text(held)
    config = tmp_path / "run.toml"
    config.write_text(f"[job]\nextends = ['{ROOT}/train_configs/debug_model.toml']\n\n{section}")
    words = [f"--job.config_file={config}", *TWENTY_STEPS, "--training.steps=12"]
    done = python(ROOT / "train.py", *words, f"--job.dump_folder={tmp_path}/run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    scores = scores_of(_rows(tmp_path / "run"))
    assert sorted(scores) == [10, 12]
    assert sorted(scores[12]) == [
        "eval/held-out/bits_per_byte",
        "eval/quiz/acc",
        "eval/quiz/acc_norm",
    ]
    assert f"bits_per_byte  {scores[12]['eval/held-out/bits_per_byte']:.4f}" in done.stdout
    run = read_run(tmp_path / "run")
    shown = json.loads(json.dumps(_as_json(run)))["tasks"]
    assert {f"eval/{name}": value for name, value in shown.items()} == scores[12]


# Refusals


def _written(folder: Path, *lines: Any) -> str:
    path = folder / "bad.jsonl"
    path.write_text(
        "".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in lines)
    )
    return str(path)


GOOD = {"question": "1 + 1 =", "choices": ["2", "3"], "answer": 0}


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ("{", "not valid JSON"),
        ([1], "no question: Expected `object`, got `array`"),
        ({**GOOD, "answer": 2}, "'answer' must be the number of a choice, 0 to 1, found 2"),
        ({**GOOD, "answer": True}, "no question: Expected `int`, got `bool` - at `$.answer`"),
        (
            {**GOOD, "choices": ["2"]},
            "no question: Expected `array` of length >= 2",
        ),
        ({**GOOD, "choices": ["2", ""]}, "no question: Expected `str` matching regex"),
        ({**GOOD, "choices": "23"}, "no question: Expected `array`, got `str` - at `$.choices`"),
        ({**GOOD, "question": None}, "no question: Expected `str`, got `null` - at `$.question`"),
        ({"choices": ["2", "3"], "answer": 0}, "there is neither 'question' nor 'context'"),
        ({**GOOD, "question": "\ud83d"}, "the field question holds \\ud83d"),
    ],
)
def test_a_bad_question_is_refused_with_its_line(tmp_path: Path, record: Any, said: str) -> None:
    path = _written(tmp_path, GOOD, "", record)
    with pytest.raises(DataError) as caught:
        read_own(path, "text", 1)
    assert str(caught.value).startswith(f"{path}, line 3: {said}")


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
@pytest.mark.parametrize("place", [30, -400])
def test_a_damaged_file_of_questions_is_refused(tmp_path: Path, kind: str, place: int) -> None:
    pytest.importorskip("zstandard")
    import zstandard

    words = random.Random(0)
    lines = [json.dumps({**GOOD, "question": words.randbytes(80).hex()}) for _ in range(400)]
    whole = "\n".join(lines).encode()
    packed = gzip.compress(whole) if kind == "gzip" else zstandard.ZstdCompressor().compress(whole)
    broken = bytearray(packed)
    broken[place : place + 40] = words.randbytes(40)
    file = tmp_path / "quiz.jsonl"
    file.write_bytes(packed)
    assert isinstance(read_own(str(file), "text", None), ChoiceTask)
    for content in (bytes(broken), packed[: len(packed) // 2]):
        file.write_bytes(content)
        with pytest.raises(DataError, match=r"quiz\.jsonl"):
            read_own(str(file), "text", None)


def test_a_mark_of_byte_order_leaves_questions_questions(tmp_path: Path) -> None:
    record = {"question": "The opposite of hot is", "choices": ["cold", "warm"], "answer": 0}
    file = tmp_path / "quiz.jsonl"
    file.write_text(json.dumps(record) + "\n", encoding="utf-8-sig")
    assert isinstance(read_own(str(file), "text", None), ChoiceTask)


def test_a_bad_text_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    path = _written(tmp_path, {"text": "a"}, {"body": "b"})
    with pytest.raises(DataError, match=r"bad.jsonl, line 2: the key 'text' is missing"):
        read_own(path, "text", None)
    assert read_own(_written(tmp_path, {"body": "b"}), "body", None).name == "bad"
    with pytest.raises(DataError, match=r"eval.tasks: .*none.txt cannot be read: No such file"):
        read_own(str(tmp_path / "none.txt"), "text", None)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match=r"eval.tasks: .*empty.txt holds no text"):
        read_own(str(tmp_path / "empty.txt"), "text", None)


def test_a_run_with_a_bad_file_ends_before_its_ranks_meet(tmp_path: Path) -> None:
    path = _written(tmp_path, GOOD, {**GOOD, "answer": 9})
    words = ["--job.config_file=debug_model.toml", *TWENTY_STEPS, *SHORT, *flags_of(path)]
    folder = f"--job.dump_folder={tmp_path / 'run'}"
    codes, said = train([*words, folder], 2, tmp_path / "log")
    assert codes[0] == exit_codes.CONFIG, said
    assert f"{path}, line 2: 'answer' must be the number of a choice" in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("flags", "key", "said"),
    [
        (["--eval.tasks=['a/x.txt', 'b/x.jsonl']"], "eval.tasks", "2 entries named 'x'"),
        (["--eval.tasks=['two words']"], "eval.tasks", "is no name of a task, and no file"),
        (["--eval.tasks=['./x.txt']", "--eval.ema"], "eval.ema", "needs optimizer.ema_decay"),
        (
            ["--eval.tasks=['./x.txt']", "--eval.num_fewshot=2"],
            "eval.num_fewshot",
            "is for tasks of lm-evaluation-harness",
        ),
    ],
)
def test_contradictions_are_found_before_anything_starts(
    flags: list[str], key: str, said: str
) -> None:
    problem = refusal(["--job.config_file=debug_model.toml", *flags])
    assert problem.key == key
    assert said in problem.message


def test_a_folder_of_task_files_that_a_kept_config_names_is_code() -> None:
    (claim,) = config_claims("a.toml:3", "eval.include_path", "tasks", "tasks")
    assert claim.effect.startswith("runs functions that task files below /")


def test_keys_without_tasks_are_told() -> None:
    notes, warnings = idle_keys(load(["--job.config_file=debug_model.toml", "--eval.freq=3"]))
    assert any("eval.freq" in line for line in [*notes, *warnings])
