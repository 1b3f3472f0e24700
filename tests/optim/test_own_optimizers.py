"""titanlite's own optimizers: against torch's on whole tensors, in bfloat16, sharded, saved and
resumed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.checkpoints import assert_equal, two_and_two
from tests.support.checkpoints import train as train_and_save
from tests.support.harness import TINY, Run, batches, full_precision, train
from titanlite.config.errors import ConfigError
from titanlite.config.load import load
from titanlite.config.model_sections import Optimizer, OptimizerGroup
from titanlite.config.own_functions import load_functions
from titanlite.config.sections import Training
from titanlite.models import get_spec
from titanlite.optim.adamw import AnyPrecisionAdamW
from titanlite.optim.groups import parameter_groups
from titanlite.optim.muon import Muon, orthogonalize
from titanlite.optim.optimizer import build_optimizer, gated_step, set_rates
from titanlite.utils import logger

CPU = torch.device("cpu")
PURE_BF16 = Training(dtype="bfloat16", mixed_precision_reduce="bfloat16")
KAHAN = Optimizer(name="AnyPrecisionAdamW", kahan=True, momentum_dtype="bfloat16", weight_decay=0.0)
MUON = Optimizer(name="Muon", weight_decay=0.1)


def two(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Return the same random parameter twice."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return [nn.Parameter(values.to(dtype, copy=True)) for _ in range(2)]


#: A matrix and a vector, for tests that take no step.
PARAMETERS = {"layers.0.w": two((4, 3))[0], "norm.weight": two((3,))[0]}


def follow(ours: Any, theirs: torch.optim.Optimizer, steps: int, within: float = 1e-6) -> None:
    """Give both optimizers the same gradients, some steps of ours held back, and compare the
    parameters.
    """
    (mine,), (other,) = ours.param_groups[0]["params"], theirs.param_groups[0]["params"]
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        gradient = torch.randn(other.shape, generator=generator)
        if step % 3 == 1:
            mine.grad = torch.full_like(mine, float("nan"))
            gated_step(ours, torch.tensor(False), ours.param_groups[0]["lr"])
        mine.grad = gradient.to(mine.dtype)
        other.grad = gradient.to(other.dtype)
        gated_step(ours, torch.tensor(True), ours.param_groups[0]["lr"])
        theirs.step()
    torch.testing.assert_close(mine, other.float(), rtol=1e-6, atol=within)


def test_any_precision_in_float32_is_adamw():
    mine, other = two((40, 30))
    other.data = (
        other.data.double()
    )  # torch's decay, a factor 1 - lr * decay, loses 3e-6 in float32 by itself
    hyper: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    ours = AnyPrecisionAdamW([mine], **hyper, variance_dtype=torch.float32)
    follow(ours, torch.optim.AdamW([other], **hyper), 100)
    assert {k: v.dtype for k, v in ours.state[mine].items()} == dict.fromkeys(
        ["step", "exp_avg", "exp_avg_sq"], torch.float32
    )


def test_a_loaded_state_keeps_its_dtypes():
    """Torch would cast it to the dtype of the parameters: a resume would round the momentum."""
    mine, other = two((8, 8), torch.bfloat16)
    ours, theirs = AnyPrecisionAdamW([mine]), AnyPrecisionAdamW([nn.Parameter(other.to("meta"))])
    mine.grad = torch.ones_like(mine)
    ours.step()
    theirs.load_state_dict(ours.state_dict())
    (state,) = theirs.state.values()
    assert {value.device.type for value in state.values()} == {"meta"}
    assert {name: value.dtype for name, value in state.items()} == {
        "step": torch.float32,
        "exp_avg": torch.float32,
        "exp_avg_sq": torch.bfloat16,
    }


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_muon_on_a_whole_matrix_is_torchs(shape):
    mine, other = two(shape)
    ours = Muon([{"params": [mine], "muon": True}], lr=0.02, weight_decay=0.1)
    theirs = torch.optim.Muon([other], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    # The iteration is in bfloat16, and torch rounds its intermediate sums otherwise.
    follow(ours, theirs, 5, within=5 * 0.02 * 0.2 * 40**0.5 * 2**-8)


def test_kahan_keeps_updates_that_round_away():
    """1,000 updates of 1e-5 on weights of 1.0: 2^-9 of a weight is the least that bfloat16
    takes.
    """
    moved = {}
    for kahan in (False, True):
        weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        optimizer = AnyPrecisionAdamW([weight], lr=1e-5, kahan=kahan, momentum_dtype=torch.bfloat16)
        for _ in range(1000):
            weight.grad = torch.ones_like(weight)
            gated_step(optimizer, torch.tensor(True), 1e-5)
        moved[kahan] = 1 - weight.float().mean().item()
    assert moved[False] == 0.0
    assert moved[True] == pytest.approx(0.01, rel=0.25)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"replicas": 2}], ids=str)
def test_muon_on_shards_is_muon_on_whole_matrices(pool, mesh):
    # Two numbers of the embedding have gradients near 0. With an epsilon of 1e-8 AdamW steps by the
    # sign of their rounding, and a kernel that rounds otherwise moves them by a whole rate.
    settings = Optimizer(name="Muon", weight_decay=0.1, eps=1e-6)
    args = replace(TINY, n_kv_heads=4)
    run = Run(*batches(3, 8, 16, 192), [3e-3] * 3, args=args, settings=settings, **mesh)
    curve = pool(4).run(train, run)[0]
    alone = pool(1).run(train, run.alone())[0]
    torch.testing.assert_close(curve.losses, alone.losses, rtol=1e-4, atol=1e-4)
    for name, weight in curve.weights.items():
        torch.testing.assert_close(weight, alone.weights[name], rtol=0, atol=5e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "training"),
    [(MUON, full_precision()), (KAHAN, PURE_BF16)],
    ids=["muon", "kahan"],
)
def test_two_and_two_equal_four(pool, tmp_path, settings, training):
    run = Run(*batches(4, 8, 16, 192), [3e-3] * 4, training=training, settings=settings)
    straight = two_and_two(pool, run, tmp_path)
    other = pool(4).run(train_and_save, run, tmp_path / "run", 5, 4)  # only loads
    assert_equal(other[0]["state"], straight["state"])


def names_of(groups: list[dict[str, Any]], parameters: dict[str, nn.Parameter]) -> list[set[str]]:
    ids = {id(parameter): name for name, parameter in parameters.items()}
    return [{ids[id(parameter)] for parameter in group["params"]} for group in groups]


def test_groups_take_the_first_pattern_and_keep_their_ratio():
    parameters = {
        "tok_embeddings.weight": two((8, 4))[0],
        "layers.0._orig_mod.attention.wq.weight": two((4, 4))[0],
        "layers.0.attention_norm.weight": two((4,))[0],
        "output.weight": two((8, 4))[0],
    }
    settings = Optimizer(
        lr=1e-3,
        no_decay_on_norms=True,
        groups=[
            OptimizerGroup(pattern="^layers.0.attention", lr=5e-4, beta2=0.99, weight_decay=0.1),
            OptimizerGroup(pattern="wq|embed", weight_decay=0.5),
        ],
    )
    groups = parameter_groups(parameters, settings)
    embed, wq, norm, output = parameters
    assert names_of(groups, parameters) == [{embed}, {wq}, {norm}, {output}]
    optimizer = build_optimizer(parameters, settings, CPU)
    set_rates(optimizer, 1e-4)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(
        [1e-4, 5e-5, 5e-5, 1e-4]
    )
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.1, 0.0, 0.1]
    assert [group["betas"] for group in optimizer.param_groups] == [
        (0.9, 0.95),
        (0.9, 0.99),
        (0.9, 0.99),
        (0.9, 0.95),
    ]


def test_a_group_keeps_its_rate_where_the_others_have_none():
    settings = Optimizer(lr=0.0, groups=[OptimizerGroup(pattern="norm", lr=2e-4)])
    optimizer = build_optimizer(PARAMETERS, settings, CPU)
    set_rates(optimizer, settings.peak_lr / 2)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 1e-4]


def test_muon_takes_the_matrices_of_blocks():
    spec = get_spec("llama3")
    parameters = dict(spec.build_on_meta(TINY).named_parameters())
    groups = parameter_groups(parameters, MUON, spec.block_names(TINY))
    (matrices,) = names_of([group for group in groups if "muon" in group], parameters)
    assert matrices == {n for n, p in parameters.items() if n.startswith("layers.") and p.ndim == 2}


def test_many_matrices_in_one_parameter_are_made_orthogonal_one_by_one():
    stack = torch.randn(2, 3, 8, 5, generator=torch.Generator().manual_seed(0))
    found = orthogonalize(stack)
    assert found.shape == stack.shape
    assert torch.equal(found[1, 2], orthogonalize(stack[1, 2][None])[0])
    assert torch.linalg.svdvals(found.float()).sub(1).abs().max() < 0.4


OWN = '''
import torch


class Decayed(torch.optim.SGD):
    """Has the arguments of SGD, and one more."""

    def __init__(self, params, lr, power, momentum=0.0):
        super().__init__(params, lr=lr / power, momentum=momentum)


class Inherits(Decayed):
    pass


class WithSettings(torch.optim.AdamW):
    def __init__(self, parameters, settings, device):
        super().__init__(parameters.values(), lr=settings.lr, weight_decay=settings.weight_decay)
'''


def test_a_class_gets_the_rate_its_arguments_and_the_groups():
    matrices, norms = two((4, 3)), two((3,))
    settings = Optimizer(
        name="torch.optim:SGD",
        lr=1e-2,
        args={"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        groups=[OptimizerGroup(pattern="norm", lr=5e-3, weight_decay=0.25)],
    )
    ours = {"layers.0.w": matrices[0], "norm.weight": norms[0]}
    optimizer = build_optimizer(ours, settings, CPU)
    assert type(optimizer) is torch.optim.SGD
    reference = torch.optim.SGD(
        [
            {"params": matrices[1:]},
            {"params": norms[1:], "weight_decay": 0.25, "scale": 0.5},
        ],
        lr=1e-2,
        momentum=0.9,
        nesterov=True,
        weight_decay=0.1,
    )
    generator = torch.Generator().manual_seed(1)
    for rate in (1e-2, 5e-3, 2e-3):
        for mine, other in (matrices, norms):
            mine.grad = torch.randn(mine.shape, generator=generator)
            other.grad = mine.grad.clone()
        gated_step(optimizer, torch.tensor(True), rate)
        for group in reference.param_groups:
            group["lr"] = rate * group.get("scale", 1.0)
        reference.step()
    for mine, other in (matrices, norms):
        assert torch.equal(mine, other)


def test_two_and_two_steps_equal_four(pool, tmp_path):
    args = {"betas": [0.9, 0.99], "decoupled_weight_decay": True}
    settings = Optimizer(name="torch.optim:NAdam", args=args, no_decay_on_norms=True)
    run = Run(*batches(4, 8, 16, 192), [3e-3] * 4, training=full_precision(), settings=settings)
    straight = two_and_two(pool, run, tmp_path)
    assert len(set(straight["losses"])) == 4


def refused(*flags: str) -> str:
    """Return the report of a config whose functions are refused when they are imported."""
    with pytest.raises(ConfigError, match="optimizer.name") as error:
        load_functions(load(flags))
    return str(error.value)


def test_arguments_are_compared_with_the_class_before_work(tmp_path):
    sgd = "--optimizer.name=torch.optim.SGD"
    assert load([sgd, "--optimizer.args.momentum=0.9"]).value("optimizer.name") == "torch.optim:SGD"
    assert "unexpected keyword argument 'momentun'" in refused(sgd, "--optimizer.args.momentun=0.9")
    assert "multiple values for keyword argument 'lr'" in refused(sgd, "--optimizer.args.lr=1")
    torchs = "--optimizer.name=torch.optim:"
    assert "its step needs a closure" in refused(f"{torchs}LBFGS")
    assert "has no Nonsense" in refused(f"{torchs}Nonsense")
    (tmp_path / "own.py").write_text(OWN)
    own = f"--optimizer.name={tmp_path}/own.py"
    assert "missing a required argument: 'power'" in refused(f"{own}:Decayed")
    assert "missing a required argument: 'power'" in refused(f"{own}:Inherits")
    load_functions(load([f"{own}:Inherits", "--optimizer.args.power=2"]))
    load_functions(load([f"{own}:WithSettings"]))


def test_settings_that_a_class_does_not_get_are_a_warning(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    flags = ["--optimizer.weight_decay=0.1", "--optimizer.beta1=0.8"]
    load_functions(load(["--optimizer.name=torch.optim.SGD", *flags]))
    assert caplog.messages == [
        "optimizer.weight_decay, beta1: a class of optimizers gets lr and [optimizer.args] alone"
    ]
    caplog.clear()
    (tmp_path / "own.py").write_text(OWN)
    load_functions(load([f"--optimizer.name={tmp_path}/own.py:WithSettings", *flags]))
    assert not caplog.messages


def test_values_that_a_class_refuses_are_config_errors():
    wrong = Optimizer(name="torch.optim:SGD", args={"momentum": -1.0})
    with pytest.raises(
        ConfigError, match="optimizer.args: 'torch.optim:SGD' refuses them: Invalid momentum value"
    ):
        build_optimizer(PARAMETERS, wrong, CPU)
    groups = [OptimizerGroup(pattern="norm", beta1=0.5)]
    with pytest.raises(ConfigError, match="'torch.optim:SGD' knows no betas"):
        build_optimizer(PARAMETERS, Optimizer(name="torch.optim:SGD", groups=groups), CPU)


def test_a_class_that_takes_the_section_is_called_as_a_function(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    settings = Optimizer(name=f"{tmp_path}/own.py:WithSettings", lr=3e-4, weight_decay=0.7)
    (group,) = build_optimizer(PARAMETERS, settings, CPU).param_groups
    assert (group["lr"], group["weight_decay"], len(group["params"])) == (3e-4, 0.7, 2)
