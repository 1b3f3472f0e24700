"""The command line as people type it: words in any order, wrong words, help, and no
torch.
"""

from __future__ import annotations

import json

import pytest

from tests.support.processes import python
from titanlite import exit_codes
from titanlite.cli.command_table import COMMANDS
from titanlite.cli.main import main


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int) -> str:
    """Run a command that must end with `code`; return what it printed."""
    try:
        ended = main(words)
    except SystemExit as end:
        ended = int(end.code or 0)
    out, err = capsys.readouterr()
    assert ended == code, err
    return out if code == 0 else err


@pytest.mark.parametrize(
    "words",
    [
        (
            "debug_model.toml --training.steps 5 --optimizer.name Adam --no-training.compile "
            "--debug.deterministic"
        ),
        (
            "--training.steps 5 --optimizer.name Adam debug_model.toml --no-training.compile "
            "--debug.deterministic"
        ),
        (
            "--debug.deterministic --no-training.compile debug_model.toml --optimizer.name Adam "
            "--training.steps 5"
        ),
        "--debug.deterministic true --training.steps=5 --strict debug_model.toml --world-size 1",
        "--training.steps 5 --data.skip_steps 3 5-7 debug_model.toml --world-size 1",
        "--data.streaming auto --training.compile False --training.steps=5 debug_model.toml",
    ],
)
def test_flags_stand_before_and_behind_the_file(words, capsys):
    text = printed(capsys, "config", "check", *words.split(), code=0)
    assert "  steps          5, " in text
    assert "files          train_configs/debug_model.toml" in text


def test_options_stand_before_and_behind_the_words(capsys):
    orders = [
        "launch local debug_model.toml --dry-run --launch.gpus_per_node 2",
        "launch local --dry-run --launch.gpus_per_node 2 debug_model.toml",
        "launch --dry-run --launch.gpus_per_node 2 local debug_model.toml",
    ]
    first, *others = [printed(capsys, *order.split(), code=0) for order in orders]
    assert "titanlite train" in first
    assert others == [first, first]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "trian debug_model.toml",
            "titanlite: error: unknown command 'trian': did you mean `titanlite train`?",
        ),
        ("debug_model.toml", "as in `titanlite train debug_model.toml`"),
        ("zzzz", f"unknown command 'zzzz': commands: {', '.join(COMMANDS)}"),
        (
            "config chek",
            (
                "titanlite config: error: unknown command 'chek': did you mean `titanlite config "
                "check`?"
            ),
        ),
        ("lr debug_model.toml", "`titanlite lr` is gone: `titanlite config check`"),
        ("sample x --greedy", "--greedy is gone: --temperature 0"),
        ("push x a/b --step 3", "--step is gone: name the checkpoint"),
        ("data verify folder", "`titanlite data verify` is gone: `titanlite data prepare`"),
    ],
)
def test_unknown_commands(words, expected, capsys):
    assert expected in printed(capsys, *words.split(), code=exit_codes.CONFIG)


@pytest.mark.parametrize(
    ("words", "usage", "expected"),
    [
        ("runs --jsn", "titanlite runs [-h]", "unknown option --jsn: the nearest is --json"),
        (
            "checkpoint rm step-1 --force",
            "titanlite checkpoint [-h]",
            "`titanlite checkpoint rm` is gone: delete the folder step-N",
        ),
        (
            "config check --stict debug_model.toml",
            "titanlite config check [-h]",
            "the nearest is --strict",
        ),
        ("sample nowhere text --sed", "titanlite sample [-h]", "the nearest is --seed"),
        (
            "train debug_model.toml --steps 5",
            "titanlite train [-h]",
            "as --training.steps or --validation.steps",
        ),
        (
            "runs --qqqq=3",
            "titanlite runs [-h]",
            "unknown option --qqqq: `titanlite runs --help` lists the options",
        ),
        ("data peek a word", "titanlite data peek [-h]", "unexpected words: word"),
        ("data prepare a --out b", "titanlite data prepare [-h]", "required: --tokenizer"),
    ],
)
def test_wrong_options_show_the_usage_of_their_command(words, usage, expected, capsys):
    text = printed(capsys, *words.split(), code=exit_codes.CONFIG)
    assert text.startswith(f"usage: {usage}")
    assert expected in text


#: Runs each command where torch cannot be imported; one line of JSON each: exit code and what it
#: printed.
RUN_ALL = """
import contextlib, io, json, os, sys
sys.modules["torch"] = None
os._exit = sys.exit
from titanlite.cli.main import main
for command in json.loads(sys.argv[1]):
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            code = main(command.split())
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, text.getvalue()]))
"""


#: Exit code → commands that end with it on a machine without torch, and what each says.
WITHOUT_TORCH = {
    exit_codes.CONFIG: {
        "train debug_model.toml": "torch is not installed",
        "train debug_model.toml --nproc-per-node 2": "torch is not installed",
        "train debug_model.toml --nproc 1": "torch is not installed",
        # Wrong paths are told first.
        "train nowhere.toml": 'no file "nowhere.toml"',
        "data prepare nowhere.txt --out there --tokenizer bundled": "nowhere.txt does not exist",
        "launch slurm /no.toml": "/no",
        "config show /no.toml": "/no",
        "doctor /no.toml": "/no",
        "plan /no.toml": "/no",
        "sweep /no.toml": "/no",
        "data peek /no.toml": "/no",
        "runs /no": "/no",
    },
    exit_codes.CHECKPOINT: {
        "sample nowhere text": "error: nowhere: no such folder",
        "sample mine.toml text": (
            "error: mine.toml is a file: name a run or its folder of checkpoints"
        ),
        "eval nowhere --tasks x": "error: nowhere: no such folder",
        "eval nowhere": "error: nowhere: no such folder",
        "eval outputs/run": "error: outputs/run: no such folder\n",
        "eval mine.toml": "mine.toml is a file: name a run",
        "export nowhere there": "error: nowhere: no such folder",
        "export an-owner/A-1.5 there": (
            "error: an-owner/A-1.5: no such folder; a model of the hub: hf download an-owner/A-1.5 "
            "--local-dir an-owner/A-1.5"
        ),
        "export mine.toml there": "mine.toml is a file",
        "checkpoint diff nowhere nowhere": "error: nowhere: no such folder",
        "checkpoint ls /no": "/no",
        "checkpoint verify /no": "/no",
        "push /no ada/tiny": "/no",
    },
    exit_codes.DONE: {"plan llama3_8b.toml --gpus 8 --gpu h100-80g": " fits, "},
}


def test_commands_without_torch(tmp_path):
    (tmp_path / "mine.toml").write_text("")
    words = [command for said in WITHOUT_TORCH.values() for command in said]
    done = python("-c", RUN_ALL, json.dumps(words), cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert len(lines) == len(words), done.stderr
    answers = dict(zip(words, map(json.loads, lines), strict=True))
    for code, said in WITHOUT_TORCH.items():
        for command, wanted in said.items():
            found, text = answers[command]
            assert found == code, f"{command}: {found}, {text}"
            assert wanted in text, f"{command}: {text}"
