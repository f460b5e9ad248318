"""``python -m cuflash check``: random calls against the float64 reference, both directions."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

import numpy as np
from threadpoolctl import threadpool_limits

import cuflash
from cuflash import config, jit, reference

from .cli_common import Device, Failure, Progress

# Few pairs: on a GPU each is kernels to build.
_HEAD_DIMS = ((64, 64), (128, 128), (64, 64), (128, 128), (3, 5), (40, 24), (96, 160), (256, 256))
_MEMORY = ("plain", "transposed", "every other", "reversed", "shared")
_CAUSAL = (False, False, True, "bottom_right", "top_left")
_SCORES = ("softcap", "bias", "alibi_slopes", "mask", "kv_lens")


@dataclass(frozen=True)
class Case:
    """One random call."""

    dtype: str
    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    scale: float | None
    causal: bool | str
    causal_offset: int | None
    window: tuple | None
    layout: str
    memory: str
    peak: float
    scores: tuple  # names of options that act on scores

    @classmethod
    def draw(cls, rng, dtypes):
        """A random case of one of ``dtypes``."""

        def pick(values):
            return values[rng.integers(len(values))]

        kv_heads, group = int(pick((1, 1, 2, 3))), int(pick((1, 1, 2, 4)))
        head_dim, head_dim_v = pick(_HEAD_DIMS)
        seqlen_q, seqlen_k = (
            int(pick((0, 1, 2, 17, 64, 65, 128, 160, int(rng.integers(1, 300))))) for _ in "qk"
        )
        causal = pick(_CAUSAL)
        window = pick((None, None, (0, 0), (7, None), (None, 3), (64, 64), (-1, 20)))
        offset = None
        if rng.random() < 0.2 and not isinstance(causal, str) and (causal or window):
            offset = int(rng.integers(-seqlen_q - 2, seqlen_k + 3))
        return cls(
            pick(dtypes),
            int(pick((1, 1, 2, 3))),
            kv_heads * group,
            kv_heads,
            seqlen_q,
            seqlen_k,
            head_dim,
            head_dim_v,
            pick((None, None, None, 0.3, -0.5, 0.0)),
            causal,
            offset,
            window,
            pick(("bhsd", "bshd")),
            pick(_MEMORY),
            float(pick((1.0, 1.0, 8.0))),
            # On a GPU every set of them is kernels of its own.
            pick(((),) * 9 + (_SCORES[:3], _SCORES[3:], _SCORES)),
        )

    @property
    def options(self):
        names = ("scale", "causal", "causal_offset", "window", "layout")
        return {name: getattr(self, name) for name in names}

    def scored(self, rng):
        """The options on scores: numbers and NumPy arrays."""
        pairs = (self.seqlen_q, self.seqlen_k)
        made = {
            "softcap": 5.0,
            "bias": rng.standard_normal((self.batch, 1, *pairs), np.float32),
            "alibi_slopes": rng.uniform(0, 0.2, self.heads).astype(np.float32),
            "mask": rng.random(pairs) < 0.8,
            "kv_lens": rng.integers(0, self.seqlen_k + 1, self.batch),
        }
        return {name: made[name] for name in self.scores}

    def arrays(self, rng):
        """(base, view) for q, k, v and dout: ``view(base)``, in the case's layout, is the argument,
        also on a GPU, where a copy would be contiguous.
        """
        shapes = (
            (self.heads, self.seqlen_q, self.head_dim),
            (self.kv_heads, self.seqlen_k, self.head_dim),
            (self.kv_heads, self.seqlen_k, self.head_dim_v),
            (self.heads, self.seqlen_q, self.head_dim_v),
        )
        pairs = []
        for factor, (heads, length, width) in zip((self.peak, 1.0, 1.0, 1.0), shapes):
            order = (heads, length) if self.layout == "bhsd" else (length, heads)
            pairs.append(self._lay_out(rng, (self.batch, *order, width), factor))
        return pairs

    def _lay_out(self, rng, shape, factor):
        def normal(shape):
            return (factor * rng.standard_normal(shape, np.float32)).astype(dtype_of(self.dtype))

        if self.memory == "transposed":
            return normal(shape[::-1]), lambda x: x.T
        if self.memory == "every other":
            return normal((*shape[:-1], 2 * shape[-1])), lambda x: x[..., ::2]
        if self.memory == "reversed":
            return normal(shape), lambda x: x[..., ::-1, ::-1]
        if self.memory == "shared":
            return normal((1, *shape[1:])), lambda x: np.broadcast_to(x, shape)
        return normal(shape), lambda x: x


def dtype_of(name):
    """The NumPy dtype of that name; ImportError when bfloat16 is asked for without ml_dtypes."""
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def plain(case, scores, q, k, v, dout):
    """The textbook way, with the score matrix, in the case's own precision; scores are
    `Case.scored`'s. P and dS are rounded to the inputs' dtype, as frameworks do.

    Returns [out, lse, dq, dk, dv] in (B, H, L, D) order and the largest |score|.
    """
    work = np.float64 if case.dtype == "float64" else np.float32
    narrow = dtype_of(case.dtype)

    def rounded(x):
        return x.astype(narrow).astype(work)

    group = case.heads // case.kv_heads
    q, k, v, dout = (np.asarray(x, work) for x in (q, k, v, dout))
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    scale = work(case.head_dim**-0.5 if case.scale is None else case.scale)
    s, slope = with_scores(case, scores, scale * (q @ k.mT))
    largest = float(np.max(np.abs(s), initial=0.0))
    s = np.where(visible(case, scores), s, work(-np.inf))
    top = s.max(axis=-1, initial=-np.inf, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    p = np.exp(s - top)
    total = p.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    p = p / np.where(total > 0, total, 1)
    out = rounded(p) @ v
    ds = p * (dout @ v.mT - (dout * rounded(out)).sum(axis=-1, keepdims=True))
    ds = rounded(ds * slope)

    def over_group(x):
        return x.reshape(case.batch, case.kv_heads, group, *x.shape[-2:]).sum(axis=2)

    dk, dv = over_group(scale * (ds.mT @ q)), over_group(rounded(p).mT @ dout)
    out, dq, dk, dv = map(rounded, (out, scale * (ds @ k), dk, dv))
    return [out, lse, dq, dk, dv], largest


def distances(case):
    """(L, S): how far each key lies behind the query's own."""
    offset = case.causal_offset
    if offset is None:
        offset = 0 if case.causal == "top_left" else case.seqlen_k - case.seqlen_q
    return np.arange(case.seqlen_k) - np.arange(case.seqlen_q)[:, None] - offset


def with_scores(case, scores, s):
    """The scores of all pairs, from scale * q @ k.T, and their derivative by it."""
    slope = s.dtype.type(1)
    if "softcap" in scores:
        cap = s.dtype.type(scores["softcap"])
        bent = np.tanh(s / cap)
        s, slope = cap * bent, 1 - bent * bent
    if "bias" in scores:
        s = s + scores["bias"].astype(s.dtype)
    if "alibi_slopes" in scores:
        slopes = scores["alibi_slopes"].astype(s.dtype)[:, None, None]
        s = s - slopes * np.abs(distances(case)).astype(s.dtype)
    return s, slope


def visible(case, scores):
    """Which pairs are visible, from the definition: (L, S), or (B, 1, L, S) with lengths."""
    distance = distances(case)
    left, right = case.window or (None, None)
    seen = np.ones(distance.shape, bool)
    if case.causal:
        seen &= distance <= 0
    if left not in (None, -1):
        seen &= distance >= -left
    if right not in (None, -1):
        seen &= distance <= right
    if "mask" in scores:
        seen = seen & scores["mask"]
    if "kv_lens" in scores:
        seen = seen & (np.arange(case.seqlen_k) < scores["kv_lens"][:, None, None, None])
    return seen


def check_case(case, rng, device):
    """The list of faults found."""
    pairs, scores = case.arrays(rng), case.scored(rng)
    *inputs, dout = (view(device.put(base)) for base, view in pairs)
    options = case.options | on_device(device, scores)
    (out, lse), pullback = cuflash.attention_vjp(*inputs, return_lse=True, **options)
    grads = pullback(dout)
    got = [device.get(x) for x in (out, lse, grads.dq, grads.dk, grads.dv)]
    again = device.get(cuflash.attention(*inputs, **options))
    faults = [] if again.tobytes() == got[0].tobytes() else ["out differs between two equal calls"]

    q, k, v, dout = (view(base) for base, view in pairs)
    options = case.options | scores
    truth = [
        *reference.attention(q, k, v, **options),
        *reference.attention_backward(dout, q, k, v, **options)[:3],
    ]
    swap = (lambda x: np.swapaxes(x, 1, 2)) if case.layout == "bshd" else (lambda x: x)
    textbook, score = plain(case, scores, *map(swap, (q, k, v, dout)))
    sizes = term_sizes(case, q, k, v, dout)
    for name, value, exact, beside in zip(sizes, got, truth, map(swap, textbook)):
        fault = compare(name, value, exact, beside, sizes[name], score)
        faults += [fault] if fault else []
    return faults


def on_device(device, scores):
    """The options with their arrays where the others are."""
    return {n: device.put(x) if isinstance(x, np.ndarray) else x for n, x in scores.items()}


def term_sizes(case, q, k, v, dout):
    """The size of the terms each result is a sum of: rounding is relative to it."""
    big_q, big_k, big_v, big_dout = (
        float(np.max(np.abs(x.astype(np.float64)), initial=0.0)) for x in (q, k, v, dout)
    )
    scale = abs(case.head_dim**-0.5 if case.scale is None else case.scale)
    slope = scale * big_dout * big_v * case.head_dim_v**0.5
    return {"out": big_v, "lse": 1.0, "dq": slope * big_k, "dk": slope * big_q, "dv": big_dout}


def compare(name, value, exact, beside, size, score):
    """None, or the fault when a result is off by more than twice the textbook's error.

    The roundings are of the result (relative to it and to the ``size`` of its terms), and of the
    scores in their dtype: the softmax turns a score's absolute error into a relative one, and where
    few keys count, the textbook may be luckier with it than twice.
    """
    if value.shape != exact.shape:
        return f"{name} has shape {value.shape}, expected {exact.shape}"
    eps = 2.0**-7 if value.dtype.name == "bfloat16" else float(np.finfo(value.dtype).eps)
    score_eps = eps if value.dtype == np.float64 else float(np.finfo(np.float32).eps)
    value = value.astype(np.float64)
    finite = np.isfinite(exact)
    same = np.array_equal(value[~finite], exact[~finite], equal_nan=True)
    if not same or not np.isfinite(value[finite]).all():
        return f"{name} is not finite, or infinite, at other places than the reference"
    if not finite.any():
        return None
    value, exact, beside = value[finite], exact[finite], beside[finite]
    error = np.max(np.abs(value - exact))
    sums = 4 if eps < 1e-5 else 1  # wide results also carry the rounding of their float sums
    rounding = sums * eps * (np.max(np.abs(exact)) + size) + score_eps * score * size
    allowed = 2 * np.max(np.abs(beside - exact)) + rounding
    return None if error <= allowed else f"{name} is off by {error:.3g}, allowed {allowed:.3g}"


def run(args):
    """The command."""
    device = Device.pick(args.device)
    dtypes = ["float32", "float64", "float16"]
    try:
        dtypes.append(dtype_of("bfloat16").name)
    except ImportError:
        print("bfloat16 is left out: the package ml_dtypes is not installed")
    numbers = range(args.cases) if args.only is None else [args.only]
    print(
        f"{len(numbers)} random cases, seed {args.seed}, against the float64 reference, on {device}"
    )
    if device.kind == "cuda":
        _build_kernels(numbers, args.seed, dtypes, device, args.jobs or config.processors())
    start = time.perf_counter()
    # The reference's products are small: BLAS's threads would mostly wait for each other.
    with threadpool_limits(1):
        failed = _run_cases(numbers, args.seed, dtypes, device)
    spent = time.perf_counter() - start
    if failed:
        raise Failure(f"check FAILED: {failed} of {len(numbers)} cases on {device}, {spent:.1f} s")
    print(f"check passed: {len(numbers)} of {len(numbers)} cases on {device}, {spent:.1f} s")


def _build_kernels(numbers, seed, dtypes, device, jobs):
    """Build the kernels that the cache lacks."""
    from . import prebuild

    plans = {}
    for number in numbers:
        case, rng = _drawn(number, seed, dtypes)
        try:
            q, k, v, dout = (view(device.put(base)) for base, view in case.arrays(rng))
            options = case.options | on_device(device, case.scored(rng))
            plans.update(dict.fromkeys(prebuild.plans_of_call(dout, q, k, v, options)))
        except Exception:  # by which the case itself is going to fail
            continue
    arch = jit.architecture(*divmod(device.capability, 10))
    missing = [plan for plan in plans if not jit.is_built(plan, arch)]
    if not missing:
        return
    print(f"{len(missing)} of {len(plans)} kernels are not in the cache and are built first")
    progress, failed = Progress("build", len(missing)), 0
    for outcome in prebuild.build_all(missing, arch, jobs):
        failed += isinstance(outcome, Exception)
        progress.advance(note=f"{failed} failed" if failed else "")


def _drawn(number, seed, dtypes):
    """The case of that number, and the generator of its arrays."""
    rng = np.random.default_rng([seed, number])
    return Case.draw(rng, dtypes), rng


def _run_cases(numbers, seed, dtypes, device):
    """Print the cases' faults. Returns how many cases failed."""
    progress, failed = Progress("check", len(numbers)), 0
    for number in numbers:
        case, rng = _drawn(number, seed, dtypes)
        try:
            faults = check_case(case, rng, device)
        except Exception as error:  # a call that raises is a failed case; the others still count
            faults = [f"{type(error).__name__}: {error}"]
        progress.advance(note=f"{failed} failed" if failed else "")
        if faults:
            failed += 1
            print(f"case {number} (--seed {seed} --only {number}): {'; '.join(faults)}")
            print(f"  {asdict(case)}")
    return failed
