"""Lengths and segments of large calls: which keys and blocks kernels visit, in place of a mask that is
looked at pair by pair.
"""

from __future__ import annotations

import math

from .score import symbol

# From so many pairs of all heads on: estimates of where skipped blocks pay for the kernels in front;
# and of so many keys, sixteen blocks.
LENGTH_PAIRS, SEGMENT_PAIRS, SEGMENT_KEYS = 1 << 22, 1 << 24, 2048
# Beyond, score functions and lists of blocks need more registers than there are: forward, backward.
SEGMENT_DIMS = 192, 128


def pairs(problem) -> int:
    """Of queries and keys, in all heads."""
    return math.prod(problem.batch) * problem.num_heads * problem.seqlen_q * problem.seqlen_k


def conditions(problem) -> list:
    """The terms that all must hold where a key is visible; none where anything but such terms and a
    band acts on scores.
    """
    program = problem.program
    if program is None or program.visible is None or program.value is not symbol("s"):
        return []
    if problem.sinks or problem.dropout or problem.packed or problem.block_map is not None:
        return []
    waiting, found = [program.visible], []
    while waiting:
        node = waiting.pop()
        if node.op == "and":
            waiting += node.operands
        else:
            found.append(node)
    return found


def lengths(problem) -> tuple:
    """The program's arguments that alone bound a batch entry's queries and keys, None for the side
    that has none; nothing where other terms decide.
    """
    ends = {}
    for node in conditions(problem):
        if node.op != "less" or node.operands[1].op != "element":
            return ()
        place, end = node.operands
        if any(problem.program.args[end.value].along):
            return ()
        ends[place] = end.value
    return tuple(ends.get(symbol(x)) for x in "ij") if ends else ()


def segments(problem, backward: bool) -> bool:
    """Whether equal ids of queries and keys, the program's two arguments, alone let pairs through, and
    kernels have what walking along lists of blocks takes.
    """
    terms = conditions(problem)
    if len(terms) != 1 or terms[0].op != "equal":
        return False
    sides = [(x.op, x.value) for x in terms[0].operands] == [("element", 0), ("element", 1)]
    along = [arg.along for arg in problem.program.args]
    fits = max(problem.head_dim, problem.head_dim_v) <= SEGMENT_DIMS[backward]
    large = pairs(problem) >= SEGMENT_PAIRS and problem.seqlen_k >= SEGMENT_KEYS
    even = problem.seqlen_k % 2 == 0  # ids of two keys are one read
    return sides and along == [(True, False), (False, True)] and fits and large and even
