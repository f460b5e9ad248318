"""Lengths and segments on the host: the kernels that read them, the blocks that then meet, and backward's
turns; the same source compiled as C++.
"""

import itertools
import re
import subprocess

import numpy as np
import pytest
from test_kernel_dropout import COMPILER, PRELUDE

from cuflash import block_lists, params, source
from cuflash.block_lists import Cut
from cuflash.families import portable
from cuflash.plan import round_up

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler for the host")

HOST = (
    PRELUDE
    + r"""
#include <iostream>
#define __global__
#define __launch_bounds__(x)
#define __grid_constant__
Lane blockIdx;
"""
)
BLOCK_M, BLOCK_N = 4, 8

LENGTHS = r"""
int main() {
    std::vector<long long> q{-5, 0, 3, 7, 8, 1ll << 40};
    std::vector<unsigned char> k{0, 200, 1, 2, 3, 255};
    std::vector<int> found(12, -1);
    for (bool given : {true, false}) {
        Params p{given ? q.data() : nullptr, k.data(), found.data()};
        p.q_given_strides.batch[2] = 1, p.k_given_strides.batch[1] = 1;
        p.batch_sizes[0] = 1, p.batch_sizes[1] = 2, p.batch_sizes[2] = 3;
        p.seqlen_q = 7, p.seqlen_k = 100, p.count = 6;
        for (threadIdx.x = 0; threadIdx.x < 8; ++threadIdx.x) lengths(p);
        for (int x : found) std::cout << x << ' ';
        std::cout << '\n';
    }
}
"""
# For each block of queries, then of keys: the range. Then for each visited pair of blocks, m and n,
# its turn, in the order in which the block of keys meets them.
BLOCKS = r"""
int main() {
    Params p;
    int ends[2], group;
    while (std::cin >> p.seqlen_q >> p.seqlen_k >> ends[0] >> ends[1] >> p.band_lo >> p.band_hi >>
           group) {
        p.lengths = ends;
        p.num_m_blocks = ceil_div(p.seqlen_q, Plan::kBlockM);
        p.num_blocks = ceil_div(p.seqlen_k, Plan::kBlockN);
        p.num_heads = p.group = p.num_sectioned = 1;
        p.turn_group = p.last_turn_group = group;
        const auto show = [](const BlockRange& x) {
            std::cout << x.begin << ' ' << x.full_begin << ' ' << x.full_end << ' ' << x.end << ' ';
        };
        const Lengths own = lengths_of(p, 0);
        for (int m = 0; m < int(p.num_m_blocks); ++m) {
            const int first = m * Plan::kBlockM;
            const int last = min_of(first + Plan::kBlockM, own.seqlen_q) - 1;
            show(key_blocks(p, own, first, last));
        }
        for (int n = 0; n < int(p.num_blocks); ++n) show(queries_of(p, {n, 0, 0}));
        std::cout << '\n';
        for (int n = 0; n < int(p.num_blocks); ++n) {
            const Work<1> w{n, 0, 0};
            const BlockRange range = queries_of(p, w);
            int m = Plan::kBand ? range.begin : Place(p, w).start();
            for (int left = range.end - range.begin; left > 0; --left) {
                std::cout << m << ' ' << n << ' ' << turn_of(p, w, m) << ' ';
                m = m + 1 == range.end ? range.begin : m + 1;
            }
        }
        std::cout << '\n';
    }
}
"""
PARAMS = r"""
struct Params {
    const void* lengths;
    int seqlen_q, seqlen_k, band_lo, band_hi;
    unsigned num_heads, group, num_blocks, num_m_blocks, num_sectioned, turn_group, last_turn_group;
};
template <int> struct Work { int block; unsigned head, batch; };
"""


def build(folder, text):
    (folder / "main.cpp").write_text(text)
    command = [COMPILER, "-std=c++17", "-O1", "-w", "-pthread", "main.cpp", "-o", "main"]
    subprocess.run(command, cwd=folder, check=True)

    def run(text=""):
        done = subprocess.run([folder / "main"], input=text, check=True, capture_output=True,
                              text=True)  # fmt: skip
        return [np.array(line.split(), int) for line in done.stdout.splitlines()]

    return run


def test_any_integers_become_lengths(tmp_path):
    plan = "struct Plan { using GivenQ = i64; using GivenK = unsigned char; "
    plan += "static constexpr int kThreads = 8; };\n"
    parts = [HOST, source.unit("types.cuh"), plan, params.text("lengths")]
    parts += [source.unit("lengths.cu", skip=("types.cuh",)), LENGTHS]
    both, one = build(tmp_path, "\n".join(parts))()
    k = [0, 0, 0, 100, 100, 100]  # along the second axis alone
    assert both.reshape(6, 2).T.tolist() == [[0, 0, 3] * 2, k]
    assert one.reshape(6, 2).T.tolist() == [[7] * 6, k]


@pytest.fixture(scope="module", params=(False, True), ids=("lengths", "band"))
def blocks(request, tmp_path_factory):
    """(run, whether there is a band)"""
    plan = "struct Plan { static constexpr bool kIntervals = false, kLengths = true; "
    plan += f"static constexpr bool kBand = {str(request.param).lower()}; "
    plan += f"static constexpr int kBlockM = {BLOCK_M}, kBlockN = {BLOCK_N}; }};\n"
    skip = ("types.cuh", "ptx/misc.cuh")
    parts = [HOST, source.unit("types.cuh"), plan, PARAMS, source.unit("attn/range.cuh", skip=skip)]
    backward = (source.folder() / "attn/backward_sm90.cuh").read_text()
    start = backward.index("// The blocks of queries that see a block of keys.")
    parts.append(backward[start : backward.index("// The order in which a block of keys")])
    return build(tmp_path_factory.mktemp("blocks"), "\n".join([*parts, BLOCKS])), request.param


def cases(band):
    rng = np.random.default_rng(7)
    for number in range(600):
        size = rng.integers(1, 60, 2)
        ends = [int(rng.choice([0, n, rng.integers(0, n + 1)])) for n in size]
        lo, hi = sorted(rng.integers(-70, 70, 2)) if band else (0, 0)
        if number % 3 == 0:
            lo = -70
        yield (*size, *ends, lo, hi, int(rng.integers(1, 9)))


def seen_of(case, band):
    length, keys, q_end, k_end, lo, hi, _ = case
    i, j = np.ogrid[:length, :keys]
    return (i < q_end) & (j < k_end) & (not band or ((j - i >= lo) & (j - i <= hi)))


def test_blocks_that_meet(blocks):
    """Just those with a visible pair are visited, in both directions; none that is called full has a
    hidden one. Turns at a block of queries are 0, 1, ...
    """
    run, band = blocks
    given = list(cases(band))
    lines = run("\n".join(" ".join(map(str, case)) for case in given))
    for case, ranges, turns in zip(given, lines[::2], lines[1::2], strict=True):
        seen = seen_of(case, band)
        counts = -(-seen.shape[0] // BLOCK_M), -(-seen.shape[1] // BLOCK_N)
        ranges = ranges.reshape(-1, 4)
        by_queries, by_keys = ranges[: counts[0]], ranges[counts[0] :]
        visits = np.zeros((2, *counts), bool)
        for m, n in itertools.product(*map(range, counts)):
            block = seen[m * BLOCK_M :][:BLOCK_M, n * BLOCK_N :][:, :BLOCK_N]
            rows_left = case[2] - m * BLOCK_M
            for way, (begin, full_begin, full_end, end) in enumerate((by_queries[m], by_keys[n])):
                at = (n, m)[way]
                visits[way, m, n] = begin <= at < end
                assert block.any() <= visits[way, m, n], case
                if full_begin <= at < full_end:
                    # Forward forgets rows behind the last query.
                    rows = block[:rows_left] if way == 0 else block
                    assert rows.all() and rows.shape[1] == BLOCK_N, case
                    assert way == 0 or rows.shape[0] == BLOCK_M, case
        assert np.array_equal(*visits), case
        found = turns.reshape(-1, 3)
        for m in range(counts[0]):
            order = found[found[:, 0] == m]
            assert sorted(order[:, 2]) == list(range(visits[0, m].sum())), case
            assert set(order[:, 1]) == set(np.flatnonzero(visits[0, m])), case


def test_turns_never_wait_for_each_other(blocks):
    """A group's blocks of keys, each in its own order, finish: a step runs once all turns before its
    own are over.
    """
    run, band = blocks
    given = list(cases(band))[:200]
    lines = run("\n".join(" ".join(map(str, case)) for case in given))
    for case, turns in zip(given, lines[1::2], strict=True):
        queues = {}
        for m, n, turn in turns.reshape(-1, 3):
            queues.setdefault(n, []).append((m, turn))
        done = dict.fromkeys(turns.reshape(-1, 3)[:, 0], 0)
        # With a band tickets are in the order of the turns: from the last block on.
        while queues:
            ready = [n for n, steps in queues.items() if done[steps[0][0]] == steps[0][1]]
            assert ready, case
            for n in ready:
                m, turn = queues[n][0]
                if done[m] == turn:
                    queues[n].pop(0)
                    done[m] += 1
            queues = {n: steps for n, steps in queues.items() if steps}


# ---- segments --------------------------------------------------------------------------------------

WARPS = r"""
template <class F> int reduced(int mine, F f) {
    warp.values[threadIdx.x % 32] = mine;
    warp.meet();
    int found = mine;
    for (unsigned x : warp.values) found = f(found, int(x));
    warp.meet();
    return found;
}
int __reduce_min_sync(unsigned, int x) { return reduced(x, [](int a, int b) { return a < b ? a : b; }); }
int __reduce_max_sync(unsigned, int x) { return reduced(x, [](int a, int b) { return a > b ? a : b; }); }
unsigned __ballot_sync(unsigned, bool mine) {
    return reduced(int(unsigned(mine) << threadIdx.x % 32), [](int a, int b) { return a | b; });
}
int __popc(unsigned x) { return __builtin_popcount(x); }
inline constexpr int kWarpSize = 32;
template <class F> void each_warp(int blocks, int threads, F f) {
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (int first = 0; first < threads; first += 32) {
            std::vector<std::thread> lanes;
            for (int lane = 0; lane < 32; ++lane)
                lanes.emplace_back([=] { threadIdx.x = first + lane, f(); });
            for (auto& lane : lanes) lane.join();
        }
}
template <class X> std::vector<X> load(std::size_t count) {
    std::vector<X> found(count);
    std::fread(found.data(), sizeof(X), count, stdin);
    return found;
}
"""
SPANS = r"""
int main() {
    const auto q = load<Plan::GivenQ>(BATCH * LENGTH_Q);
    const auto k = load<Plan::GivenK>(LENGTH_K);
    std::vector<int> ids(BATCH * PITCH, -7), spans(BATCH * PITCH / 16, -7);
    Params p{q.data(), k.data(), ids.data(), spans.data()};
    p.q_given_strides.batch[2] = LENGTH_Q, p.q_given_strides.row = p.k_given_strides.col = 1;
    for (int& size : p.batch_sizes) size = 1;
    p.batch_sizes[2] = p.count = BATCH;
    p.seqlen_q = LENGTH_Q, p.seqlen_k = LENGTH_K, p.first_key = FIRST_KEY, p.pitch = PITCH;
    each_warp((BATCH * PITCH + 127) / 128, 128, [=] { ::spans(p); });
    for (const auto* found : {&ids, &spans})
        for (int x : *found) std::cout << x << ' ';
    std::cout << '\n';
}
"""
LISTS = r"""
int main() {
    const auto spans = load<int>(BATCH * PITCH / 16);
    std::vector<int> lists(BATCH * ROWS * ROW, -7);
    const Params p{spans.data(), lists.data(), LENGTH_Q, LENGTH_K, BATCH, FIRST_KEY, PITCH, LO, HI,
                   ROWS, ROW};
    each_warp((BATCH * ROWS + 3) / 4, 128, [=] { span_lists(p); });
    for (int x : lists) std::cout << x << ' ';
    std::cout << '\n';
}
"""
BATCH, LENGTH_Q, LENGTH_K = 2, 333, 710
FIRST_KEY = round_up(LENGTH_Q, 32)
PITCH = FIRST_KEY + round_up(LENGTH_K, 32)
SIZES = dict(BATCH=BATCH, LENGTH_Q=LENGTH_Q, LENGTH_K=LENGTH_K, FIRST_KEY=FIRST_KEY, PITCH=PITCH)


def run_kernel(folder, plan, main, data, skip, before="", **sizes):
    """What a kernel's host program prints of the arrays that it reads."""
    parts = [HOST, source.unit("types.cuh", skip=skip), WARPS, plan.text(), before]
    parts += [params.text(plan.params), source.unit(f"{plan.kernel}.cu", skip=("types.cuh", *skip))]
    text = "\n".join([*parts, main]).replace("inline constexpr int kWarpSize = 32;", "", 1)
    for name, value in {**SIZES, **sizes}.items():
        text = re.sub(rf"\b{name}\b", str(value), text)
    (folder / "kernel.cpp").write_text(text)
    command = [COMPILER, "-std=c++17", "-O1", "-w", "-pthread", "kernel.cpp", "-o", "kernel"]
    subprocess.run(command, cwd=folder, check=True)
    done = subprocess.run([folder / "kernel"], input=data, check=True, capture_output=True)
    return np.array(done.stdout.split(), int)


def drawn_ids(kind):
    """Sorted, as packed sequences have them, or not; with long runs, so that some blocks are full."""
    rng = np.random.default_rng(len(kind))
    q, k = (np.sort(rng.integers(0, 3, (rows, n))) for rows, n in ((BATCH, LENGTH_Q), (1, LENGTH_K)))
    if kind == "unsorted":
        q, k = (np.roll(x, 150, -1) for x in (q, k))
        k[0, 5:40] = rng.integers(-9, 9, 35)
    return q, k[0]


def spans_of(q, k):
    """(batch, PITCH / 32, 2)"""
    found = []
    for own in q:
        parts = [x[n : n + 32] for x in (own, k) for n in range(0, len(x), 32)]
        found.append([(x.min(), x.max()) for x in parts])
    return np.array(found, np.int32)


def test_ids_and_their_spans(tmp_path):
    """Of any integers, saturated as scores read them; behind the end none."""
    q, k = drawn_ids("unsorted")
    q = q.astype(np.int64)
    q[0, :3] = 1 << 40, -(1 << 40), 5
    plan = portable.given_plan("spans", "int64", "int16")
    program = (source.folder() / "attn/program.cuh").read_text()
    start = program.index("template <class Int> __device__ __forceinline__ int read_int")
    read_int = program[start : program.index("\n}\n", start) + 3]
    rows = source.unit("tile/rows.cuh", skip=("types.cuh",))
    data = q.tobytes() + k.astype(np.int16).tobytes()
    found = run_kernel(tmp_path, plan, SPANS, data, ("attn/program.cuh",), rows + read_int)
    ids, spans = found[: BATCH * PITCH].reshape(BATCH, PITCH), found[BATCH * PITCH :]
    q = np.clip(q, -(1 << 31), (1 << 31) - 1)
    assert np.array_equal(ids[:, :LENGTH_Q], q)
    assert np.array_equal(ids[:, FIRST_KEY:][:, :LENGTH_K], np.broadcast_to(k, (BATCH, LENGTH_K)))
    assert np.array_equal(spans.reshape(BATCH, -1, 2), spans_of(q, k))


@pytest.mark.parametrize("kind", ("sorted", "unsorted"))
@pytest.mark.parametrize("band", (None, (-400, 90)), ids=str)
@pytest.mark.parametrize("backward, spread", ((False, False), (True, False), (True, True)))
def test_lists(tmp_path, kind, band, backward, spread):
    """Those that block_lists.py makes of the same kinds."""
    q, k = drawn_ids(kind)
    spans = spans_of(q, k)
    cut = Cut(LENGTH_Q, LENGTH_K, 64, 128, band, True, spread)
    units = spans[:, : FIRST_KEY // 32], spans[:, FIRST_KEY // 32 :]
    (m, n) = ([(x[:, at : at + size, 0].min(1), x[:, at : at + size, 1].max(1))
               for at in range(0, x.shape[1], size)] for x, size in zip(units, (2, 4)))  # fmt: skip
    kinds = np.zeros((BATCH, len(m), len(n)), np.uint8)
    for (a, (low, high)), (b, (first, last)) in itertools.product(enumerate(m), enumerate(n)):
        full = (low == last) & (high == first)
        kinds[:, a, b] = np.where(full, 2, (low <= last) & (first <= high))
    assert set(kinds.flat) == {0, 1, 2}
    want = block_lists.lists(np, kinds, (64, 128), cut, backward)
    rows, row = want.shape[1:]
    plan = portable.span_lists_plan(cut, backward)
    low, high = band or (0, 0)
    found = run_kernel(
        tmp_path, plan, LISTS, spans.tobytes(), ("ptx/misc.cuh",),
        ROWS=rows, ROW=row, LO=low, HI=high,
    ).reshape(want.shape)  # fmt: skip
    assert np.array_equal(found[..., :2], want[..., :2])
    for got, should in zip(found.reshape(-1, row), want.reshape(-1, row)):
        for start in (2, 2 + cut.blocks[0]) if backward else (2,):
            visited = slice(start, start + should[0])
            assert np.array_equal(got[visited], should[visited])
