"""Lengths and segments on the host: the blocks that meet, backward's turns, and the kernel that writes
lists; the same source compiled as C++.
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

# For each block of queries, then of keys: the range. Then for each visited pair of blocks, m and n,
# its turn, in the order in which the block of keys meets them.
BLOCKS = r"""
int main() {
    Params p;
    int ends[2], group;
    while (std::cin >> p.seqlen_q >> p.seqlen_k >> ends[0] >> ends[1] >> p.band_lo >> p.band_hi >>
           group) {
        p.q_lengths = ends, p.k_lengths = ends + 1;
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
    const void *q_lengths, *k_lengths;
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


@pytest.fixture(scope="module", params=(False, True), ids=("lengths", "band"))
def blocks(request, tmp_path_factory):
    """(run, whether there is a band)"""
    plan = "struct Plan { static constexpr bool kIntervals = false, kLengths = true; "
    plan += f"static constexpr bool kBand = {str(request.param).lower()}; "
    plan += f"static constexpr int kBlockM = {BLOCK_M}, kBlockN = {BLOCK_N}; }};\n"
    mask = (source.folder() / "attn/mask.cuh").read_text()
    lengths = mask[mask.index("struct Lengths") : mask.index("template <bool kBand> struct Mask")]
    skip = ("types.cuh", "ptx/misc.cuh", "attn/mask.cuh")
    parts = [HOST, source.unit("types.cuh"), plan, PARAMS, lengths]
    parts.append(source.unit("attn/range.cuh", skip=skip))
    backward = (source.folder() / "attn/backward_sm90.cuh").read_text()
    start = backward.index("// The blocks of queries that see a block of keys.")
    parts.append(backward[start : backward.index("// The order in which a block of keys")])
    return build(tmp_path_factory.mktemp("blocks"), "\n".join([*parts, BLOCKS])), request.param


def cases(band):
    rng = np.random.default_rng(7)
    for number in range(600):
        size = rng.integers(1, 60, 2)
        ends = [int(rng.choice([-3, 0, n, n + 9, rng.integers(0, n + 1)])) for n in size]
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
unsigned __ballot_sync(unsigned, bool mine) {
    return reduced(int(unsigned(mine) << threadIdx.x % 32), [](int a, int b) { return a | b; });
}
int __popc(unsigned x) { return __builtin_popcount(x); }
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
LISTS = r"""
int main() {
    const auto q = load<int>(BATCH * LENGTH_Q), k = load<int>(BATCH * LENGTH_K);
    std::vector<int> lists(BATCH * ROWS * ROW, -7);
    const Params p{q.data(), k.data(), lists.data(), LENGTH_Q, LENGTH_K, LO, HI, ROWS, ROW};
    each_warp(BATCH * ROWS, 32, [=] { span_lists(p); });
    for (int x : lists) std::cout << x << ' ';
    std::cout << '\n';
}
"""
BATCH, LENGTH_Q, LENGTH_K = 2, 333, 710


def run_lists(folder, cut, backward, data, shape):
    plan = portable.span_lists_plan(cut, backward)
    skip = ("ptx/misc.cuh",)
    parts = [HOST, "#define __shared__ static\n#define __syncthreads warp.meet", WARPS]
    parts += [source.unit("types.cuh"), plan.text().replace("= 256", "= 32")]  # one warp a block
    parts += [params.text(plan.params), source.unit("span_lists.cu", skip=("types.cuh", *skip)), LISTS]
    low, high = cut.band or (-LENGTH_Q, LENGTH_K)
    sizes = dict(BATCH=BATCH, LENGTH_Q=LENGTH_Q, LENGTH_K=LENGTH_K, ROWS=shape[1], ROW=shape[2])
    text = "\n".join(parts)
    for name, value in {**sizes, "LO": low, "HI": high}.items():
        text = re.sub(rf"\b{name}\b", str(value), text)
    (folder / "lists.cpp").write_text(text)
    command = [COMPILER, "-std=c++17", "-O1", "-w", "-pthread", "lists.cpp", "-o", "lists"]
    subprocess.run(command, cwd=folder, check=True)
    done = subprocess.run([folder / "lists"], input=data, check=True, capture_output=True)
    return np.array(done.stdout.split(), int).reshape(shape)


def drawn_ids(kind):
    """Sorted, as packed sequences have them, or not; with long runs, so that some blocks are full."""
    rng = np.random.default_rng(len(kind))
    found = [np.sort(rng.integers(0, 3, (BATCH, n)), -1) for n in (LENGTH_Q, LENGTH_K)]
    if kind == "unsorted":
        found = [np.roll(x, 150, -1) for x in found]
        found[1][:, 5:40] = rng.integers(-9, 9, 35)
    return [x.astype(np.int32) for x in found]


@pytest.mark.parametrize("kind", ("sorted", "unsorted"))
@pytest.mark.parametrize("band", (None, (-400, 90)), ids=str)
@pytest.mark.parametrize("backward", (False, True))
@pytest.mark.parametrize("block", ((64, 128), (128, 32)), ids=str)
def test_lists(tmp_path, kind, band, backward, block):
    """Those that block_lists.py makes of the same kinds."""
    ids, cut = drawn_ids(kind), Cut(LENGTH_Q, LENGTH_K, *block, band, True)
    (q_low, q_high), (k_low, k_high) = (
        [f.reduceat(x, np.arange(0, x.shape[1], size), axis=1) for f in (np.minimum, np.maximum)]
        for x, size in zip(ids, block)
    )  # fmt: skip
    q_low, q_high, k_low, k_high = (
        x[:, :, None] if n < 2 else x[:, None] for n, x in enumerate((q_low, q_high, k_low, k_high))
    )
    meet, one = (q_low <= k_high) & (k_low <= q_high), (q_low == k_high) & (q_high == k_low)
    kinds = np.where(one, 2, meet).astype(np.uint8)
    assert set(kinds.flat) == {0, 1, 2}
    want = block_lists.lists(np, kinds, block, cut, backward)
    found = run_lists(tmp_path, cut, backward, b"".join(x.tobytes() for x in ids), want.shape)
    last = want.shape[1] - 1
    for (_, n), got, should in zip(
        np.ndindex(want.shape[:2]), found.reshape(-1, want.shape[2]), want.reshape(-1, want.shape[2])
    ):
        total = should[0]
        assert got[0] == total
        if not backward and n == last:  # looked at, though forward would not need it
            assert got[1] == total and sorted(got[2 : 2 + total]) == sorted(should[2 : 2 + total])
            continue
        assert got[1] == should[1]
        for start in (2, 2 + cut.blocks[0]) if backward else (2,):
            assert np.array_equal(got[start : start + total], should[start : start + total])
