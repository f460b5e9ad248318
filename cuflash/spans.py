"""Lengths of batch entries in large calls: ends of the queries and keys that kernels visit, in place of
a mask that is looked at pair by pair.
"""

from __future__ import annotations

import math

from .score import symbol

# From so many pairs of all heads on: estimates of where skipped blocks pay for the kernel in front.
LENGTH_PAIRS = 1 << 22


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
