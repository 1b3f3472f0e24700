"""No key without an effect, and no plan field that nobody reads."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from titanlite.config import plans as plans_module
from titanlite.config.errors import ConfigError
from titanlite.config.load import load
from titanlite.config.plans import Plans
from titanlite.config.resolve import resolve
from titanlite.config.schema import Key, base, check_value, keys, members, quote
from titanlite.config.unbuilt import UNBUILT, refused
from titanlite.models import SHAPES

#: Used up while the config is loaded, and tested there.
AT_LOAD = {
    "job.config_file": "test_layers",
    "job.extends": "test_layers",
    "job.dialect": "test_names",
    "job.use_for_integration_test": "the one key without an effect; a warning says so, see below",
}

#: What must be on before a key can matter.
CONTEXT = {
    "checkpoint.": ["--checkpoint.enable_checkpoint"],
    "validation.": ["--validation.enable"],
    "float8.": ["--float8.enable_float8_linear"],
    "float8.precompute": ["--float8.enable_fsdp_float8_all_gather"],
    "compile.": ["--training.compile"],
    "metrics.save_tb_folder": ["--metrics.enable_tensorboard"],
    "metrics.rank_0_only": ["--metrics.enable_tensorboard"],
    "training.enable_loss_parallel": ["--training.tensor_parallel_degree=2"],
    "training.fsdp_min_params": ["--training.fsdp_units=size"],
    "experimental.pipeline": ["--experimental.pipeline_parallel_degree=2"],
    "experimental.enable_async": ["--training.tensor_parallel_degree=2", "--training.compile"],
    "activation_checkpoint.selective": ["--activation_checkpoint.mode=selective"],
    "activation_checkpoint.memory": ["--activation_checkpoint.mode=budget", "--training.compile"],
    "activation_checkpoint.mode": ["--training.compile"],
    "optimizer.": ["--optimizer.name=AnyPrecisionAdamW"],
    "data.lanes": ["--training.dataset=c4"],
    "data.shuffle_buffer": ["--training.dataset=c4"],
    "profiling.": ["--profiling.enable_profiling", "--profiling.enable_memory_snapshot"],
    "memory_estimation.": ["--memory_estimation.enabled"],
    "guard.policy": ["--checkpoint.enable_checkpoint"],
    "guard.max_skips": ["--guard.policy=skip"],
    "guard.window": ["--guard.spike_sigmas=4"],
    "stall.heartbeat": ["--stall.deadline_seconds=60"],
    "debug.deterministic_warn_only": ["--debug.deterministic"],
    "checkpoint.last_save_in_hf": ["--checkpoint.enable_checkpoint", "--checkpoint.model_weights_only"],
    "checkpoint.export_dtype": ["--checkpoint.enable_checkpoint", "--checkpoint.model_weights_only"],
    "checkpoint.keep_best": ["--checkpoint.enable_checkpoint", "--validation.enable"],
    "checkpoint.initial": ["--checkpoint.enable_checkpoint", "--checkpoint.initial_load_path=/x"],
}

SPECIAL: dict[str, str] = {
    "model.name": "llama2",
    "model.flavor": "8B",
    "model.overrides": "{n_layers = 3}",
    "launch.environment": '{A = "b"}',
    "training.data_parallel_replicate_degree": "2",
    "training.data_parallel_shard_degree": "2",
    "training.global_batch_size": "64",
    "experimental.pipeline_parallel_microbatches": "4",  # two are those of two ranks
    "experimental.pipeline_parallel_schedule": "GPipe",
    "data.source": '[{path = "x"}]',
    "validation.sources": '[{path = "x"}]',
    "optimizer.groups": '[{pattern = "norm"}]',
}


def other_values(key: Key) -> list[str]:
    """Legal values that are not the default, as written on the command line."""
    if key.name in SPECIAL:
        return [SPECIAL[key.name]]
    found: list[Any] = []
    for part in map(base, members(key.annotation)):
        if part is bool:
            found += [True, False]
        elif part is int:
            found += [key.default + 1 if isinstance(key.default, int) and key.default > 0 else 2]
        elif part is float:
            found += [key.default / 2 if key.default else 0.5, 2.0]
        elif part is str:
            found += ["other", "3"]
        elif get_origin(part) is Literal:
            found += get_args(part)
        elif get_origin(part) is list:
            (item,) = get_args(part)
            found += (
                [[2]]
                if int in map(base, members(item))
                else [[get_args(item)[0]]]
                if get_origin(item) is Literal
                else [["x"]]
            )
    legal = [v for v in found if v != key.default and not check_value(key, v)]
    return [v if isinstance(v, str) else quote(v) for v in legal]


def context(name: str) -> list[str]:
    flags = [f for prefix, extra in CONTEXT.items() if name.startswith(prefix) for f in extra]
    return [flag for flag in dict.fromkeys(flags) if not flag.startswith(f"--{name}")]


def outcome(flags: list[str]) -> tuple[Plans | None, list[str]]:
    """The plans (without the text of the config in them), and the keys that training would refuse."""
    try:
        config = load(flags)
        resolved = resolve(config, world_size=4, shapes=SHAPES)
    except ConfigError as error:
        return None, [problem.key for problem in error.problems]
    return dataclasses.replace(resolved, config_toml="", notes=()), [problem.key for problem in refused(config)]


VALUES = [(key.name, value) for key in keys().values() if key.name not in AT_LOAD for value in other_values(key)]
#: The one legal value is the default; the others that users know are refused with a reason.
SINGLE = "float8.scaling_type_"


def test_every_key_has_a_value_to_try():
    tried = {name for name, _ in VALUES}
    left = [n for n in keys() if n not in tried and n not in AT_LOAD and not (n.startswith(SINGLE))]
    assert left == []


@pytest.mark.parametrize(("name", "value"), VALUES)
def test_every_value_changes_the_plans_or_is_refused(name, value):
    before, refused_before = outcome(context(name))
    flag = (
        [f"--{name}.{value.strip('{}').partition(' = ')[0]}={value.strip('{}').partition(' = ')[2].strip(chr(34))}"]
        if keys()[name].is_table
        else [f"--{name}={value}"]
    )
    after, refused_after = outcome([*context(name), *flag])
    changed = after != before and after is not None
    newly_refused = name in refused_after and name not in refused_before
    assert changed or newly_refused, (before, after, refused_after)
    # A value is either refused or obeyed, never both refused and planned under another key's name.
    if name in UNBUILT and not newly_refused:
        assert changed


@pytest.mark.parametrize("name", [name for name in keys() if name in UNBUILT])
def test_registry_entry_is_a_real_key(name):
    assert UNBUILT[name].feature


def test_registry_names_only_keys():
    assert set(UNBUILT) <= set(keys())


def test_mark_for_test_suites_is_the_one_key_without_effect_and_says_so():
    before, _ = outcome([])
    after, _ = outcome(["--job.use_for_integration_test"])
    assert before is not None and after is not None
    assert dataclasses.replace(after, warnings=()) == before
    assert after.warnings == ("job.use_for_integration_test has no effect",)


PLANS = {n: c for n, c in vars(plans_module).items() if isinstance(c, type) and dataclasses.is_dataclass(c)}
ROOMS = {f.name: f.type for f in dataclasses.fields(Plans) if f.type in PLANS}


def fields_read(tree: ast.AST) -> set[str]:
    """`Plan.field` for every read through a name, attribute or room that somewhere in the file holds that plan."""
    holders: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation is not None:
            target = node.arg if isinstance(node, ast.arg) else getattr(node.target, "id", "")
            plan = ast.unparse(node.annotation).strip("'\"").removesuffix(" | None").rpartition(".")[2]
            if plan in PLANS:
                holders.setdefault(target, set()).add(plan)

    def plans_of(node: ast.AST) -> set[str]:
        if isinstance(node, ast.Name):
            return holders.get(node.id, set())
        if isinstance(node, ast.Attribute):
            return {ROOMS[node.attr]} if node.attr in ROOMS else holders.get(node.attr, set())
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("resolve", "resolve_plans"):
            return {"Plans"}
        return set()

    assignments = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    for node in assignments * 2:  # twice: a name may be assigned from another one assigned further down
        targets = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else node.targets
        values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        for target, value in zip(targets, values, strict=False):
            name = getattr(target, "id", getattr(target, "attr", ""))
            holders.setdefault(name, set()).update(plans_of(value))
    return {
        f"{plan}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        for plan in plans_of(node.value)
    }


#: Their rooms read the sections of the config instead.
MOVED = ("StallPlan.", "ProfilePlan.", "Plans.stall", "Plans.profile", "Float8Plan.drift_check")


def test_every_field_of_a_plan_is_read_by_some_room():
    package = Path(plans_module.__file__).parents[1]
    files = [f for f in package.rglob("*.py") if "config" not in f.relative_to(package).parts]
    files = [f for f in [*files, package.parent / "train.py"] if f.is_file() and f.name != "cli.py"]
    read = set().union(*(fields_read(ast.parse(f.read_text(encoding="utf-8"))) for f in files))
    fields = [f"{name}.{field.name}" for name, plan in PLANS.items() for field in dataclasses.fields(plan)]
    assert [field for field in fields if field not in read and not field.startswith(MOVED)] == []
