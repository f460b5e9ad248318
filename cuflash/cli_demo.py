"""``python -m cuflash demo``: predict each byte of a text from all bytes before it, by one
attention call and no training.

Example j says "after this context came byte x[j]" and question i asks for the byte after its own
context, so a causal call that sees only earlier positions (``causal_offset=-1``) answers all
questions at once: out[i] is a distribution over the bytes, estimated from everything before i.

The context enters as a code of +-1 entries: 32 each for the last one, two, three and five bytes.
The codes of equal contexts have the dot product 32; those of different contexts nearly cancel. So
each context length that agrees adds about 4 to the score (``scale`` is 4 / 32), and a longer
agreement outweighs many shorter ones, as in the variable-order models of data compression.
"""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import numpy as np

import cuflash
from cuflash import reference

from .cli_common import Device, Failure, UsageError, human
from .source import folder

_CONTEXTS = (1, 2, 3, 5)  # bytes of context, each with a code of its own
_CODE = 32  # entries a code
_SCALE = 4 / _CODE
_DEFAULT_LENGTH = {"cpu": 1 << 15, "cuda": 1 << 18}
_SHOWN = 72  # characters of text printed with their predictions


def own_source():
    """The package's own Python and CUDA sources in a row."""
    python = sorted(Path(__file__).parent.rglob("*.py"))
    cuda = sorted(file for file in folder().rglob("*") if file.suffix in (".cu", ".cuh"))
    return b"\n".join(file.read_bytes() for file in python + cuda)


def read_text(path, length):
    """The bytes of ``path`` (None: own_source) as uint8, at most ``length`` of them."""
    if path is None:
        data = own_source()[:length]
    else:
        try:
            with open(path, "rb") as file:
                data = file.read(length)
        except OSError as error:
            raise UsageError(f"FILE: {path} cannot be read: {error.strerror}") from None
    if len(data) < 2:
        raise UsageError(f"FILE: {path} has {len(data)} bytes; predicting takes at least 2")
    return np.frombuffer(data, np.uint8)


def context_codes(text):
    """(n, 128) array of +-1, int8: row i codes the bytes before position i, not byte i itself.

    A context's code is 32 bits of a hash, which takes in one more byte a round and mixes by the
    finaliser of SplitMix64 (Steele, Lea and Flood 2014).
    """
    state = np.zeros(len(text), np.uint64)
    codes = []
    for distance in range(1, max(_CONTEXTS) + 1):
        earlier = np.zeros(len(text), np.uint64)  # 0 stands for "before the text"
        earlier[distance:] = text[:-distance].astype(np.uint64) + np.uint64(1)
        state = _mix(state + earlier * np.uint64(0x9E3779B97F4A7C15) + np.uint64(distance))
        if distance in _CONTEXTS:
            octets = state.astype("<u8").view(np.uint8).reshape(-1, 8)[:, : _CODE // 8]
            codes.append(np.unpackbits(octets, axis=1).astype(np.int8) * np.int8(2) - np.int8(1))
    return np.concatenate(codes, axis=1)


def _mix(x):
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def smooth(codes, values, device):
    """The attention call. Returns (out as NumPy, seconds, peak bytes beyond inputs and output)."""
    codes, values = device.put(codes), device.put(values)
    out = (np if device.kind == "cpu" else device.cupy).empty_like(values)

    def call():
        cuflash.attention(
            codes, codes, values, scale=_SCALE, causal=True, causal_offset=-1, out=out
        )
        device.synchronize()

    if device.kind == "cuda":
        call()  # builds or loads the kernels
        pool = device.cupy.get_default_memory_pool()
        pool.free_all_blocks()
        held, start = pool.total_bytes(), time.perf_counter()
        call()
        return device.get(out), time.perf_counter() - start, pool.total_bytes() - held
    tracemalloc.start()
    try:
        held, start = tracemalloc.get_traced_memory()[0], time.perf_counter()
        call()
        return out, time.perf_counter() - start, tracemalloc.get_traced_memory()[1] - held
    finally:
        tracemalloc.stop()


def slice_error(codes, values, out):
    """The last rows again by the dense float64 reference. Returns (rows, largest difference)."""
    n = len(codes)
    rows = max(1, min(64, n, (1 << 24) // n))
    exact, _ = reference.attention(
        codes[n - rows :], codes, values, scale=_SCALE, causal=True, causal_offset=n - rows - 1
    )
    return rows, float(np.max(np.abs(out[n - rows :].astype(np.float64) - exact)))


def run(args):
    """The command."""
    device = Device.pick(args.device)
    text = read_text(args.file, args.length or _DEFAULT_LENGTH[device.kind])
    alphabet, symbol = np.unique(text, return_inverse=True)
    # The codes are exact in a GPU's 16 bits, and the scores are summed in float32.
    dtype = np.dtype("float32" if device.kind == "cpu" else "float16")
    codes = context_codes(text).astype(dtype)
    # A column for each byte that occurs, and unused ones up to a multiple of 8: 16-byte reads.
    values = np.zeros((len(text), -(-len(alphabet) // 8) * 8), dtype)
    values[np.arange(len(text)), symbol] = 1
    n, name = len(text), args.file or "cuflash's own source"
    print(
        f"Predicting each of the {n:,} bytes of {name} from all bytes before it,\n"
        f"by one causal attention call in {dtype} (L = S = {n}, D = {codes.shape[1]}, "
        f"Dv = {values.shape[1]})\non {device}"
    )
    out, seconds, extra = smooth(codes, values, device)

    guess = out.argmax(axis=1)
    right = float(np.mean(guess[1:] == symbol[1:]))  # byte 0 has nothing before it
    constant = float(np.bincount(symbol[1:]).max() / (n - 1))
    flop = 2 * (n * (n - 1) // 2) * (codes.shape[1] + values.shape[1])
    inputs = codes.nbytes + values.nbytes + out.nbytes
    print(f"  accuracy            {right:.1%} right; always the most frequent byte: {constant:.1%}")
    print(f"  time                {seconds:.3g} s, {flop / seconds / 1e9:,.0f} GFLOP/s")
    print(f"  peak extra memory   {human(extra)} beside {human(inputs)} of inputs and output")
    print(f"  the L x S matrix    {human(n * n * dtype.itemsize)}, had it been built")
    _show(text, alphabet[guess])
    rows, error = slice_error(codes, values, out)
    limit = 1e-4 if dtype == np.float32 else 4e-3
    print(
        f"  check               last {rows} rows against the dense float64 reference: "
        f"largest difference {error:.2g} (limit {limit:g})"
    )
    if not error <= limit:
        raise Failure("demo FAILED: the result differs from the reference")


def _show(text, guess):
    """One stretch of the text above its predictions."""
    first = len(text) * 3 // 4
    shown = slice(first, first + _SHOWN)

    def printable(codes):
        return "".join(chr(c) if 32 <= c < 127 else "~" for c in codes)

    above, below = printable(text[shown]), printable(guess[shown])
    wrong = "".join("." if t == g else g for t, g in zip(above, below))
    print(f"  text      |{above}|\n  guesses   |{wrong}|")
    print("             . is a right guess, ~ a byte that does not print")
