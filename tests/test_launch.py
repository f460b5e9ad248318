"""From arrays to launches without a GPU: host arrays stand in CuPy's place, and what would be
launched is looked at instead.
"""

import math
import threading
from dataclasses import replace

import numpy as np
import pytest
from conftest import np_dtype
from hypothesis import given
from hypothesis import strategies as st
from launches import TILE, arrays_of, gpu_side, mapped  # noqa: F401
from test_plan import DTYPES, HOPPER, problem_of

from cuflash import ahead, params
from cuflash.explanation import Explanation
from cuflash.families import device_of, portable
from cuflash.plan import CPP_TYPES
from cuflash.problem import Band

# arrays -------------------------------------------------------------------------------------------


@st.composite
def _views(draw, min_axes=3):
    """A NumPy view of 3 to 6 axes with strides of every kind, and its dtype's name."""
    dtype = draw(st.sampled_from(DTYPES))
    axes = draw(st.integers(min_axes, 6))
    shape = [draw(st.integers(1, 4)) for _ in range(axes - 1)] + [draw(st.integers(1, 20))]
    steps = [draw(st.sampled_from([1, 1, 1, 2, -1])) for _ in shape]
    pads = [draw(st.sampled_from([0, 0, 1, 3, 8])) for _ in shape]
    order = draw(st.permutations(range(axes)))
    if draw(st.booleans()):  # the usual case
        order = list(range(axes))
    big = [abs(step) * size + pad for step, size, pad in zip(steps, shape, pads, strict=True)]
    count = int(np.prod(big))
    base = (np.arange(count) % 251).astype(np_dtype(dtype)).reshape([big[axis] for axis in order])
    view = base.transpose(np.argsort(order))
    view = view[tuple(slice(None, None, step) for step in steps)]
    view = view[tuple(slice(0, size) for size in shape)]
    for axis in range(axes - 1):
        if draw(st.integers(0, 4)) == 0:
            view = np.broadcast_to(view.take([0], axis), view.shape)
    return view


def _start(view):
    return view.__array_interface__["data"][0]


@given(_views())
def test_strides_address_every_element(gpu_side, view):
    cupy, steps, _ = gpu_side
    array = cupy.ndarray(None, base=view)
    batch_axes = view.ndim - 3
    strides = steps.strides_of(array, batch_axes)
    assert len(strides) == params.STRIDES
    used = strides[params.BATCH_DIMS - batch_axes :]
    for index in {
        tuple(np.unravel_index(n, view.shape)) for n in (0, view.size // 2, -1 % view.size)
    }:
        offset = sum(i * stride for i, stride in zip(index, used, strict=True))
        cell = view[tuple(slice(i, i + 1) for i in index)]
        assert _start(view) + offset * view.itemsize == _start(cell)
    assert all(stride == 0 for size, stride in zip(view.shape, used, strict=True) if size == 1)
    assert steps.strides_of(None, batch_axes) == [0] * params.STRIDES


@given(_views())
def test_width_is_the_widest_that_every_row_allows(gpu_side, view):
    cupy, steps, _ = gpu_side
    rows = [view[index] for index in np.ndindex(view.shape[:-1])]
    together = view.shape[-1] == 1 or view.strides[-1] == view.itemsize
    fitting = [
        width
        for width in (16, 8, 4)
        if together and width >= view.itemsize and all(_start(row) % width == 0 for row in rows)
    ]
    assert steps.width(cupy.ndarray(None, base=view)) == (fitting[0] if fitting else 0)


@given(_views())
def test_packing_keeps_values_and_broadcast_axes(gpu_side, view):
    cupy, steps, _ = gpu_side
    base = steps.packed(cupy.ndarray(None, base=view)).base
    assert base.shape == view.shape and base.dtype == view.dtype
    assert base.tobytes() == np.ascontiguousarray(view).tobytes()
    assert view.shape[-1] == 1 or base.strides[-1] == view.itemsize
    for size, old, new in zip(view.shape[:-1], view.strides[:-1], base.strides[:-1], strict=True):
        assert size == 1 or new % 16 == 0
        assert size == 1 or (old == 0) == (new == 0)


def test_elements_between_places_are_refused(gpu_side):
    cupy, steps, launch = gpu_side
    raw = np.zeros(4096, np.uint8)
    odd = np.ndarray((1, 2, 4, 8), np.float16, raw, strides=(1, 129, 16, 2))
    late = np.ndarray((1, 2, 4, 8), np.float16, raw, offset=1)
    fine = np.ndarray((1, 2, 4, 8), np.float16, raw, strides=(1, 128, 16, 2))
    steps.check_aligned(q=cupy.ndarray(None, base=fine), lse=None)
    for base in (odd, late):
        with pytest.raises(ValueError, match="k: its address .* multiples of its item size, 2"):
            steps.check_aligned(
                q=cupy.ndarray(None, base=fine), k=cupy.ndarray(None, base=base), lse=None
            )
    q = cupy.ndarray((1, 2, 4, 8), np.float16)
    with pytest.raises(ValueError, match="v: its address"):
        launch.forward(
            problem_of(dim=8, dim_v=8, length=4, num_kv_heads=2),
            q,
            q,
            cupy.ndarray(None, base=odd),
            q,
            None,
        )


# launches -----------------------------------------------------------------------------------------


def _call_both(cupy, launch, problem, deterministic=True):
    """Forward and backward of contiguous arrays; the plans that were launched."""
    q, k, v, out, lse = arrays_of(cupy, problem)
    launch.log.clear()
    launch.forward(problem, q, k, v, out, lse)
    grads = [cupy.ndarray(x.shape, x.dtype) for x in (q, k, v)]
    launch.backward(problem, out, q, k, v, out, lse, None, *grads, deterministic)
    return [plan for plan, _, _ in launch.log]


@pytest.mark.parametrize("dtype", DTYPES)
def test_ahead_builds_what_calls_run(gpu_side, dtype):
    """Kernels built ahead are those of calls on contiguous arrays of any length."""
    cupy, _, launch = gpu_side
    for dim, dim_v in ((64, 64), (100, 36), (17, 8), (5, 256), (1, 2)):
        for banded in (False, True):
            there = set()
            for length in ahead.LENGTHS:
                band = Band(-length, 0) if banded else None
                problem = problem_of(dtype, dim, dim_v, length, band=band)
                there |= set(ahead.plans_of(problem, HOPPER, True))
            for length, keys in ((1, 1), (200, 77), (1024, 1024), (1024, 1040), (1100, 1000)):
                band = Band(-length, keys - length) if banded else None
                problem = problem_of(dtype, dim, dim_v, length, keys, band=band)
                for deterministic in (False, True):
                    assert set(_call_both(cupy, launch, problem, deterministic)) <= there


def test_forward_passes_the_facts_of_a_call(gpu_side):
    cupy, _, launch = gpu_side
    problem = problem_of("float32", 20, 12, 70, 33, batch=(2, 3), band=Band(-5, 7), num_heads=6)
    problem = replace(problem, num_kv_heads=2)
    q, k, v, out, lse = arrays_of(cupy, problem)
    launch.log.clear()
    launch.forward(problem, q, k, v, out, lse)
    ((plan, blocks, fields),) = launch.log
    assert plan.kernel == "fwd_portable" and plan["Element"] == "float"
    assert [fields[name] for name in ("q", "k", "v", "out", "lse", "stats")] == [
        *(x.data.ptr for x in (q, k, v, out, lse)),
        0,
    ]
    assert fields["batch_sizes"] == [1, 2, 3] and (fields["num_heads"], fields["group"]) == (6, 3)
    assert (fields["seqlen_q"], fields["seqlen_k"]) == (70, 33)
    assert (fields["head_dim"], fields["head_dim_v"]) == (20, 12)
    assert (fields["band_lo"], fields["band_hi"]) == (-5, 7)
    assert fields["q_strides"] == [0, 3 * 6 * 70 * 20, 6 * 70 * 20, 70 * 20, 20, 1]
    assert fields["lse_strides"] == [0, 3 * 6 * 70, 6 * 70, 70, 1, 0]
    assert fields["num_blocks"] == -(-70 // plan["kBlockM"])
    assert blocks == fields["num_blocks"] * 36 * plan["kSlices"]
    assert fields["scale_log2"] == pytest.approx(0.125 / np.log(2), rel=1e-15)
    assert fields["section"] == 36 and fields["num_sectioned"] == 36


def test_strides_beyond_32_bits(gpu_side):
    """Bug 153: a stride that 32 bits cannot hold arrives whole."""
    cupy, _, launch = gpu_side
    problem = problem_of(dim=8, dim_v=8, length=2, num_heads=1)
    q, k, v, out, lse = arrays_of(cupy, problem)
    far = np.lib.stride_tricks.as_strided(v.base, strides=(16, 16, 2**33, 2))  # never read here
    for tile in (None, TILE):
        launch.log.clear()
        launch.forward(problem, q, k, v.view_of(far), out, lse, tile=tile)
        assert launch.log[0][2]["v_strides"][4] == 2**32


def test_zero_scale_stays_finite(gpu_side):
    _, steps, _ = gpu_side
    assert steps.scale_log2(problem_of(scale=0.0)) == 1.0
    for dtype in DTYPES:
        problem = problem_of(dtype, scale=-5e-324)
        limits = np.finfo(problem.lse_dtype)
        assert steps.scale_log2(problem) >= limits.tiny
        assert steps.scale_log2(replace(problem, scale=-float(limits.max))) == limits.max


def test_too_many_blocks_raise(gpu_side):
    """Bugs 163 and 165: what a launch cannot hold is an error, not an output left as it was."""
    _, steps, _ = gpu_side
    plan = portable.combine_plan("float16")
    steps.Step(plan, b"", 2**31 - 1)
    with pytest.raises(NotImplementedError, match="combine would need 2147483648 thread blocks"):
        steps.Step(plan, b"", 2**31)


@given(st.integers(1, 10**6), st.integers(1, 10**12), st.integers(0, 10**9), st.booleans())
def test_sections_are_whole(gpu_side, heads, head_bytes, l2_bytes, turns):
    """As few sections as L2 allows, none of them much smaller than the others."""
    _, steps, _ = gpu_side
    device = replace(HOPPER, l2_bytes=l2_bytes)
    problem = problem_of(band=None if turns else Band(0, 0))
    section, whole = steps.section_values(problem, device, heads, head_bytes, turns)
    assert 1 <= section <= heads and whole % section == 0 and heads - section < whole <= heads
    assert section == 1 or section * head_bytes <= l2_bytes
    sections = -(-heads // section)
    assert section * sections - heads < sections
    more = section + 1  # heads a section: fewer sections, or no room
    assert (more * head_bytes > l2_bytes * 3 // 4) or -(-heads // more) == sections
    assert steps.section_values(problem_of(), device, heads, head_bytes) == [1, heads]


def test_sections_of_backward(gpu_side):
    """Blocks that take turns at dq start together for as many heads as L2 holds, others do not."""
    cupy, steps, launch = gpu_side
    device = replace(HOPPER, l2_bytes=60 << 20)
    assert steps.section_values(problem_of(), device, 16, 8 << 20, True) == [4, 16]
    problem = problem_of(dim=64, dim_v=64, length=128, num_heads=6, num_kv_heads=2)
    heads = 2 * math.prod(problem.batch)
    for dtype, kernel, ordered in (
        ("float32", "bwd_portable", heads),
        ("bfloat16", "bwd_sm90", 1),  # where turns count on a head's blocks being neighbours
    ):
        problem = replace(problem, dtype=dtype)
        q, k, v, out, lse = arrays_of(cupy, problem)
        grads = [cupy.ndarray(x.shape, x.dtype) for x in (q, k, v)]
        orders = ((True, True, ordered), (True, False, 1), (False, True, 1))
        for deterministic, dq, section in orders:
            launch.log.clear()
            given = [grads[0] if dq else None, *grads[1:]]
            launch.backward(problem, out, q, k, v, out, lse, None, *given, deterministic)
            (fields,) = (fields for plan, _, fields in launch.log if plan.kernel == kernel)
            assert (fields["section"], fields["num_sectioned"]) == (section, heads)


def test_more_leading_axes_run_in_turn(gpu_side):
    cupy, _, launch = gpu_side
    problem = problem_of(dim=8, dim_v=8, length=4, batch=(2, 2, 1, 3, 2), num_heads=1)
    q, k, v, out, lse = arrays_of(cupy, problem)
    k = cupy.broadcast_to(k[:1], k.shape)
    launch.log.clear()
    launch.forward(problem, q, k, v, out, lse)
    starts = [(fields["q"], fields["k"], fields["lse"]) for _, _, fields in launch.log]
    expected = [
        (q[i, j].data.ptr, k[i, j].data.ptr, lse[i, j].data.ptr) for i in (0, 1) for j in (0, 1)
    ]
    assert starts == expected
    assert all(fields["batch_sizes"] == [1, 3, 2] for _, _, fields in launch.log)
    grads = [cupy.ndarray(x.shape, x.dtype) for x in (q, v, v)]
    launch.log.clear()
    launch.backward(problem, out, q, k, v, out, lse, None, *grads, True)
    assert [plan.kernel for plan, _, _ in launch.log] == 4 * [
        "delta", "fwd_portable", "bwd_portable", "cast",
    ]  # fmt: skip


@pytest.mark.parametrize("need", range(1, 8))
def test_backward_launches_what_is_needed(gpu_side, need):
    cupy, _, launch = gpu_side
    problem = problem_of(dim=8, dim_v=16, length=64)
    q, k, v, out, lse = arrays_of(cupy, problem)
    dq, dk, dv = (
        cupy.ndarray(x.shape, x.dtype) if need >> n & 1 else None for n, x in enumerate((q, k, v))
    )
    launch.log.clear()
    launch.backward(problem, out, q, k, v, out, lse, lse, dq, dk, dv, True, tile=TILE)
    kernels = {plan.kernel: (plan, fields) for plan, _, fields in launch.log}
    assert ("cast" in kernels) == (dq is not None)
    plan, fields = kernels["bwd_portable"]
    assert plan["kNeedDq"] == (dq is not None) and plan["kDeterministic"]
    assert plan["kNeedDkv"] == (dk is not None or dv is not None)
    assert (fields["dk"] != 0) == (fields["dv"] != 0) == plan["kNeedDkv"]  # one kernel writes both
    assert dk is None or fields["dk"] == dk.data.ptr
    assert (fields["dq_accum"] != 0) == (dq is not None)
    assert fields["dq_accum"] % 16 == 0 and fields["flags"] % 4 == 0
    assert fields["stats"] == kernels["delta"][1]["stats"] == kernels["fwd_portable"][1]["stats"]
    assert kernels["delta"][0]["kDlse"]


def test_narrow_rows_are_packed_where_it_pays(gpu_side):
    cupy, _, launch = gpu_side
    for length, copies in ((64, False), (1024, True)):
        problem = problem_of(dim=20, dim_v=24, length=length)
        q, k, v, out, lse = arrays_of(cupy, problem)
        for _ in range(2):  # prepared, then found
            for tile in (None, TILE):
                launch.log.clear()
                launch.forward(problem, q, k, v, out, lse, tile=tile)
                ((plan, _, fields),) = launch.log
                assert fields["v"] == v.data.ptr
                if plan.kernel == "fwd_sm90":  # packed rows begin on 16 bytes: a map describes them
                    assert copies and tile is None
                    shape, strides, start = mapped(fields["q_map"])
                    assert start != q.data.ptr and strides[-2] == 48 and shape[-1] == 20
                    assert mapped(fields["v_map"])[2] == v.data.ptr
                    continue
                assert tile is TILE or not copies
                assert (fields["q"] != q.data.ptr) == copies
                assert plan["kCopyBytes"] == (16 if copies else 8)
                assert fields["q_strides"][4] == (24 if copies else 20)


def test_alignment_is_part_of_what_calls_share(gpu_side):
    """Bug 227: two calls that differ only in where their arrays begin, in both orders."""
    cupy, steps, launch = gpu_side
    problem = problem_of(dim=8, dim_v=8, length=16, num_heads=1)
    q, k, v, out, lse = arrays_of(cupy, problem)
    room = np.zeros(q.size + 64, np.float16)
    first = -(room.__array_interface__["data"][0] // 2) % 8  # the first element on 16 bytes
    even, odd = (q.view_of(room[n : n + q.size].reshape(q.shape)) for n in (first, first + 1))
    for order in ((even, odd), (odd, even)):
        steps._prepared.clear()
        widths = []
        for shifted in (*order, *order):
            launch.log.clear()
            launch.forward(problem, shifted, k, v, out, lse)
            widths.append(dict(launch.log[0][0].constants).get("kCopyBytes", "boxes"))
        assert widths == 2 * ["boxes" if shifted is even else 0 for shifted in order]


def test_preparations_are_bounded_and_shared_by_threads(gpu_side, monkeypatch):
    _, steps, _ = gpu_side
    monkeypatch.setattr(steps, "_prepared", {})
    monkeypatch.setattr(steps, "_PREPARED_LIMIT", 10)
    wrong = []

    def work(seed):
        for n in np.random.default_rng(seed).integers(0, 40, 2000):
            if steps.prepared(int(n), lambda n=n: f"value {n}") != f"value {n}":
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(steps._prepared) <= 10 + len(threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_of_parts_with_any_strides(gpu_side, dtype):
    cupy, _, launch = gpu_side
    lse_dtype = "float64" if dtype == "float64" else "float32"
    outs = [cupy.ndarray((2, 3, 5, 8), np_dtype(dtype)) for _ in range(3)]
    lses = [cupy.ndarray((2, 3, 5), np.dtype(lse_dtype)) for _ in range(3)]
    launch.log.clear()
    launch.merge(outs, lses, outs[0], lses[0])
    ((plan, blocks, fields),) = launch.log
    assert (fields["rows"], fields["count"], fields["head_dim_v"]) == (30, 3, 8)
    assert fields["out"] == outs[0].data.ptr and fields["lse"] == lses[0].data.ptr
    assert blocks * plan["kWarps"] >= 30 and plan["Element"] == CPP_TYPES[dtype]
    swapped = cupy.ndarray((2, 5, 3, 8), np_dtype(dtype)).swapaxes(1, 2)
    swapped_lse = cupy.ndarray((2, 5, 3), np.dtype(lse_dtype)).swapaxes(1, 2)
    launch.merge(outs, lses, swapped, swapped_lse)
    assert launch.log[1][2]["out"] != swapped.data.ptr  # through a contiguous copy
    empty, empty_lse = outs[0][:0], lses[0][:0]
    launch.merge([empty], [empty_lse], empty, empty_lse)
    assert len(launch.log) == 2


def test_explain_says_what_would_run(gpu_side):
    cupy, steps, launch = gpu_side
    for batch in ((2,), (3, 2, 1, 2), ()):
        problem = problem_of(dim=20, dim_v=24, length=1024, batch=batch, band=Band(-1024, 0))
        q, k, v, *_ = arrays_of(cupy, problem)
        told = launch.explain(problem, q, k, v)
        assert isinstance(told, Explanation) and told.packed == ("q", "k")
        assert "copied     q, k" in str(told)
        if len(batch) > 2:  # launches of three leading axes
            assert "16 bytes at a time" in str(told) and "not        sm90: 3 leading" in str(told)
        else:
            assert "sm90 family" in str(told) and "through tensor maps" in str(told)
            assert "warps that load" in str(told)
    small = problem_of(dim=1, dim_v=1, length=4)
    told = str(launch.explain(small, *arrays_of(cupy, small)[:3]))
    assert "reads      single elements" in told and "portable family on a GPU" in told
    assert "not        sm90: tensor maps cannot describe the inputs: q: " in told
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "device_facts", lambda device_id: device_of(75))
        wide = problem_of("float64", 256, 256)
        told = str(launch.explain(wide, *arrays_of(cupy, wide)[:3]))
        assert "reads      single elements, where they are used" in told
    empty = problem_of(batch=(0, 1, 1, 1), band=Band(-128, 0))
    assert "constant" in launch.explain(empty, *arrays_of(cupy, empty)[:3])
