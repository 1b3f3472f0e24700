"""The weights of a rank, in the groups that FSDP gathers. No torch here."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titanlite.plan.rank_sizes import RankSizes


@dataclass(frozen=True)
class Weight:
    """A parameter after tensor and expert parallelism: rows that `fully_shard` divides."""

    rows: int
    #: Numbers in each row.
    width: int
    shards: int
    #: Sizes of a matrix of a block; the last two dimensions where several
    #: are stacked.
    matrix: tuple[int, int] | None = None
    #: Bytes of a number while it is gathered; 0: those of all others.
    gathered_bytes: int = 0
    #: Divided along another dimension than the first: put in order by a copy.
    copied: bool = False
    #: Ranks in a row that hold the same rows of other experts.
    neighbours: int = 1
    #: It has no gradient and no state, and is held in the dtype of products.
    frozen: bool = False

    @property
    def numbers(self) -> int:
        return self.rows * self.width

    @property
    def padded(self) -> int:
        """Its numbers, padded to divide evenly."""
        return -(-self.rows // self.shards) * self.shards * self.width

    @property
    def part(self) -> int:
        return self.padded // self.shards

    def local(self, index: int) -> int:
        """Return the numbers of shard `index`."""
        each = -(-self.rows // self.shards)
        return min(max(self.rows - index // self.neighbours * each, 0), each) * self.width


@dataclass(frozen=True, eq=False)
class Group:
    """Modules that are gathered together."""

    modules: tuple[str, ...]
    weights: tuple[Weight, ...]
    #: Freed after its forward.
    reshards: bool

    @property
    def numbers(self) -> int:
        return sum(weight.numbers for weight in self.weights)

    @property
    def padded(self) -> int:
        return sum(weight.padded for weight in self.weights)

    @property
    def part(self) -> int:
        """A rank's numbers, padded."""
        return sum(weight.part for weight in self.weights)

    @cached_property
    def by_mesh(self) -> tuple[tuple[Weight, ...], ...]:
        """The weights of each collective: those that all ranks divide, then experts."""
        shared = tuple(one for one in self.weights if one.neighbours == 1)
        experts = tuple(one for one in self.weights if one.neighbours > 1)
        return tuple(weights for weights in (shared, experts) if weights)

    @cached_property
    def trained(self) -> Group:
        """The group with trained weights alone."""
        return replace(self, weights=tuple(one for one in self.weights if not one.frozen))


def position(module: str, layers: int) -> int:
    """Return a module's place in the order they run."""
    if module == "tok_embeddings":
        return -1
    if module == "norm":
        return layers
    if module == "output":
        return layers + 1
    return int(module.rpartition(".")[2])


def groups_of(sizes: RankSizes, mine: Collection[str]) -> list[Group]:
    """Return the FSDP groups of a rank's modules, in the order they last run, as
    `ModelSpec.fsdp_units`.

    mine: without a last norm that runs with the head.
    """
    run = sizes.run
    with_weights = set(mine)
    if "output" in mine:
        with_weights.add("norm")
    units: list[tuple[str, ...]] = []
    every = run.spec.fsdp_groups(sizes.args)
    if run.training.fsdp_units == "root":
        every = [sum(every, ())]
    for unit in every:
        here = tuple(name for name in unit if name in with_weights)
        if here:
            units.append(here)
    groups = []
    for index, unit in enumerate(units):
        weights: list[Weight] = []
        for name in unit:
            own = module_weights(name, sizes)
            weights += sizes.products.weights(name, own, sizes.shards)
        modules = [name for name in unit if name in mine]
        modules.sort(key=lambda name: position(name, sizes.args.n_layers))
        # By default the last two stay: the backward begins with them.
        reshards: object = run.training.reshard_after_forward
        frees = index < len(units) - 2 if reshards == "default" else reshards != "never"
        groups.append(Group(tuple(modules), tuple(weights), frees))
    return groups


def module_weights(module: str, sizes: RankSizes) -> list[Weight]:
    """Return a module's weights; a tied head has none."""
    args = sizes.args
    mesh = sizes.run.mesh
    if module == "output" and args.tied:
        return []
    if module in ("tok_embeddings", "output"):
        return [Weight(args.n_vocab // mesh.tensor, args.dim, mesh.weight_shards)]
    if module == "norm":
        return [Weight(args.dim, 1, mesh.weight_shards)]
    shape = sizes.shape_of(module)
    args = shape.args
    shards = mesh.weight_shards
    matrices = {}
    for name, whole in {**args.attention_linears(), **args.feed_forward_linears()}.items():
        size = whole if mesh.tensor == 1 else sizes.linears.on_rank(f"{module}.{name}")
        matrices[name] = (size.out_features, size.in_features)
    found = list(shape.feed_forward.weights(mesh))
    for name, (rows, columns) in matrices.items():
        gathered = shape.products.gathered_bytes(name)
        found.append(Weight(rows, columns, shards, (rows, columns), gathered))
    found += [Weight(length, 1, shards) for length in args.block_norms().values()]
    # A norm over all heads is divided as they are.
    divided = mesh.tensor if args.qk_norm_whole else 1
    found += [Weight(n // divided, 1, shards) for n in args.attention_extras().values()]
    return found
