"""``python -m cuflash run``: attention from .npy files to a .npy file, block by block.

Inputs and results are memory-mapped, so they may be larger than memory. A block is some heads of
one batch index, or a range of query rows of one head. Keys too many for a GPU's memory pass in
parts, merged at the end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass

import numpy as np

import cuflash

from .cli_common import Device, Failure, Progress, UsageError, human
from .problem import Call, call_of

_OPTIONS = ("layout", "scale", "causal", "causal_offset", "window", "precision")
# Multiply-adds a block: enough to keep the device busy, few enough that progress shows.
_BLOCK_WORK = {"cpu": 4 * 10**10, "cuda": 4 * 10**13}
_CPU_BLOCK_BYTES = 256 << 20
_MIN_ROWS = 128


def open_array(name, path):
    """The array in a .npy file, memory-mapped. NumPy stores bfloat16 as two-byte voids."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise UsageError(f"{name}: no such file: {path}") from None
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"{name}: {path} cannot be read as a .npy file: {error}") from None
    if not isinstance(array, np.ndarray):
        array.close()
        raise UsageError(f"{name}: {path} is an archive of several arrays; save one as .npy")
    array = np.asarray(array)  # the same mapped memory without the memmap subclass
    if array.dtype.kind == "V" and array.dtype.itemsize == 2 and array.dtype.names is None:
        array = array.view(_bfloat16())
    if not array.dtype.isnative:
        raise UsageError(
            f"{name}: {path} has dtype {array.dtype.str}; byte-swapped arrays are not taken, "
            "save it in the machine's own byte order"
        )
    return array


def _bfloat16():
    try:
        import ml_dtypes
    except ImportError:
        raise UsageError("a bfloat16 file needs the package ml_dtypes") from None
    return np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Job:
    """The files' arrays as (*batch, H, L, D) views of one batch, and their call."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    call: Call

    @classmethod
    def of(cls, q, k, v, options):
        """Check the whole call, as cuflash.attention would."""
        dtypes = (q.dtype.name, k.dtype.name, v.dtype.name)
        try:
            call = call_of(dtypes, q.shape, k.shape, v.shape, **options)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise UsageError(str(error)) from None
        views = [_as_heads(x, call.layout) for x in (q, k, v)]
        return cls(*(np.broadcast_to(x, call.problem.batch + x.shape[-3:]) for x in views), call)

    @property
    def row_bytes(self):
        """Bytes of one row of q with its output, or of one key with its value."""
        return (self.q.shape[-1] + self.v.shape[-1]) * self.q.dtype.itemsize

    def visible_keys(self, first, last):
        """The range of keys that the queries first .. last - 1 see."""
        band, keys = self.call.problem.band, self.call.problem.seqlen_k
        if band is None:
            return 0, keys
        begin, end = max(0, first + band.lo), min(keys, last + band.hi)
        return (begin, end) if begin < end else (0, 0)

    def options(self, first, begin):
        """Keywords for queries from ``first`` and keys from ``begin``: the band moves along."""
        problem = self.call.problem
        options = {"scale": problem.scale, "precision": problem.precision}
        if problem.band is not None:
            width = max(0, problem.band.hi - problem.band.lo)
            options.update(window=(width, 0), causal_offset=problem.band.hi + first - begin)
        return options


@dataclass(frozen=True)
class Block:
    """One step: a range of kv heads and of query rows at one batch index."""

    index: tuple
    heads: tuple[int, int]
    rows: tuple[int, int]


def _as_heads(x, layout):
    """A view (*batch, H, L, D); a 2-D array is one head."""
    if x.ndim == 2:
        return x[None]
    return np.swapaxes(x, -3, -2) if layout == "bshd" else x


def plan_blocks(job, device, chunk=None):
    """(list of Block, most keys a call may take). ``chunk``: at most so many query rows a block."""
    problem, row_bytes = job.call.problem, job.row_bytes
    rows, keys, group = problem.seqlen_q, problem.seqlen_k, problem.group
    free = device.free_bytes()
    budget = _CPU_BLOCK_BYTES if free is None else max(free // 4, 1 << 20)
    # A GPU has to hold a block's keys; the CPU reads them in the mapped file.
    key_limit = keys if device.kind == "cpu" else budget // 2 // row_bytes
    head_bytes = group * rows * row_bytes + (0 if device.kind == "cpu" else keys * row_bytes)
    head_work = group * rows * keys * (problem.head_dim + problem.head_dim_v)
    work = _BLOCK_WORK[device.kind]
    fitting_heads = min(budget // max(head_bytes, 1), work // max(head_work, 1))
    per_block, step = min(problem.num_kv_heads, fitting_heads), max(rows, 1)
    if per_block < 1:
        per_block = 1
        fitting_rows = min(budget // 2 // (group * row_bytes), work * rows // max(head_work, 1))
        step = min(step, max(_MIN_ROWS, fitting_rows))
    step = min(step, chunk) if chunk else step
    blocks = [
        Block(index, (h, min(h + per_block, problem.num_kv_heads)), (i, min(i + step, rows)))
        for index in np.ndindex(*problem.batch)
        for h in range(0, problem.num_kv_heads, per_block)
        for i in range(0, rows, step)
    ]
    return blocks, max(key_limit, _MIN_ROWS)


def run_block(job, block, device, key_limit, out, lse):
    """Compute one block, write it into ``out`` and ``lse`` (or None), both (*batch, H, L, ...)."""
    (h0, h1), (i0, i1) = block.heads, block.rows
    group = job.call.problem.group
    rows = (*block.index, slice(h0 * group, h1 * group), slice(i0, i1))
    q = device.put(job.q[rows])
    begin, end = job.visible_keys(i0, i1)
    parts = []
    for j0 in range(begin, max(end, begin + 1), key_limit):
        keys = (*block.index, slice(h0, h1), slice(j0, min(j0 + key_limit, end)))
        k, v = device.put(job.k[keys]), device.put(job.v[keys])
        parts.append(cuflash.attention(q, k, v, return_lse=True, **job.options(i0, j0)))
    part_out, part_lse = parts[0] if len(parts) == 1 else cuflash.merge(*map(list, zip(*parts)))
    out[rows] = device.get(part_out)
    if lse is not None:
        lse[rows] = device.get(part_lse)


def run(args):
    """The command."""
    paths = {"q": args.q, "k": args.k, "v": args.v}
    q, k, v = (open_array(name, path) for name, path in paths.items())
    job = Job.of(q, k, v, {name: getattr(args, name) for name in _OPTIONS})
    device = Device.pick(args.device)
    targets = {args.output: (job.call.out_shape, q.dtype)}
    if args.lse:
        targets[args.lse] = (job.call.lse_shape, np.dtype(job.call.problem.lse_dtype))
    _check_targets(args, targets)
    blocks, key_limit = plan_blocks(job, device, args.chunk)
    print(f"q {q.shape} k {k.shape} v {v.shape} {q.dtype} -> {args.output} {job.call.out_shape}")
    print(f"on {device}")
    try:
        _fill(job, blocks, key_limit, device, targets)
        for path in targets:
            os.replace(path + ".part", path)
    finally:
        for path in targets:
            # After a failure Windows keeps a file that is still mapped.
            with contextlib.suppress(OSError):
                os.remove(path + ".part")
    print("wrote " + ", ".join(f"{path} ({human(os.path.getsize(path))})" for path in targets))


def _fill(job, blocks, key_limit, device, targets):
    """Write every block into ``<target>.part``; on return these are closed, ready to be renamed."""
    out_file, *rest = [_create(path + ".part", *like) for path, like in targets.items()]
    out = _as_heads(out_file, job.call.layout)
    lse = _as_heads(rest[0][..., None], job.call.layout)[..., 0] if rest else None
    progress = Progress("run", len(blocks))
    for block in blocks:
        run_block(job, block, device, key_limit, out, lse)
        progress.advance()


def _create(path, shape, dtype):
    """An array in a new .npy file, mapped for writing."""
    try:
        if 0 in shape:  # an empty file cannot be mapped
            empty = np.empty(shape, dtype)
            with open(path, "wb") as file:
                np.save(file, empty)
            return empty
        return np.asarray(np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape))
    except OSError as error:
        raise Failure(f"{path} cannot be written: {error}") from None


def _check_targets(args, targets):
    inputs = {os.path.realpath(path) for path in (args.q, args.k, args.v)}
    if args.lse and os.path.realpath(args.lse) == os.path.realpath(args.output):
        raise UsageError(f"--output and --lse both name {args.output}; they must differ")
    needed = 0
    for path, (shape, dtype) in targets.items():
        if os.path.realpath(path) in inputs:
            raise UsageError(f"{path} is an input; the result needs a file of its own")
        if not os.path.isdir(os.path.dirname(path) or "."):
            raise UsageError(f"{path}: its folder does not exist")
        needed += int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    free = shutil.disk_usage(os.path.dirname(args.output) or ".").free
    if needed > free:
        beside = f"beside {args.output}"
        raise Failure(f"the result takes {human(needed)}, but only {human(free)} are free {beside}")
