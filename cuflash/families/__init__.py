"""The kernel families and the choice between them: the first that can run a problem runs it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """The facts of a GPU that plans depend on."""

    capability: int  # 10 * major + minor
    smem_per_block: int  # bytes a block may ask for
    smem_per_sm: int
    num_sms: int
    l2_bytes: int = 0  # only orders the work; unknown where kernels are built ahead
    name: str = ""


# Shared memory of a block and of an SM in KiB, by compute capability (CUDA C++ Programming Guide,
# technical specifications): what plans are made from when kernels are built ahead of time, without
# the device.
_SMALL, _MEDIUM, _LARGE = (99, 100), (163, 164), (227, 228)
_SMEM_KIB = {
    75: (64, 64),
    80: _MEDIUM,
    86: _SMALL,
    87: _MEDIUM,
    88: _SMALL,
    89: _SMALL,
    90: _LARGE,
    100: _LARGE,
    103: _LARGE,
    107: _LARGE,
    110: _LARGE,
    120: _SMALL,
    121: _SMALL,
}


def device_of(capability: int, num_sms: int = 132) -> Device:
    """The device that an architecture name stands for.

    Raises
    ------
    ValueError
        The architecture is below sm_75 or unknown.
    """
    if capability not in _SMEM_KIB:
        known = ", ".join(f"sm_{c}" for c in _SMEM_KIB)
        raise ValueError(f"arch: sm_{capability} is not one of {known}")
    block, sm = _SMEM_KIB[capability]
    return Device(capability, block * 1024, sm * 1024, num_sms, name=f"sm_{capability}")


@dataclass(frozen=True)
class Access:
    """How the arrays of a call can be reached: structure, since copy loops are compiled for it."""

    load_bytes: int  # widest piece (16, 8 or 4) at which every row of the inputs starts; 0: any
    store_bytes: int  # 16, or 0 for any strides
    unmapped: str | None = None  # why no tensor maps describe q, k and v; None: they do


def families():
    """The family modules, fastest first. Each has a NAME, its DIRECTIONS, a class Tile, reject and
    for each direction a function that makes the plan. Two modules may be one family, a direction
    each.
    """
    from . import portable, sm90, sm90_backward

    return (sm90, sm90_backward, portable)


def choose(problem, device: Device, access: Access, direction: str, tile=None):
    """The first family that can run ``problem`` forward or backward, and why the ones before it
    cannot. A tile asks for the family that it belongs to.

    Returns
    -------
    (module, list of (name, reason))

    Raises
    ------
    NotImplementedError
        No family can; the message has every reason.
    """
    serving = {family.NAME for family in families() if direction in family.DIRECTIONS}
    rejections = []
    for family in families():
        if tile is not None and not isinstance(tile, family.Tile):
            continue
        if direction not in family.DIRECTIONS:
            if family.NAME not in serving:
                rejections.append((family.NAME, f"it has no {direction} kernel"))
            continue
        reason = family.reject(problem, device, access)
        if reason is None:
            return family, rejections
        rejections.append((family.NAME, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in rejections)
    raise NotImplementedError(f"no kernel runs this problem: {reasons}")
