"""Scores of the caller's on the way to kernels, without a GPU: what a launch would pass, and how
gradients of the score's arrays become integers and numbers again.
"""

import struct
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest
from launches import TILE, arrays_of, gpu_side, mapped  # noqa: F401
from test_plan import problem_of

from cuflash import edge
from cuflash.arrays import home_of
from cuflash.extras import Extras
from cuflash.score import (
    Arg,
    Expr,
    Program,
    constant,
    derivative,
    element,
    entries,
    symbol,
    trace,
)
from cuflash.score_bounds import largest

LOG2E = 1.4426950408889634


def program_of(function, args, visible=None):
    """A program whose function takes its arguments, grids among them, as the tracer gives them."""
    given = [(n, arg) for n, arg in enumerate(args) if arg.kind != "grid"]
    value = trace(lambda s, b, h, i, j, *free: function(s, i, j, *free), given)
    slopes = tuple((n.value, n, derivative(value, n)) for n in entries(value))
    return Program(value, visible, tuple(args), derivative(value, symbol("s")), slopes)


BIAS = Arg("grid", "float16", 0, "bias")
TABLE = Arg("free", "float32", 2, "table")
CAP = Arg("scalar", "float32", 0, "softcap")
COUNT = Arg("scalar", "int32", 0, "count")


def many():
    bias = Expr(element(0, BIAS))
    return program_of(
        lambda s, i, j, table, cap, count: cap * np.tanh((s + bias) / cap)
        + np.where(i < count, table[i % 4, j % 8], 0.0),
        [BIAS, TABLE, CAP, COUNT],
    )


def array(cupy, shape, dtype):
    return cupy.ndarray(None, base=np.zeros(shape, dtype))


def as_word(x):
    """A number and its inverse."""
    return struct.unpack("Q", struct.pack("ff", x, 1 / x))[0]


@pytest.mark.parametrize("tile, kernel", [(None, "fwd_sm90"), (TILE, "fwd_portable")])
def test_forward_passes_operands_by_the_rows_of_the_plan(gpu_side, tile, kernel):
    cupy, steps, launch = gpu_side
    problem = problem_of(batch=(2,), length=64)
    problem = replace(problem, program=many(), sinks=True, dropout=True)
    q, k, v, out, lse = arrays_of(cupy, problem)
    bias = cupy.ndarray(
        None, base=np.broadcast_to(np.zeros((2, 1, 64, 64), np.float16), (2, 2, 64, 64))
    )
    table = cupy.ndarray(None, base=np.zeros((8, 4), np.float32).T)
    sinks = cupy.ndarray(None, base=np.broadcast_to(np.zeros(2, np.float32), (2, 2)))
    type(sinks).astype = lambda self, dtype, copy=True: self
    extras = Extras((bias, table, 30.0, -3), sinks, 0.75, -1)
    launch.log.clear()
    launch.forward(problem, q, k, v, out, lse, tile, extras=extras)
    ((plan, _, fields),) = launch.log
    assert plan.kernel == kernel
    assert fields["scale_log2"] == pytest.approx(LOG2E, 1e-7) and fields["scale"] == problem.scale
    assert fields["arg0"] == bias.data.ptr and fields["arg0_strides"] == [0, 0, 4096, 0, 64, 1]
    assert fields["arg1"] == table.data.ptr
    assert [fields[f"arg1_{part}{axis}"] for axis in (0, 1) for part in ("size", "stride")] == [
        4, 1, 8, 4,
    ]  # fmt: skip
    assert fields["arg2"] == as_word(30.0) and fields["arg3"] == 2**64 - 3
    assert fields["sinks"] == sinks.data.ptr and fields["sinks_strides"] == [0, 0, 0, 1, 0, 0]
    assert fields["keep_limit"] == 192
    assert fields["seed"] == 2**64 - 1 and fields["seed_array"] == 0
    assert fields["first_batch"] == 0
    # Another seed, number or array is the same preparation with other words.
    again = Extras((bias, table, 9.0, 5), sinks, 0.75, 7)
    launch.forward(problem, q, k, v, out, lse, tile, extras=again)
    _, (again, _, later) = launch.log
    assert again is plan
    assert (later["seed"], later["arg2"], later["arg3"]) == (7, as_word(9.0), 5)


def test_explain_names_what_decides_the_scores(gpu_side):
    cupy, _, launch = gpu_side
    problem = problem_of(length=64)
    q, k, v, *_ = arrays_of(cupy, problem)
    assert "scores " not in str(launch.explain(problem, q, k, v))
    bias, table = array(cupy, (1, 2, 64, 64), np.float16), array(cupy, (4, 8), np.float32)
    extras = Extras((bias, table, 30.0, 3), keep=0.5, seed=1)
    problem = replace(problem, program=many(), dropout=True)
    text = str(launch.explain(problem, q, k, v, extras=extras))
    assert "scores     a function of bias, table, softcap, count; dropout" in text
    assert "sm90 family" in text


def test_pairs_of_keys_are_read_at_once_where_they_are_aligned(gpu_side):
    """Which is part of the plan, as it is of what equal calls share."""
    cupy, _, launch = gpu_side
    program = program_of(lambda s, i, j: s + Expr(element(0, BIAS)), [BIAS])
    problem = replace(problem_of(length=64), program=program)
    arrays = arrays_of(cupy, problem)

    def paired(bias):
        launch.log.clear()
        launch.forward(problem, *arrays, extras=Extras((cupy.ndarray(None, base=bias),)))
        score = launch.log[0][0].score
        assert ("ahead.arg0" in score) != ("q.start0[i64(" in score)
        return "ahead.arg0" in score

    memory = np.zeros((1, 2, 64, 130), np.float16)
    assert paired(memory[..., :64]) and paired(memory[..., 2:66])
    assert not paired(memory[..., 1:65])  # it starts between two pairs
    assert not paired(memory[..., :128:2])
    assert not paired(memory.reshape(-1)[: 2 * 64 * 65].reshape(1, 2, 64, 65)[..., :64])
    assert paired(np.broadcast_to(memory[:, :1, :1, :64], (1, 2, 64, 64)))
    odd = replace(problem_of(length=63), program=program)
    problem, arrays = odd, arrays_of(cupy, odd)
    assert not paired(memory[:, :, :63, :63])


def test_biases_that_a_tensor_map_describes_come_by_one(gpu_side):
    """Of another array another map, in the same preparation."""
    cupy, _, launch = gpu_side
    program = program_of(lambda s, i, j: s + Expr(element(0, BIAS)), [BIAS])
    problem = replace(problem_of(length=64), program=program)
    arrays = arrays_of(cupy, problem)

    def starts(*biases):
        launch.log.clear()
        views = [cupy.ndarray(None, base=bias) for bias in biases]
        for view in views:
            launch.forward(problem, *arrays, extras=Extras((view,)))
        plans = {plan for plan, *_ in launch.log}
        if not all(plan["kStaged"] for plan in plans):
            return None
        assert len(plans) == 1
        found = [mapped(fields["staged_map"]) for *_, fields in launch.log]
        assert [start for *_, start in found] == [view.data.ptr for view in views]
        return found

    memory = np.zeros((2, 1, 2, 64, 136), np.float16)
    memory = memory[..., (-memory.ctypes.data % 16) // 2 :]
    first, second = starts(memory[0, ..., :64], memory[1, ..., 64:128])
    assert first[:2] == second[:2]
    assert starts(np.broadcast_to(memory[0, :, :1, :1, :64], (1, 2, 64, 64))) is not None
    assert starts(memory[0, ..., 2:66]) is None  # it starts between two pieces of 16 bytes
    rows = memory.reshape(-1)[: 2 * 64 * 68].reshape(1, 2, 64, 68)[..., :64]
    assert starts(rows) is None  # and so do its rows


def test_heads_that_share_a_bias_start_their_blocks_together(gpu_side):
    cupy, _, launch = gpu_side
    program = program_of(lambda s, i, j: s + Expr(element(0, BIAS)), [BIAS])
    problem = replace(problem_of(length=64), program=program)
    arrays = arrays_of(cupy, problem)
    bias = np.zeros((1, 2, 64, 64), np.float16)
    for shape, section in ((bias, 1), (np.broadcast_to(bias[:, :1], bias.shape), 2)):
        launch.log.clear()
        launch.forward(problem, *arrays, extras=Extras((cupy.ndarray(None, base=shape),)))
        assert launch.log[0][2]["section"] == section


def test_launches_of_many_axes_number_their_batches(gpu_side):
    cupy, _, launch = gpu_side
    problem = replace(problem_of(batch=(2, 3, 2, 1, 5), length=16), dropout=True)
    arrays = arrays_of(cupy, problem)
    launch.log.clear()
    launch.forward(problem, *arrays, extras=Extras(keep=0.5, seed=1))
    assert [fields["first_batch"] for _, _, fields in launch.log] == [0, 10, 20, 30, 40, 50]


BACKWARDS = {"bwd_sm90_wide": None, "bwd_portable": TILE}


@pytest.mark.parametrize("kernel", BACKWARDS)
def test_backward_gives_the_statistics_pass_the_score_but_no_dropout(gpu_side, kernel):
    cupy, _, launch = gpu_side
    problem = replace(problem_of(length=64), program=many(), dropout=True)
    q, k, v, out, lse = arrays_of(cupy, problem)
    bias, table = array(cupy, (1, 2, 64, 64), np.float16), array(cupy, (4, 8), np.float32)
    extras = Extras((bias, table, 30.0, 3), keep=0.5, seed=1)
    grads = [cupy.ndarray(x.shape, x.dtype) for x in (q, k, v)]
    launch.log.clear()
    tile = BACKWARDS[kernel]
    launch.backward(problem, out, q, k, v, out, lse, None, *grads, True, tile, extras=extras)
    by_kernel = {plan.kernel: (plan, fields) for plan, _, fields in launch.log}
    assert list(by_kernel) == ["delta", "fwd_portable", kernel, "cast"]
    _, stats = by_kernel["fwd_portable"]
    plan, main = by_kernel[kernel]
    assert main["scale"] == problem.scale and main["score_scale"] == np.float32(problem.scale)
    assert stats["arg0"] == main["arg0"] == bias.data.ptr
    assert "seed" not in stats and main["seed"] == 1
    assert stats["scale_log2"] == main["scale_log2"] == LOG2E
    assert "kGradients = false" in plan.score


def test_bounds_hold_where_they_are_known():
    problem = replace(problem_of(batch=(3,), length=32), num_heads=6)
    i, j, h = (Expr(symbol(name)) for name in "ijh")
    offset = 3
    for expression, most in (
        (-abs(i + offset - j), 34),
        (i * j - 2 * h, 961),
        (np.where(i > j, 2.5, -4.0), 4),
        ((j - i).astype(float) * 0.5, 15.5),
    ):
        assert most <= largest(expression.node, problem) <= 1.5 * most
    assert largest(constant(-1.0), problem) == 1
    assert largest(np.tanh(Expr(symbol("s"))).node, problem) is None
    assert largest(Expr(element(0, BIAS)).node, problem) is None


@pytest.fixture
def sums_side(gpu_side, monkeypatch):
    """launch_gradients with NumPy in CuPy's place."""
    from cuflash import launch_gradients

    monkeypatch.setattr(launch_gradients, "cupy", np)
    return launch_gradients


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sums_become_the_numbers_that_were_added(sums_side, dtype):
    problem = replace(problem_of(length=8), dtype=dtype, program=many())
    dbias = np.empty((1, 2, 8, 1), dtype)
    dargs = (dbias, None, None, None)
    wanted = sums_side.gradients_of(problem, dargs)
    assert [(g.along, g.measured, g.words) for g in wanted] == [((True, False), True, 2)]
    assert problem.program.gradients[wanted[0].number][0] == 0
    sums = sums_side.sums_of(problem, wanted, dargs)[0]
    assert sums.strides == [0, 8, 1, 0] and sums.count == 16
    terms = np.random.default_rng(0).normal(size=(16, 50)) * 1e-3
    sums.choose_unit(np.array([abs(terms).max()]), dtype)
    unit = sums.unit[0]
    assert np.log2(unit) == round(np.log2(unit))
    assert 2.0**50 < abs(terms).max() * unit * sums.terms < 2.0**61
    scaled = terms * unit
    sums.sums[:16] = np.rint(scaled).astype(np.int64).sum(axis=1)
    low = np.rint((scaled - np.rint(scaled)) * 2.0**sums_side.LOW_BITS)
    sums.sums[16:] = low.astype(np.int64).sum(axis=1)
    sums.notes[3], sums.notes[4], sums.notes[5], sums.notes[6] = 1, 2, 4, 6
    sums.finish(dbias)
    want = terms.sum(axis=1)
    want[3:7] = np.nan, np.inf, -np.inf, np.nan
    tolerance = 1e-6 if dtype == "float32" else 1e-14
    np.testing.assert_allclose(dbias.reshape(-1), want, rtol=tolerance, atol=1e-18)


def test_a_run_that_measures_adds_nothing(gpu_side, sums_side, monkeypatch):
    """Of bias and slopes, only the latter's terms must be measured, by a run before the one that
    counts."""
    backward = sys.modules["cuflash.launch_backward"]
    x = np.zeros((1, 2, 7, 8), np.float32)
    options = dict(bias=np.zeros((1, 2, 7, 7), np.float32), alibi_slopes=np.float32([1, 2]))
    home = home_of([("q", x)])
    shaping, scores = edge.split_options("test", options)
    call = edge.resolve(x, x, x, shaping)
    made = edge.scored(home, call, shaping, scores)
    problem, runs = made.problem, []

    def run(problem, given, by_sink, deterministic, wanted, operands, tile):
        sums = operands.sums.values()
        runs.append([one.measuring for one in sums])
        for one in sums:
            if one.measuring:
                one.largest[...] = np.float64(1).view(np.uint64)
            else:
                one.sums[: one.count] += 3
                one.notes[0] |= runs[0] is runs[-1]  # NaN in the first entry

    def choose_bounded_units(problem, sums, *_):
        for one in sums.values():
            one.unit[...] = 1

    monkeypatch.setattr(sums_side, "choose_bounded_units", choose_bounded_units)
    monkeypatch.setattr(backward, "gradients", sums_side)
    monkeypatch.setattr(backward, "_backward", run)
    dargs = [np.full((1, 2, 7, 7), np.nan), np.full((1, 2, 1, 1), np.nan)]
    dargs += [None] * (len(problem.program.args) - 2)
    names = [arg.name for arg in problem.program.args]
    assert names[:2] == ["bias", "alibi_slopes"]
    lse = np.zeros((1, 2, 7), np.float32)
    backward.backward(
        problem, x, x, x, x, x, lse, None, x, x, x, True, extras=made.extras, dargs=dargs
    )
    assert runs == [[False, True], [False, False]]
    assert (dargs[0] == 3).all() and np.isfinite(dargs[1]).all()


def test_sinks_receive_what_their_probability_says(sums_side):
    rng = np.random.default_rng(1)
    sinks, delta = rng.normal(size=(2, 3)), rng.normal(size=(2, 3, 5))
    lse = rng.normal(size=(2, 3, 5))
    lse[0, 0, 0] = -np.inf
    sinks[0, 0] = -np.inf
    lse[1, 1, 1] = sinks[1, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = sums_side.sink_gradient(sinks, lse, delta)
    sinks[0, 0] = 0  # its p is 0 in the end
    lse[0, 0, 0] = 0
    p = np.exp(sinks[..., None] - lse)
    p[0, 0] = 0
    np.testing.assert_allclose(found, -(p * delta).sum(axis=-1))
    shared = np.empty((1, 3))
    sums_side.reduce_to(shared, found)
    np.testing.assert_allclose(shared, found.sum(axis=0, keepdims=True))


def test_dropout_alone_counts_scaled_scores_in_both_passes(gpu_side):
    """The maxima of one pass are subtracted in the other."""
    cupy, _, launch = gpu_side
    problem = replace(problem_of(dtype="float32", length=16), dropout=True)
    q, k, v, out, lse = arrays_of(cupy, problem)
    grads = [cupy.ndarray(x.shape, x.dtype) for x in (q, k, v)]
    launch.log.clear()
    extras = Extras(keep=0.5, seed=1)
    launch.backward(problem, out, q, k, v, out, lse, None, *grads, True, extras=extras)
    passes = {plan.kernel: fields for plan, _, fields in launch.log}
    assert passes["fwd_portable"]["scale_log2"] == passes["bwd_portable"]["scale_log2"] == LOG2E
