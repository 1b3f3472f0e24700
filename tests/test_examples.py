"""examples/: real runs of what docs/library.md shows, and each extension point by its effect."""

from __future__ import annotations

import json
import math
import re
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.support.pool import Pools
from tests.support.processes import ROOT
from tests.support.refusals import refusal
from tests.support.whole_runs import scalars, train_run
from titanlite import Callback, Trainer, apply_cp, apply_fsdp, apply_tp, build, load_config
from titanlite.checkpoint.manifest import CheckpointError, read_manifest
from titanlite.checkpoint.state_dict import gather
from titanlite.config.errors import ConfigError
from titanlite.config.own_functions import load_functions
from titanlite.dist import ParallelismError
from titanlite.dist.dist_env import DistEnv
from titanlite.models import ShapeError, get_spec, resolve_args
from titanlite.models.args import as_record
from titanlite.models.recorded_args import from_record
from titanlite.resolve.load import check_config

EXAMPLES = ROOT / "examples"
CONFIG = str(EXAMPLES / "extensions.toml")
MODEL = f"{EXAMPLES}/tiny_gpt.py:SPEC"
LOSS = f"{EXAMPLES}/z_loss.py:z_loss"
SMALL = [
    "--training.batch_size=2",
    "--training.seq_len=32",
    "--training.warmup_steps=2",
    "--checkpoint.interval=3",
]
LLAMA = [
    "--model.name=llama3",
    "--model.flavor=debugmodel",
    "--model.overrides.n_layers=2",
    "--model.overrides.dim=64",
]


class Watch(Callback):
    """Notes the numbers of each step, and what was built."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, float, float, float]] = []
        self.rates: list[list[float]] = []

    def on_start(self, trainer: Trainer) -> None:
        model = trainer.parts.model
        optimizer = trainer.parts.optimizer
        self.wrapped = [
            name for name, module in model.named_modules() if isinstance(module, FSDPModule)
        ]
        self.sharded = all(isinstance(p, DTensor) for p in model.parameters())
        self.scales = [group.get("lr_scale") for group in optimizer.param_groups]
        self.decays = [group["weight_decay"] for group in optimizer.param_groups]
        self.weights = {
            name: p.full_tensor().detach().numpy() for name, p in model.named_parameters()
        }  # type: ignore[operator]
        self.texts = trainer.parts.datasets.train.corpus.documents
        self.first = trainer.parts.datasets.train.sequence(0)

    def on_log(self, trainer: Trainer, figures: Mapping[str, float]) -> None:
        self.rows.append((trainer.step, figures["loss"], figures["grad_norm"], figures["lr"]))
        self.rates.append([group["lr"] for group in trainer.parts.optimizer.param_groups])


def _run(world: DistEnv, folder: str, *flags: str, config: str = CONFIG) -> Watch:
    watch = Watch()
    loaded = load_config(config, world.size, [*SMALL, f"--job.dump_folder={folder}", *flags])
    parts = build(loaded, world)
    parts.callbacks.append(watch)
    Trainer(parts).train()
    return watch


def _refused(world: DistEnv, folder: str, *flags: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        _run(world, folder, *flags)
    return str(caught.value)


@pytest.fixture(scope="module")
def straight(pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> Watch:
    """Six steps of all examples together, on 2 ranks."""
    folder = str(tmp_path_factory.mktemp("straight"))
    found: Watch = pool(2).run(_run, folder, "--training.steps=6")[0]
    return found


@pytest.mark.slow
def test_all_examples_together_resume_to_the_last_bit(pool, straight, tmp_path):
    flags = ["--training.steps=3", "--lr_scheduler.total_steps=6"]
    first = pool(2).run(_run, str(tmp_path), *flags)[0]
    second = pool(2).run(_run, str(tmp_path), "--training.steps=6")[0]
    assert first.rows + second.rows == straight.rows
    assert [row[0] for row in straight.rows] == [1, 2, 3, 4, 5, 6]
    assert first.rates + second.rates == straight.rates
    manifest = read_manifest(tmp_path / "checkpoint" / "step-6")
    assert manifest.train["best_loss"] == min(row[1] for row in straight.rows)
    # The checkpoint names the source of each part.
    parts = (f"{EXAMPLES}/lr_groups.py:adamw", f"{EXAMPLES}/text_files.py:documents")
    assert all(path in manifest.config["toml"] for path in (MODEL, LOSS, *parts))
    assert "model" in pool(1).run(_refused, str(tmp_path), "--training.steps=8", *LLAMA)[0]


def test_groups_keep_their_ratio_to_the_rate_that_is_logged(straight):
    assert straight.texts == len(list((ROOT / "docs").glob("*.md"))), "the function's text"
    assert straight.scales == [1.0, 1.0, pytest.approx(0.2, rel=1e-12)]
    assert straight.decays == [0.1, 0.0, 0.1]
    rates = [row[3] for row in straight.rows]
    assert rates == pytest.approx([1e-3 * f for f in (1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25)])
    assert straight.rates == [[rate, rate, rate * straight.scales[2]] for rate in rates]


def test_the_model_is_sharded_by_block_and_drawn_by_its_rule(straight):
    assert straight.wrapped == ["", "blocks.0", "blocks.1"]
    assert straight.sharded
    spec = get_spec(MODEL)
    weights = straight.weights
    args = resolve_args(
        MODEL, "tiny", tokenizer_size=len(weights["embedding.weight"]), max_seq_len=32
    )
    assert sum(weight.size for weight in weights.values()) == spec.count_parameters(args)
    assert set(weights) == {name for name, _ in spec.build_on_meta(args).named_parameters()}
    assert (weights["blocks.1.norm2.bias"] == 0).all()
    assert (weights["norm.weight"] == 1).all()
    assert weights["embedding.weight"].std() == pytest.approx(0.02, rel=0.02)
    assert weights["blocks.0.down.weight"].std() == pytest.approx(0.01, rel=0.02)


@pytest.mark.slow
def test_the_loss_has_its_penalty(pool, straight, tmp_path):
    flags = ["--training.steps=1", "--training.loss=cross_entropy"]
    plain = pool(2).run(_run, str(tmp_path), *flags)[0]
    # At the start all logits are near 0: Z is the number of entries.
    penalty = 1e-4 * math.log(len(straight.weights["embedding.weight"])) ** 2
    assert straight.rows[0][1] - plain.rows[0][1] == pytest.approx(penalty, rel=0.01)


EXACT = (
    "--training.loss_chunks=3 --activation_checkpoint.mode=full --training.fsdp_units=Block "
    "--training.batch_size=1 --training.global_batch_size=4"
)


@pytest.mark.parametrize(
    ("flags", "tolerance"),
    [
        pytest.param(EXACT, 1e-6, id="exact"),
        pytest.param(
            "--training.compile --compile.backend=aot_eager "
            "--float8.enable_float8_linear --float8.emulate",
            2e-2,
            marks=pytest.mark.slow,
            id="compiled float8",
        ),
    ],
)
def test_features_work_on_a_model_and_a_loss_of_ones_own(
    pool, straight, tmp_path, flags, tolerance
):
    words = ["--training.steps=2", "--lr_scheduler.total_steps=6", *flags.split()]
    rows = pool(2).run(_run, str(tmp_path), *words)[0].rows
    wanted = [row[1] for row in straight.rows[:2]]
    assert [row[1] for row in rows] == pytest.approx(wanted, rel=tolerance)


TWO_STEPS = ["--training.steps=2", "--lr_scheduler.total_steps=6", *LLAMA]


@pytest.fixture(scope="module")
def plain(pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> Watch:
    """Two steps of a Llama on data-parallel ranks."""
    found: Watch = pool(2).run(_run, str(tmp_path_factory.mktemp("plain")), *TWO_STEPS)[0]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "degree", ["training.tensor_parallel_degree", "experimental.pipeline_parallel_degree"]
)
def test_loss_optimizer_and_text_work_with_other_parallelisms(pool, plain, tmp_path, degree):
    flags = [f"--{degree}=2", "--training.batch_size=4"]
    for rank in pool(2).run(_run, str(tmp_path), *TWO_STEPS, *flags):
        wanted = [row[1] for row in plain.rows]
        assert [row[1] for row in rank.rows] == pytest.approx(wanted, rel=2e-5)
        all_rates = {rate for rates in plain.rates for rate in rates}
        assert {rates[-1] for rates in rank.rates} <= all_rates


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("training.tensor_parallel_degree=2", "has no tensor_plan"),
        ("experimental.pipeline_parallel_degree=2", "no pipeline_costs"),
        ("experimental.context_parallel_degree=2", "no context_parallel"),
        ("model.flavor=big", "there are tiny, small"),
        ("model.name=./tiny_gpt.py:GPT", "not a titanlite.ModelSpec"),
        ("training.loss=hinge", '"cross_entropy", or a dotted path'),
        ("training.dataset_path=.", "excludes training.dataset"),
    ],
)
def test_config_check_names_what_is_not_offered_or_not_there(monkeypatch, flag, words):
    monkeypatch.chdir(EXAMPLES)
    problem = refusal([f"--job.config_file={CONFIG}", f"--{flag}"], 2)
    assert problem.key == flag.partition("=")[0]
    assert words in f"{problem.message}; {problem.remedy}"
    assert problem.where


def test_functions_of_another_kind_are_refused_before_any_work(tmp_path):
    (tmp_path / "mine.py").write_text(
        "loss = 7\ndef adamw(parameters): ...\ndef broken(): ...\n1 / 0\n"
    )
    (tmp_path / "other.py").write_text("loss = 7\ndef adamw(parameters): ...\n")
    config = tmp_path / "run.toml"
    config.write_text(
        '[training]\nloss = "./other.py:loss"\ndataset = "./mine.py:broken"\n[optimizer]\nname = '
        '"./other.py:adamw"\n'
    )
    asked, _ = check_config([f"--job.config_file={config}"], 1, training=False)
    with pytest.raises(ConfigError) as caught:
        load_functions(asked)
    loss, text, optimizer = map(str, caught.value.problems)
    assert ":2: training.loss: " in loss
    assert "is 7, and not a function to call with (logits, labels)" in loss
    assert ":3: training.dataset: " in text
    assert "ZeroDivisionError" in text
    assert ":5: optimizer.name: " in optimizer
    assert "(parameters, settings, device)" in optimizer


def test_a_model_of_ones_own_is_recorded_and_has_no_hugging_face_form():
    args = resolve_args(MODEL, "tiny", {"n_layers": 3}, vocab_size=64, max_seq_len=16)
    assert from_record(json.loads(json.dumps(as_record(MODEL, args)))) == (MODEL, args)
    with pytest.raises(ShapeError, match="dim, n_layers is missing"):
        from_record({"family": MODEL, "n_heads": 2})
    with pytest.raises(ValueError, match="no conversion"):
        get_spec(MODEL).hf_names(args)


def _misfit(world: DistEnv, folder: str, *flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        _run(world, folder, "--training.loss=cross_entropy", *LLAMA, *flags)
    return str(caught.value)


def test_a_loop_refuses_what_a_run_refuses(pool, tmp_path):
    group = "--optimizer.groups=[{pattern='no_such', lr=1e-4}]"
    said = pool(1).run(_misfit, str(tmp_path), "--optimizer.name=AdamW", group)[0]
    assert "optimizer.groups[0].pattern: 'no_such' is found in no parameter's name" in said


def test_a_state_that_is_no_tensor_is_refused_by_name():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                self.state[p]["count"] = 1

    model = torch.nn.Linear(2, 2, bias=False)
    with pytest.raises(TypeError, match=r"state.weight.count of Counting is no tensor"):
        gather(model, Counting(model.parameters(), lr=0.1))


# The page


PAGE = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")


def test_the_code_of_the_page_is_that_of_the_examples():
    shown = re.findall(r"<!-- (examples/\w+\.py) -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert {name for name, _ in shown} >= {
        f"examples/{name}.py" for name in ("tiny_gpt", "lr_groups", "z_loss")
    }
    for name, code in shown:
        source = (ROOT / name).read_text(encoding="utf-8")
        for piece in re.split(r" *# …\n", code):
            assert piece.strip("\n") in source, f"{name}: {piece.splitlines()[0]}"


def _loop_of_the_page(world: DistEnv, file: str) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the whole weights after the loop."""
    found = runpy.run_path(file, run_name="__main__")
    weights = found["model"].named_parameters()
    return found["losses"], {name: p.full_tensor().detach() for name, p in weights}


def _plain_loop(file: str) -> tuple[list[float], dict[str, Tensor]]:
    """The same training by torch alone: the model and the sequences of the page, in one process."""
    code = Path(file).read_text(encoding="utf-8").partition("losses = []")[0]
    page: dict[str, Any] = {}
    exec(code, page)
    torch.manual_seed(0)
    model = page["MyModel"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(1, 11):
        rows = page["sequences"](step)
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


def test_the_loop_of_the_page_trains_as_plain_torch_does(pool, tmp_path):
    file = tmp_path / "my_loop.py"
    file.write_text(PAGE.partition("```python\n")[2].partition("```")[0], encoding="utf-8")
    losses, weights = _plain_loop(str(file))
    assert losses[-1] < losses[0] - 1
    # AdamW moves a weight whose gradient is rounding by that rounding's sign.
    for ranks, of_losses, of_weights in ((1, 0, 0), (2, 1e-6, 1e-5)):
        for found, trained in pool(ranks).run(_loop_of_the_page, str(file)):
            assert found == pytest.approx(losses, rel=of_losses, abs=0)
            for name, weight in weights.items():
                torch.testing.assert_close(trained[name], weight, rtol=0, atol=of_weights)


def test_the_figure_of_the_page_is_logged_over_all_ranks(pool, tmp_path):
    """Of two ranks the standard deviation is the distance of the larger loss from the mean."""
    code = PAGE.partition("### Figures of your own")[2].partition("```python\n")[2]
    (tmp_path / "my_figures.py").write_text(code.partition("```")[0], encoding="utf-8")
    flags = [
        f"--job.callbacks={tmp_path}/my_figures.py:LossSpread",
        f"--metrics.save_tb_folder={tmp_path}/boards",
        "--metrics.enable_tensorboard",
        "--metrics.log_freq=2",
        "--training.steps=4",
        "--no-validation.enable",
    ]
    rows = pool(2).run(train_run, str(tmp_path), *flags)[0]["rows"]
    assert [row["step"] for row in rows] == [1, 2, 4]
    for row in rows:
        assert row["loss_spread"] == pytest.approx(row["max_loss"] - row["loss"], rel=1e-3)
        assert row["loss_spread"] > 1e-3
    shown = scalars(next((tmp_path / "boards").iterdir()))["loss_spread"]
    assert shown == [(row["step"], pytest.approx(row["loss_spread"])) for row in rows]


def _refused_meshes(world: DistEnv) -> list[str]:
    ours = world.build_mesh(dp_shard=world.size)
    unnamed = init_device_mesh("cpu", (world.size,))
    others = init_device_mesh("cpu", (world.size,), mesh_dim_names=("dp",))
    messages = []
    for mesh in (unnamed, others, ours["dp_shard"]):
        with pytest.raises(ParallelismError) as caught:
            apply_fsdp(torch.nn.Linear(2, 2), [], mesh)
        messages.append(str(caught.value))
    with pytest.raises(ParallelismError, match="this one has dp: make it by"):
        apply_cp(torch.nn.Linear(2, 2), others)
    with pytest.raises(ParallelismError, match='one dimension, as mesh."tp"'):
        apply_tp(torch.nn.Linear(2, 2), {}, ours)
    return messages


def test_a_mesh_of_other_dimensions_is_refused(pool):
    messages = pool(2).run(_refused_meshes)[1]
    assert all("pp, dp_replicate, dp_shard, cp, tp" in message for message in messages)
    for message, name in zip(messages, ["no names", "dp", "dp_shard"], strict=True):
        assert f"this one has {name}: make it by DistEnv.build_mesh" in message
