"""The public names and their signatures: a change of this list is a change for the programs of
users.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import titanlite
from tests.support.processes import ROOT, python
from titanlite import Callback, Checkpointer
from titanlite.assembly.build import build

#: Arguments after `*` are given by name, those with `=` have a default.
SIGNATURES = """\
AnyPrecisionAdamW(parameters, lr=, betas=, eps=, weight_decay=, *kahan=, *momentum_dtype=, *variance_dtype=, *compensation_dtype=)
BadStepError(step, norm, loss, why, kind=, ranks=, applied=, updated=)
Batch(tokens, labels, documents=)
Callback()
Checkpointer(config, world, fingerprints, run_config=, tokenizer_files=, averages=, base=)
Cost(flops, parameters)
Datasets(tokenizer, train, validation, tasks=)
DistEnv(rank, local_rank, size, device, timeout=)
Figures()
FiniteGuard(device, policy=, max_skips=, spike_sigmas=, window=)
Init(kind, std=, bound=, value=)
LoadedState(step, train, notices=, folder=, origin=, left_out=, partial=, config=, changes=, verified=, is_foreign=)
ModelSpec(name, args_class, flavors, build, init_rule, block_names, count_parameters, flops_per_token, head=, fsdp_units=, linears=, tensor_plan=, tensor_sizes=, sublayer_names=, pipeline_costs=, context_parallel=, experts=, tied=, hf_names=, left_out=, part_of=, part_prefix=, hf_config=, args_from_hf=, why_not=)
PlainRunner(model, loss_function=, sync_every=)
ReplicationFactors(tokens=, loss=)
RunEnd(state, step, error=, reason=)
Size(in_features, out_features)
StepResult(loss, local_loss, grad_norm, layer_norms, good)
StopSignal(at_once=)
TrainStep(model, optimizer, runner, guard, max_norm, factors=, layer_norms=, before_update=, after_update=, phase=, in_backward=, balance=)
Trainer(parts, stop=)
TrainingComponents(run, world, datasets, model_parts, optimizer, learning_rate, train_step, average, loaders, saves, course, callbacks=, trackers=)
apply_ac(model, names, settings, device)
apply_compile(modules, backend=, options=)
apply_cp(model, mesh)
apply_float8(model, names, recipe, *all_gather=, *emulate=)
apply_fsdp(model, groups, mesh, *param_dtype=, *reduce_dtype=, *reshard_after_forward=, *prefetch=, *cpu_offload=, *average=, *placement=)
apply_tp(model, plan, mesh, shard_logits=)
build(run, world, datasets=, watchdog=, callbacks=)
check_ranks(world, *config=, *texts=, *folder=, *needs_folder=)
generate(checkpoint, prompt, *chat=, *max_tokens=, *temperature=, *top_k=, *top_p=, *seed=, *device=, *dtype=, *tokenizer=, *ema=, *trust_code=)
groups_by_class(model, names)
load_config(path, world_size, flags=)
read_datasets(run, share=)
to_device(batches, device)
validate(model, batches, device, runner, factors=)
"""  # noqa: E501
#: Sections of the config: docs/config-keys.md freezes their fields.
SECTIONS = {"ActivationCheckpoint", "Checkpoint", "Optimizer"}
METHODS = {
    Callback: """\
before_update(self, trainer)
on_end(self, trainer, end)
on_exit(self, stop)
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


def test_public_names_and_signatures_are_frozen():
    assert callable(titanlite.build)
    assert set(titanlite.__all__) <= set(dir(titanlite))
    names = sorted(set(titanlite.__all__) - {"__version__", "RunConfig", *SECTIONS})
    found = (signature(n, build if n == "build" else getattr(titanlite, n)) for n in names)
    assert "".join(found) == SIGNATURES
    for owner, expected in METHODS.items():
        methods = {name: value for name, value in vars(owner).items() if callable(value)}
        assert set(expected.splitlines(True)) <= {*map(signature, methods, methods.values())}, owner


def test_type_checkers_know_the_same_names():
    tree = ast.parse(Path(titanlite.__file__).read_text(encoding="utf-8"))
    imported = {
        (alias.name, node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    known = {(name, f"titanlite.{module}") for name, module in titanlite._MODULES.items()}
    assert imported == known
    assert set(titanlite.__all__) == {"__version__"} | {name for name, _ in imported}


def test_the_page_of_the_public_names_is_what_the_script_writes():
    utf8 = {"PYTHONIOENCODING": "utf-8"}
    written = python("scripts/api_page.py", env=utf8, encoding="utf-8")
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert written.stdout == page, "run: python scripts/generate.py"


def test_each_public_name_and_its_methods_are_documented():
    bare = []
    for name in set(titanlite.__all__) - {"__version__"}:
        found = build if name == "build" else getattr(titanlite, name)
        # A comment beside a field says what it holds.
        fields = getattr(found, "__dataclass_fields__", {})
        methods = [key for key in vars(found) if not key.startswith("_") and key not in fields]
        described = {name: found, **{f"{name}.{key}": getattr(found, key) for key in methods}}
        for path, one in described.items():
            is_described = callable(one) or isinstance(one, property)
            if is_described and not inspect.getdoc(one):
                bare.append(path)
    assert bare == []
