"""A start imports only the modules of a plain run, and repeats no work of an earlier one."""

from __future__ import annotations

import json

import pytest

from tests.support.processes import python
from tests.support.tiny import EIGHT_STEPS

_RUNS = """
import gc, json, sys
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from titanlite import main
from titanlite.data import token_cache

def note(owner, name, calls, what):
    real = getattr(owner, name)
    def noted(*given, **named):
        calls.append(what(*given))
        return real(*given, **named)
    setattr(owner, name, noted)

class Watcher:
    def find_spec(self, name, path=None, target=None):
        if name == "torch._dynamo":
            collecting.append(gc.isenabled())

operators, tokenized, collecting = [], [], []
sys.meta_path.insert(0, Watcher())
name = "propagate_op_sharding_non_cached"
note(ShardingPropagator, name, operators, lambda self, call: str(call.op))
note(token_cache, "tokenize", tokenized, lambda *given: 1)
assert main.run(sys.argv[1:]) == 0
modules = list(sys.modules)

assert main.run(sys.argv[1:]) == 0
print(json.dumps([modules, operators, len(tokenized), collecting]))
"""


@pytest.mark.slow
def test_a_start_imports_nothing_that_it_does_not_use_and_tokenizes_a_text_once(tmp_path):
    words = [
        *EIGHT_STEPS,
        "--training.steps=2",
        "--data.token_cache=auto",
        "--validation.enable=false",
    ]
    done = python(
        "-c", _RUNS, *words, f"--job.dump_folder={tmp_path / 'run'}", env={"TMPDIR": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    modules, operators, tokenized, collecting = json.loads(done.stdout.splitlines()[-1])
    unused = {
        "torch._inductor.graph",
        "torch.distributed.pipelining",
        "torchao",
        "transformers",
        "tensorboard",
        "torch.utils.tensorboard",
        "datasets",
        "wandb",
        "pyarrow",
        "fsspec",
        "triton",
    }
    assert not unused.intersection(modules)
    assert collecting == [False], "the collector looks through no objects of torch's compiler"
    assert tokenized == 1, "the second run maps the tokens of the first"
    assert operators and not any("foreach" in name or "adam" in name for name in operators), (
        "AdamW on DTensors"
    )
