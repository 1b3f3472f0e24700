"""The package looks its names up when they are used."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import titanlite.data


def test_importing_the_room_loads_nothing_heavy() -> None:
    code = (
        "import sys, titanlite.data, titanlite.data.errors\n"
        "assert not {'torch', 'tiktoken', 'numpy'} & set(sys.modules)\n"
        "from titanlite.data import build_dataset, load_tokenizer\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_name_is_where_it_is_said_to_be() -> None:
    assert sorted(titanlite.data._HOME) == titanlite.data.__all__
    for name, module in titanlite.data._HOME.items():
        assert getattr(titanlite.data, name) is getattr(import_module(f"titanlite.data.{module}"), name)
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        titanlite.data.nothing_of_that_name  # noqa: B018
