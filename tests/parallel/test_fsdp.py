"""What sharding sends, when, and where the parameters end up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.harness import TINY, Run, batches, build_tiny, full_precision, micro_batches
from tests.support.watch import GATHER, REDUCE, SUM, Sent, Watch, Wire, collectives
from titanlite.dist import ParallelismError
from titanlite.dist.dist_env import DistEnv
from titanlite.models import get_spec
from titanlite.optim.guard import FiniteGuard
from titanlite.parallel.fsdp import apply_fsdp, set_gradient_sync
from titanlite.parallel.fsdp_groups import groups_by_class
from titanlite.step import PlainRunner, TrainStep

RUN = Run(*batches(1, 8, 16, 192), [1e-3])
# parameters of TINY: embedding and head 12,288 each, two blocks of 49,280, final norm 64
TOTAL = 123_200
EMBEDDING = 12_288
BLOCK = 49_280
HEAD = 12_288 + 64
CLASSES = ["Attention", "FeedForward"]


def _step(world: DistEnv, run: Run) -> list[Sent]:
    """The collectives of the second step, without those of the counts and of loss and norm."""
    return [
        sent for sent in collectives(world, run) if sent.name != SUM or sent.bytes_in > 24
    ]  # 24: three counts


def _counts(seen: list[Sent]) -> dict[str, int]:
    return dict(Counter(sent.name for sent in seen))


def _bytes(seen: list[Sent], name: str, end: str) -> int:
    return sum(getattr(sent, f"bytes_{end}") for sent in seen if sent.name == name)


@pytest.mark.parametrize(
    # number of groups that are gathered (the root is one if it holds parameters), and the sizes of
    # the last two
    ("fsdp_units", "groups", "last_two", "reshard"),
    [
        ("block", 4, BLOCK + HEAD, "default"),  # embedding, blocks, norm with head
        ("root", 1, TOTAL, "never"),
        (["Block"], 3, BLOCK + EMBEDDING + HEAD, "always"),  # blocks, root
        (CLASSES, 5, TOTAL - 2 * 12_288 - 36_864, "default"),  # the last feed-forward, root
    ],
    ids=["block", "root", "class", "classes"],
)
def test_each_policy_gathers_as_its_reshard_setting_says(
    pool, fsdp_units, groups, last_two, reshard
):
    training = full_precision(fsdp_units=fsdp_units, reshard_after_forward=reshard)
    seen = pool(2).run(_step, replace(RUN, training=training))[0]
    again = {"default": max(groups - 2, 0), "always": groups, "never": 0}[reshard]
    assert _counts(seen) == {GATHER: groups + again, REDUCE: groups}
    whole = {"default": 2 * TOTAL - last_two, "always": 2 * TOTAL, "never": TOTAL}[reshard]
    assert _bytes(seen, GATHER, "out") == 4 * whole
    assert _bytes(seen, REDUCE, "in") == 4 * TOTAL
    assert _bytes(seen, REDUCE, "out") == 4 * TOTAL // 2


def test_a_number_gathers_for_backward_within_groups_of_that_many_ranks(pool):
    for seen in pool(4).run(_step, replace(RUN, training=full_precision(reshard_after_forward=2))):
        ranks = Counter(sent.bytes_out // sent.bytes_in for sent in seen if sent.name == GATHER)
        assert ranks == {4: 4, 2: 4}, "forward over all four ranks, backward over two"
        assert _counts(seen) == {GATHER: 8, REDUCE: 4}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("ranks", "counts", "summed"),
    # with DDP whole weights are neither gathered nor scattered
    [(4, {GATHER: 6, REDUCE: 4, SUM: 4}, TOTAL // 2), (2, {SUM: 4}, TOTAL)],
    ids=["HSDP", "DDP"],
)
def test_replicas_add_one_all_reduce_of_a_shard_per_group(pool, ranks, counts, summed):
    for seen in pool(ranks).run(_step, replace(RUN, replicas=2)):
        assert _counts(seen) == counts
        assert _bytes(seen, SUM, "in") == 4 * summed


def _order(world: DistEnv, run: Run) -> tuple[list[int], list[int]]:
    """All-gathers begun before the embedding and each block computes, and before each block does in
    backward.
    """
    model, _, rank = build_tiny(world, run)
    batch = micro_batches(run, 0, rank, world.size)[0]
    gathers = 0
    forward: dict[str, int] = {}
    backward: dict[str, int] = {}

    def note(sent: Sent) -> None:
        nonlocal gathers
        gathers += sent.name == GATHER

    def watch_forward(name: str) -> None:
        model.get_submodule(name).register_forward_pre_hook(
            lambda *_: forward.update({name: gathers})
        )

    def watch_backward(name: str) -> None:
        def arrived(gradient: torch.Tensor) -> None:
            backward.setdefault(name, gathers)

        def after(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            output.register_hook(arrived)

        # The last product is the first in backward, and comes after the group's hooks before its
        # backward.
        model.get_submodule(f"{name}.feed_forward.w2").register_forward_hook(after)

    blocks = [f"layers.{i}" for i in range(run.args.n_layers)]
    for name in ("tok_embeddings", *blocks):
        watch_forward(name)
    for name in blocks:
        watch_backward(name)
    model(batch.tokens).sum().backward()
    forward.clear()
    backward.clear()
    with Wire(note):
        loss = model(batch.tokens).sum()
        in_forward = gathers
        loss.backward()
    return list(forward.values()), [backward[name] - in_forward for name in blocks]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("ahead", "tied"), [(0, False), (2, False), (1, True)])
def test_prefetch_begins_gathers_before_the_group_in_front_computes(pool, ahead, tied):
    """Groups are embedding, five blocks, norm with head, all gathered again for backward.

    Tied embedding and head stay gathered from the first to the last use: block 0 is next after
    them.
    """
    training = full_precision(reshard_after_forward="always", prefetch=ahead)
    run = replace(RUN, args=replace(TINY, n_layers=5, tied=tied), training=training)
    forward, backward = pool(2).run(_order, run)[0]
    groups = 6 if tied else 7
    # Before the embedding, itself; before block i, blocks 0 … i too; and those ahead.
    assert forward == [min(1 + i + ahead, groups) for i in range(6)]
    # Before block i in backward: the head, blocks 4 … i, and those ahead; torch by itself is one
    # ahead there.
    assert backward == [min(6 - i + max(ahead, 1), groups) for i in range(5)]


class Odd(nn.Module):
    """A user's own model: groups of its own classes, a tied head, rows that no two ranks divide
    evenly.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 6)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(3)
        )
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def _twins() -> tuple[Odd, Odd, list[list[str]]]:
    """Two models of the same weights, and groups of modules."""
    torch.manual_seed(0)
    plain = Odd()
    return plain, deepcopy(plain), groups_by_class(plain, ["Sequential", "Embedding"])


def _own_model(world: DistEnv, prefetch: int, average: bool, replicas: int) -> tuple[float, int]:
    """Largest difference of a gradient from the plain model's, and the all-gathers of a step.

    average: the ranks' losses are means over their own tokens; the plain model's over all tokens.
    """
    plain, ours, groups = _twins()
    apply_fsdp(
        ours,
        groups,
        world.build_mesh(dp_replicate=replicas, dp_shard=world.size // replicas),
        param_dtype=torch.float32,
        reshard_after_forward=True,
        prefetch=prefetch,
        average=average,
    )
    tokens = torch.arange(26).view(2, 13) % 13
    reduce = torch.mean if average else torch.sum
    reduce(plain(tokens).logsumexp(-1)).backward()
    seen: list[Sent] = []
    with Wire(seen.append):
        reduce(ours(tokens[world.rank :: world.size]).logsumexp(-1)).backward()
    pairs: Any = zip(plain.parameters(), ours.parameters(), strict=True)
    worst = max((b.grad.full_tensor() - a.grad).abs().max().item() for a, b in pairs)
    return worst, _counts(seen).get(GATHER, 0)


@pytest.mark.parametrize(
    ("prefetch", "average", "replicas", "gathers", "within"),
    # three layers, and embedding with head, forward and backward; averages have gradients up to 0.1
    [(2, False, 1, 8, 1e-5), (0, True, 1, 8, 1e-6), (0, True, 2, 0, 1e-6)],
    ids=["ahead", "average", "average, DDP"],
)
def test_a_users_own_model_has_the_gradients_of_one_process(
    pool, prefetch, average, replicas, gathers, within
):
    for worst, gathered in pool(2).run(_own_model, prefetch, average, replicas):
        assert worst < within
        assert gathered == gathers


def _refused_steps(world: DistEnv) -> dict[str, str]:
    """What a step in a loop of one's own says to each way to spread a model over two ranks."""
    mesh = world.build_mesh(dp_shard=world.size)
    tensor = world.build_mesh(tp=world.size)
    _, _, groups = _twins()
    ways: dict[str, Callable[[nn.Module], Any]] = {
        "summed": lambda model: apply_fsdp(model, groups, mesh),
        "ddp": DistributedDataParallel,
        "torch's own": lambda model: fully_shard(model, mesh=mesh["dp_shard"]),
        "averaged": lambda model: apply_fsdp(model, groups, mesh, average=True),
        "both": lambda model: apply_fsdp(
            model, groups, mesh, average=True, placement=lambda _: None
        ),
        "no factors": lambda model: apply_fsdp(model, groups, tensor),
    }
    found = {}
    for name, spread in ways.items():
        model: nn.Module = Odd()
        try:
            model = spread(model) or model
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            TrainStep(model, optimizer, PlainRunner(model), FiniteGuard(world.device), 1.0)
        except ParallelismError as error:
            found[name] = str(error)
    return found


def test_a_step_refuses_a_model_that_ranks_would_train_apart(pool):
    for found in pool(2).run(_refused_steps):
        assert found.keys() == {"ddp", "torch's own", "averaged", "both", "no factors"}
        assert "call apply_fsdp(model, groups, mesh) before" in found["averaged"]
        assert "give the ReplicationFactors" in found["no factors"]


def _one_rank(world: DistEnv) -> tuple[list[int], bool, bool]:
    """Elements of the copies of two passes, whether they sum the gradients of a plain model, and
    whether new weights count.
    """
    plain, ours, groups = _twins()
    apply_fsdp(ours, groups, world.build_mesh(), param_dtype=torch.float32)
    tokens = torch.arange(26).view(2, 13) % 13
    copied: list[int] = []

    def note(func: Any, args: Any, output: Any) -> None:
        if func is torch.ops.aten.copy_.default and args[0] is not args[1]:
            copied.append(args[0].numel())

    with Watch(note):
        for model in (plain, ours, ours):
            model(tokens).logsumexp(-1).sum().backward()
    pairs = zip(plain.parameters(), ours.parameters(), strict=True)
    sums = all(torch.equal(b.grad.to_local(), 2 * a.grad) for a, b in pairs)  # type: ignore[union-attr,operator]
    for model, more in ((plain, {}), (ours, {"assign": True})):
        state = {name: weight * 2 for name, weight in model.state_dict().items()}
        model.load_state_dict(state, **more)
    return copied, sums, torch.equal(ours(tokens), plain(tokens))


def test_one_rank_computes_with_its_shards_and_copies_nothing(pool):
    assert pool(1).run(_one_rank) == [([], True, True)]


def _bf16_weights(world: DistEnv) -> bool:
    """Whether gradients of several micro-batches are their sum in float32."""
    plain, ours, groups = _twins()
    for model in (plain, ours):
        model.bfloat16()
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in plain.parameters()]
    apply_fsdp(ours, groups, world.build_mesh())
    for last in (*[False] * 31, True):
        tokens = torch.randint(13, (2, 13))
        plain.zero_grad()
        set_gradient_sync(ours, last)
        for model in (plain, ours):
            model(tokens).logsumexp(-1).sum().backward()
        for total, parameter in zip(sums, plain.parameters(), strict=True):
            total += parameter.grad
    pairs = zip(sums, ours.parameters(), strict=True)
    return all(torch.equal(total.bfloat16(), p.grad.to_local()) for total, p in pairs)  # type: ignore[union-attr]


def test_one_rank_sums_gradients_of_bf16_weights_in_float32(pool):
    assert pool(1).run(_bf16_weights) == [True]


@pytest.mark.parametrize("name", ["DecoderLayer", "SdpaAttention", "ModuleDict", "Llama"])
def test_a_class_that_makes_no_group_is_refused_with_those_that_do(name):
    """Also modules without parameters, lists that are never called, and the root itself."""
    there = "Attention (2), Block (2), Embedding (1), FeedForward (2), Linear (15), RMSNorm (5)"
    with pytest.raises(ParallelismError) as error:
        groups_by_class(get_spec("llama3").build_on_meta(TINY), ["Block", name])
    assert f"of {name};" in str(error.value)
    assert str(error.value).endswith(there)
