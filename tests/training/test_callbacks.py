"""Callbacks of your own: the points, their state, their errors, and how a config names them."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch

from tests.support.processes import TORCHRUN, python
from tests.support.tiny import TWENTY_STEPS
from tests.support.whole_runs import make_trainer
from titanlite import doors, exit_codes, main
from titanlite.assembly.own_callbacks import load_callbacks
from titanlite.callbacks import Callback, CallbackError, Callbacks, Figures, RunEnd
from titanlite.checkpoint.manifest import read_manifest
from titanlite.config.errors import ConfigError
from titanlite.config.import_objects import resolve
from titanlite.config.load import load_file
from titanlite.dist.dist_env import DistEnv
from titanlite.dist.launch_env import read_launch_env
from titanlite.dist.signals import StopRequested, StopSignal
from titanlite.optim.bad_step_errors import BadStepError
from titanlite.resolve.load import check_config
from titanlite.runs.attempts import read_entries
from titanlite.trainer import Trainer

FLAGS = [
    "--training.steps=4",
    "--validation.freq=2",
    "--checkpoint.interval=3",
    "--metrics.log_freq=2",
]


class Note(Callback):
    """Notes what it is called with."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_start(self, trainer: Trainer) -> None:
        before = None if trainer.loaded is None else trainer.loaded.train["note"]
        self.calls.append(("start", trainer.step, before))

    def before_update(self, trainer: Trainer) -> None:
        self.complete = all(p.grad is not None for p in trainer.parts.model.parameters())

    def on_step_end(self, trainer: Trainer, result: Any) -> None:
        assert self.complete
        assert result.loss.ndim == 0
        self.calls.append(("step", trainer.step))

    def on_log(self, trainer: Trainer, figures: Any) -> None:
        self.calls.append(
            ("log", trainer.step, round(figures["loss"], 3) > 5 and figures["grad_norm"] > 0)
        )

    def on_validation_end(self, trainer: Trainer, loss: float, tokens: int, seconds: float) -> None:
        self.calls.append(("validation", trainer.step, tokens))

    def state_dict(self, trainer: Trainer) -> dict[str, Any]:
        return {"note": f"of step {trainer.step}"}

    def on_save(self, trainer: Trainer, step: int, folder: Any, seconds: float) -> None:
        self.calls.append(("save", step))

    def on_end(self, trainer: Trainer, end: RunEnd) -> None:
        self.calls.append(("end", end.state, end.step))


def _noted(world: DistEnv, folder: str, *flags: str) -> list[Any]:
    trainer = make_trainer(world, folder, *FLAGS, *flags)
    note = Note()
    # First in the list: titanlite's own show what they do after it.
    trainer.callbacks = Callbacks([*trainer.parts.callbacks, note])
    trainer.train()
    return note.calls


def test_each_point_is_called_on_every_rank_and_state_comes_back(pool, tmp_path):
    tokens = 2 * 2 * 4 * 32  # ranks x batches x sequences x length
    middle = [("step", 2), ("validation", 2, tokens), ("step", 3), ("save", 3)]
    last = [("step", 4), ("validation", 4, tokens), ("save", 4), ("end", "done", 4)]
    for calls in pool(2).run(_noted, str(tmp_path)):
        logs = [call for call in calls if call[0] == "log"]
        assert logs == [("log", step, True) for step in (1, 2, 4)]
        rest = [call for call in calls if call[0] != "log"]
        assert rest == [("start", 0, None), ("step", 1), *middle, *last]
    assert read_manifest(tmp_path / "checkpoint" / "step-3").train["note"] == "of step 3"
    assert pool(2).run(_noted, str(tmp_path), "--training.steps=5")[0][0] == (
        "start",
        4,
        "of step 4",
    )


class RaisesAtTheEnd(Callback):
    def on_step_end(self, trainer: Trainer, result: Any) -> None:
        if trainer.step == 2:
            raise ZeroDivisionError("on purpose")

    def on_end(self, trainer: Trainer, end: RunEnd) -> None:
        raise ValueError("later")


class RaisesAtALog(Callback):
    def on_log(self, trainer: Trainer, figures: Any) -> None:
        1 / 0  # noqa: B018


class Twice(Figures):
    def __init__(self, name: str) -> None:
        self.name = name

    def sums(self, trainer: Trainer) -> torch.Tensor:
        return torch.zeros(1)

    def figures(self, trainer: Trainer, sums: list[float]) -> dict[str, float]:
        return {"mine": 0.0, self.name: 0.0}


def _raised(world: DistEnv, folder: str, *callbacks: Callback) -> tuple[str, str]:
    trainer = make_trainer(world, folder, *FLAGS)
    trainer.callbacks = Callbacks([*trainer.parts.callbacks, *callbacks])
    with pytest.raises(CallbackError) as caught:
        trainer.train()
    return str(caught.value), type(caught.value.__cause__).__name__


def test_a_callback_that_raises_ends_the_run_with_its_name(pool, tmp_path):
    ((said, cause),) = pool(1).run(_raised, str(tmp_path / "log"), RaisesAtALog())
    error = "ZeroDivisionError: division by zero"
    assert said == f"callback {__name__}:RaisesAtALog failed in on_log: {error}"
    assert cause == "ZeroDivisionError"
    ((said, cause),) = pool(1).run(_raised, str(tmp_path), RaisesAtTheEnd())
    error = "ZeroDivisionError: on purpose"
    assert f"test_callbacks:RaisesAtTheEnd failed in on_step_end: {error}" in said
    assert cause == "ZeroDivisionError"
    end = read_entries(tmp_path)[-1]
    assert (end["state"], end["step"], end["exit_code"]) == ("failed", 2, exit_codes.ERROR)


@pytest.mark.parametrize("taken", ["loss", "step", "time", "mine"])
def test_a_figure_of_your_own_takes_no_name_of_the_log_or_of_another(taken, pool, tmp_path):
    own = [Twice("other"), Twice("third")] if taken == "mine" else [Twice(taken)]
    ((said, _),) = pool(1).run(_raised, str(tmp_path), *own)
    assert said == f"callback {__name__}:Twice: the log has {taken!r} already: choose another name"


def test_errors_with_an_exit_code_pass_and_the_end_reaches_all():
    """An error of a callback at the end counts if the run has none."""
    seen: list[str] = []

    class Good(Callback):
        def on_phase(self, trainer, phase):
            raise BadStepError(1, 1.0, 9.0, "too high")

        def on_end(self, trainer, end):
            seen.append(end.state)

    callbacks: Any = Callbacks([Good(), RaisesAtTheEnd(), Good()])
    with pytest.raises(BadStepError):
        callbacks("on_phase", None, "data")
    callbacks.end(None, RunEnd("failed", 3, ValueError("its own")))
    with pytest.raises(CallbackError, match="later"):
        callbacks.end(None, RunEnd("done", 3))
    assert seen == ["failed", "failed", "done", "done"]


class Keeps(Callback):
    def __init__(self, **entries: Any) -> None:
        self.entries = entries

    def state_dict(self, trainer: Any) -> dict[str, Any]:
        return self.entries


@pytest.mark.parametrize(
    ("callbacks", "said"),
    [
        ([Keeps(mine=torch.ones(1))], "no JSON object: Object of type Tensor"),
        ([Keeps(tokens_seen=7)], "has 'tokens_seen' already"),
        ([Keeps(best=1), Keeps(best=2)], "has 'best' already"),
    ],
)
def test_entries_that_a_checkpoint_cannot_hold_name_their_callback(callbacks, said):
    state = {"tokens_seen": 64}
    with pytest.raises(CallbackError, match=f"callback {__name__}:Keeps: .*{said}"):
        Callbacks(callbacks).add_state(None, state)  # type: ignore[arg-type]
    assert state["tokens_seen"] == 64


# By dotted path

SOURCE = """
from titanlite import Callback
class Mine(Callback):
    made = 0
    def __init__(self): type(self).made += 1
    def on_end(self, trainer, end): print("mine:", end.state, trainer.step, flush=True)
ready = Mine()
number = 7
class Needs(Callback):
    def __init__(self, something): ...
"""


def test_names_are_resolved_beside_the_config_then_in_the_working_directory(tmp_path, monkeypatch):
    assert resolve("os.path:join") is os.path.join
    assert resolve("titanlite.callbacks:Callback.on_end") is Callback.on_end
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine.py").write_text(SOURCE)
    (tmp_path / "here.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "there" / "run.toml"
    config.write_text(
        '[job]\ncallbacks = ["./mine.py:Mine", "./mine.py:ready", "./here.py:Mine"]\n'
    )
    paths = load_file(str(config)).sections.job.callbacks
    assert paths == [
        f"{tmp_path}/{name}"
        for name in ("there/mine.py:Mine", "there/mine.py:ready", "here.py:Mine")
    ]
    mine = resolve("./there/mine.py:Mine")
    first, second, third = load_callbacks(paths)
    assert type(first) is type(second) is mine and mine.made == 2, "one file is one module"
    assert type(third) is not mine
    with pytest.raises(
        CallbackError, match=r"^callback mine:Mine failed in on_end: AttributeError"
    ):
        Callbacks([first]).call(first, "on_end", None, None)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("os.path", "colon"),
        ("./missing.py:Mine", "no file"),
        ("./mine.py:number", "is 7, and not a titanlite.Callback"),
        ("./mine.py:Needs", "TypeError"),
        ("./broken.py:Mine", "ZeroDivisionError"),
    ],
)
def test_what_cannot_be_loaded_is_a_config_error(tmp_path, monkeypatch, path, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(ConfigError) as caught:
        load_callbacks([path, "os:also_missing"], "run.toml:7")
    problem, other = caught.value.problems
    assert (problem.key, problem.where) == ("job.callbacks", "run.toml:7")
    assert repr(path) in problem.message
    assert words in problem.message
    assert "also_missing" in other.message
    assert not [name for name in sys.modules if "broken" in name and name.startswith("titanlite_")]


#: Trackers of a package of somebody else.
TRACKERS = """
from titanlite.metrics.tracker_base import Tracker

number = 7
"""


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("raises:Mine", "ZeroDivisionError"),
        ("theirs:Missing", "AttributeError"),
        ("theirs:number", "TypeError"),
    ],
)
def test_a_tracker_that_cannot_be_loaded_is_a_config_error(tmp_path, monkeypatch, place, words):
    (tmp_path / "theirs.py").write_text(TRACKERS)
    (tmp_path / "raises.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(doors.OURS["trackers"], "mine", place)
    asked, config = check_config(["--metrics.trackers=mine"], 1)
    with pytest.raises(ConfigError) as caught:
        main._Rank(read_launch_env(), asked, config, StopSignal()).load_code()
    (problem,) = caught.value.problems
    assert problem.key == "metrics.trackers"
    assert f"the tracker 'mine' ({place}) {words}: " in problem.message


# The process


class Settings(Callback):
    def on_step_end(self, trainer: Trainer, result: Any) -> None:
        strict = torch.are_deterministic_algorithms_enabled()
        self.seen = strict, os.environ.get("CUBLAS_WORKSPACE_CONFIG")


def _deterministic(
    world: DistEnv, folder: str
) -> list[tuple[tuple[bool, str | None], dict[str, bytes]]]:
    """Train twice with debug.deterministic; settings of the process, bits of this rank's
    weights.
    """
    found = []
    try:
        for turn in ("first", "again"):
            settings = Settings()
            flags = ("--training.steps=2", "--debug.deterministic")
            trainer = make_trainer(world, f"{folder}/{turn}", *flags)
            trainer.callbacks = Callbacks([*trainer.parts.callbacks, settings])
            trainer.train()
            weights = trainer.parts.model.state_dict().items()
            bits = {name: weight.to_local().numpy().tobytes() for name, weight in weights}
            found.append((settings.seen, bits))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    return found


def test_a_deterministic_run_repeats_to_the_bit(pool, tmp_path):
    for first, again in pool(2).run(_deterministic, str(tmp_path)):
        assert first == again
        settings, weights = first
        assert settings == (True, ":4096:8")
        assert len(weights) > 20


class ForeignError(RuntimeError):
    exit_code = 0


class DerivedError(BadStepError):
    exit_code = 0


def test_exit_codes_are_those_of_the_table_alone():
    """Schedulers act on them: 0 of a foreign error would mean that the run is done, 5 that it may
    go on.
    """
    assert exit_codes.code_of(ForeignError("x")) == exit_codes.ERROR
    assert exit_codes.code_of(DerivedError(1, 1.0, 2.0, "why")) == exit_codes.GUARD
    assert exit_codes.code_of(StopRequested("x", 3, True)) == exit_codes.PREEMPTED
    assert exit_codes.code_of(StopRequested("x", 3, False)) == exit_codes.PREEMPTED_UNSAVED


_ENDINGS = """
import os, sys, time
from titanlite.callbacks import Callback

class Exits(Callback):
    def on_step_end(self, trainer, result):
        sys.exit(0)

class Hangs(Callback):
    def on_end(self, trainer, end):
        time.sleep(3600)

class Lingers(Callback):
    def on_end(self, trainer, end):
        time.sleep(12 * int(os.environ["RANK"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks", "timeout", "code", "state", "words"),
    [
        ("Exits", 1, 300, 1, "failed", "Exits called sys.exit(0). That ends no run"),
        ("Hangs", 2, 8, 1, "done", "callbacks and threads have not ended in 16 s"),
        ("Lingers", 2, 8, 0, "done", "another rank does not end"),
    ],
)
def test_a_callback_that_ends_or_holds_up_a_run_starts_none_again(
    tmp_path, kind, ranks, timeout, code, state, words
):
    """A scheduler takes 0 for done, and a process that hangs keeps the run's folder."""
    (tmp_path / "mine.py").write_text(_ENDINGS)
    flags = [
        *TWENTY_STEPS,
        f"--job.dump_folder={tmp_path}/run",
        "--training.steps=2",
        f"--job.callbacks={tmp_path}/mine.py:{kind}",
        f"--comm.init_timeout_seconds={timeout}",
    ]
    launcher = TORCHRUN if ranks > 1 else []
    done = python(*launcher, "train.py", "--job.config_file=debug_model.toml", *flags)
    assert done.returncode == code, done.stderr
    assert words in done.stdout + done.stderr
    end = read_entries(tmp_path / "run")[-1]
    assert (end["event"], end["state"]) == ("end", state)
    assert end["exit_code"] == (exit_codes.ERROR if state == "failed" else exit_codes.DONE)
