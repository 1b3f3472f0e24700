"""Features are folders: imported when they are on, and asked at the moments of their base class."""

from __future__ import annotations

import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import titanlite.plan
from tests.support.processes import python
from titanlite.parallel import parallelize
from titanlite.resolve.load import load_config
from titanlite.run.features import FEATURES, Feature, features_of

#: Folders of features → the flags that switch them on.
ON = {
    "": [],
    "context": ["--experimental.context_parallel_degree=2"],
    "ema pipeline sdc": [
        "--experimental.pipeline_parallel_degree=2",
        "--optimizer.ema_decay=0.5",
        "--sdc.freq=9",
    ],
    "experts": ["--model.name=mixtral", "--parallelism.expert_parallel_degree=2"],
    # MXFP8 is float8 with other numbers.
    "float8 mx": [
        "--float8.enable_float8_linear",
        "--float8.emulate",
        "--float8.recipe_name=mxfp8",
    ],
    "activation_offload async_tp float8 loss_chunks": [
        "--activation_checkpoint.offload",
        "--experimental.enable_async_tensor_parallel",
        "--training.compile",
        "--float8.enable_float8_linear",
        "--training.loss_chunks=2",
    ],
}
LOADED = """
import sys
from titanlite.resolve.load import load_config
load_config("debug_model.toml", 2, sys.argv[1:])
names = {name.split(".")[2] for name in sys.modules if name.startswith("titanlite.features.")}
print(*sorted(names - {"feature", "interactions"}), "torch" in sys.modules)
"""
PLAN = Path(titanlite.plan.__path__[0])
HOOKS = [
    name for name, member in vars(Feature).items() if inspect.isfunction(member) and name[0] != "_"
]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("names", ON)
def test_a_config_check_imports_the_features_that_are_on_and_no_torch(names):
    done = python("-c", LOADED, *ON[names])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [*names.split(), "False"]


def test_a_seed_checkpoint_is_made_by_one_process_whatever_the_degrees():
    flags = [
        "--checkpoint.create_seed_checkpoint",
        "--checkpoint.enable_checkpoint",
        "--model.name=mixtral",
        "--parallelism.expert_parallel_degree=3",
        "--experimental.context_parallel_degree=2",
        "--experimental.pipeline_parallel_degree=2",
        "--training.seq_len=33",
    ]
    assert features_of(load_config("debug_model.toml", 1, flags)).on == []


def test_neither_the_plan_nor_the_recipe_of_a_model_names_a_feature():
    """Features change them by their hooks."""
    named = "|".join({entry.name for entry in FEATURES})
    pattern = re.compile(rf"\bfeatures\.({named})\b|titanlite\.features|\bmoe_layers_of\b")
    for path in [*PLAN.glob("*.py"), Path(parallelize.__file__)]:
        assert not pattern.search(path.read_text()), path.name


def test_there_are_at_most_twelve_hooks_and_two_features_or_more_have_each():
    classes = [pkgutil.resolve_name(entry.place) for entry in FEATURES]
    users = {name: sum(name in vars(cls) for cls in classes) for name in HOOKS}
    assert len(users) <= 12
    assert min(users.values()) >= 2, users
