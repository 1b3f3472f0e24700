"""Float8, attention kernels, recomputation, compilation and memory snapshots as a GPU runs them."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch

from tests.support import float8_runs
from tests.support.checkpoints import RUN as SAVED
from tests.support.checkpoints import assert_equal, unequal
from tests.support.checkpoints import train as train_and_save
from tests.support.compare import LABELS, TOKENS, WARM, distance, spread
from tests.support.float8_runs import RATES, REAL, RECIPES, recipe
from tests.support.harness import (
    MODES,
    TINY,
    Run,
    batches,
    build_tiny,
    changed,
    micro_batches,
    train,
    train_afresh,
)
from tests.support.stand_ins import ANY, at_step
from titanlite.callbacks import RunEnd
from titanlite.config.run_sections import Profiling
from titanlite.config.sections import ActivationCheckpoint, Compile, Training
from titanlite.data.loader import to_device
from titanlite.dist.dist_env import DistEnv
from titanlite.features.loss_chunks.head import _chunked
from titanlite.loss import cross_entropy_sum
from titanlite.metrics.profiler import Profiler

BF16 = Training()
RUN = Run(TOKENS, LABELS, WARM)
COMPILED = Compile()

#: Needs kernels of compute capability 8.9.
FLOAT8_HARDWARE = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="needs a GPU with float8",
)


@pytest.mark.numbers
@FLOAT8_HARDWARE
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_float8_stays_within_the_spread_of_seeds(world, name, compiled):
    long = replace(float8_runs.RUN, rates=RATES, compile=COMPILED if compiled else None)
    plain, *others = (train_afresh(world, replace(long, seed=seed)).losses for seed in (7, 8, 9))
    ours = train_afresh(world, replace(long, float8=recipe(name, REAL))).losses
    assert 0 < distance(ours, plain) < 2 * spread(plain, others)


def peak_and_gradients(world: DistEnv, run: Run) -> tuple[int, dict[str, torch.Tensor]]:
    """Bytes at the peak of a second pass over the run's first micro-batch, less what was there
    before; its gradients, whole, by name.
    """
    model, _, rank = build_tiny(world, run)
    data = to_device(micro_batches(run, 0, rank, world.size), world.device)
    for _ in range(2):
        model.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(data[0].tokens).float().logsumexp(-1).sum().backward()
        peak = torch.cuda.max_memory_allocated() - before
    return peak, {n: p.grad.full_tensor().clone() for n, p in model.named_parameters()}  # type: ignore[union-attr]


@pytest.mark.numbers
def test_each_mode_keeps_less_and_computes_the_same(world):
    """Peak memory over a forward and backward pass, less what was there before."""
    args = replace(
        TINY, dim=512, n_layers=8, n_heads=8, n_kv_heads=8, max_seq_len=512, multiple_of=256
    )
    tokens, labels = batches(1, 8, 512, 192)
    peaks = {}
    gradients = {}
    offload = ActivationCheckpoint(mode="none", offload=True)
    for name, plan in {**MODES, "none, offload": offload}.items():
        run = Run(tokens, labels, [1e-3], args=args, training=BF16, activations=plan)
        peaks[name], gradients[name] = peak_and_gradients(world, run)
    assert peaks["full"] < peaks["every"] < peaks["none"]
    assert peaks["op"] < peaks["none"]
    assert peaks["none, offload"] < peaks["none"]
    for name, ours in gradients.items():
        for parameter, gradient in gradients["none"].items():
            torch.testing.assert_close(
                ours[parameter], gradient, rtol=2e-2, atol=1e-3, msg=f"{name}: {parameter}"
            )


@pytest.mark.numbers
def test_compiled_training_is_eager_training_to_rounding(world):
    """In fp32, where inductor keeps the precision of the products; equal blocks are one graph."""
    from torch._dynamo.utils import counters

    eager = train(world, RUN)
    counters.clear()
    compiled = train_afresh(world, replace(RUN, compile=COMPILED))
    assert compiled.losses == pytest.approx(eager.losses, abs=1e-4)
    assert counters["stats"]["unique_graphs"] == 2, "a block and the loss"


def test_snapshots_are_written_on_the_cycle_and_when_memory_runs_out(tmp_path, world):
    section = Profiling(
        enable_memory_snapshot=True, save_memory_snapshot_folder=str(tmp_path), profile_freq=2
    )
    profiler = Profiler(section, 0, world.device)
    profiler.on_start(at_step(0))
    kept: list[torch.Tensor] = []
    for step in (1, 2, 3):
        kept.append(torch.empty(2**20, device=world.device))
        profiler.on_step_end(at_step(step), ANY)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2**50, dtype=torch.uint8, device=world.device)
    profiler.on_end(at_step(3), RunEnd("failed", 3, caught.value))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "iteration_2",
        "iteration_3_out_of_memory",
    ]
    snapshot = pickle.loads(
        (tmp_path / "iteration_2" / "rank0_memory_snapshot.pickle").read_bytes()
    )
    events = [
        event
        for trace in snapshot["device_traces"]
        for event in trace
        if event["action"] == "alloc"
    ]
    assert [event["size"] for event in events].count(2**22) >= 2
    names = [frame["name"] for event in events for frame in event["frames"]]
    assert names and not any("::" in name for name in names), "stacks of C++ are slow"


@pytest.mark.numbers
def test_a_loss_in_chunks_never_has_all_logits(world):
    vocab = 32768
    chunks = 8
    tokens, labels = batches(2, 8, 512, vocab)
    args = replace(TINY, vocab_size=vocab, max_seq_len=512)
    losses = []
    peaks = []
    for count in (1, chunks):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run = Run(tokens, labels, [1e-3] * 2, args=args, training=BF16, loss_chunks=count)
        losses.append(train(world, run).losses)
        peaks.append(torch.cuda.max_memory_allocated())
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    logits = 4 * 8 * 512 * vocab
    # Their probabilities and two gradients of them in float32, less a chunk's.
    assert peaks[0] - peaks[1] > 2 * logits * (chunks - 1) / chunks


@pytest.mark.numbers
def test_the_heads_gradient_in_chunks_is_that_of_float32(world):
    x, weight = (
        torch.randn(rows, 32, device=world.device).mul(0.3).bfloat16() for rows in (64, 48)
    )
    labels = torch.arange(64, device=world.device)[None] % 48
    gradients = []
    for chunks, inputs in ((8, (x, weight)), (1, (x.float(), weight.float()))):
        rows, head = (t.clone().requires_grad_() for t in inputs)
        _chunked(rows[None], head, labels, cross_entropy_sum, chunks).backward()
        gradients.append(head.grad)
    torch.testing.assert_close(gradients[0].float(), gradients[1], rtol=0.02, atol=0.01)


GATHERED = changed(REAL, enable_fsdp_float8_all_gather=True)
PRECOMPUTED = changed(GATHERED, precompute_float8_dynamic_scale_for_fsdp=True)


@pytest.mark.numbers
@FLOAT8_HARDWARE
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "plan",
    [REAL, GATHERED, PRECOMPUTED, recipe("rowwise", REAL)],
    ids=["tensorwise", "all-gather", "precomputed", "rowwise"],
)
def test_a_resume_in_float8_is_exact(world, tmp_path, plan):
    """Six steps without a break, and six that were saved and resumed after the third."""
    run = replace(SAVED, training=BF16, float8=plan)
    straight = train_and_save(world, run, tmp_path / "straight", 1, 6, every=3)
    first, rest = (
        train_and_save(world, run, tmp_path / "parts", *steps) for steps in ((1, 3), (4, 6))
    )
    assert [*first["losses"], *rest["losses"]] == straight["losses"]
    assert_equal(rest["weights"], straight["weights"])
    assert unequal(tmp_path / "parts" / "step-6", tmp_path / "straight" / "step-6") == []
