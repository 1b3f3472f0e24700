"""A run imports only the modules of its kind of text."""

from __future__ import annotations

import json

import pytest

from tests.support.processes import python

_RUN = """
import json, sys
from titanlite.assembly.datasets import read_training_text
from titanlite.data.loader import TrainLoader
from titanlite.data.prefetch import Prefetcher
from titanlite.data.tokenizer import load_tokenizer
from titanlite.resolve.load import load_config
rows = read_training_text(load_config("debug_model.toml", 1, []), load_tokenizer())
with Prefetcher(TrainLoader(rows, 8, 8)) as batches:
    batches.next_step()
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
    "daemon_threads",
    "dataset_builder",
    "dataset_sources",
    "file_kinds",
    "file_stamps",
    "formats",
    "listing",
    "loader",
    "local_files",
    "prefetch",
    "records",
    "rows",
    "sequences",
    "skip_ranges",
    "split_names",
    "state_checks",
    "step_sizes",
    "text_files",
    "token_cache",
    "token_paths",
    "tokenize_files",
    "tokenizer",
    "tokenizer.base",
    "tokenizer.load_local",
    "tokenizer.tiktoken_ranks",
]


@pytest.mark.slow
def test_a_run_of_plain_text_imports_no_module_of_another_kind_of_text() -> None:
    """The list is exact: streams, mixtures, token files, chats, URLs and other tokenizers are not
    in it.
    """
    assert _modules(_RUN) == _PLAIN


def test_the_check_of_a_config_imports_no_reader() -> None:
    assert _modules(_CHECK) == ["", "dataset_sources", "step_sizes", "token_paths"]


def _modules(program: str) -> list[str]:
    """Return the modules of `titanlite.data` that a program has imported at its end."""
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return [name.removeprefix("titanlite.data").removeprefix(".") for name in found]
