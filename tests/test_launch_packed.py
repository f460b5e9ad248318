"""Packed sequences on the way to kernels, without a GPU: what each launch would be told."""

import numpy as np
import pytest
from launches import arrays_of, gpu_side, mapped, on_host  # noqa: F401
from test_plan import problem_of

import cuflash
from cuflash.params import SPARE_ROWS


@pytest.fixture
def packed_side(on_host, monkeypatch):  # noqa: F811
    """(cupy, launch) whose arrays do what launch_packed.py asks of them."""
    cupy, launch = on_host
    of = cupy.ndarray
    for name, function in {
        "asarray": lambda x: of(None, base=x),
        "ascontiguousarray": lambda x: of(None, base=np.ascontiguousarray(x.base)),
        "arange": lambda n, dtype: np.arange(n, dtype=dtype),
        "where": lambda a, b, c: of(None, base=np.where(a, b.base, c)),
    }.items():
        monkeypatch.setattr(cupy, name, function, raising=False)
    # A length, the host reads; items it must not.
    monkeypatch.setattr(of, "__len__", lambda self: len(self.base), raising=False)
    monkeypatch.setattr(of, "__dlpack__", None, raising=False)
    monkeypatch.setattr(
        of, "astype", lambda self, t, copy=True: of(None, base=self.base.astype(t)), raising=False
    )
    launch.log.clear()
    return cupy, launch


def device(cupy, x):
    return cupy.ndarray(None, base=x)


def qkv(cupy, queries=70, keys=90, heads=(4, 2), dims=(64, 32), dtype=np.float16):
    shapes = ((queries, heads[0], dims[0]), (keys, heads[1], dims[0]), (keys, heads[1], dims[1]))
    return [cupy.ndarray(shape, dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_one_launch_for_all_sequences(packed_side, dtype):
    """Of the portable kernels, and of Hopper's."""
    cupy, launch = packed_side
    q, k, v = qkv(cupy, dtype=np.dtype(dtype))
    kind = {"float32": "portable", "float16": "sm90"}[dtype]
    offsets = [device(cupy, np.array(x, np.int32)) for x in ((0, 30, 30, 60), (0, 5, 40, 90))]
    (out, lse), pull = cuflash.attention_varlen_vjp(
        q, k, v, *offsets, causal=True, window=(20, 5), return_lse=True
    )
    pull(out, need=("q", "k", "v"))
    names = [plan.kernel for plan, _, _ in launch.log]
    assert names == [
        "offsets", "intervals", f"fwd_{kind}", "delta", "fwd_portable", f"bwd_{kind}", "cast",
    ]  # fmt: skip
    fields = [found for _, _, found in launch.log]
    plan, blocks, cleaned = launch.log[0]
    assert plan["Offset"] == "i32" and blocks == 1
    assert (cleaned["q_given"], cleaned["k_given"]) == tuple(x.data.ptr for x in offsets)
    assert [cleaned[n] for n in ("sequences", "seqlen_q", "seqlen_k")] == [3, 70, 90]
    made, blocks = fields[1], launch.log[1][1]
    assert blocks * 256 >= 70 + 90 + 2 * SPARE_ROWS
    assert [made[n] for n in ("left", "right", "shift", "bottom_right")] == [20, 0, 0, 1]
    assert made["q_offsets"] == cleaned["q_offsets"] != made["k_offsets"] == cleaned["k_offsets"]
    assert made["q_places"] == made["k_places"] == 0  # no score asks
    for n in (2, 4, 5):
        plan, _, found = launch.log[n]
        assert plan["kIntervals"] and plan["kBand"] and not plan["kTail"]
        assert found["q_intervals"] == made["q_intervals"] != 0
        assert found["k_intervals"] == made["k_intervals"] != 0
        assert (found["seqlen_q"], found["seqlen_k"], found["num_heads"]) == (70, 90, 4)
        assert "q_map" in found or found["q_strides"] == [0, 0, 0, 64, 256, 1]
    if dtype == "float16":
        assert mapped(fields[2]["out_map"])[0] == (4, 70, 32)
    else:
        assert fields[2]["k_strides"] == [0, 0, 0, 64, 128, 1]
    assert out.shape == (70, 4, 32) and lse.shape == (70, 4)
    # The same structure is the same kernel, whatever the lengths.
    cuflash.attention_varlen(q, k, v, [0, 2, 9, 70], [0, 50, 51, 90])
    plan, _, found = launch.log[-1]
    assert plan == launch.log[2][0]
    assert [launch.log[-2][2][n] for n in ("left", "right")] == [1 << 40] * 2


@pytest.mark.parametrize("options, shift, bottom_right", [
    (dict(causal="top_left"), 0, 0), (dict(causal=True, causal_offset=-3), -3, 0),
    (dict(window=(None, 4), causal_offset=7), 7, 0), (dict(causal="bottom_right"), 0, 1),
])  # fmt: skip
def test_where_windows_stand(packed_side, options, shift, bottom_right):
    cupy, launch = packed_side
    cuflash.attention_varlen(*qkv(cupy), np.array([0, 70]), [0, 90], **options)
    found = launch.log[1][2]
    assert (found["shift"], found["bottom_right"]) == (shift, bottom_right)
    assert found["right"] == (4 if "window" in options else 0)


def test_scores_read_places(packed_side):
    cupy, launch = packed_side
    q, k, v = qkv(cupy)
    cuflash.attention_varlen(
        q, k, v, [0, 40, 70], [0, 10, 90], score_mod=lambda s, b, h, i, j: s + b * i, dropout_p=0.5,
        seed=1,
    )  # fmt: skip
    made, (plan, _, found) = launch.log[1][2], launch.log[2]
    assert found["q_places"] == made["q_places"] != 0 != made["k_places"] == found["k_places"]
    assert "at.b" in plan.score and "at.i" in plan.score and "PackedDropout" in plan.score
    assert "int i, int j) const {\n        const PackedIndices at(" in plan.score


def test_alibi_counts_from_each_sequences_end(packed_side):
    cupy, launch = packed_side
    slopes = device(cupy, np.ones(4, np.float32))
    type(slopes).astype = lambda self, dtype, copy=True: self
    type(slopes).reshape = lambda self, *shape: self.view_of(self.base.reshape(*shape))
    cuflash.attention_varlen(*qkv(cupy), [0, 40, 70], [0, 10, 90], alibi_slopes=slopes)
    shifts, (plan, _, found) = launch.log[0][2]["shifts"], launch.log[2]
    assert found["arg1"] == shifts and found["arg1_size0"] == 2
    assert "arg1(at.b)" in plan.score


def test_offsets_on_the_device_are_not_read(packed_side):
    cupy, launch = packed_side
    q, k, v = qkv(cupy)
    wild = device(cupy, np.array([7, -5, 10**9]))
    cuflash.attention_varlen(q, k, v, wild, wild)
    assert launch.log[0][0]["Offset"] == "i64"
    small = device(cupy, np.array([0, 3], np.int8))
    cuflash.attention_varlen(q, k, v, small, device(cupy, np.array([0, 3], np.int32)))
    assert launch.log[3][0]["Offset"] == "i64"
    with pytest.raises(TypeError, match="cu_seqlens_q is float64"):
        cuflash.attention_varlen(q, k, v, device(cupy, np.zeros(3)))
    with pytest.raises(ValueError, match="cu_seqlens_k has 2"):
        cuflash.attention_varlen(q, k, v, wild, small)
    with pytest.raises(ValueError, match="cu_seqlens_q=.*never fall"):
        cuflash.attention_varlen(q, k, v, [0, 5, 3])


def test_rows_beyond_32_bits_are_refused(packed_side):
    from cuflash import launch_packed

    with pytest.raises(NotImplementedError, match="packed rows"):
        launch_packed.pack(0, None, None, (2**31 - 5, 9), (None, None), None, False)


def test_nothing_to_do_launches_nothing_more(packed_side):
    cupy, launch = packed_side
    q, k, v = qkv(cupy, queries=0)
    out, pull = cuflash.attention_varlen_vjp(q, k, v, [0, 0], [0, 90])
    grads = pull(out)
    assert out.shape == (0, 4, 32) and not grads.dk.base.any()
    assert {plan.kernel for plan, _, _ in launch.log} == {"offsets", "intervals"}


def test_every_launch_has_the_head_as_a_section_member(packed_side):
    """Blocks of sequences differ in length, so heads start together as they do with a band."""
    cupy, launch = packed_side
    problem = problem_of(length=64)
    q, k, v, out, lse = arrays_of(cupy, problem)
    x = cupy.ndarray((64, 8, 64), np.float16)
    cuflash.attention_varlen(x, x, x, [0, 64])
    assert launch.log[-1][2]["section"] == 8
