"""The facts of a call: every rule on shapes, dtypes and options; bands by brute force."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash import checks, problem
from cuflash.problem import Band, call_of

F32 = ("float32",) * 3


def make(q=(2, 4, 5, 8), k=(2, 2, 7, 8), v=None, dtypes=F32, **options):
    """call_of with defaults for all that a test does not look at."""
    v = (*k[:-1], 6) if v is None else v
    given_options = dict(
        layout="bhsd", scale=None, causal=False, causal_offset=None, window=None, precision=None
    )
    given_options.update(options)
    return call_of(dtypes, q, k, v, **given_options)


def test_facts_of_a_plain_call():
    call = make()
    assert call.problem == problem.Problem(
        dtype="float32",
        batch=(2,),
        num_heads=4,
        num_kv_heads=2,
        seqlen_q=5,
        seqlen_k=7,
        head_dim=8,
        head_dim_v=6,
        scale=1 / math.sqrt(8),
    )
    assert call.problem.group == 2
    assert (call.out_shape, call.lse_shape) == ((2, 4, 5, 6), (2, 4, 5))
    assert call.direct and not call.trivial


@pytest.mark.parametrize(
    "layout, q, k, v, batch, out_shape, lse_shape",
    [
        ("bhsd", (5, 8), (7, 8), (7, 3), (), (5, 3), (5,)),
        ("bshd", (5, 8), (7, 8), (7, 3), (), (5, 3), (5,)),
        ("bhsd", (5, 8), (1, 7, 8), (7, 3), (), (1, 5, 3), (1, 5)),
        ("bshd", (5, 8), (7, 1, 8), (7, 3), (), (5, 1, 3), (5, 1)),
        ("bhsd", (5, 8), (2, 1, 7, 8), (7, 3), (2,), (2, 1, 5, 3), (2, 1, 5)),
        ("bhsd", (4, 5, 8), (2, 7, 8), (2, 7, 3), (), (4, 5, 3), (4, 5)),
        ("bshd", (5, 4, 8), (7, 2, 8), (7, 2, 3), (), (5, 4, 3), (5, 4)),
        ("bshd", (2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 3), (2,), (2, 5, 4, 3), (2, 5, 4)),
        (
            "bhsd",
            (3, 1, 4, 5, 8),
            (6, 4, 7, 8),
            (1, 4, 7, 3),
            (3, 6),
            (3, 6, 4, 5, 3),
            (3, 6, 4, 5),
        ),
        ("bhsd", (1, 4, 5, 8), (0, 4, 7, 8), (0, 4, 7, 3), (0,), (0, 4, 5, 3), (0, 4, 5)),
    ],
)
def test_layouts_ranks_and_broadcasting(layout, q, k, v, batch, out_shape, lse_shape):
    call = make(q, k, v, layout=layout)
    assert (call.problem.batch, call.out_shape, call.lse_shape) == (batch, out_shape, lse_shape)
    assert call.problem.seqlen_q == 5 and call.problem.seqlen_k == 7
    assert call.direct == (layout == "bhsd" and q[:-3] == k[:-3] == v[:-3] and len(v) > 2)


@pytest.mark.parametrize(
    "q, k, trivial",
    [
        ((2, 4, 5, 8), (2, 4, 7, 8), False),
        ((0, 4, 5, 8), (0, 4, 7, 8), True),
        ((2, 0, 5, 8), (2, 0, 7, 8), True),
        ((2, 0, 5, 8), (2, 3, 7, 8), True),
        ((2, 4, 0, 8), (2, 4, 7, 8), True),
        ((2, 4, 5, 8), (2, 4, 0, 8), True),
    ],
)
def test_zero_sizes_are_trivial(q, k, trivial):
    assert make(q, k, causal=True).trivial is trivial
    assert make(q, k).problem.group >= 0


BAD_CALLS = [
    # (what differs from a good call, exception, parts of the message)
    (dict(dtypes=("int64",) * 3), TypeError, ["q", "int64", "float16, bfloat16"]),
    (dict(dtypes=(">f4",) * 3), TypeError, ["q", ">f4", "native byte order"]),
    (dict(dtypes=("float32", "complex64", "float32")), TypeError, ["k", "complex64"]),
    (dict(dtypes=("float32", "float32", "float16")), TypeError, ["float16", "equal"]),
    (dict(dtypes=("float16", "bfloat16", "float16")), TypeError, ["bfloat16", "equal"]),
    (dict(q=(8,)), ValueError, ["q", "(8,)", "(..., heads, length, head_dim)"]),
    (dict(k=(), v=(7, 8)), ValueError, ["k", "()"]),
    (dict(q=(8,), layout="bshd"), ValueError, ["q", "(..., length, heads, head_dim)"]),
    (dict(v=(8,)), ValueError, ["v", "(8,)"]),
    (dict(q=(2, 4, 5, 9)), ValueError, ["k", "head_dim is 8", "q's, 9"]),
    (dict(q=(2, 4, 5, 0), k=(2, 4, 7, 0)), ValueError, ["head_dim is 0", "from 1 to 256"]),
    (dict(v=(2, 2, 7, 0)), ValueError, ["v", "head_dim_v is 0", "from 1 to 256"]),
    (
        dict(q=(2, 4, 5, 257), k=(2, 4, 7, 257)),
        NotImplementedError,
        ["head_dim is 257", "from 1 to 256"],
    ),
    (dict(v=(2, 2, 7, 300)), NotImplementedError, ["v", "head_dim_v is 300"]),
    (dict(v=(2, 2, 6, 8)), ValueError, ["v", "length is 6", "k's, 7"]),
    (dict(v=(2, 1, 7, 8)), ValueError, ["v", "1 heads", "k's, 2"]),
    (dict(q=(2, 3, 5, 8)), ValueError, ["q", "3 heads", "multiple of the 2"]),
    (dict(q=(2, 1, 5, 8)), ValueError, ["q", "1 heads", "multiple of the 2"]),
    (dict(q=(2, 4, 5, 8), k=(2, 0, 7, 8)), ValueError, ["q", "4 heads", "multiple of the 0"]),
    (dict(q=(3, 4, 5, 8)), ValueError, ["broadcast", "(3, 4, 5, 8)", "[2, 3]"]),
    (dict(q=(0, 4, 5, 8)), ValueError, ["broadcast", "[0, 2]"]),
    (dict(q=(2, 4, 2**30, 8), k=(2, 4, 2**30, 8)), NotImplementedError, ["2**31", str(2**30)]),
    (dict(layout="sbhd"), ValueError, ["layout='sbhd'", "'bhsd' or 'bshd'"]),
    (dict(layout=None), TypeError, ["layout=None"]),
    (dict(scale="1"), TypeError, ["scale='1'", "real number"]),
    (dict(scale=True), TypeError, ["scale=True"]),
    (dict(scale=1j), TypeError, ["scale=1j"]),
    (dict(scale=np.ones(1)), TypeError, ["scale=array"]),
    (dict(scale=math.nan), ValueError, ["scale=nan", "finite"]),
    (dict(scale=-math.inf), ValueError, ["scale=-inf", "finite"]),
    (dict(scale=10**400), ValueError, ["scale=1000", "finite"]),
    (dict(scale=1e39), ValueError, ["scale=1e+39", "finite in float32"]),
    (dict(causal=None), TypeError, ["causal=None", "'top_left'"]),
    (dict(causal=1), TypeError, ["causal=1"]),
    (dict(causal=[True]), TypeError, ["causal=[True]"]),
    (dict(causal="upper"), ValueError, ["causal='upper'", "'bottom_right'"]),
    (dict(causal_offset=1), ValueError, ["causal_offset=1", "no effect"]),
    (dict(causal=True, causal_offset=1.0), TypeError, ["causal_offset=1.0", "whole number"]),
    (dict(causal=True, causal_offset=True), TypeError, ["causal_offset=True"]),
    (dict(causal="top_left", causal_offset=0), ValueError, ["causal_offset=0", "'top_left'"]),
    (
        dict(causal="bottom_right", causal_offset=0),
        ValueError,
        ["causal_offset=0", "'bottom_right'"],
    ),
    (dict(window=3), TypeError, ["window=3", "(left, right)"]),
    (dict(window="ab"), TypeError, ["window='ab'"]),
    (dict(window=np.zeros(2, int)), TypeError, ["window=array"]),
    (dict(window=(1,)), ValueError, ["window=(1,)", "(left, right)"]),
    (dict(window=(1, 2, 3)), ValueError, ["window=(1, 2, 3)"]),
    (dict(window=(1.0, 2)), TypeError, ["left=1.0", "whole number"]),
    (dict(window=(1, True)), TypeError, ["right=True"]),
    (dict(window=([], 1)), TypeError, ["left=[]"]),
    (dict(window=(-2, 0)), ValueError, ["left=-2", "at least 0"]),
    (dict(window=(0, -7)), ValueError, ["right=-7", "at least 0"]),
    (dict(precision="bf16"), ValueError, ["precision='bf16'", "'tf32'"]),
    (dict(precision=1), TypeError, ["precision=1"]),
    (dict(precision="tf32", dtypes=("float16",) * 3), ValueError, ["precision='tf32'", "float16"]),
    (dict(precision="tf32", dtypes=("float64",) * 3), ValueError, ["precision='tf32'", "float64"]),
]


@pytest.mark.parametrize("change, kind, parts", BAD_CALLS)
def test_a_bad_call_raises_and_says_why(change, kind, parts):
    with pytest.raises(kind) as caught:
        make(**change)
    assert type(caught.value) is kind
    for part in parts:
        assert part in str(caught.value)


def test_a_valid_call_does_not_hide_an_invalid_one_that_compares_equal():
    make(causal=True, scale=1.0, window=(1, 0))
    for change in (dict(causal=1), dict(scale=True), dict(window=(True, 0)), dict(window=(1, 0.0))):
        with pytest.raises(TypeError):
            make(**{**dict(causal=True, scale=1.0, window=(1, 0)), **change})


@pytest.mark.parametrize("scale", [0.0, -0.5, 3, np.float32(0.25), np.float16(2), np.int64(2)])
def test_scale_is_taken_as_it_is(scale):
    assert make(scale=scale).problem.scale == float(scale)
    assert type(make(scale=scale).problem.scale) is float


def test_a_large_scale_is_fine_in_float64():
    assert make(scale=1e39, dtypes=("float64",) * 3).problem.scale == 1e39


def test_default_scale_is_of_the_true_head_dim():
    assert make((1, 5, 40), (1, 5, 40)).problem.scale == 1 / math.sqrt(40)


def test_whole_numbers_of_numpy_count_as_such():
    call = make(window=[np.int32(2), np.uint8(0)], causal_offset=np.int64(-1))
    assert call.problem.band == Band(lo=-3, hi=-1)
    assert make(causal=np.True_).problem.band == make(causal=True).problem.band


def test_tf32_is_for_float32():
    assert make(precision="tf32").problem.precision == "tf32"


side = st.none() | st.integers(-1, 9)


@given(
    seqlen_q=st.integers(0, 7),
    seqlen_k=st.integers(0, 7),
    causal=st.sampled_from([False, True, "bottom_right", "top_left"]),
    window=st.none() | st.tuples(side, side),
    causal_offset=st.none() | st.integers(-12, 12) | st.sampled_from([-(10**30), 10**30]),
)
def test_band_against_brute_force(seqlen_q, seqlen_k, causal, window, causal_offset):
    if causal_offset is not None and (isinstance(causal, str) or not (causal or window)):
        causal_offset = None
    band = make(
        (1, seqlen_q, 8),
        (1, seqlen_k, 8),
        causal=causal,
        window=window,
        causal_offset=causal_offset,
    ).problem.band
    offset = 0 if causal == "top_left" else seqlen_k - seqlen_q
    offset = offset if causal_offset is None else causal_offset
    left, right = (None if x == -1 else x for x in window or (None, None))
    visible = [
        [
            (not causal or j <= i + offset)
            and (left is None or j >= i + offset - left)
            and (right is None or j <= i + offset + right)
            for j in range(seqlen_k)
        ]
        for i in range(seqlen_q)
    ]
    if band is None:
        assert all(map(all, visible))
        return
    assert -seqlen_q <= band.lo <= seqlen_k and -seqlen_q - 1 <= band.hi <= seqlen_k
    assert not all(map(all, visible))  # a band that hides nothing must be None
    for i, row in enumerate(visible):
        for j, seen in enumerate(row):
            assert seen == (i + band.lo <= j <= i + band.hi)


@pytest.mark.parametrize(
    "need, wanted",
    [(("q", "k", "v"), (1, 1, 1)), (["v"], (0, 0, 1)), ({"k", "q"}, (1, 1, 0)), ((), (0, 0, 0))],
)
def test_need(need, wanted):
    assert checks.check_need(need) == tuple(map(bool, wanted))


@pytest.mark.parametrize(
    "need, kind, part",
    [
        ("qk", TypeError, "'qk'"),
        (None, TypeError, "None"),
        ((1,), TypeError, "(1,)"),
        (("x",), ValueError, "'x'"),
    ],
)
def test_bad_need(need, kind, part):
    with pytest.raises(kind, match="need=") as caught:
        checks.check_need(need)
    assert part in str(caught.value)
