"""A run imports only the modules of its kind of text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.processes import python
from tests.support.tiny import EIGHT_STEPS

_RUN = """
import json, sys
from titanlite import main
assert main.run(sys.argv[1:]) == 0
print(json.dumps(sorted(name for name in sys.modules if name.startswith("titanlite.data"))))
"""

_CHECK = """
import json, sys
from titanlite.resolve.load import check_config
check_config([], training=False)
print(json.dumps(sorted(name for name in sys.modules if name.startswith("titanlite.data"))))
"""

#: Local text that is held as a whole, from one source, split into rows.
_PLAIN = [
    "",
    "choose_files",
    "compression",
    "file_kinds",
    "file_stamps",
    "formats",
    "listing",
    "loader",
    "local_files",
    "named_texts",
    "prefetch",
    "records",
    "rows",
    "sequences",
    "skip_ranges",
    "splits",
    "state",
    "step_sizes",
    "text",
    "text_files",
    "text_report",
    "threads",
    "token_cache",
    "token_paths",
    "tokenize_files",
    "tokenizer",
    "tokenizer.base",
    "tokenizer.load_local",
    "tokenizer.tiktoken_ranks",
]


@pytest.mark.slow
def test_a_run_of_plain_text_imports_no_module_of_another_kind_of_text(tmp_path: Path) -> None:
    """The list is exact: streams, mixtures, token files, chats, URLs and other tokenizers are not
    in it.
    """
    flags = [*EIGHT_STEPS, "--training.steps=2", f"--job.dump_folder={tmp_path / 'run'}"]
    assert _modules(_RUN, *flags) == _PLAIN


def test_the_check_of_a_config_imports_no_reader() -> None:
    assert _modules(_CHECK) == ["", "named_texts", "step_sizes", "token_paths"]


def _modules(program: str, *words: str) -> list[str]:
    """Return the modules of `titanlite.data` that a program has imported at its end."""
    done = python("-c", program, *words)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return [name.removeprefix("titanlite.data").removeprefix(".") for name in found]
