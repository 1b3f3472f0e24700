"""Lifetimes of the tensors inside of a block: what is kept for the backward, and the peaks of forward and backward.

A module is a list of `Op`, one for each operator whose tensors matter. `measure` replays forward and backward on sizes
alone, by the rules of autograd: a saved tensor dies with the last node that saved it, a gradient when its node is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from titanlite.models.llama import LlamaArgs


@dataclass(frozen=True)
class Op:
    """One operator; sizes are in bytes."""

    #: Name of its output, and the size.
    name: str
    size: int
    #: Inputs that get a gradient.
    reads: tuple[str, ...]
    #: Tensors kept for the backward: inputs, or its own output.
    saves: tuple[str, ...] = ()
    #: More that it keeps, as the logarithms of attention's sums.
    keeps: int = 0
    #: Temporary tensors at the peak of its forward beside inputs and output, and of its backward beside saved tensors,
    #: the output's gradient and those of inputs.
    forward: int = 0
    backward: int = 0
    #: Gradient of its weight.
    weight: int = 0
    #: As `activation_checkpoint.kind_of`.
    kind: str = ""
    #: The gradients of its inputs are the output's own tensor, as of an addition.
    passes: bool = False
    #: Tensors that Python variables hold until it is done.
    holds: tuple[str, ...] = ()
    #: What it keeps is in float8.
    float8: bool = False


class Peak(NamedTuple):
    """Bytes at the moment of a module's peak, beside what it keeps before (backward) or after (forward)."""

    working: int = 0
    #: Gradients of the module's weights made so far.
    weights: int = 0

    @property
    def total(self) -> int:
        return self.working + self.weights


class ModuleMemory(NamedTuple):
    """What a module needs in one micro-batch, in bytes."""

    #: Between forward and backward, its input included, its output not; and that part of it that is in float8.
    kept: int
    float8: int
    #: Peaks above `kept`.
    forward: Peak
    backward: Peak
    #: Gradients of its weights, all of them.
    weights: int
    #: Its output.
    out: int


def measure(ops: Sequence[Op], sizes: dict[str, int], mode: str = "none") -> ModuleMemory:
    """Replay a module. sizes: its inputs → bytes. mode: "none", "full" or "op", how it checkpoints activations."""
    sizes = sizes | {op.name: op.size for op in ops}
    sizes |= {f"{op.name}'": op.keeps for op in ops}
    inputs = [name for op in ops for name in op.reads if name not in {op.name for op in ops}]
    saved = {name for op in ops for name in _saved(op)}
    cached = _by_policy(ops) if mode == "op" else set()
    held = saved if mode == "none" else {*inputs[:1], *cached}
    kept = _sum(held - {ops[-1].name} if mode == "none" else held, sizes)
    alive, top = _forward(ops, sizes, held, set(inputs), set())
    forward = Peak(max(top - kept, 0))
    if mode == "none":
        peak = _backward(ops, sizes, saved, 0)
    else:
        # Recomputation ends with the last tensor that is saved.
        last = max(i for i, op in enumerate(ops) if op.saves or op.keeps)
        rest = {op.name for op in ops[last:]} & cached
        gradient = ops[-1].size
        again, top = _forward(ops[: last + 1], sizes, saved | rest, held, cached, stops=True)
        peak = Peak(top + gradient - kept)
        peak = max(peak, _backward(ops, sizes, saved | rest, kept), key=lambda p: p.total)
    return ModuleMemory(
        kept,
        sum(sizes[name] for op in ops if op.float8 for name in _saved(op)) if mode == "none" else 0,
        forward,
        peak if mode != "none" else Peak(max(peak.working - kept, 0), peak.weights),
        sum(op.weight for op in ops),
        ops[-1].size,
    )


def _saved(op: Op) -> tuple[str, ...]:
    return (*op.saves, f"{op.name}'") if op.keeps else op.saves


def _sum(names: Iterable[str], sizes: dict[str, int]) -> int:
    return sum(sizes[name] for name in names)


def _by_policy(ops: Sequence[Op]) -> set[str]:
    """Return the outputs that `OpPolicy` keeps: attention, and every second matrix product, the first included."""
    products = [op.name for op in ops if op.kind == "matmul"]
    chosen = {*products[::2], *(op.name for op in ops if op.kind in ("attention", "other"))}
    return chosen | {f"{op.name}'" for op in ops if op.kind == "attention" and op.keeps}


def _forward(
    ops: Sequence[Op], sizes: dict[str, int], stay: set[str], alive: set[str], cached: set[str], stops: bool = False
) -> tuple[set[str], int]:
    """Run forward; return what is alive after it, and the peak. cached: outputs that exist already, in `alive`."""
    alive, top = set(alive), 0
    last_use = {name: i for i, op in enumerate(ops) for name in (*op.reads, *op.saves, *op.holds)}
    for i, op in enumerate(ops):
        if stops and i == len(ops) - 1 and op.name not in op.saves and not op.keeps:
            break  # its inputs are all that was missing
        new = {op.name, f"{op.name}'"} - alive
        work = 0 if op.name in cached else op.forward
        alive |= new
        top = max(top, _sum(alive, sizes) + work)
        alive -= {name for name in alive if last_use.get(name, -1) <= i and name not in stay and name != op.name}
    return alive, top


def _backward(ops: Sequence[Op], sizes: dict[str, int], alive: set[str], kept: int) -> Peak:
    """Run backward from a gradient of the output; return the peak above `kept`."""
    alive, peak, made = set(alive), Peak(), 0
    storages: dict[int, list[int]] = {0: [ops[-1].size, 1]}  # bytes, uses
    of = {ops[-1].name: 0}
    first_saver: dict[str, int] = {}
    for i, op in enumerate(ops):
        for name in _saved(op):
            first_saver.setdefault(name, i)

    def drop(storage: int) -> None:
        storages[storage][1] -= 1
        if not storages[storage][1]:
            del storages[storage]

    for i in range(len(ops) - 1, -1, -1):
        op = ops[i]
        given = of.pop(op.name)
        made += op.weight
        mine: dict[str, int] = {}
        for name in op.reads:
            if op.passes:
                mine[name] = given
                storages[given][1] += 1
            else:
                mine[name] = max(storages) + 1 if storages else 0
                storages[mine[name]] = [sizes[name], 1]
        now = _sum(alive, sizes) + sum(size for size, _ in storages.values()) + op.backward - kept
        peak = max(peak, Peak(now, made), key=lambda p: p.total)
        drop(given)
        for name, storage in mine.items():
            if name in of:  # added up, in place where nobody else holds the first
                first = of[name]
                if storages[first][1] > 1:
                    now = _sum(alive, sizes) + sum(size for size, _ in storages.values()) + sizes[name] - kept
                    peak = max(peak, Peak(now, made), key=lambda p: p.total)
                    drop(first)
                    of[name] = storage
                else:
                    drop(storage)
            else:
                of[name] = storage
        alive -= {name for name in _saved(op) if first_saver[name] == i}
    return peak


@dataclass(frozen=True)
class Shape:
    """What a rank computes in one micro-batch."""

    #: Tokens of the rank (sequences * tokens of each, without those of other context-parallel ranks).
    tokens: int
    args: LlamaArgs
    #: Bytes of a number in activations and gathered weights: 2 or 4.
    size: int
    tp: int = 1

    def linear(self, name: str, x: str, rows: int, columns: int, holds: tuple[str, ...] = ()) -> Op:
        """A product of all tokens with a weight [rows, columns], this rank's part of it."""
        size = self.size
        return Op(name, self.tokens * rows * size, (x,), (x,), weight=rows * columns * size, kind="matmul", holds=holds)

    def norm(self, name: str, x: str, rows: int, width: int) -> Op:
        """`layers.RMSNorm`: keeps x and one number per row; computes in float32."""
        n, low = rows * width, self.size == 2
        forward, backward = (8 * n, 14 * n) if low else (4 * n, 8 * n)
        return Op(name, n * self.size, (x,), (x,), 4 * rows, forward, backward, width * self.size)

    def rotation(self, name: str, x: str, width: int) -> Op:
        """`layers.Rotation`: keeps nothing, since the tables need no gradient; computes in float32."""
        n, low = self.tokens * width, self.size == 2
        forward, backward = (12 * n, 10 * n) if low else (4 * n, 4 * n)
        return Op(name, n * self.size, (x,), (), 0, forward, backward)


def block_ops(s: Shape) -> tuple[list[Op], dict[str, int]]:
    """Return the operators of a decoder block, and the size of its input "x"."""
    a, heads, groups = s.args, s.args.n_heads // s.tp, s.args.kv_heads // s.tp
    k, hidden = a.head_dim, s.tokens * a.dim * s.size
    ops = [
        s.norm("n1", "x", s.tokens, a.dim),
        s.linear("q", "n1", heads * k, a.dim),
        s.linear("k", "n1", groups * k, a.dim),
        s.linear("v", "n1", groups * k, a.dim),
    ]
    q, key = "q", "k"
    if a.qk_norm:
        ops += [s.norm("qn", "q", s.tokens * heads, k), s.norm("kn", "k", s.tokens * groups, k)]
        q, key = "qn", "kn"
    ops += [
        s.rotation("qr", q, heads * k),
        s.rotation("kr", key, groups * k),
        Op("y", s.tokens * heads * k * s.size, *2 * (("qr", "kr", "v"),), 4 * s.tokens * heads, kind="attention"),
        s.linear("o", "y", a.dim, heads * k, holds=("n1", "qr", "kr", "v")),
        Op("h", hidden, ("x", "o"), passes=True),
        s.norm("n2", "h", s.tokens, a.dim),
    ]
    ops[-4] = _saving_itself(ops[-4])
    ops += feed_forward_ops(s)
    ops.append(Op("out", hidden, ("h", "f"), passes=True, holds=("x",)))
    return ops, {"x": hidden}


def _saving_itself(op: Op) -> Op:
    return replace(op, saves=(*op.saves, op.name))


def feed_forward_ops(s: Shape) -> list[Op]:
    """Return the operators of SwiGLU, from "n2" to "f"."""
    width, dim = s.args.ffn_width // s.tp, s.args.dim
    size = s.tokens * width * s.size
    return [
        s.linear("g", "n2", width, dim),
        s.linear("u", "n2", width, dim),
        # Its backward makes both gradients, and once more a tensor of the same size.
        Op("m", size, ("g", "u"), ("g", "u")),
        s.linear("f", "m", dim, width, holds=("n2",)),
    ]


def head_ops(s: Shape, chunks: int) -> tuple[list[Op], dict[str, int]]:
    """Return the operators of last norm, head and loss, and the size of their input "x"."""
    vocab, dim, size = s.args.n_vocab, s.args.dim, s.size
    hidden = s.tokens * dim * size
    ops = [s.norm("n", "x", s.tokens, dim)]
    if chunks > 1:
        rows = -(-s.tokens // chunks)
        table = vocab * dim
        # A chunk's logits, their float32 copy, probabilities and two gradients; or its gradient and its product.
        logits = rows * vocab * (size + 12)
        product = rows * vocab * size + table * size
        sums = 4 * table + (0 if size == 4 else table * size)
        ops.append(
            Op(
                "loss",
                4,
                ("n",),
                (),
                hidden + table * size,
                max(4 * table + max(logits, product), sums) - table * size,
                0,
                table * size,
                holds=("x", "n"),
            )
        )
        return ops, {"x": hidden}
    logits = s.tokens * vocab
    ops.append(s.linear("logits", "n", vocab, dim))
    last = "logits"
    if size == 2:
        ops.append(Op("float", 4 * logits, ("logits",)))
        last = "float"
    ops += [Op("p", 4 * logits, (last,), ("p",)), Op("loss", 4, ("p",), holds=("logits", last, "x", "n"))]
    return ops, {"x": hidden}
