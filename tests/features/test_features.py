"""Features are folders: imported when they are on, and asked at the moments of their base class."""

from __future__ import annotations

import pytest

from tests.support.processes import python
from titanlite.resolve.load import load_config
from titanlite.run.features import features_of

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
