"""attention_varlen on a GPU: one launch of all rows, in which each query sees its own sequence.

Nothing that the device holds is read here: neither offsets nor lengths.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from . import edge
from .arrays import home_of
from .options import arrays_of

class Packed(NamedTuple):
    """A call's arrays in the caller's library, and its sequences."""

    arrays: tuple  # q, k, v
    packing: Any  # launch_packed.Packing
    shaping: tuple
    scores: dict

def pack(home, arrays, adopted, offsets, shaping, scores) -> Packed:
    """The sequences of a call.

    Parameters
    ----------
    home : Home
        Of a GPU, inside its scope.
    arrays : tuple of array
        q, k and v as the caller has them.
    adopted : tuple of array
        The same in CuPy, checked.
    offsets : tuple of array
        Of queries and keys, checked: NumPy's from the host, or CuPy's.
    shaping, scores : tuple, dict
        As of edge.split_options.
    """
    from . import launch_packed

    names = dict(zip(edge.SHAPING, shaping))
    left, right = (None if x == -1 else x for x in names["window"] or (None, None))
    if names["causal"]:
        right = 0 if right is None else min(right, 0)
    shift = names["causal_offset"]
    if names["causal"] == "top_left":
        shift = 0
    rows = len(adopted[0]), len(adopted[1])
    packing = launch_packed.pack(home.device, *offsets, rows, (left, right), shift, bool(scores))
    return Packed(arrays, packing, shaping, scores)

def forward(home, packed: Packed, out, return_lse: bool):
    """As edge.forward."""
    return edge.forward(
        home, *packed.arrays, out, return_lse, packed.shaping, packed.scores, 0, packed.packing
    )

def backward(packed: Packed, out, lse, dout, dlse, wanted, deterministic: bool):
    """As edge.backward."""
    operands = {"dout": dout, **dict(zip("qkv", packed.arrays)), "out": out, "lse": lse}
    if dlse is not None:
        operands["dlse"] = dlse
    home = home_of(list(operands.items()) + arrays_of(packed.scores))
    with home.scope():
        return edge.backward(
            home, operands, wanted, deterministic, packed.shaping, packed.scores, 0, packed.packing
        )
