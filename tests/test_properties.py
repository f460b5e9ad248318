"""Properties that hold for every call, drawn by Hypothesis and run on every home of the machine."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
from conftest import np_dtype
from dense import ROUNDOFF, Oracle, check_forward, compare, heads_first, visible
from hypothesis import given, settings
from hypothesis import strategies as st
from running import attend, backward, check, differentiate, forward, same_bits, to_numpy
from strategies import DTYPES, LENGTHS, Case, bands, cases, place

import cuflash

SMALL = (1, 2, 3, 5, 9, 16, 33)


def examples(share):
    """A part of the profile's number of examples."""
    return settings(max_examples=max(1, round(settings.default.max_examples * share)))


@pytest.mark.parametrize("dtype", DTYPES)
@examples(0.5)
@given(data=st.data())
def test_equals_reference(home, dtype, data):
    """Forward and backward against the float64 reference: any shape, stride, dtype and band (C15,
    C7, C2).
    """
    check(home, data.draw(cases(dtypes=(dtype,))), dlse=data.draw(st.booleans()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "lengths, offset, window",
    [
        ((129, 3), -130, (5, 100)),  # the first key is seen from row 130 on, the last block has 129
        ((129, 3), -127, (0, 0)),
        ((3, 129), 128, (0, 5)),
        ((3, 129), 130, (5, 0)),
        ((70, 70), -68, (1, 1)),
    ],
)
def test_bands_at_the_ends(home, dtype, lengths, offset, window):
    """A band that leaves the scores inside the last block: both directions agree which blocks are
    empty.
    """
    check(home, Case(*lengths, dtype=dtype, causal_offset=offset, window=window))


@examples(0.5)
@given(case=cases(lengths=SMALL), need=st.sets(st.sampled_from("qkv")), deterministic=st.booleans())
def test_need(home, case, need, deterministic):
    """Leaving a gradient out changes none of the others, and need=() gives none."""
    arrays = case.arrays()
    every = differentiate(home, case, arrays)
    some = differentiate(home, case, arrays, need=tuple(sorted(need)), deterministic=deterministic)
    oracle = Oracle(case, *(arrays[n] for n in "qkv"), arrays["dout"], arrays["dlse"])
    for index, name in enumerate("qkv"):
        grad = some[2 + index]
        assert (grad is not None) == (name in need)
        if grad is not None:
            want = heads_first(every[2 + index].astype(np.float64), case.layout)
            compare(
                f"d{name}",
                heads_first(grad, case.layout),
                want,
                want,
                lambda index=index: 2 * oracle.bound_backward[index],
                case.dtype,
                (-2, -1),
            )


@examples(0.5)
@given(case=cases(band=False, plain=True), seed=st.integers(0, 99))
def test_key_permutation(home, case, seed):
    """Without a band the order of the keys is of no consequence, and dk and dv follow it."""
    arrays = case.arrays()
    order = np.random.default_rng(seed).permutation(case.seqlen_k)
    shuffled = {**arrays, "k": arrays["k"][..., order, :], "v": arrays["v"][..., order, :]}
    out, lse, dq, dk, dv = differentiate(home, case, shuffled)
    dk_back, dv_back = np.empty_like(dk), np.empty_like(dv)
    dk_back[..., order, :], dv_back[..., order, :] = dk, dv
    oracle = Oracle(case, *(arrays[n] for n in "qkv"), arrays["dout"], arrays["dlse"])
    check_forward(oracle, out, lse)
    for index, grad in enumerate((dq, dk_back, dv_back)):
        compare(
            "gradient",
            grad,
            oracle.backward[index],
            oracle.plain_backward[index],
            lambda index=index: oracle.bound_backward[index],
            case.dtype,
            (-2, -1),
        )


@examples(0.5)
@given(case=cases(plain=True), picked=st.integers(0, 5), size=st.integers(2, 5))
def test_batch_independence(home, case, picked, size):
    """A batch entry gives the same bits alone as among others, forward and backward (C11)."""
    case = replace(case, batch_q=(size,), batch_k=(size,), batch_v=(size,))
    if size * case.num_heads * case.seqlen_q * case.seqlen_k > 2**18:
        case = replace(case, seqlen_q=65, seqlen_k=129, num_heads=case.group, num_kv_heads=1)
    arrays = case.arrays()
    one = slice(picked % size, picked % size + 1)
    alone = replace(case, batch_q=(1,), batch_k=(1,), batch_v=(1,))
    together = differentiate(home, case, arrays)
    single = differentiate(home, alone, {name: a[one] for name, a in arrays.items()})
    same_bits(*((got, want[one]) for got, want in zip(single, together)))


@examples(0.5)
@given(case=cases(plain=True, lengths=SMALL + (65, 129)))
def test_gqa_is_repeated_heads(home, case):
    """Grouped heads equal repeated key heads; dk and dv are the sums over the group."""
    arrays = case.arrays()
    repeated = {**arrays, **{n: np.repeat(arrays[n], case.group, axis=-3) for n in "kv"}}
    full = replace(case, num_kv_heads=case.num_heads)
    grouped = differentiate(home, case, arrays)
    every = differentiate(home, full, repeated)
    oracle = Oracle(case, *(arrays[n] for n in "qkv"), arrays["dout"], arrays["dlse"])
    wide = Oracle(full, *(repeated[n] for n in "qkv"), arrays["dout"], arrays["dlse"])

    def twice_the_bound(index, shape):
        bound = (*oracle.bound_forward, *oracle.bound_backward)[index]
        if index > 2:  # the repeated heads' gradients were rounded one by one
            rounded = ROUNDOFF[case.dtype] * abs(every[index].astype(np.float64))
            bound = bound + oracle.reduce(wide.bound_backward[index - 2] + rounded, shape)
        return 2 * bound

    for index in range(5):
        got, want = grouped[index].astype(np.float64), every[index].astype(np.float64)
        if index > 2:
            want = oracle.reduce(want, got.shape)
        dtype = str(grouped[1].dtype) if index == 1 else case.dtype
        compare(
            ("out", "lse", "dq", "dk", "dv")[index],
            got,
            want,
            want,
            lambda index=index, shape=got.shape: twice_the_bound(index, shape),
            dtype,
            (-1,) if index == 1 else (-2, -1),
        )


@examples(0.5)
@given(case=cases(plain=True))
def test_out_in_hull_of_v(home, case):
    """Each output lies between the smallest and the largest visible value, up to rounding."""
    arrays = case.arrays()
    out = attend(home, case, arrays)[0].astype(np.float64)
    band = {n: x for n, x in case.options.items() if n in ("causal", "causal_offset", "window")}
    seen = visible(case.seqlen_q, case.seqlen_k, **band)
    v = np.repeat(arrays["v"].astype(np.float64), case.group, axis=-3)
    slack = 4 * ROUNDOFF[case.dtype] * abs(v).max(initial=0)
    for i, row in enumerate(seen):
        if row.any():
            assert (out[..., i, :] <= v[..., row, :].max(axis=-2) + slack).all()
            assert (out[..., i, :] >= v[..., row, :].min(axis=-2) - slack).all()
        else:
            assert not out[..., i, :].any()


@examples(0.5)
@given(case=cases(plain=True), cuts=st.lists(st.integers(0, 600), max_size=3))
def test_merged_splits_equal_whole(home, case, cuts):
    """Attention over parts of the keys, some of them empty, merges to that over all of them."""
    arrays = case.arrays()
    cuts = [0, *sorted(min(cut, case.seqlen_k) for cut in cuts), case.seqlen_k]
    offset = case.seqlen_k - case.seqlen_q if case.causal_offset is None else case.causal_offset
    offset = 0 if case.causal == "top_left" else offset
    outs, lses = [], []
    for first, last in zip(cuts, cuts[1:]):
        options = {**case.options}
        if case.causal or case.window is not None:
            options.update(causal=bool(case.causal), causal_offset=offset - first)
        part = (
            home.to_home(arrays["q"]),
            *(home.to_home(arrays[n][..., first:last, :]) for n in "kv"),
        )
        out, lse = cuflash.attention(*part, **options, return_lse=True)
        outs.append(out)
        lses.append(lse)
    out, lse = to_numpy(home, cuflash.merge(outs, lses))
    oracle = Oracle(case, *(arrays[n] for n in "qkv"))
    v = np.repeat(abs(arrays["v"].astype(np.float64)), case.group, axis=-3)
    rounded = 2 * ROUNDOFF[case.dtype] * (oracle.parts[0] @ v)  # each part was rounded to the dtype

    def bounds():
        bound_out, bound_lse = oracle.bound_forward
        return 2 * bound_out + rounded, 2 * bound_lse

    check_forward(oracle, out, lse, bounds=bounds)


@examples(0.5)
@given(case=cases(plain=True))
def test_dk_sums_to_zero(home, case):
    """Adding one vector to every key moves no output: dk sums to zero over the keys (with dlse
    None).
    """
    arrays = case.arrays()
    dk = differentiate(home, case, arrays, dlse=False)[3].astype(np.float64)
    oracle = Oracle(case, *(arrays[n] for n in "qkv"), arrays["dout"])
    bound = oracle.bound_backward[1] + ROUNDOFF[case.dtype] * abs(dk)
    total, allowed = abs(dk.sum(axis=-2)), bound.sum(axis=-2)
    assert (total <= allowed).all(), (total / allowed).max()


@examples(0.3)
@given(
    case=cases(
        plain=True,
        values=("integers",),
        scales=(None, -0.5),
        lengths=SMALL + (65, 129),
        dtypes=("float32", "float64", "bfloat16"),
    ),  # float16 has subnormal results, not exactly doubled
    power=st.integers(-3, 3),
)
def test_linear_in_v_and_dout(home, case, power):
    """out is linear in v, the gradients in dout: exactly for powers of two, up to rounding for
    sums.
    """
    arrays = case.arrays()
    rng = np.random.default_rng(case.seed + 1)
    base = differentiate(home, case, arrays, dlse=False)
    factor = np.asarray(2.0**power).astype(arrays["v"].dtype)
    scaled = differentiate(home, case, {**arrays, "v": arrays["v"] * factor}, dlse=False)
    same_bits((scaled[0], base[0] * factor), (scaled[1], base[1]), (scaled[4], base[4]))
    scaled = differentiate(home, case, {**arrays, "dout": arrays["dout"] * factor}, dlse=False)
    same_bits(*((got, want * factor) for got, want in zip(scaled[2:], base[2:])))
    other = {
        n: np.round(2 * rng.standard_normal(arrays[n].shape)).astype(arrays[n].dtype)
        for n in ("v", "dout")
    }

    def summed_bounds(name, index):
        bound = 0
        for part in (arrays[name], other[name], arrays[name] + other[name]):
            oracle = Oracle(case, *({**arrays, name: part}[n] for n in ("q", "k", "v", "dout")))
            size = (oracle.forward[0], None, *oracle.backward)[index]
            part_bound = (*oracle.bound_forward, *oracle.bound_backward)[index]
            bound = bound + part_bound + ROUNDOFF[case.dtype] * abs(size)
        return bound

    for name, first in (("v", 0), ("dout", 2)):
        second = differentiate(home, case, {**arrays, name: other[name]}, dlse=False)
        summed = differentiate(home, case, {**arrays, name: arrays[name] + other[name]}, dlse=False)
        for index in range(first, 1 if name == "v" else 5):
            want = base[index].astype(np.float64) + second[index].astype(np.float64)
            bound = functools.partial(summed_bounds, name, index)
            compare(name, summed[index], want, want, bound, case.dtype, (-2, -1))


@examples(0.5)
@given(
    case=cases(dtypes=("float64",), lengths=SMALL, scales=(None, -0.5), values=("normal",)),
    seed=st.integers(0, 99),
)
def test_vjp_against_finite_differences(home, case, seed):
    """pullback(dout, dlse) against central differences of sum(out * dout) + sum(lse * dlse)."""
    arrays = case.arrays()
    q, k, v = (home.to_home(arrays[n]) for n in "qkv")
    (out, lse), pullback = cuflash.attention_vjp(q, k, v, **case.options, return_lse=True)
    dlse = np.where(np.isfinite(home.asnumpy(lse)), arrays["dlse"], 0)
    grads = to_numpy(home, pullback(home.to_home(arrays["dout"]), home.to_home(dlse))[:3])
    rng, step = np.random.default_rng(seed), 2.0**-17

    def value(shift):
        moved = {n: arrays[n] + shift * way[n] for n in "qkv"}
        out, lse = attend(home, case, moved)
        return np.sum(out * arrays["dout"]) + np.sum(np.where(np.isfinite(lse), lse, 0) * dlse)

    for _ in range(2):
        way = {n: rng.standard_normal(arrays[n].shape) for n in "qkv"}
        numeric = (value(step) - value(-step)) / (2 * step)
        exact = sum(np.sum(grad * way[n]) for grad, n in zip(grads, "qkv"))
        size = sum(np.sum(abs(grad * way[n])) for grad, n in zip(grads, "qkv")) + 1
        assert abs(numeric - exact) <= 1e-7 * size


@examples(0.5)
@given(data=st.data(), case=cases(plain=True, band=False, lengths=SMALL + (65, 129)))
def test_hidden_entries_have_no_influence(home, case, data):
    """NaN and inf in what a row does not see change no bit of it, forward and backward (C2)."""
    case = replace(case, **data.draw(bands(case.seqlen_q, case.seqlen_k)))
    band = {n: x for n, x in case.options.items() if n in ("causal", "causal_offset", "window")}
    seen = visible(case.seqlen_q, case.seqlen_k, **band)
    arrays = case.arrays()
    bad = data.draw(st.sampled_from((np.nan, np.inf, -np.inf)))
    j = data.draw(st.integers(0, case.seqlen_k - 1))
    i = data.draw(st.integers(0, case.seqlen_q - 1))
    side = data.draw(st.sampled_from(("k", "v", "q", "dout")))
    spoiled = {name: a.copy() for name, a in arrays.items()}
    spoiled[side][..., j if side in "kv" else i, :] = bad
    clean, dirty = differentiate(home, case, arrays), differentiate(home, case, spoiled)
    if side in "kv":  # rows that do not see key j, and the keys that only such rows see
        rows = ~seen[:, j]
        keys = ~seen[~rows].any(axis=0)
    else:  # every other row, and the keys that row i does not see
        rows = np.arange(case.seqlen_q) != i
        keys = ~seen[i]
    keys &= np.arange(case.seqlen_k) != (j if side in "kv" else -1)
    same_bits(
        (dirty[0][..., rows, :], clean[0][..., rows, :]),
        (dirty[1][..., rows], clean[1][..., rows]),
        (dirty[2][..., rows, :], clean[2][..., rows, :]),
        (dirty[3][..., keys, :], clean[3][..., keys, :]),
        (dirty[4][..., keys, :], clean[4][..., keys, :]),
    )


@examples(0.5)
@given(
    data=st.data(),
    case=cases(plain=True, scales=(None,), values=("normal",), lengths=SMALL + (65, 129)),
)
def test_visible_nan_and_inf_reach_what_sees_them(home, case, data):
    """NaN anywhere, and inf in v, appear exactly where the reference has them (C15)."""
    arrays = case.arrays()
    side = data.draw(st.sampled_from(("q", "k", "v", "dout")))
    row = data.draw(st.integers(0, arrays[side].shape[-2] - 1))
    column = data.draw(st.integers(0, arrays[side].shape[-1] - 1))
    bad = data.draw(st.sampled_from((np.nan, np.inf, -np.inf) if side == "v" else (np.nan,)))
    arrays[side][..., row, column] = bad
    check(home, case, arrays, gradients=not np.isinf(bad))


@examples(0.5)
@given(case=cases())
def test_repeatable(home, case):
    """Twice the same call gives twice the same bits: forward always, backward by default (C11)."""
    arrays = case.arrays()
    placed = place(home, case, arrays)
    dlse = home.to_home(arrays["dlse"])

    def once():
        out, lse = forward(home, case, placed)
        return to_numpy(home, (out, lse, *backward(home, case, placed, out, lse, dlse)[:3]))

    same_bits(*zip(once(), once()))


@examples(0.5)
@given(case=cases(lengths=LENGTHS + (0,)), zero=st.sampled_from(("L", "S", "B", "LS", "H")))
def test_zero_sizes(home, case, zero):
    """A size of zero gives empty results of the right shape; no keys give 0 and -inf (C10)."""
    if zero == "B":
        case = replace(case, batch_q=(0,), batch_k=(0,), batch_v=(1,))
    if zero == "H":
        case = replace(case, num_heads=0, num_kv_heads=case.num_kv_heads % 2)
    case = replace(
        case,
        seqlen_q=0 if "L" in zero else case.seqlen_q,
        seqlen_k=0 if "S" in zero else case.seqlen_k,
    )
    check(home, case)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32", "float64"))
def test_printed_case_can_be_pasted(dtype):
    case = Case(
        3, 5, num_heads=2, dtype=dtype, causal=True, window=(2, None), strides=("step2",) * 5
    )
    assert eval(repr(case)) == case
    assert case.arrays()["q"].dtype == np_dtype(dtype)
