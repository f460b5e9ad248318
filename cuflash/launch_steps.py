"""From arrays to launches: how an array can be read, its strides, and a kernel with everything but
its pointers.

Arrays come as (*batch, H, L, D) views of any strides. What does not change between two calls on
arrays of the same shapes and strides, all of the choice and nearly all of the parameters, is
prepared once and kept (`prepared`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import cupy
import numpy as np

from . import jit, tensormap
from .families import Access, Device
from .params import BATCH_DIMS, layout
from .plan import Plan, round_up

MAX_BLOCKS = 2**31 - 1  # of a grid
LOG2E = 1.4426950408889634
NO_STRIDES = [0] * (BATCH_DIMS + 3)

# Below this many scores a kernel that reads elements one by one costs less than packing its inputs
# first.
PACK_SCORES = 1 << 20


@lru_cache(maxsize=None)
def device_facts(device_id: int) -> Device:
    """The facts of a device that plans depend on."""
    attributes = cupy.cuda.Device(device_id).attributes
    capability = int(cupy.cuda.Device(device_id).compute_capability)
    name = cupy.cuda.runtime.getDeviceProperties(device_id)["name"].decode()
    return Device(
        capability,
        attributes["MaxSharedMemoryPerBlockOptin"],
        attributes["MaxSharedMemoryPerMultiprocessor"],
        attributes["MultiProcessorCount"],
        attributes["L2CacheSize"],
        name,
    )


def stream_id(stream) -> int:
    """The number of a CuPy stream, which no other stream of the process ever has: a handle may come
    again while the work of its first stream still runs.
    """
    from cuda.bindings import driver

    error, number = driver.cuStreamGetId(stream.ptr)
    if int(error) != 0:
        raise RuntimeError(f"cuStreamGetId: {error.name}")
    return int(number)


# What CUDA graphs write or read when they are launched again, so that nobody else may have its
# memory; nothing tells when a graph is gone.
_held_by_graphs: list = []


def kept(array):
    """The array, held for the graph that is being captured, if one is."""
    if cupy.cuda.get_current_stream().is_capturing():
        _held_by_graphs.append(array)
    return array


# ---- views -----------------------------------------------------------------------------------


def check_aligned(**arrays) -> None:
    """ValueError for an array, by name, whose elements do not lie on multiples of their size: a GPU
    cannot read them. Views of one dtype always do; views of raw bytes need not.
    """
    for name, array in arrays.items():
        if array is None:
            continue
        strides = [stride for size, stride in zip(array.shape, array.strides) if size > 1]
        if any(place % array.itemsize for place in (array.data.ptr, *strides)):
            raise ValueError(
                f"{name}: its address {array.data.ptr:#x} and strides {array.strides} must be "
                f"multiples of its item size, {array.itemsize} bytes"
            )


def width(array) -> int:
    """Widest piece (16, 8 or 4 bytes) at which every row of the array can be read; 0 when none
    fits.
    """
    item = array.itemsize
    if array.shape[-1] > 1 and array.strides[-1] != item:
        return 0
    bits = array.data.ptr
    for size, stride in zip(array.shape[:-1], array.strides[:-1]):
        if size > 1:
            bits |= stride
    for bytes_ in (16, 8, 4):
        if bits % bytes_ == 0 and bytes_ >= item:
            return bytes_
    return 0


def packed(array):
    """A copy whose rows start on 16 bytes; broadcast axes stay broadcast."""
    head = tuple(
        slice(0, 1) if stride == 0 and size > 1 else slice(None)
        for size, stride in zip(array.shape[:-1], array.strides[:-1])
    )
    small = array[head]
    per_piece = 16 // array.itemsize
    room = cupy.empty((*small.shape[:-1], round_up(array.shape[-1], per_piece)), array.dtype)
    room[..., : array.shape[-1]] = small
    return cupy.broadcast_to(room[..., : array.shape[-1]], array.shape)


def pack_narrow(problem, *arrays):
    """The arrays, those that kernels could only read in narrow pieces packed where that pays."""
    rows = math.prod(problem.batch) * problem.num_heads * problem.seqlen_q
    if rows * problem.seqlen_k < PACK_SCORES:
        return arrays
    return tuple(a if width(a) == 16 else packed(a) for a in arrays)


def access_of(store: bool, **inputs) -> Access:
    """How kernels reach the inputs, which go by their names, and whether they store in whole
    pieces.
    """
    load_bytes = min(map(width, inputs.values()))
    return Access(load_bytes, 16 if store else 0, tensormap.why_not(**inputs))


def whole_rows(array, dim: int) -> bool:
    """Whether rows of ``dim`` elements start and end on 16 bytes."""
    return width(array) == 16 and dim % (16 // array.itemsize) == 0


def strides_of(array, batch_axes: int) -> list[int]:
    """Element strides as the struct Strides: batch axes, head, row, col; missing batch axes first,
    as 0. None has zeros.
    """
    if array is None:
        return NO_STRIDES
    item = array.itemsize
    strides = [0 if n == 1 else stride // item for n, stride in zip(array.shape, array.strides)]
    strides = [0] * (BATCH_DIMS - batch_axes) + strides
    return strides + [0] * (BATCH_DIMS + 3 - len(strides))  # an lse has no col


def all_strides(problem, *arrays) -> list[int]:
    """The strides of several arrays, one after the other."""
    return [x for array in arrays for x in strides_of(array, len(problem.batch))]


def outer(problem, arrays, operands=None):
    """Calls with more leading axes than a kernel takes run once for each index of the first
    ones: (problem, arrays, operands) of each.
    """
    extra = len(problem.batch) - BATCH_DIMS
    inner = replace(problem, batch=problem.batch[extra:])
    for index in np.ndindex(*problem.batch[:extra]):
        some = [None if a is None else a[index] for a in arrays]
        yield inner, some, None if operands is None else operands.at(problem, index)


def plans_of_outer(plans_of, problem, arrays, operands, *rest) -> list[Plan]:
    """The different plans that ``plans_of`` finds for the calls of `outer`."""
    found: dict[Plan, None] = {}
    for inner, some, its in outer(problem, arrays, operands):
        found.update(dict.fromkeys(plans_of(inner, some, its, *rest)))
    return list(found)


def starts_of(arrays) -> list[int]:
    """Where arrays begin; 0 for None."""
    return [0 if a is None else a.data.ptr for a in arrays]


# ---- parameters ------------------------------------------------------------------------------


def shape_values(problem, blocks: int) -> list[int]:
    sizes = [1] * (BATCH_DIMS - len(problem.batch)) + list(problem.batch)
    return [
        *sizes,
        problem.num_heads,
        problem.group,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.head_dim,
        problem.head_dim_v,
        blocks,
    ]


def band_values(problem) -> list[int]:
    return [0, 0] if problem.band is None else [problem.band.lo, problem.band.hi]


def section_values(problem, device, heads: int, head_bytes: int, turns: bool = False) -> list[int]:
    """How many heads start their blocks together, and how many of all heads make whole sections
    (attn/work.cuh).

    One head at a time, unless its blocks differ in length (a band, packed sequences) or wait for
    each other (``turns``): then as many as L2 holds of ``head_bytes`` each, in sections as equal as
    they get, since a small last one would leave the device to a few long blocks.
    """
    if not problem.bounded and not turns:
        return [1, heads]
    fitting = max(1, device.l2_bytes * 3 // 4 // max(1, head_bytes))
    sections = max(1, -(-heads // fitting))
    section = max(1, -(-heads // sections))
    return [section, heads // section * section]


def scale_log2(problem, options=None) -> float:
    """What the softmax multiplies scores by. Where options see them, scaled, log2(e); else
    |scale| * log2(e), finite in the scores' type; never 0, since 0 times a hidden score's -inf
    is NaN. The sign is in the plan.
    """
    if options:
        return LOG2E
    if problem.scale == 0:
        return 1.0
    limits = np.finfo(problem.lse_dtype)
    return min(max(abs(problem.scale) * LOG2E, float(limits.tiny)), float(limits.max))


@dataclass(frozen=True)
class Step:
    """One kernel with everything but its pointers.

    Parameters
    ----------
    plan, rest, blocks : Plan, bytes, int
        The kernel, its parameters after the pointers, thread blocks.
    encoders : tuple of Encoder
        Of its tensor maps.
    """

    plan: Plan
    rest: bytes
    blocks: int
    encoders: tuple[tensormap.Encoder, ...] = ()
    # Structs that no launch is writing, so that threads do not meet in one; and the loaded kernel
    # by device. Both only save time.
    _rooms: list = field(default_factory=list, compare=False, repr=False)
    _kernels: dict = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self):
        if self.blocks > MAX_BLOCKS:
            raise NotImplementedError(
                f"{self.plan.kernel} would need {self.blocks} thread blocks; a launch has at most "
                f"{MAX_BLOCKS}"
            )

    @classmethod
    def of(cls, plan: Plan, blocks: int, *values, encoders=()) -> Step:
        """``values``: of all fields after the pointers, in the order of the plan's table."""
        packed = layout(plan.params, plan.operands).rest(*values)
        return cls(plan, packed, blocks, encoders)

    def launch(self, device_id: int, *pointers: int, mapped: Sequence[int] = []) -> None:
        """Enqueue it on the current stream of the current device, which is ``device_id``.

        ``mapped``: where the arrays begin that tensor maps describe.
        """
        kernel = self._kernels.get(device_id)
        if kernel is None:
            kernel = self._kernels[device_id] = jit.kernel(self.plan, device_id)
        try:
            room = self._rooms.pop()
        except IndexError:
            room = layout(self.plan.params, self.plan.operands).room(self.rest)
        room.point(*pointers)
        if room.mapped != mapped:
            for number, start in enumerate(mapped):
                if room.mapped[number] != start:
                    room.write_map(number, start, self.encoders[number].map(start))
        kernel(device_id, self.blocks, room.address)
        self._rooms.append(room)


# ---- what two calls share --------------------------------------------------------------------

_prepared: dict = {}
_PREPARED_LIMIT = 4096


def key_of(arrays, starts) -> tuple:
    """What two calls must share to share their preparation: strides, and how well the arrays'
    starts are aligned.
    """
    strides = [None if a is None else a.strides for a in arrays]
    return (*strides, *[start & 15 for start in starts])


def prepared(key, make):
    """What ``make()`` returned when ``key`` was new. Threads that meet at a new key may each make
    it; one of the equal results stays.
    """
    found = _prepared.get(key)
    if found is None:
        found = make()
        if len(_prepared) >= _PREPARED_LIMIT:
            _prepared.clear()
        _prepared[key] = found
    return found
