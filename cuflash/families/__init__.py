"""The kernel families and the choice between them: the first family that does not reject a problem runs it."""

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


# Shared memory of a block and of an SM by compute capability (CUDA C++ Programming Guide, technical specifications):
# what plans are made from when kernels are built ahead of time, without the device.
_SMEM_KIB = {75: (64, 64), 80: (163, 164), 86: (99, 100), 87: (163, 164), 88: (99, 100), 89: (99, 100),
             90: (227, 228), 100: (227, 228), 103: (227, 228), 107: (227, 228), 110: (227, 228), 120: (99, 100), 121: (99, 100)}


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
    """How the arrays of a call can be reached; structure, since a kernel's copy loops are compiled for it."""

    load_bytes: int  # widest piece (16, 8 or 4) that every row start and length of the inputs allows; 0: any strides
    store_bytes: int  # 16, or 0 for any strides


def families():
    """The family modules, fastest first."""
    from . import portable

    return (portable,)


def choose(problem, device: Device):
    """The first family that can run ``problem``, and why the ones before it cannot.

    Returns
    -------
    (module, list of (name, reason))

    Raises
    ------
    NotImplementedError
        No family can; the message has every reason.
    """
    rejections = []
    for family in families():
        reason = family.reject(problem, device)
        if reason is None:
            return family, rejections
        rejections.append((family.NAME, reason))
    raise NotImplementedError("no kernel runs this problem: " + "; ".join(f"{n}: {r}" for n, r in rejections))
