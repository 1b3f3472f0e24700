"""The public names and their signatures: a change of this list is a change for the programs of users."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import titanlite
from titanlite import Callback, Checkpointer
from titanlite.build import build

ROOT = Path(titanlite.__file__).parents[1]

#: Arguments after `*` are given by name, those with `=` have a default.
SIGNATURES = """\
AnyPrecisionAdamW(parameters, lr=, betas=, eps=, weight_decay=, *kahan=, *momentum_dtype=, *variance_dtype=, *compensation_dtype=)
Callback()
Checkpointer(config, world, fingerprints, run_config=, tokenizer_files=, averages=)
DistEnv(rank, local_rank, size, device, timeout=)
FiniteGuard(device, policy=, max_skips=, spike_sigmas=, window=)
ModelSpec(name, args_class, flavors, build, init_rule, block_names, count_parameters, flops_per_token, head=, fsdp_units=, linears=, tensor_plan=, tensor_sizes=, sublayer_names=, pipeline_costs=, context_parallel=, experts=, tied=, hf_names=, hf_config=, args_from_hf=)
PlainRunner(model, loss_function=, sync_every=)
StepResult(loss, local_loss, grad_norm, layer_norms, good)
StopSignal(at_once=)
TrainStep(model, optimizer, runner, guard, max_norm, factors=, layer_norms=, before_update=, after_update=, phase=, in_backward=)
Trainer(parts, stop=)
TrainingComponents(world, mesh, spec, args, model, optimizer, learning_rate, train_step, loader, validation, datasets, checkpointer, save_schedule, anomalies, callbacks, trackers, steps, global_batch_size, tokens_per_step, last_save_dtype=, exclude_from_loading=, phases=)
apply_ac(model, names, settings, device)
apply_compile(modules, backend=, options=)
apply_cp(model, mesh)
apply_float8(model, names, recipe, *all_gather=, *emulate=)
apply_fsdp(model, groups, mesh, *param_dtype=, *reduce_dtype=, *reshard_after_forward=, *prefetch=, *cpu_offload=, *average=, *experts=)
apply_tp(model, plan, mesh, shard_logits=)
build(run, world, datasets=, watchdog=, callbacks=)
check_ranks(world, *config=, *texts=, *folder=, *needs_folder=)
groups_by_class(model, names)
load_config(path, world_size, flags=)
read_datasets(run, share=)
validate(model, batches, device, runner, factors=)
"""  # noqa: E501
METHODS = {
    Callback: """\
before_update(self, trainer)
on_end(self, trainer, end)
on_log(self, trainer, figures)
on_phase(self, trainer, phase)
on_rollback(self, trainer)
on_save(self, trainer, step, folder, seconds)
on_start(self, trainer)
on_step_end(self, trainer, result)
on_validation_end(self, trainer, loss, tokens, seconds)
state_dict(self, trainer)
""",
    Checkpointer: """\
load(self, model, optimizer, expected=)
""",
}


def signature(name: str, found: Any) -> str:
    def shown(parameter: inspect.Parameter) -> str:
        star = "*" if parameter.kind is parameter.KEYWORD_ONLY else ""
        return star + parameter.name + ("" if parameter.default is parameter.empty else "=")

    return f"{name}({', '.join(map(shown, inspect.signature(found).parameters.values()))})\n"


def test_public_names_and_signatures_are_frozen() -> None:
    assert callable(titanlite.build) and set(titanlite.__all__) <= set(dir(titanlite))
    names = sorted(set(titanlite.__all__) - {"__version__", "RunConfig"})
    assert "".join(signature(n, build if n == "build" else getattr(titanlite, n)) for n in names) == SIGNATURES
    for owner, expected in METHODS.items():
        found = "".join(signature(name, value) for name, value in sorted(vars(owner).items()) if callable(value))
        assert set(expected.splitlines()) <= set(found.splitlines()), owner


def test_type_checkers_know_the_same_names() -> None:
    tree = ast.parse(Path(titanlite.__file__).read_text(encoding="utf-8"))
    imported = {
        (alias.name, node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    known = {(name, f"titanlite.{module}") for name, module in titanlite._MODULES.items()}
    assert imported - {("__version__", "titanlite._version")} == known
    assert set(titanlite.__all__) == {name for name, _ in imported}


def test_the_page_lists_every_public_name() -> None:
    page = (ROOT / "docs" / "library.md").read_text(encoding="utf-8").partition("## Public names")[2]
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set(titanlite.__all__) - {"__version__"}
