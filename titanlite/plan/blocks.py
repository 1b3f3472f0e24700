"""Lifetimes of the tensors inside of a block: bytes kept for the backward, and the peaks of forward
and backward.

A module is a list of `Op`, one for each operator whose tensors matter. `measure` replays forward
and backward on sizes alone, by the rules of autograd: a saved tensor dies with the last node that
saved it, a gradient when its node is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from titanlite.models.llama import LlamaArgs
from titanlite.models.mixtral import MixtralArgs


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
    #: Temporary tensors at the peak of its forward beside inputs and output, and of its backward
    #: beside saved tensors, the output's gradient and those of inputs.
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
    #: The kept tensors are in float8.
    float8: bool = False


class Peak(NamedTuple):
    """Bytes at the moment of a module's peak, beside what it keeps before (backward) or after
    (forward).
    """

    working: int = 0
    #: Gradients of the module's weights made so far.
    weights: int = 0

    @property
    def total(self) -> int:
        return self.working + self.weights


class ModuleMemory(NamedTuple):
    """The needs of a module in one micro-batch, in bytes."""

    #: Between forward and backward, its input included, its output not; and that part of it that is
    #: in float8.
    kept: int
    float8: int
    #: Peaks above `kept`.
    forward: Peak
    backward: Peak
    #: Gradients of its weights, all of them.
    weights: int
    #: Its output.
    out: int
    #: Where gradients of inputs and of weights are made apart: the peak of the first half above
    #: `kept`, and what there is more after it: gradients of products and norms for the second half,
    #: less what only operators after them kept.
    split: Peak = Peak()
    pending: int = 0


def measure(ops: Sequence[Op], sizes: dict[str, int], mode: str = "none") -> ModuleMemory:
    """Replay a module.

    sizes: its inputs → bytes. mode: "none", "full" or "op", how it checkpoints activations.
    """
    sizes = sizes | {op.name: op.size for op in ops}
    sizes |= {f"{op.name}'": op.keeps for op in ops}
    inputs = [name for op in ops for name in op.reads if name not in {op.name for op in ops}]
    saved = {name for op in ops for name in _saved(op)}
    cached = _by_policy(ops) if mode == "op" else set()
    held = saved if mode == "none" else {*inputs[:1], *cached}
    kept = _sum(held - {ops[-1].name} if mode == "none" else held, sizes)
    alive, top = _forward(ops, sizes, held, set(inputs), set())
    forward = Peak(max(top - kept, 0))
    weighted = max((i for i, op in enumerate(ops) if op.weight), default=0) + 1
    unused = {name for op in ops[weighted:] for name in _saved(op)} - {
        n for op in ops[:weighted] for n in _saved(op)
    }
    first_half, pending = (
        _backward(ops, sizes, saved, kept, split=True),
        sum(op.size for op in ops if op.weight),
    )
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
        first_half,
        pending - _sum(unused, sizes),
    )


class Repeated(NamedTuple):
    """Operators of a block by what becomes of them under recomputation."""

    products: int
    #: Matrix products and attention whose outputs are saved, and those that run again.
    saved_products: int
    saves_attention: bool
    repeated_products: int
    repeats_attention: bool


def repeated(ops: Sequence[Op], mode: str) -> Repeated:
    """Count a module's products and attention. mode: as in `measure`."""
    cached = _by_policy(ops) if mode == "op" else set()
    again = _again(ops, cached) if mode != "none" else []
    products = [op for op in ops if op.kind == "matmul"]
    attention = [op for op in ops if op.kind == "attention"]
    return Repeated(
        products=len(products),
        saved_products=sum(op.name in cached for op in products),
        saves_attention=any(op.name in cached for op in attention),
        repeated_products=sum(op in again for op in products),
        repeats_attention=any(op in again for op in attention),
    )


def _again(ops: Sequence[Op], cached: set[str]) -> list[Op]:
    """Return the operators that a recomputation runs: up to the last one that saves a tensor."""
    last = max(i for i, op in enumerate(ops) if op.saves or op.keeps)
    saves_own = ops[last].name in ops[last].saves or ops[last].keeps
    needed = ops[: last + 1] if saves_own else ops[:last]
    return [op for op in needed if op.name not in cached]


def _saved(op: Op) -> tuple[str, ...]:
    return (*op.saves, f"{op.name}'") if op.keeps else op.saves


def _sum(names: Iterable[str], sizes: dict[str, int]) -> int:
    return sum(sizes[name] for name in names)


def _by_policy(ops: Sequence[Op]) -> set[str]:
    """Return the outputs that `OpPolicy` keeps: attention, and every second matrix product, the
    first included.
    """
    products = [op.name for op in ops if op.kind == "matmul"]
    chosen = {*products[::2], *(op.name for op in ops if op.kind in ("attention", "other"))}
    return chosen | {f"{op.name}'" for op in ops if op.kind == "attention" and op.keeps}


def _forward(
    ops: Sequence[Op],
    sizes: dict[str, int],
    stay: set[str],
    alive: set[str],
    cached: set[str],
    stops: bool = False,
) -> tuple[set[str], int]:
    """Run forward; return what is alive after it, and the peak.

    cached: outputs that exist already, in `alive`.
    """
    alive, top = set(alive), 0
    last_use = {name: i for i, op in enumerate(ops) for name in (*op.reads, *op.saves, *op.holds)}
    for i, op in enumerate(ops):
        if stops and i == len(ops) - 1 and op.name not in op.saves and not op.keeps:
            break  # its inputs are all that was missing
        new = {op.name, f"{op.name}'"} - alive
        work = 0 if op.name in cached else op.forward
        alive |= new
        top = max(top, _sum(alive, sizes) + work)
        alive -= {
            name
            for name in alive
            if last_use.get(name, -1) <= i and name not in stay and name != op.name
        }
    return alive, top


def _backward(
    ops: Sequence[Op], sizes: dict[str, int], alive: set[str], kept: int, split: bool = False
) -> Peak:
    """Run backward from a gradient of the output; return the peak above `kept`.

    split: make no gradients of weights, and keep all that they need.
    """
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
        made += op.weight * (not split)
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
        if not (split and op.weight):
            drop(given)
        for name, storage in mine.items():
            if name in of:  # added up, in place where nobody else holds the first
                first = of[name]
                if storages[first][1] > 1:
                    now = (
                        _sum(alive, sizes)
                        + sum(size for size, _ in storages.values())
                        + sizes[name]
                        - kept
                    )
                    peak = max(peak, Peak(now, made), key=lambda p: p.total)
                    drop(first)
                    of[name] = storage
                else:
                    drop(storage)
            else:
                of[name] = storage
        if not split:
            alive -= {name for name in _saved(op) if first_saver[name] == i}
    return peak


@dataclass(frozen=True)
class Shape:
    """The work of a rank in one micro-batch."""

    #: Tokens of the rank (sequences * tokens of each, without those of other context-parallel
    #: ranks).
    tokens: int
    args: LlamaArgs
    #: Bytes of a number in activations and gathered weights: 2 or 4.
    size: int
    #: Ranks of tensor, context and expert parallelism.
    tp: int = 1
    cp: int = 1
    ep: int = 1
    #: Linears of a block that compute in float8.
    float8: frozenset[str] = frozenset()

    @property
    def hidden(self) -> int:
        """Bytes of the hidden states between products; tensor-parallel ranks divide the sequence
        there.
        """
        return self.tokens // self.tp * self.args.dim * self.size

    @property
    def whole(self) -> int:
        """Bytes of the hidden states of all tokens."""
        return self.tokens * self.args.dim * self.size

    def linear(
        self, name: str, x: str, rows: int, columns: int, holds: tuple[str, ...] = (), key: str = ""
    ) -> Op:
        """A product of all tokens with a weight [rows, columns], this rank's part of it.

        key: its name in the block.
        """
        size, n, m = self.size, self.tokens * columns, self.tokens * rows
        forward = backward = 0
        if key in self.float8:
            # A cast makes two tensors in float32 and the result; it keeps the input, and casts it
            # once more in the backward, beside two layouts of the gradient.
            forward, backward = (
                max(9 * n - m * size, n + rows * columns),
                max(2 * m + 9 * n, 9 * m - n * size),
            )
            if self.tp > 1:
                # Its input is cast once: by the linear where it is this rank's part, else before it
                # is gathered.
                own, backward = (
                    n * (key.rpartition(".")[2] in ("wo", "w2")),
                    max(2 * m + n, 9 * m - n * size),
                )
                return Op(
                    name,
                    m * size,
                    (x,),
                    (),
                    own,
                    forward,
                    backward,
                    rows * columns * size,
                    "matmul",
                    holds=holds,
                )
        return Op(
            name,
            m * size,
            (x,),
            (x,),
            0,
            forward,
            backward,
            rows * columns * size,
            "matmul",
            holds=holds,
        )

    def norm(self, name: str, x: str, rows: int, width: int) -> Op:
        """`autograd.RMSNorm`: keeps x and one number per row; computes in float32."""
        n, low = rows * width, self.size == 2
        forward, backward = (8 * n, 14 * n) if low else (4 * n, 8 * n)
        return Op(name, n * self.size, (x,), (x,), 4 * rows, forward, backward, width * self.size)

    def rotation(self, name: str, x: str, width: int) -> Op:
        """`rope.Rotation`: keeps nothing, since the tables need no gradient; computes in
        float32.
        """
        n, low = self.tokens * width, self.size == 2
        forward, backward = (12 * n, 10 * n) if low else (4 * n, 4 * n)
        return Op(name, n * self.size, (x,), (), 0, forward, backward)

    def gather(self, name: str, x: str, takers: frozenset[str] = frozenset()) -> list[Op]:
        """Bring the sequence together: received by rank, then put in order; the gradient goes the
        way of `scatter`.

        takers: linears; where all compute in float8, they keep what they share in float8.
        """
        kept = self.tokens * self.args.dim * bool(takers and takers <= self.float8)
        return [Op(name, self.whole, (x,), (), kept, self.whole, self.whole)]

    def scatter(self, name: str, x: str, holds: tuple[str, ...]) -> list[Op]:
        """Add up the ranks' products, each keeping its part of the sequence: put in order by rank,
        then reduced.
        """
        return [Op(name, self.hidden, (x,), (), 0, self.whole, self.whole, 0, "other", holds=holds)]


def block_ops(s: Shape) -> tuple[list[Op], dict[str, int]]:
    """Return the operators of a decoder block, and the size of its input "x"."""
    a, heads, groups = s.args, s.args.n_heads // s.tp, s.args.kv_heads // s.tp
    k, rows, n1, q, key = a.head_dim, s.tokens // s.tp, "n1", "q", "k"
    ops = [s.norm("n1", "x", rows, a.dim)]
    if s.tp > 1:
        ops += s.gather(n1 := "n1 whole", "n1", frozenset(f"attention.w{name}" for name in "qkv"))
    for name, width in (("q", heads * k), ("k", groups * k), ("v", groups * k)):
        ops.append(s.linear(name, n1, width, a.dim, (), f"attention.w{name}"))
    if a.qk_norm:
        ops += [
            s.norm(q := "qn", "q", s.tokens * heads, k),
            s.norm(key := "kn", "k", s.tokens * groups, k),
        ]
    ops += [s.rotation("qr", q, heads * k), s.rotation("kr", key, groups * k)]
    attention: tuple[str, ...] = ("qr", "kr", "v")
    queries, sums = s.tokens * heads * k * s.size, 4 * s.tokens * heads
    if s.cp > 1:
        # Keys and values side by side, received from all ranks, put in order; gradients likewise,
        # of two calls.
        own, all_ = 2 * s.tokens * groups * k * s.size, 2 * s.tokens * groups * k * s.size * s.cp
        ops.append(Op("keys", all_, ("kr", "v"), (), 0, own + all_, own + all_))
        ops.append(
            Op(
                "parts",
                queries,
                ("qr", "keys"),
                ("qr", "keys", "parts"),
                sums,
                0,
                all_,
                kind="attention",
            )
        )
        # The results of both calls are joined, and put in wo's order.
        ops += [
            Op("joined", queries, ("parts",)),
            Op("y", queries, ("joined",), holds=("joined", "parts", "keys")),
        ]
    else:
        ops.append(Op("y", queries, attention, (*attention, "y"), sums, kind="attention"))
    ops.append(s.linear("o", "y", a.dim, heads * k, ("n1", n1, *attention), "attention.wo"))
    if s.tp > 1:
        ops += s.scatter("o part", "o", ("n1",))
    ops += [Op("h", s.hidden, ("x", ops[-1].name), passes=True), s.norm("n2", "h", rows, a.dim)]
    ops += feed_forward_ops(s)
    ops.append(Op("out", s.hidden, ("h", ops[-1].name), passes=True, holds=("x",)))
    return ops, {"x": s.hidden}


def feed_forward_ops(s: Shape) -> list[Op]:
    """Return the operators of SwiGLU or of a mixture of such, from "n2" to the last one's
    output.
    """
    if isinstance(s.args, MixtralArgs):
        return mixture_ops(s, s.args)
    width, dim, x = s.args.ffn_width // s.tp, s.args.dim, "n2"
    takers = frozenset(("feed_forward.w1", "feed_forward.w3"))
    ops = s.gather(x := "n2 whole", "n2", takers) if s.tp > 1 else []
    ops += [
        s.linear("g", x, width, dim, (), "feed_forward.w1"),
        s.linear("u", x, width, dim, (), "feed_forward.w3"),
        # Its backward makes both gradients, and each has a second tensor of the same size beside
        # it.
        Op("m", s.tokens * width * s.size, ("g", "u"), ("g", "u")),
        s.linear("f", "m", dim, width, ("n2", x), "feed_forward.w2"),
    ]
    return [*ops, *s.scatter("f part", "f", ("n2",))] if s.tp > 1 else ops


def mixture_ops(s: Shape, a: MixtralArgs) -> list[Op]:
    """Return the operators of `moe.MoE`, with as many rows for each expert."""
    n, rows, size = s.tokens * a.dim, s.tokens * a.top_k, s.size
    inner, outer = rows * a.ffn_width * size, rows * a.dim * size
    weight = a.n_experts // s.ep * a.dim * a.ffn_width * size
    router = s.linear("gate", "n2", a.n_experts, a.dim)
    # The router keeps logits and probabilities in float32, and the places of rows in int64.
    router = replace(router, keeps=s.tokens * a.n_experts * 4 * 3 + rows * 8 * 2)
    ops = [router, Op("rows", outer, ("n2",), backward=outer)]
    x = "rows"
    if s.ep > 1:  # received, then put in the order of the experts
        ops += [
            Op("sent", outer, ("rows",), kind="other", backward=outer),
            Op(x := "sorted", outer, ("sent",)),
        ]
    ops += [
        Op("g", inner, (x,), (x,), weight=weight, kind="matmul"),
        Op("u", inner, (x,), (x,), weight=weight, kind="matmul"),
        Op("m", inner, ("g", "u"), ("g", "u")),
        Op("e", outer, ("m",), ("m",), weight=weight, kind="matmul", holds=(x,)),
    ]
    y = "e"
    if s.ep > 1:
        ops += [
            Op("back", outer, ("e",), backward=outer),
            Op(y := "returned", outer, ("back",), kind="other"),
        ]
    # Weighted sums in float32, one of the experts at a time; the backward takes a copy of the
    # gradient in float32.
    ops.append(
        Op("f", n * size, (y, "gate"), (y,), 0, 8 * n + n * size, 8 * n + n * size, holds=("n2", x))
    )
    return ops


def embedding(s: Shape) -> ModuleMemory:
    """Return the memory of the embedding, which keeps nothing but tokens."""
    table = s.args.n_vocab // s.tp * s.args.dim * s.size
    if s.tp == 1:
        return ModuleMemory(0, 0, Peak(s.hidden), Peak(s.hidden, table), table, s.hidden)
    # Tensor-parallel ranks look up their rows, put them in order and reduce them, and copy the
    # result. The backward gathers the gradient, makes that of the whole table, and copies this
    # rank's rows of it. Of a tied table the sum is a tensor beside both.
    ordered = 2 * s.whole + s.hidden
    backward = max(ordered, table * s.tp + max(s.whole, table))
    return ModuleMemory(0, 0, Peak(ordered), Peak(backward), table, s.hidden)


@dataclass(frozen=True)
class Loss:
    """How a run computes its loss."""

    #: Pieces of the tokens.
    chunks: int = 1
    #: How it takes the logits of tensor-parallel ranks: each has all of them, or its part of the
    #: vocabulary, whose loss works in place, or is a graph of torch's operators.
    divided: Literal["whole", "in place", "compiled"] = "in place"
    #: It has a z-loss or label smoothing.
    penalized: bool = False
    #: The logits live until the backward, as the result of a pipeline stage.
    holds_logits: bool = False


def head_ops(s: Shape, loss: Loss) -> tuple[list[Op], dict[str, int]]:
    """Return the operators of last norm, head and loss, and the size of their input "x"."""
    n = "n"
    ops = [s.norm("n", "x", s.tokens // s.tp, s.args.dim)]
    if s.tp > 1:
        ops += s.gather(n := "n whole", "n")
    else:
        loss = replace(loss, divided="whole")
    if loss.chunks > 1:
        ops.append(chunked_loss(s, loss, n))
        return ops, {"x": s.hidden}
    ops.append(s.linear("logits", n, s.args.n_vocab // s.tp, s.args.dim))
    if loss.divided == "in place":
        ops.append(loss_in_place(s, loss))
    else:
        ops += loss_of_torch(s, loss)
    return ops, {"x": s.hidden}


def loss_in_place(s: Shape, loss: Loss) -> Op:
    """Return `divided_cross_entropy`: a tensor in float32, which becomes the gradient of logits in
    float32.
    """
    values = 4 * s.tokens * s.args.n_vocab // s.tp
    saves = ("logits",) if loss.holds_logits else ()
    instead = -values if s.size == 4 else 0
    return Op("loss", 4, ("logits",), saves, values, 0, instead, holds=("logits",))


def loss_of_torch(s: Shape, loss: Loss) -> list[Op]:
    """Return the operators of `torch.nn.functional.cross_entropy` in float32."""
    whole = loss.divided == "whole"
    logits = s.tokens * (s.args.n_vocab if whole else s.args.n_vocab // s.tp)
    ops, given = list[Op](), "logits"
    if whole and s.tp > 1:  # received by rank, then put in order
        ops.append(Op(given := "whole", logits * s.size, ("logits",), forward=logits * s.size))
    last = given
    if s.size == 2:
        ops.append(Op(last := "float", 4 * logits, (given,)))
    # With divided logits `_ShardedLoss` keeps its input too, and one tensor is the gradient of
    # both.
    saves = ("p", "logits") if not whole or loss.holds_logits else ("p",)
    ops.append(Op("p", 4 * logits, (last,), saves, passes=not whole))
    if not (loss.penalized and whole):
        return [*ops, Op("loss", 4, ("p",), holds=("logits", last))]
    # A sum beside cross-entropy: of the exponentials of the logits less the largest.
    shifted = Op("shifted", 4 * logits, (last,), passes=True)
    ops += [Op("entropy", 4, ("p",)), shifted, Op("sum", 4, ("shifted",), keeps=4 * logits)]
    return [*ops, Op("loss", 4, ("entropy", "sum"), holds=(last, given) if s.tp > 1 else (last,))]


def chunked_loss(s: Shape, loss: Loss, x: str) -> Op:
    """Return head and loss of `titanlite.features.loss_chunks`. x: name of the hidden states."""
    rows, vocab = -(-s.tokens // loss.chunks), s.args.n_vocab // s.tp
    part, table, low = rows * vocab, vocab * s.args.dim, s.size == 2
    if loss.divided == "in place":
        # The tensor in float32, and the gradient; in float32 it takes the place of that tensor.
        logits = part * (s.size + (4 + s.size if low else 4))
    elif loss.divided == "compiled":
        # Probabilities, and one tensor that is the gradient of both; in the end that of the logits.
        logits = part * (s.size + 8 + (s.size if low else 0))
    else:
        # The copy in float32, or in float32 the logits of all ranks; probabilities, and the
        # gradients of both.
        # A penalty has its peak in the forward, where one more takes the gradients' place beside
        # the whole logits.
        penalty = 4 + (s.size if low and s.tp > 1 else 0)
        in_float = rows * s.args.n_vocab * (12 + penalty * loss.penalized)
        logits = in_float + (part * s.size if low or s.tp > 1 else 0)
    # A chunk's gradient, and its product with x, which float32 adds to the sum at once.
    product = part * s.size + (table * s.size if low else 0)
    # In the end the sum becomes the gradient: by a copy in the dtype of the weight.
    kept, sums, copied = s.whole + table * s.size, 4 * table, 4 * table if low else 0
    forward = max(sums + max(logits, product) - table * s.size, copied)
    return Op("loss", 4, (x,), (), kept, forward, 0, table * s.size, holds=("x", "n"))
