"""Lengths on the host: the kernel that reads them, the blocks that then meet, and backward's turns; the
same source compiled as C++.
"""

import itertools
import subprocess

import numpy as np
import pytest
from test_kernel_dropout import COMPILER, PRELUDE

from cuflash import params, source

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
