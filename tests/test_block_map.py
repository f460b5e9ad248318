"""Block maps: made from masks, used by calls, drawn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from conftest import CUPY
from dense import visible
from hypothesis import given, settings
from hypothesis import strategies as st
from score_cases import SCORES, block_sums, check, check_agreement, random_map, run, to_home
from strategies import Case, cases

import cuflash
from cuflash import reference


def shaped(home, *shape):
    return home.to_home(np.zeros(shape, np.float32))


def kinds_of(seen, block):
    """Brute force: the kinds of the blocks of booleans (..., L, S)."""
    count, whole = block_sums(seen.astype(int), block), block_sums(np.ones_like(seen, int), block)
    return np.where(count == 0, 0, np.where(count == whole, 2, 1))


RNG = np.random.default_rng(0)
TABLE = RNG.random((130, 300)) < 0.8
MASKS = {
    "nothing": (dict(), (1, 1)),
    "causal": (dict(causal=True), (1, 1)),
    "window": (dict(window=(70, 20), causal_offset=3), (1, 1)),
    "mask": (dict(mask=np.sort(RNG.random((3, 130, 300)) < 0.3, axis=-1)), (1, 3)),
    "lengths": (dict(q_lens=np.array([7, 130]), kv_lens=np.array([300, 0])), (2, 1)),
    "segments": (
        dict(q_segment_ids=np.arange(130) // 50, kv_segment_ids=np.arange(300)[None] // 50),
        (1, 1),
    ),
    "mask_mod": (dict(mask_mod=lambda b, h, i, j: (i // 32 + j // 32 + h) % 3 > 0), (1, 3)),
    "batch": (dict(mask_mod=lambda b, h, i, j: (i // 32 + j // 32 + b) % 3 > 0), (2, 1)),
    "args": (
        dict(mask_mod=lambda b, h, i, j, t, n: t[i, j] | (j < n), score_args=(TABLE, 200)),
        (1, 1),
    ),
}


def seen_by(options, shape):
    """The reference's visible pairs."""
    band = {n: x for n, x in options.items() if n in ("causal", "window", "causal_offset")}
    masks = {n: x for n, x in options.items() if n not in band}
    batch, heads, seqlen_q, seqlen_k = shape
    scores = reference.Scores(shape, seqlen_k - seqlen_q, masks)
    return scores.visible() & visible(seqlen_q, seqlen_k, **band)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("block", ((128, 128), (32, 64), (130, 7), (500, 500)))
def test_made_from_masks(home, name, block):
    """Each block's kind against all of its pairs; heads and batch share what they can."""
    options, own = MASKS[name]
    q, k = shaped(home, 2, 3, 130, 8), shaped(home, 2, 3, 300, 8)
    found = cuflash.block_map(q, k, block=block, **to_home(home, options))
    want = kinds_of(seen_by(options, (2, 3, 130, 300)), block)
    kinds = home.asnumpy(found.kinds)
    assert kinds.shape[:-2] == own and kinds.dtype == np.uint8 and found.block == block
    assert np.array_equal(np.broadcast_to(kinds, want.shape), want)
    assert found.density == np.count_nonzero(kinds) / kinds.size
    assert found.pairs == np.count_nonzero(kinds) * block[0] * block[1]
    turned = found.transposed
    assert turned.block == block[::-1]
    assert np.array_equal(home.asnumpy(turned.kinds), kinds.swapaxes(-1, -2))


def test_made_with_a_function_that_cannot_be_traced():
    """The CPU calls it, for every head."""
    q = np.zeros((2, 3, 40, 8))
    mod = lambda b, h, i, j: np.hypot(i, j) < 10 * (h + b + 1)  # noqa: E731
    found = cuflash.block_map(q, q, mask_mod=mod, block=(16, 16))
    want = kinds_of(seen_by(dict(mask_mod=mod), (2, 3, 40, 40)), (16, 16))
    assert np.array_equal(found.kinds, want)


def test_made_for_nothing(home):
    q, k = shaped(home, 1, 2, 0, 8), shaped(home, 1, 2, 5, 8)
    assert cuflash.block_map(q, k, causal=True).kinds.shape == (1, 1, 0, 1)
    assert cuflash.block_map(k, q).density == 0 and "0 x 1" in str(cuflash.block_map(q, k))
    out = cuflash.attention(k, q, q, block_map=cuflash.block_map(k, q))
    assert not home.asnumpy(out).any()


CASE = Case(300, 520, 16, 8, 4, 2, (2,), (2,), (2,))


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float64"))
@pytest.mark.parametrize("block", ((128, 128), (128, 256), (64, 64), (40, 300)))
@pytest.mark.parametrize("band", (dict(), dict(causal=True), dict(window=(100, 30))))
def test_hides_what_it_says(home, dtype, block, band):
    """out, lse and the gradients, with no other mask: a pair counts if its block is not empty."""
    case = replace(CASE, dtype=dtype, **band)
    kinds = RNG.integers(0, 3, (2, 1, *(-(-n // x) for n, x in zip((300, 520), block))))
    check(home, case, options=dict(block_map=cuflash.BlockMap(kinds, block)))


@pytest.mark.parametrize("heads", ((), (1, 1), (4,), (2, 4), (2, 1)))
def test_of_heads_and_batch(home, heads):
    kinds = RNG.integers(0, 2, (*heads, 3, 5))
    check(home, CASE, options=dict(block_map=cuflash.BlockMap(kinds)))


@settings(max_examples=max(1, settings.default.max_examples // 2))
@given(data=st.data())
def test_with_its_own_masks(home, data):
    """A call with masks gives the same with the map that was made from them."""
    name = data.draw(st.sampled_from(sorted(MASKS)))
    options, _ = MASKS[name]
    case = Case(130, 300, 16, 16, 3, 3, (2,), (2,), (2,), seed=data.draw(st.integers(0, 9)))
    block = data.draw(st.sampled_from(((128, 128), (32, 64), (64, 16))))
    arrays = case.arrays()
    made = cuflash.block_map(
        *(home.to_home(arrays[n]) for n in "qk"), block=block, **to_home(home, options)
    )
    (out, lse, dq, dk, dv, *_), _ = run(home, case, arrays, options)
    mapped = {**options, "block_map": cuflash.BlockMap(home.asnumpy(made.kinds), block)}
    check(home, case, arrays, mapped)
    (again, *_), _ = run(home, case, arrays, mapped)
    assert np.allclose(out, again, atol=1e-5)


@pytest.mark.parametrize("dtype", ("float32", "float16"))
# On a GPU each example builds kernels of its own.
@settings(max_examples=max(1, settings.default.max_examples // (3 if CUPY is None else 12)))
@given(data=st.data())
def test_beside_other_options(home, dtype, data):
    """Two options or more and any band beside a random map: out, lse and every gradient."""
    case = data.draw(cases(dtypes=(dtype,), lengths=(1, 40, 129, 300), values=("normal",)))
    names = data.draw(st.lists(st.sampled_from(SCORES), min_size=2, max_size=4, unique=True))
    if dtype == "float16":  # sums over many pairs whose delta was rounded to 16 bits
        names = [name for name in names if name != "alibi_slopes"]
    case = replace(case, scores=(*names, "block_map"), strides=("packed",) * 5, tile=None)
    check(home, case)


@pytest.mark.parametrize("block", ((128, 128), (32, 48)))
@pytest.mark.parametrize("dtype", ("float32", "float16"))
def test_nan_in_empty_blocks(home, block, dtype):
    """Keys and values of empty blocks, and queries that see nothing, have no influence (C1, C2)."""
    case = Case(256, 512, 16, 16, 2, 1, dtype=dtype)
    rows, columns = 256 // block[0], -(-512 // block[1])
    kinds = RNG.integers(1, 3, (rows, columns))
    kinds[:, -1] = 0
    kinds[-1] = 0
    options = dict(block_map=cuflash.BlockMap(kinds, block))
    arrays = case.arrays()
    clean, _ = run(home, case, arrays, options)
    dirty = {name: x.copy() for name, x in arrays.items()}
    hidden = (columns - 1) * block[1]
    dirty["k"][..., hidden:, :], dirty["v"][..., hidden:, :] = np.nan, np.inf
    first = (rows - 1) * block[0]
    dirty["q"][..., first:, :] = np.nan
    found, _ = run(home, case, dirty, options)
    for got, want in zip(found, clean):
        assert (got is None and want is None) or np.array_equal(got, want)
    out, lse, dq, dk, dv, *_ = found
    assert not out[..., first:, :].any() and (lse[..., first:] == -np.inf).all()
    assert not dq[..., first:, :].any() and not dk[..., hidden:, :].any()


def test_sees_nan_in_what_is_visible(home):
    """inf and NaN in a block that some rows see go to these rows, and to no others."""
    case = Case(256, 384, 16, 16, 1, 1, causal="top_left")
    kinds = np.array([[1, 1, 0], [1, 0, 2]])
    arrays = case.arrays()
    arrays["v"][..., 5, 3], arrays["k"][..., 130, 2] = np.inf, np.nan
    check(home, case, arrays, dict(block_map=cuflash.BlockMap(kinds)))


def test_a_full_block_is_not_looked_at():
    """On the CPU masks are not called for full blocks, nor anything for empty ones."""
    places = []

    def mod(b, h, i, j):
        if isinstance(i, np.ndarray):
            places.append((int(i.min()) // 128, int(j.min()) // 128))
        return (i < 128) | (j >= 128)

    q = np.zeros((1, 1, 256, 8))
    found = cuflash.BlockMap(np.array([[2, 0], [1, 2]]))
    cuflash.attention(q, q, q, block_map=found, mask_mod=mod)
    assert places == [(1, 0)]


def test_random_maps_are_honest():
    """The helper that other tests draw maps with."""
    rng = np.random.default_rng(1)
    seen = rng.random((2, 200, 300)) < 0.9999
    for _ in range(20):
        found = random_map(rng, seen.shape, seen)
        assert ((found.kinds < 2) | (kinds_of(seen, found.block) == 2)).all()


def test_picture():
    found = cuflash.BlockMap(np.array([[0, 1], [2, 0], [2, 2]]), (64, 32))
    assert found.picture() == ".+\n#.\n##"
    assert str(found) == (
        "BlockMap of 3 x 2 blocks of 64 x 32, density 66.7 % (. empty, + partial, # full)\n"
        ".+\n#.\n##"
    )
    assert repr(found) == "<BlockMap (3, 2) of 64 x 32>"
    large = cuflash.BlockMap(np.kron(np.array([[2, 0], [1, 2]]), np.ones((40, 40), int)))
    assert large.picture(width=4) == "##..\n##..\n++##\n++##"
    heads = cuflash.BlockMap(np.array([[[0]], [[2]]]))
    assert heads.picture() == "." and heads.picture((1,)) == "#"
    assert "leading axes (2,)" in str(heads)


def test_save(tmp_path):
    pytest.importorskip("matplotlib")
    cuflash.BlockMap(np.eye(4, dtype=int)).save(tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


ONE = np.ones((2, 3), int)


@pytest.mark.parametrize(
    "make, error, text",
    [
        (lambda: cuflash.BlockMap([[1]]), TypeError, "kinds is a builtins.list"),
        (lambda: cuflash.BlockMap(np.ones((2, 2))), TypeError, "kinds: its dtype is float64"),
        (lambda: cuflash.BlockMap(np.ones((2, 2), bool)), TypeError, "kinds: its dtype is bool"),
        (lambda: cuflash.BlockMap(np.ones(2, int)), ValueError, "kinds: its shape is"),
        (lambda: cuflash.BlockMap(3 * ONE), ValueError, "kinds: it must hold 0"),
        (lambda: cuflash.BlockMap(-ONE), ValueError, "kinds: it must hold 0"),
        (lambda: cuflash.BlockMap(ONE, 128), TypeError, "block=128"),
        (lambda: cuflash.BlockMap(ONE, (128, 1.0)), TypeError, "block="),
        (lambda: cuflash.BlockMap(ONE, (128, 0)), ValueError, "block="),
        (lambda: cuflash.BlockMap(ONE, (128,)), ValueError, "block="),
    ],
)
def test_bad_maps(make, error, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize(
    "given, error, text",
    [
        (ONE, TypeError, "block_map is a ndarray, but it must be a BlockMap"),
        (cuflash.BlockMap(ONE), ValueError, "block_map: it has 2 x 3 blocks of .128, 128."),
        (cuflash.BlockMap(ONE, (40, 30)), ValueError, "70 queries and 70 keys make 2 x 3"),
        (cuflash.BlockMap(np.ones((3, 1, 1), int)), ValueError, "block_map: its leading axes"),
        (cuflash.BlockMap(np.ones((1, 2, 2, 1, 1), int)), ValueError, "block_map: its leading"),
    ],
)
def test_bad_calls(given, error, text):
    q = np.zeros((2, 2, 70, 8))
    if "make 2 x 3" in text:
        given = cuflash.BlockMap(np.ones((1, 3), int), (40, 30))
    with pytest.raises(error, match=text):
        cuflash.attention(q, q, q, block_map=given)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("head_dim", (64, 128))
def test_long_lists(gpu, head_dim, causal):
    """More pieces of work than SMs and rows of lists that fill pages, against the same pairs as a
    mask.
    """
    xp, length = gpu.xp, 8192
    kinds = xp.asarray(2 * (RNG.random((length // 128,) * 2) < 0.25).astype(np.int32))
    kinds[5] = 0  # queries that see nothing
    mask = (kinds > 0).repeat(128, axis=0).repeat(128, axis=1)
    ways = [dict(block_map=cuflash.BlockMap(kinds), causal=causal), dict(mask=mask, causal=causal)]
    check_agreement(gpu, (1, 6, length, head_dim), "bfloat16", ways, 0.02)


def test_map_on_another_device(gpu):
    q = shaped(gpu, 1, 1, 70, 8)
    with pytest.raises(ValueError, match="block_map: it is on the CPU, but the arrays are on dev"):
        cuflash.attention(q, q, q, block_map=cuflash.BlockMap(np.ones((1, 1), int)))


def test_packed_sequences_have_none():
    x = np.zeros((6, 2, 8))
    with pytest.raises(NotImplementedError, match="block_map with attention_varlen"):
        cuflash.attention_varlen(x, x, x, [0, 6], block_map=cuflash.BlockMap(np.ones((1, 1), int)))
