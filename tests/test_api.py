"""The public functions on NumPy arrays: results, layouts, gradients, every error."""

import inspect

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import reference

TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-6, "float64": 1e-14}


def randn(*shape, dtype="float32", seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.dtype(dtype))


def close(actual, expected, dtype="float32", factor=1):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    scale = max(1.0, np.abs(expected[np.isfinite(expected)]).max(initial=0))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=factor * TOLERANCE[dtype] * scale)


def good():
    return randn(2, 4, 5, 8), randn(2, 2, 7, 8), randn(2, 2, 7, 3)


# Shapes ----------------------------------------------------------------------------------------

SHAPES = [
    # (layout, q, k, v)
    ("bhsd", (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 3)),
    ("bshd", (2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 3)),
    ("bhsd", (5, 8), (7, 8), (7, 3)),
    ("bshd", (5, 8), (7, 8), (7, 3)),
    ("bhsd", (4, 5, 8), (7, 8), (1, 7, 3)),
    ("bshd", (5, 4, 8), (7, 8), (7, 1, 3)),
    ("bhsd", (5, 8), (3, 1, 7, 8), (7, 3)),
    ("bshd", (5, 8), (3, 7, 1, 8), (7, 3)),
    ("bhsd", (3, 1, 4, 5, 8), (6, 4, 7, 8), (1, 4, 7, 3)),
    ("bshd", (3, 1, 5, 4, 8), (1, 6, 7, 2, 8), (7, 2, 3)),
    ("bhsd", (1, 1, 2, 5, 8), (2, 7, 8), (1, 2, 7, 3)),
    ("bhsd", (0, 4, 5, 8), (1, 4, 7, 8), (0, 4, 7, 3)),
    ("bhsd", (2, 0, 5, 8), (2, 2, 7, 8), (2, 2, 7, 3)),
    ("bshd", (2, 0, 4, 8), (2, 7, 4, 8), (1, 7, 4, 3)),
    ("bhsd", (2, 4, 5, 8), (2, 4, 0, 8), (2, 4, 0, 3)),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout, q, k, v", SHAPES)
def test_results_and_gradients_have_the_right_shapes_and_values(layout, q, k, v, causal):
    q, k, v = (randn(*shape) for shape in (q, k, v))
    options = dict(layout=layout, causal=causal)
    expected, expected_lse = reference.attention(q, k, v, **options)
    (out, lse), pullback = cuflash.attention_vjp(q, k, v, return_lse=True, **options)
    assert out.dtype == np.float32 and lse.dtype == np.float32
    assert out.flags.c_contiguous and lse.flags.c_contiguous and lse.shape == out.shape[:-1]
    close(out, expected)
    close(np.exp(lse), np.exp(expected_lse))
    dout, dlse = randn(*out.shape, seed=1), randn(*lse.shape, seed=2)
    grads = pullback(dout, dlse)
    expected_grads = reference.attention_backward(dout, q, k, v, dlse=dlse, **options)
    for x, grad, want in zip((q, k, v), grads, expected_grads, strict=True):
        assert grad.shape == x.shape and grad.dtype == x.dtype and grad.flags.c_contiguous
        close(grad, want, factor=4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes(dtype):
    q, k, v = (x.astype(np.dtype(dtype)) for x in good())
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    assert out.dtype == q.dtype
    assert lse.dtype == (np.float64 if dtype == "float64" else np.float32)
    close(out, reference.attention(q, k, v)[0], dtype)
    grads = cuflash.attention_backward(out, q, k, v, out, lse)
    assert all(grad.dtype == q.dtype for grad in grads)


def test_broadcast_gradients_of_16_bit_are_summed_in_float32():
    # 600 equal gradients: a running sum in float16 would stop growing at 2048 times its step.
    q, k, v = (np.ones(shape, np.float16) for shape in ((600, 1, 1, 4), (1, 3, 4), (1, 3, 4)))
    out, pullback = cuflash.attention_vjp(q, k, v)
    assert (pullback(np.full_like(out, 7)).dv == np.float16(1400)).all()


def test_memory_maps_and_subclasses_are_plain_arrays(tmp_path):
    q, k, v = good()
    np.save(tmp_path / "q.npy", q)
    mapped = np.load(tmp_path / "q.npy", mmap_mode="r")
    out = cuflash.attention(mapped, k, v)
    assert type(out) is np.ndarray and (out == cuflash.attention(q, k, v)).all()


def test_lse_is_only_returned_on_request():
    assert isinstance(cuflash.attention(*good()), np.ndarray)
    assert isinstance(cuflash.attention(*good(), return_lse=np.True_), tuple)


# Signatures ------------------------------------------------------------------------------------


def test_signature_is_the_contract():
    parameters = inspect.signature(cuflash.attention).parameters
    kinds = inspect.Parameter
    assert [n for n, p in parameters.items() if p.kind is kinds.POSITIONAL_ONLY] == ["q", "k", "v"]
    assert [n for n, p in parameters.items() if p.kind is kinds.KEYWORD_ONLY] == (
        "scale causal causal_offset window softcap bias alibi_slopes mask q_lens kv_lens "
        "q_segment_ids "
        "kv_segment_ids block_map sinks score_mod mask_mod score_args dropout_p seed layout precision out "
        "return_lse"
    ).split()


SCORED = {
    "softcap": 30.0,
    "bias": np.zeros((5, 7)),
    "alibi_slopes": np.ones(4),
    "mask": np.ones((5, 7), bool),
    "q_lens": [5, 5],
    "kv_lens": [7, 7],
    "q_segment_ids": np.zeros((2, 5), int),
    "kv_segment_ids": np.zeros((2, 7), int),
    "block_map": cuflash.BlockMap(np.ones((1, 1), int)),
    "sinks": np.zeros(4),
    "score_mod": lambda s, b, h, i, j: s,
    "mask_mod": lambda b, h, i, j: i >= j,
    "score_args": (np.zeros(3),),
    "dropout_p": 0.1,
    "seed": 0,
}


def test_defaults_of_options_are_accepted():
    defaults = {n: None for n in SCORED} | {"score_args": (), "dropout_p": 0}
    q, k, v = good()
    plain = cuflash.attention(q, k, v)
    assert (cuflash.attention(q, k, v, **defaults) == plain).all()
    assert (cuflash.attention_vjp(q, k, v, **defaults)[0] == plain).all()


@pytest.mark.parametrize(
    "name, call",
    [
        ("attention", lambda q, k, v: cuflash.attention(q, k, v, softmax=1)),
        ("attention_vjp", lambda q, k, v: cuflash.attention_vjp(q, k, v, softmax=1)),
        (
            "attention_backward",
            lambda q, k, v: cuflash.attention_backward(q, q, k, v, q, q, softmax=1),
        ),
        ("attention_backward", lambda q, k, v: cuflash.attention_backward(q, q, k, v, q, q, out=q)),
        ("explain", lambda q, k, v: cuflash.explain(q, k, v, return_lse=True)),
    ],
)
def test_unknown_keywords(name, call):
    with pytest.raises(TypeError, match=rf"{name}\(\) got (an unexpected keyword|multiple)"):
        call(*good())


# Errors ----------------------------------------------------------------------------------------

BAD_ARRAYS = [
    # (replacements, exception, parts of the message); the full table of shapes is in
    # test_problem.py
    (dict(q=[[1.0]]), TypeError, ["q", "list", "numpy.asarray"]),
    (dict(k=1.0), TypeError, ["k", "float"]),
    (dict(v=None), TypeError, ["v", "NoneType", "must be an array"]),
    (dict(q=np.float32(1)), TypeError, ["q", "numpy.float32"]),
    (dict(q=np.ndarray), TypeError, ["q", "type", "must be an array"]),
    (dict(q=np.ma.zeros((2, 4, 5, 8), np.float32)), TypeError, ["q", "MaskedArray"]),
    (dict(k=np.zeros((2, 2, 7, 8), int)), TypeError, ["k", "int64", "float32"]),
    (dict(q=np.zeros((2, 4, 5, 8), bool)), TypeError, ["q", "bool"]),
    (dict(q=np.zeros((2, 4, 5, 8), ">f4")), TypeError, ["q", ">f4", "native byte order"]),
    (dict(q=np.zeros((2, 4, 5, 8), object)), TypeError, ["q", "object"]),
    (dict(q=np.zeros((2, 4, 5, 8), np.float16)), TypeError, ["float16, float32", "equal"]),
    (dict(q=np.zeros((2, 4, 5, 8), ml_dtypes.float8_e4m3fn)), TypeError, ["q", "float8_e4m3fn"]),
    (dict(q=np.zeros((2, 3, 5, 8), np.float32)), ValueError, ["q", "3 heads", "multiple of the 2"]),
    (dict(window=(-3, 0)), ValueError, ["window", "left=-3"]),
    (dict(causal="yes"), ValueError, ["causal='yes'"]),
    (dict(return_lse=1), TypeError, ["return_lse=1", "True or False"]),
    (
        dict(out=np.zeros((2, 4, 5, 8), np.float32)),
        ValueError,
        ["out", "(2, 4, 5, 8)", "(2, 4, 5, 3)"],
    ),
    (dict(out=np.zeros((2, 4, 5, 3), np.float64)), TypeError, ["out", "float64", "float32"]),
    (dict(out=np.zeros((2, 4, 5, 3), ">f4")), TypeError, ["out", ">f4", "float32"]),
    (dict(out=[0.0]), TypeError, ["out", "list"]),
    (dict(out=np.broadcast_to(np.float32(0), (2, 4, 5, 3))), ValueError, ["out", "read-only"]),
]


@pytest.mark.parametrize("change, kind, parts", BAD_ARRAYS)
def test_a_bad_argument_raises_and_says_why(change, kind, parts):
    q, k, v = good()
    arrays = dict(q=q, k=k, v=v) | {n: x for n, x in change.items() if n in "qkv"}
    options = {n: x for n, x in change.items() if n not in "qkv"}
    with pytest.raises(kind) as caught:
        cuflash.attention(*arrays.values(), **options)
    assert type(caught.value) is kind
    for part in parts:
        assert part in str(caught.value)


BAD_BACKWARD = [
    (
        dict(dout=np.zeros((2, 4, 5, 8), np.float32)),
        ValueError,
        ["dout", "(2, 4, 5, 8)", "(2, 4, 5, 3)"],
    ),
    (dict(dout=np.zeros((2, 4, 5, 3))), TypeError, ["dout", "float64", "float32"]),
    (dict(dout=1.0), TypeError, ["dout", "float"]),
    (dict(out=np.zeros((4, 5, 3), np.float32)), ValueError, ["out", "(4, 5, 3)"]),
    (dict(out=np.zeros((2, 4, 5, 3), np.float16)), TypeError, ["out", "float16"]),
    (
        dict(lse=np.zeros((2, 4, 5, 1), np.float32)),
        ValueError,
        ["lse", "(2, 4, 5, 1)", "(2, 4, 5)"],
    ),
    (dict(lse=np.zeros((2, 4, 5))), TypeError, ["lse", "float64", "float32"]),
    (dict(dlse=np.zeros((2, 5, 4), np.float32)), ValueError, ["dlse", "(2, 5, 4)"]),
    (dict(dlse=np.zeros((2, 4, 5), np.float16)), TypeError, ["dlse", "float16"]),
    (dict(k=np.zeros((2, 2, 7, 9), np.float32)), ValueError, ["k", "head_dim is 9"]),
    (dict(need="q"), TypeError, ["need='q'"]),
    (dict(need=("q", "bias")), ValueError, ["need=", "'bias'"]),
    (dict(deterministic=None), TypeError, ["deterministic=None"]),
]


@pytest.mark.parametrize("change, kind, parts", BAD_BACKWARD)
def test_a_bad_argument_of_backward_raises_and_says_why(change, kind, parts):
    q, k, v = good()
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    arrays = dict(dout=out, q=q, k=k, v=v, out=out, lse=lse)
    options = {n: x for n, x in change.items() if n not in arrays}
    arrays |= {n: x for n, x in change.items() if n in arrays}
    with pytest.raises(kind) as caught:
        cuflash.attention_backward(*arrays.values(), **options)
    for part in parts:
        assert part in str(caught.value)


# Gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("need", [("q",), ("k",), ("v",), ("q", "v"), ["k", "v"], {"q", "k"}, ()])
def test_need(need):
    q, k, v = good()
    out, pullback = cuflash.attention_vjp(q, k, v, causal=True)
    every = pullback(out)
    some = pullback(out, need=need)
    for name, grad, full in zip("qkv", some, every, strict=True):
        if name in need:
            close(grad, full)
        else:
            assert grad is None


def test_grads_have_names():
    q, k, v = good()
    out, pullback = cuflash.attention_vjp(q, k, v)
    grads = pullback(out)
    assert isinstance(grads, cuflash.AttentionGrads) and grads._fields == ("dq", "dk", "dv")
    assert cuflash.AttentionGrads() == (None, None, None)


def test_vjp_is_attention_and_its_backward():
    q, k, v = good()
    given = np.empty((2, 4, 5, 3), np.float32)
    (out, lse), pullback = cuflash.attention_vjp(
        q, k, v, window=(2, 1), scale=-0.5, out=given, return_lse=True
    )
    assert out is given
    options = dict(window=(2, 1), scale=-0.5)
    expected, expected_lse = cuflash.attention(q, k, v, return_lse=True, **options)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse, expected_lse)
    dlse = randn(*lse.shape)
    direct = cuflash.attention_backward(out, q, k, v, out, lse, dlse=dlse, **options)
    for a, b in zip(pullback(out, dlse), direct, strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(pullback(out, dlse, deterministic=False), direct, strict=True):
        close(a, b, factor=4)


def test_strided_and_broadcast_dout():
    q, k, v = good()
    out, pullback = cuflash.attention_vjp(q, k, v)
    ones = np.broadcast_to(np.float32(1), out.shape)
    for a, b in zip(pullback(ones), pullback(np.ones_like(out)), strict=True):
        np.testing.assert_array_equal(a, b)


# merge, explain, compile -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_merge_of_parts_is_the_whole(dtype):
    q, k, v = (x.astype(np.dtype(dtype)) for x in good())
    whole, whole_lse = cuflash.attention(q, k, v, return_lse=True)
    bounds = [(0, 1), (1, 1), (1, 4), (4, 7)]  # the second part has no key at all
    parts = [cuflash.attention(q, k[:, :, a:b], v[:, :, a:b], return_lse=True) for a, b in bounds]
    out, lse = cuflash.merge([p[0] for p in parts], tuple(p[1] for p in parts))
    assert out.dtype == q.dtype and lse.dtype == whole_lse.dtype
    close(out, whole, dtype, factor=2)
    close(lse, whole_lse, "float64" if dtype == "float64" else "float32")


def test_merge_of_nothing_visible():
    out, lse = cuflash.merge([np.zeros((3, 4))] * 2, [np.full(3, -np.inf)] * 2)
    assert (out == 0).all() and (lse == -np.inf).all()


def test_merge_of_empty_arrays():
    out, lse = cuflash.merge([np.zeros((0, 3, 4))], [np.zeros((0, 3))])
    assert out.shape == (0, 3, 4) and lse.shape == (0, 3)


O32, L32 = np.zeros((2, 3, 4), np.float32), np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    "outs, lses, kind, parts",
    [
        ([], [], ValueError, ["0", "at least one"]),
        ([O32], [L32, L32], ValueError, ["1", "2", "equally many"]),
        (O32, [L32], TypeError, ["outs", "ndarray", "list or tuple"]),
        ([O32], L32, TypeError, ["lses", "ndarray"]),
        ([O32, 1.0], [L32, L32], TypeError, ["outs[1]", "float"]),
        ([O32, O32[:1]], [L32, L32], ValueError, ["outs[1]", "(1, 3, 4)", "(2, 3, 4)"]),
        ([O32, O32.astype(np.float16)], [L32, L32], TypeError, ["outs[1]", "float16"]),
        ([O32], [L32.astype(np.float64)], TypeError, ["lses[0]", "float64", "float32"]),
        ([O32, O32], [L32, L32.T], ValueError, ["lses[1]", "(3, 2)"]),
        ([O32.astype(int)], [L32], TypeError, ["outs[0]", "int64"]),
        ([O32[..., :0]], [L32], ValueError, ["outs[0]", "head_dim_v is 0"]),
        ([np.zeros((3, 257), np.float32)], [L32[0]], NotImplementedError, ["outs[0]", "257"]),
        ([np.float32(1)], [L32], TypeError, ["outs[0]"]),
        ([L32[0]], [L32[0, 0:1]], ValueError, ["outs[0]", "(3,)"]),
    ],
)
def test_bad_merge(outs, lses, kind, parts):
    with pytest.raises(kind) as caught:
        cuflash.merge(outs, lses)
    for part in parts:
        assert part in str(caught.value)


def test_explain_on_the_cpu():
    q, k, v = good()
    text = str(cuflash.explain(q, k, v, causal=True))
    assert "NumPy path" in text and "seqlen_k=7" in text
    with pytest.raises(ValueError, match="head_dim"):
        cuflash.explain(q, k[..., 1:], v)


def test_docstrings_show_true_examples():
    import doctest

    from cuflash import api

    assert doctest.testmod(api).failed == 0


@pytest.mark.parametrize(
    "name", ["attention", "attention_vjp", "attention_backward", "merge", "explain", "compile"]
)
def test_docstrings_have_the_numpydoc_parts(name):
    function = getattr(cuflash, name)
    doc = inspect.getdoc(function)
    for part in ("Parameters\n---", "Returns\n---", "Raises\n---"):
        assert part in doc
    for parameter in inspect.signature(function).parameters.values():
        assert parameter.name in doc


def test_documented_names_of_later_options_are_complete():
    doc = inspect.getdoc(cuflash.attention)
    assert all(name in doc for name in SCORED)
