"""The kernels' dropout mask on the host: the same source, compiled as C++, a warp as 32 threads.

Every element of every layout must be kept or not by its seed and its place alone.
"""

import shutil
import subprocess

import numpy as np
import pytest

from cuflash import source

COMPILER = shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler for the host")

PRELUDE = r"""
#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <thread>
#include <vector>
#define __device__
#define __forceinline__ inline
struct Lane { int x; };
struct int2 { int x, y; };
struct int4 { int x, y, z, w; };
inline int opaque(int x) { return x; }
template <class X> X load_constant(const X* address) { return *address; }
thread_local Lane threadIdx;
inline constexpr unsigned kFullWarp = ~0u;
inline int detached(int x) { return x; }

// What the lanes of a warp exchange: all write, all read, in step.
struct Warp {
    std::mutex mutex;
    std::condition_variable done;
    int waiting = 0, round = 0;
    unsigned values[32];
    void meet() {
        std::unique_lock<std::mutex> lock(mutex);
        const int now = round;
        if (++waiting == 32) waiting = 0, ++round, done.notify_all();
        else done.wait(lock, [&] { return round != now; });
    }
} warp;
unsigned __shfl_sync(unsigned, unsigned x, int lane) {
    warp.values[threadIdx.x] = x;
    warp.meet();
    const unsigned found = warp.values[lane];
    warp.meet();
    return found;
}
"""

PROGRAM = r"""
template <int kRows, int kCols, bool kTransposed, class Dropout>
void show(Dropout dropout, int row, int col) {
    std::vector<int> kept(16 * kRows * 8 * kCols);
    std::vector<std::thread> lanes;
    for (int lane = 0; lane < 32; ++lane)
        lanes.emplace_back([&, lane] {
            threadIdx.x = lane;
            FragmentBits<kRows, kCols> bits;
            if (kTransposed) dropout.keep_transposed(bits, row, col);
            else dropout.keep(bits, row, col);
            for_each_place<kRows, kCols>([&](int m, int n, int r) {
                kept[row_in_fragment(m, r) * 8 * kCols + col_in_fragment(n, r)] = bits.get(m, n, r);
            });
        });
    for (auto& lane : lanes) lane.join();
    for (int x : kept) std::printf("%d", x);
    std::printf("\n");
}
int main() {
    u32 counter[4] = {0, 0, 0, 0};
    philox(counter, 0, 0);
    std::printf("%08x %08x %08x %08x\n", counter[0], counter[1], counter[2], counter[3]);
    u32 digits[4] = {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344};
    philox(digits, 0xa4093822, 0x299f31d0);
    std::printf("%08x %08x %08x %08x\n", digits[0], digits[1], digits[2], digits[3]);
    const Dropout some{SEED, 192, 3, 5}, all{SEED, 256, 3, 5};
    show<2, 6, false>(some, 40, 64);
    show<1, 2, false>(some, 40, 64);
    show<2, 6, true>(some, 64, 40);
    show<1, 4, true>(some, 64, 40);
    show<1, 2, true>(all, 64, 40);
    std::vector<int4> places(512, int4{0, 0, 0, 0});
    for (int i = 45; i < 512; ++i) places[i] = {2, 45, 71, 0};
    const PackedDropout packed{SEED, 192, 3, 5, places.data()};
    show<2, 6, false>(packed, 40, 64);
    show<2, 6, true>(packed, 64, 40);
    show<1, 2, true>(PackedDropout{SEED, 256, 3, 5, places.data()}, 64, 40);
}
"""
SEED = 0x0123456789ABCDEF


def philox(counter, key):
    """Philox4x32-7 as its paper has it, on Python's integers."""
    a, b, c, d = counter
    low, high = key
    for _ in range(7):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (second >> 32) ^ b ^ low, second, (first >> 32) ^ d ^ high, first
        a, b, c, d = (x & 0xFFFFFFFF for x in (a, b, c, d))
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return a, b, c, d


def is_kept(i, j, batch=3, head=5, limit=192):
    words = philox((j // 16, i, head, batch), (SEED & 0xFFFFFFFF, SEED >> 32))
    return (words[j % 16 // 4] >> 8 * (j % 4) & 0xFF) < limit


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dropout")
    text = PRELUDE + source.unit("attn/dropout.cuh", skip=("ptx/misc.cuh",))
    text += PROGRAM.replace("SEED", f"{SEED:#x}ull")
    (folder / "dropout.cpp").write_text(text)
    command = [COMPILER, "-std=c++17", "-O1", "-w", "-pthread", "dropout.cpp", "-o", "dropout"]
    subprocess.run(command, cwd=folder, check=True)
    return subprocess.run(
        [folder / "dropout"], check=True, capture_output=True, text=True
    ).stdout.split("\n")


def test_philox_is_the_published_one(lines):
    assert lines[0] == "5f6fb709 0d893f64 4f121f81 4f730a48"
    assert lines[1] == "4dfccaba 190a87f0 c47362ba b6b5242a"


@pytest.mark.parametrize(
    "line, rows, cols, transposed",
    [(2, 32, 48, False), (3, 16, 16, False), (4, 32, 48, True), (5, 16, 32, True)],
)
def test_every_layout_keeps_the_same(lines, line, rows, cols, transposed):
    found = np.array([x == "1" for x in lines[line]]).reshape(rows, cols)
    found = found.T if transposed else found
    want = [[is_kept(40 + i, 64 + j) for j in range(found.shape[1])] for i in range(found.shape[0])]
    np.testing.assert_array_equal(found, want)
    assert 0.6 < found.mean() < 0.9


@pytest.mark.parametrize("line, transposed", [(7, False), (8, True)])
def test_packed_sequences_count_in_their_own(lines, line, transposed):
    found = np.array([x == "1" for x in lines[line]]).reshape(32, 48)
    found = found.T if transposed else found
    checked = 0
    for i in range(40, 40 + found.shape[0]):
        number, q_start, k_start = (2, 45, 71) if i >= 45 else (0, 0, 0)
        for j in range(max(64, k_start), 64 + found.shape[1]):
            want = is_kept(i - q_start, j - k_start, batch=3 + number)
            assert found[i - 40, j - 64] == want, (i, j)
            checked += 1
    assert checked > 1000


def test_nothing_is_dropped_where_the_rounded_probability_is_1(lines):
    assert lines[6] == lines[9] == "1" * 256
