"""From arrays to launches of the Hopper family, without a GPU."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from launches import TILE, Encoder, arrays_of, fields_of, gpu_side, mapped  # noqa: F401
from test_plan import HOPPER, problem_of

from cuflash import jit, tensormap
from cuflash.families import Access, sm90, sm90_backward
from cuflash.problem import Band


@pytest.mark.parametrize("band", [None, Band(-70, 33)])
@pytest.mark.parametrize("length", [70, 7000])
def test_hopper_forward_passes_the_facts_of_a_call(gpu_side, band, length):
    cupy, _, launch = gpu_side
    problem = problem_of("bfloat16", 72, 40, length, 33, batch=(2, 3), band=band, num_heads=6)
    q, k, v, out, lse = arrays_of(cupy, replace(problem, num_kv_heads=2))
    launch.log.clear(), cupy.log.clear(), launch._tickets.clear()
    launch.forward(replace(problem, num_kv_heads=2), q, k, v, out, lse)
    ((plan, blocks, fields),) = launch.log
    assert plan.kernel == "fwd_sm90" and plan["Element"] == "bf16"
    for name, x in (("q_map", q), ("k_map", k), ("v_map", v)):
        assert mapped(fields[name]) == (x.shape, x.strides, x.data.ptr)
    assert [fields[name] for name in ("v", "out", "lse")] == [x.data.ptr for x in (v, out, lse)]
    assert fields["batch_sizes"] == [1, 2, 3] and (fields["num_heads"], fields["group"]) == (6, 3)
    assert (fields["seqlen_q"], fields["seqlen_k"]) == (length, 33)
    assert fields["out_strides"] == [0, *(s // 2 for s in out.strides)]
    assert (fields["band_lo"], fields["band_hi"]) == ((band.lo, band.hi) if band else (0, 0))
    assert fields["num_blocks"] == -(-length // plan["kBlockM"])
    assert fields["num_work"] == 36 * fields["num_blocks"]
    assert blocks == min(fields["num_work"], HOPPER.num_sms)
    # A counter only where blocks draw more than their first piece.
    uneven = band is not None or length % plan["kBlockM"] != 0
    drawn = uneven and fields["num_work"] > blocks
    assert (fields["ticket"] != 0) == drawn and cupy.log == ["zeroed"] * drawn


def test_maps_are_made_anew_for_other_pointers_only(gpu_side):
    cupy, _, launch = gpu_side
    problem = problem_of(length=16, num_heads=1)
    q, k, v, out, lse = arrays_of(cupy, problem)
    other = arrays_of(cupy, problem)[0]
    launch.forward(problem, q, k, v, out, lse)
    for read, count in ((q, 0), (other, 1), (other, 0), (q, 1)):
        before = Encoder.made
        launch.log.clear()
        launch.forward(problem, read, k, v, out, lse)
        assert Encoder.made - before == count
        fields = launch.log[0][2]
        starts = [mapped(fields[name])[2] for name in ("q_map", "k_map", "v_map")]
        assert starts == [x.data.ptr for x in (read, k, v)]


def test_threads_do_not_meet_in_one_struct(gpu_side, monkeypatch):
    """Each launch passes the pointers of its own call, whoever else is launching the same step."""
    cupy, steps, launch = gpu_side
    problem = problem_of(length=16, num_heads=1)
    sets = [arrays_of(cupy, problem) for _ in range(4)]
    (plan,) = launch.plans_of(problem, *sets[0])
    wrong, meet = [], threading.Barrier(4)

    def kernel(device_id, blocks, address):
        meet.wait(10)  # all four structs are filled
        fields = fields_of(plan, address)
        seen.append((fields["out"], mapped(fields["q_map"])[2]))

    monkeypatch.setattr(jit, "kernel", lambda plan, device_id: kernel)
    monkeypatch.setattr(steps, "_prepared", {})
    for _ in range(20):
        seen = []
        threads = [threading.Thread(target=launch.forward, args=(problem, *x)) for x in sets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wrong += {(x[3].data.ptr, x[0].data.ptr) for x in sets} ^ set(seen)
    assert not wrong


def test_more_work_than_32_bits_count_is_an_error(gpu_side):
    _, _, launch = gpu_side
    plan = sm90.forward_plan(problem_of(), HOPPER, Access(16, 16))
    problem = problem_of(length=192 * 2**16, batch=(2**8, 2**8))
    with pytest.raises(NotImplementedError, match="8589934592 pieces of work"):
        launch._sm90_step(problem, HOPPER, plan, launch.Operands(), *[None] * 6)


def test_a_stream_has_one_counter(gpu_side, monkeypatch):
    """Zeroed once: kernels leave it at 0, and those of one stream never meet."""
    cupy, _, launch = gpu_side
    problem = problem_of(length=7000, batch=(9,), band=Band(-7000, 0), num_heads=4)
    arrays = arrays_of(cupy, problem)
    launch._tickets.clear(), cupy.log.clear()
    for number in (7, 8, 7, 8, 7):
        monkeypatch.setattr(cupy, "stream_number", number)
        launch.forward(problem, *arrays)
    assert list(launch._tickets) == [(0, 7), (0, 8)] and cupy.log == ["zeroed"] * 2


def test_a_graph_keeps_its_counter(gpu_side, monkeypatch):
    cupy, steps, launch = gpu_side
    problem = problem_of(length=7000, batch=(9,), band=Band(-7000, 0), num_heads=4)
    arrays = arrays_of(cupy, problem)
    held = steps._held_by_graphs
    monkeypatch.setattr(cupy, "capturing", False)
    launch.forward(problem, *arrays)
    assert not held
    monkeypatch.setattr(cupy, "capturing", True)
    launch.forward(problem, *arrays)
    assert [counter.ptr for counter in held] == [0xC0FFEE00]
    held.clear()


def test_why_the_portable_family_runs(gpu_side, monkeypatch):
    cupy, _, launch = gpu_side

    def reasons(problem, **replaced):
        q, k, v, *_ = arrays_of(cupy, problem)
        given = dict(q=q, k=k, v=v) | replaced
        told = launch.explain(problem, *given.values())
        return told.family, dict(told.rejections).get("sm90", "")

    problem = problem_of(length=16)
    assert reasons(problem) == ("sm90", "")
    late = cupy.ndarray(None, base=np.zeros(2056, np.float16)[1:2049].reshape(1, 2, 16, 64))
    family, reason = reasons(problem, q=late)
    assert family == "portable" and "q: its address" in reason
    family, reason = reasons(problem_of("float32", length=16))
    assert family == "portable" and "16-bit types" in reason
    family, reason = reasons(problem_of(length=16, batch=(2, 3, 2)))
    assert family == "portable" and "3 leading axes" in reason
    monkeypatch.setattr(tensormap, "missing", lambda: "no cuda.bindings")
    assert reasons(problem) == (
        "portable", "tensor maps cannot describe the inputs: no cuda.bindings"
    )  # fmt: skip


def test_a_tile_asks_for_its_family(gpu_side):
    cupy, _, launch = gpu_side
    problem = problem_of(length=16)
    arrays = arrays_of(cupy, problem)
    hopper = sm90.Tile(64, 64, 2)
    for tile, kernel in ((None, "fwd_sm90"), (TILE, "fwd_portable"), (hopper, "fwd_sm90")):
        launch.log.clear()
        launch.forward(problem, *arrays, tile=tile)
        plan = launch.log[0][0]
        assert plan.kernel == kernel and (tile is None or plan["kBlockM"] == 64)
    with pytest.raises(NotImplementedError, match="sm90: it multiplies 16-bit types"):
        other = problem_of("float32", length=16)
        launch.forward(other, *arrays_of(cupy, other), tile=sm90.Tile(64, 64, 2))
    q, k, v, out, lse = arrays
    hopper = sm90_backward.Tile(64, 128)
    for tile, kernel in ((None, "bwd_sm90"), (TILE, "bwd_portable"), (hopper, "bwd_sm90")):
        launch.log.clear()
        launch.backward(problem, out, q, k, v, out, lse, None, q, k, v, True, tile=tile)
        assert launch.log[2][0].kernel == kernel


@pytest.mark.parametrize("need", range(1, 8))
@pytest.mark.parametrize("band", [None, Band(-70, 33)])
@pytest.mark.parametrize("dim, dim_v", [(72, 40), (64, 64), (136, 200)])
def test_hopper_backward_passes_the_facts_of_a_call(gpu_side, dim, dim_v, band, need):
    cupy, _, launch = gpu_side
    problem = problem_of("bfloat16", dim, dim_v, 700, 20_000, batch=(2, 3), band=band, num_heads=6)
    problem = replace(problem, num_kv_heads=2)
    q, k, v, out, lse = arrays_of(cupy, problem)
    dq, dk, dv = (
        cupy.ndarray(x.shape, x.dtype) if need >> n & 1 else None for n, x in enumerate((q, k, v))
    )
    launch.log.clear()
    launch.backward(problem, out, q, k, v, out, lse, None, dq, dk, dv, True)
    kernels = {plan.kernel: (plan, blocks, fields) for plan, blocks, fields in launch.log}
    plan, blocks, fields = kernels["bwd_sm90_wide" if dim > 128 else "bwd_sm90"]
    assert plan["kNeedDq"] == (dq is not None) == ("cast" in kernels)
    assert plan["kNeedDkv"] == (dk is not None or dv is not None)
    maps = {"q_map": q, "k_map": k, "v_map": v, "dout_map": out}
    for name, x in maps.items():
        assert mapped(fields[name]) == (x.shape, x.strides, x.data.ptr)
    assert [fields[name] for name in ("q", "k", "dout")] == [x.data.ptr for x in (q, k, out)]
    assert dk is None or fields["dk"] == dk.data.ptr
    assert dv is None or fields["dv"] == dv.data.ptr
    assert (fields["dk"] != 0) == (fields["dv"] != 0) == plan["kNeedDkv"]
    assert (fields["dq_accum"] != 0) == (fields["flags"] != 0) == (dq is not None)
    assert fields["dq_accum"] % 16 == 0 and fields["stats"] % 16 == 0
    blocks_of_keys = -(-20_000 // plan["kBlockN"])
    assert fields["num_blocks"] == blocks_of_keys and blocks == blocks_of_keys * 12
    assert fields["num_m_blocks"] == -(-700 // plan["kBlockM"])
    assert fields["stats_pitch"] == kernels["delta"][2]["stats_pitch"]
    assert fields["stats_pitch"] >= fields["num_m_blocks"] * plan["kBlockM"]
    # Blocks that wait for each other must all fit the device at once; those of several heads, where
    # few queries would have them wait long.
    groups = [fields["turn_group"], fields["last_turn_group"]]
    if dq is None or band is not None:
        assert groups == [min(blocks_of_keys, HOPPER.num_sms)] * 2
    else:
        assert fields["section"] == 12 and fields["num_sectioned"] == 12
        assert 12 * groups[0] <= HOPPER.num_sms < 12 * (groups[0] + 1) and groups[0] == groups[1]
    if dq is not None:
        assert plan["kStoreFirst"] and kernels["delta"][2]["flags"] == fields["flags"]
        assert kernels["delta"][2]["num_flags"] == 36 * fields["num_m_blocks"] + 1
        assert fields["ticket"] == fields["flags"] + 4 * 36 * fields["num_m_blocks"]
        assert kernels["cast"][0]["kEmptyRows"] == (plan["kBlockM"] if band else 0)
        columns = 8 * plan["kAccumTiles"]
        assert fields["accum_pitch"] == fields["num_m_blocks"] * plan["kBlockM"] * columns
        assert kernels["cast"][0]["kAccumTiles"] == plan["kAccumTiles"]
        assert columns >= dim
