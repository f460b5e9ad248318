"""Masks as bits: where many heads share them, a kernel writes down once what they let through, a
bit for each pair, and attention reads that. Lengths and segments need less: ends of batch entries,
lists of blocks (`unmasked`).

Pair by pair a boolean mask costs a Hopper warp eight lines of L1 for 64 bytes that it uses; as bits
a row of 64 keys is one read.
"""

from __future__ import annotations

import math
from dataclasses import replace

from .plan import round_up
from .score import BITS, BITS_BY_KEY, Arg, Node, Program, element, ordered, symbol

TILE = 256  # queries and keys of a thread block of mask_bits.cu
# Kernels read whole blocks, of up to TILE keys, from the last one that lies in the sequence.
SPARE_WORDS = TILE // 32
# Estimates: how many heads, and pairs of all heads, pay for the kernel in front.
SHARED_BY, LEAST_PAIRS = 4, 1 << 24
# The same of lengths and segments, and from how many keys and up to how many rows (span_lists.cu)
# and head dimensions, forward and backward, for which there are registers.
LENGTH_PAIRS, SEGMENT_PAIRS = 1 << 22, 1 << 24
SEGMENT_KEYS, SEGMENT_ROWS, SEGMENT_DIMS = 2048, 1 << 17, (192, 128)


def row_words(length: int) -> int:
    """Words of 32 bits of all keys of a query, or all queries of a key."""
    return round_up(-(-length // 32), TILE // 32) + SPARE_WORDS


def own_axes(problem, args) -> tuple[int, ...]:
    """(*batch, Hq), with 1 where the masks are the same; args are what the program reads."""
    full = (*problem.batch, problem.num_heads)
    own = [1] * len(full)
    for node in ordered(problem.program.visible):
        if node.op == "element":
            view = args[node.value]
            own = [n if stride == 0 else size for n, size, stride in
                   zip(own, view.shape, view.strides)]  # fmt: skip
        elif node.op == "symbol" and node.value == "h":
            own[-1] = full[-1]
        elif node.op == "symbol" and node.value == "b":
            own[:-1] = full[:-1]
    return tuple(own)


def pairs(problem) -> int:
    return math.prod(problem.batch) * problem.num_heads * problem.seqlen_q * problem.seqlen_k


def unmasked(problem, backward: bool):
    """A large call in which lengths or ids alone hide keys, beside a band, with ends or a map in
    the masks' place, and the numbers of these arguments, of queries and of keys (None without).
    Other calls are False.
    """
    program, size = problem.program, pairs(problem)
    others = problem.sinks or problem.dropout or problem.packed or problem.block_map
    if others or program.value is not symbol("s"):
        return False
    terms = [program.visible]
    while terms[0].op == "and":
        terms[:1] = terms[0].operands
    parts = [(term.op, *(x.op for x in term.operands)) for term in terms]
    if set(parts) == {("less", "symbol", "element")} and size >= LENGTH_PAIRS:
        ends = {place.value: end.value for place, end in (term.operands for term in terms)}
        return replace(problem, program=None, lengths=True), (ends.get("i"), ends.get("j"))
    keys, widest = problem.seqlen_k, max(problem.head_dim, problem.head_dim_v)
    if (
        parts == [("equal", "element", "element")]
        and size >= SEGMENT_PAIRS
        and SEGMENT_KEYS <= keys
        and max(problem.seqlen_q, keys) <= SEGMENT_ROWS
        and keys % 2 == 0  # ids of two are one read
        and widest <= SEGMENT_DIMS[backward]
    ):
        program = replace(program, args=tuple(replace(x, dtype="int32") for x in program.args))
        return replace(problem, program=program, block_map=(128, 128)), (0, 1)
    return False


def pays(problem, args) -> bool:
    """Whether a call's masks are worth a kernel in front."""
    program = problem.program
    if program is None or program.visible is None or problem.packed:
        return False
    if not any(x.op in ("element", "fetch", "symbol") for x in ordered(program.visible)):
        return False  # a constant needs no bits
    heads = math.prod(problem.batch) * problem.num_heads
    return pairs(problem) >= LEAST_PAIRS and heads >= SHARED_BY * math.prod(own_axes(problem, args))


def rewritten(problem, by_key: bool):
    """The problem with bits, its last argument, in its masks' place, and which others it reads.

    ``by_key``: of all queries of a key.
    """
    program = problem.program
    roots = [program.value, program.derivative]
    roots += [x for _, entry, term in program.gradients for x in (entry, term)]
    read = {x.value for x in ordered(*roots) if x.op in ("element", "fetch")}
    read |= {n for n, _, _ in program.gradients}
    kept = tuple(sorted(read))
    numbers = {n: place for place, n in enumerate(kept)}
    bits = Arg("grid", BITS_BY_KEY if by_key else BITS, 0, "masks")
    changed = Program(
        _renumbered(program.value, numbers),
        element(len(kept), bits),
        (*(program.args[n] for n in kept), bits),
        _renumbered(program.derivative, numbers),
        tuple(
            (numbers[n], _renumbered(entry, numbers), _renumbered(term, numbers))
            for n, entry, term in program.gradients
        ),
    )
    return replace(problem, program=changed), kept


def _renumbered(root, numbers):
    """The expression with other numbers of arguments."""
    made = {}
    for x in ordered(root):
        value = numbers[x.value] if x.op in ("element", "fetch") else x.value
        made[x] = Node(x.op, tuple(made[y] for y in x.operands), value, x.kind)
    return made[root]
