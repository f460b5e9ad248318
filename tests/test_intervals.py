"""What packed queries and keys see (offsets.cu, intervals.cu, attn/interval.cuh): the same source on
the host, against every pair of rows.
"""

import subprocess

import numpy as np
import pytest
from test_kernel_dropout import COMPILER, PRELUDE

from cuflash import params, source

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler for the host")

PROGRAM = r"""
#include <iostream>
template <class F> void each_lane(F f) {
    std::vector<std::thread> lanes;
    for (int lane = 0; lane < 32; ++lane)
        lanes.emplace_back([&, lane] {
            threadIdx.x = lane;
            f();
        });
    for (auto& lane : lanes) lane.join();
}
void show(const void* intervals, int count, int other, int block, int other_block) {
    const Interval* rows = static_cast<const Interval*>(intervals);
    for (int n = 0; n < count; ++n) std::cout << rows[n].first << ' ' << rows[n].last << ' ';
    for (int first = 0; first < count; first += block) {
        const BlockRange range =
            interval_range(intervals, first, min_of(first + block, count) - 1, other_block);
        std::cout << range.begin << ' ' << range.full_begin << ' ' << range.full_end << ' '
                  << range.end << ' ';
    }
    std::cout << rows[count].first << ' ' << rows[count + 255].last << '\n';
}
int main() {
    int count, rows_q, rows_k, bottom_right, block_m, block_n;
    i64 left, right, shift;
    while (std::cin >> count >> rows_q >> rows_k >> left >> right >> shift >> bottom_right >>
           block_m >> block_n) {
        std::vector<i64> given_q(count + 1), given_k(count + 1);
        for (auto* given : {&given_q, &given_k})
            for (i64& x : *given) std::cin >> x;
        std::vector<int> q(count + 1), k(count + 1), shifts(count + 1);
        std::vector<int2> intervals_q(rows_q + 256), intervals_k(rows_k + 256);
        std::vector<int4> places_q(rows_q + 256), places_k(rows_k + 256);
        const first::Params offsets{given_q.data(), given_k.data(), q.data(), k.data(),
                                    shifts.data(), count, rows_q, rows_k};
        each_lane([&] { first::offsets(offsets); });
        const second::Params intervals{q.data(), k.data(), intervals_q.data(), intervals_k.data(),
                                       places_q.data(), places_k.data(), count, rows_q, rows_k,
                                       left, right, shift, bottom_right};
        for (blockIdx.x = 0; blockIdx.x * 32 < rows_q + rows_k + 512; ++blockIdx.x)
            for (threadIdx.x = 0; threadIdx.x < 32; ++threadIdx.x) second::intervals(intervals);
        for (int n = 0; n <= count; ++n) std::cout << q[n] << ' ' << k[n] << ' ';
        for (int n = 0; n < count; ++n) std::cout << shifts[n] << ' ';
        std::cout << '\n';
        show(intervals_q.data(), rows_q, rows_k, block_m, block_n);
        show(intervals_k.data(), rows_k, rows_q, block_n, block_m);
        for (const auto* places : {&places_q, &places_k}) {
            for (const int4& x : *places) std::cout << x.x << ' ' << x.y << ' ' << x.z << ' ';
            std::cout << '\n';
        }
    }
}
"""


def translation_unit():
    parts = [
        PRELUDE,
        "#define __global__\n#define __launch_bounds__(x)\n#define __grid_constant__",
        "#define __shared__ static\n#define __syncthreads warp.meet\nLane blockIdx;",
        "struct Plan { using Offset = long long; static constexpr int kThreads = 32; };",
        source.unit("attn/interval.cuh", skip=("ptx/misc.cuh",)),
    ]
    seen = (*source.included("attn/interval.cuh", ()), "ptx/misc.cuh")
    for space, kernel in (("first", "offsets"), ("second", "intervals")):
        unit = source.unit(f"{kernel}.cu", skip=seen)
        parts.append(f"namespace {space} {{\n{params.text(kernel)}{unit}\n}}")
    return "\n".join([*parts, PROGRAM])


def cases():
    """Sequences and windows: (offsets of queries, of keys, rows, window, shift, blocks)."""
    rng = np.random.default_rng(0)
    for number in range(400):
        count = rng.integers(0, 7)
        lengths = rng.integers(0, (2, 9, 40)[number % 3], (2, count))
        if rng.random() < 0.3:
            lengths[1] = lengths[0]
        lengths[:, rng.random(count) < 0.3] *= rng.integers(0, 2, (2, 1))
        offsets = np.concatenate([np.zeros((2, 1), int), np.cumsum(lengths, 1)], 1)
        rows = offsets[:, -1] + rng.integers(0, 20, 2) * rng.integers(0, 2, 2)
        window = [None if rng.random() < 0.4 else int(rng.integers(0, 12)) for _ in "lr"]
        shift = None if rng.random() < 0.6 else int(rng.integers(-15, 15))
        if min(rows) > 0:
            yield offsets, tuple(map(int, rows)), window, shift, tuple(rng.choice([1, 4, 16], 2))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("intervals")
    (folder / "main.cpp").write_text(translation_unit())
    command = [COMPILER, "-std=c++17", "-O1", "-w", "-pthread", "main.cpp", "-o", "main"]
    subprocess.run(command, cwd=folder, check=True)

    def run(items):
        text = ""
        for offsets, rows, window, shift, blocks in items:
            ends = [1 << 40 if x is None else x for x in window]
            text += f"{len(offsets[0]) - 1} {rows[0]} {rows[1]} {ends[0]} {ends[1]} {shift or 0} "
            text += f"{int(shift is None)} {blocks[0]} {blocks[1]} "
            text += " ".join(str(x) for side in offsets for x in side) + "\n"
        output = subprocess.run(
            [folder / "main"], input=text, check=True, capture_output=True, text=True
        ).stdout
        lines = [np.array(line.split(), np.int64) for line in output.splitlines()]
        return [lines[n : n + 5] for n in range(0, len(lines), 5)]

    return run


def visible(offsets, rows, window, shift):
    """The definition, sequence by sequence."""
    seen = np.zeros(rows, bool)
    for n in range(len(offsets[0]) - 1):
        (q0, q1), (k0, k1) = (side[n : n + 2] for side in offsets)
        i, j = np.arange(q1 - q0)[:, None], np.arange(k1 - k0)
        center = i + (k1 - k0 - q1 + q0 if shift is None else shift)
        left, right = (1 << 40 if x is None else x for x in window)
        seen[q0:q1, k0:k1] = (j >= center - left) & (j <= center + right)
    return seen


def split(line, count, block):
    """(intervals, block ranges) of one side."""
    blocks = -(-count // block)
    intervals, line = line[: 2 * count].reshape(-1, 2), line[2 * count :]
    assert line[-2] >= 2**31 - 256 and line[-1] == -1  # spare rows see nothing
    return intervals, line[: 4 * blocks].reshape(-1, 4)


def inside(intervals, count):
    columns = np.arange(count)
    return (columns >= intervals[:, :1]) & (columns <= intervals[:, 1:])


def padded(seen, block_m, block_n):
    """By blocks: whether any pair is visible, whether all inside the arrays are."""
    rows, cols = seen.shape
    room = np.zeros((-(-rows // block_m) * block_m, -(-cols // block_n) * block_n), bool)
    shape = (room.shape[0] // block_m, block_m, room.shape[1] // block_n, block_n)
    room[:rows, :cols] = seen
    some = room.reshape(shape).any(axis=(1, 3))
    room[rows:] = room[:, cols:] = True
    room[:rows, :cols] = seen
    return some, room.reshape(shape).all(axis=(1, 3))


def between(ranges, count, first, last):
    columns = np.arange(count)
    return (columns >= ranges[:, first, None]) & (columns < ranges[:, last, None])


def test_every_pair(run):
    items = list(cases())
    assert len(items) > 200
    for item, (ends, of_q, of_k, places_q, places_k) in zip(items, run(items), strict=True):
        offsets, rows, window, shift, blocks = item
        want = visible(offsets, rows, window, shift)
        count = len(offsets[0]) - 1
        assert np.array_equal(ends[: 2 * count + 2].reshape(-1, 2).T, offsets)
        lengths = np.diff(offsets, axis=1)
        assert np.array_equal(ends[2 * count + 2 :], lengths[1] - lengths[0])
        queries, keys = split(of_q, rows[0], blocks[0]), split(of_k, rows[1], blocks[1])
        assert np.array_equal(inside(queries[0], rows[1]), want), item
        assert np.array_equal(inside(keys[0], rows[0]), want.T), item
        some, whole = padded(want, *blocks)
        met = between(queries[1], some.shape[1], 0, 3)
        assert np.array_equal(met, between(keys[1], some.shape[0], 0, 3).T), item
        assert not (some & ~met).any(), item
        for found in (
            between(queries[1], some.shape[1], 1, 2), between(keys[1], some.shape[0], 1, 2).T
        ):  # fmt: skip
            # Only what is full counts as full; and all of it, but for the ends of the arrays.
            assert not (found & ~whole).any(), item
            inner = tuple(n // block for n, block in zip(rows, blocks))
            assert np.array_equal(found[: inner[0], : inner[1]], whole[: inner[0], : inner[1]])
        for n, (places, side) in enumerate(((places_q, offsets[0]), (places_k, offsets[1]))):
            place = places.reshape(-1, 3)
            number = np.searchsorted(side, np.arange(len(place)), "right") - 1
            assert np.array_equal(place[:, 0], number)
            assert np.array_equal(place[:, 1:], np.array(offsets)[:, number].T), n


def test_bad_offsets_are_made_safe(run):
    given = np.array([[3, -5, 4, 2, 90, 6], [7, 9, 8, 30, -1, 12]])
    want = np.array([[0, 0, 4, 4, 12, 12], [0, 9, 9, 20, 20, 20]])
    (found,) = run([(given, (12, 20), (None, 0), None, (4, 4))])
    assert np.array_equal(found[0][:12].reshape(-1, 2).T, want)
    seen = visible(want, (12, 20), (None, 0), None)
    assert np.array_equal(inside(split(found[1], 12, 4)[0], 20), seen)
    many = np.sort(np.random.default_rng(1).integers(0, 500, (2, 1000)), axis=1)
    many[:, 0] = 0
    (found,) = run([(many, (500, 500), (None, None), None, (16, 16))])
    assert np.array_equal(found[0][:2000].reshape(-1, 2).T, many)
