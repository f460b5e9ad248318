"""The kernels' integer sums of gradients on the host: the same source, a warp as 32 threads."""

import subprocess

import numpy as np
import pytest
from test_kernel_dropout import COMPILER, PRELUDE

from cuflash import source

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler for the host")

STANDINS = r"""
#include <cmath>
using std::fabs;
using std::rint;
long long __float2ll_rn(float x) { return std::llrintf(x); }
long long __double2ll_rn(double x) { return std::llrint(x); }
long long __double_as_longlong(double x) { long long y; __builtin_memcpy(&y, &x, 8); return y; }
template <class X> X exchanged(X x, int lane) {
    unsigned words[2] = {0, 0};
    __builtin_memcpy(words, &x, sizeof x);
    for (unsigned& word : words) word = __shfl_sync(kFullWarp, word, lane);
    __builtin_memcpy(&x, words, sizeof x);
    return x;
}
template <class X> X __shfl_xor_sync(unsigned, X x, int distance) {
    return exchanged(x, threadIdx.x ^ distance);
}
template <class X> void atomicAdd(X* place, X x) { __atomic_fetch_add(place, x, __ATOMIC_RELAXED); }
void atomicOr(unsigned* place, unsigned x) { __atomic_fetch_or(place, x, __ATOMIC_RELAXED); }
void atomicMax(unsigned long long* place, unsigned long long x) {
    static std::mutex mutex;
    std::lock_guard<std::mutex> lock(mutex);
    *place = std::max(*place, x);
}
template <class X> X fmax_of(X a, X b) { return std::fmax(a, b); }
template <class X> bool is_nonfinite(X x) { return !std::isfinite(x); }
template <class A, int kR, int kC> struct Fragment {
    static constexpr int kRowTiles = kR, kColTiles = kC;
    A x[kR][kC][4];
};
"""

PROGRAM = r"""
inline constexpr int kM = 2, kN = 3, kKeys = 29, kQueries = 21, kUnit = 1 << 20;
unsigned long long words[2 * 32 * 24], largest;
unsigned notes[32 * 24];

template <class A, bool kI, bool kJ, int kCount> struct Gradient {
    static constexpr bool kAlongI = kI, kAlongJ = kJ, kMeasured = true;
    static constexpr int kWords = kCount;
    bool measuring;
    A term(A s, int i, int j) const { return s * A(i - j); }
    i64 entry(int i, int j) const { return (kJ ? j : 0) * (kI ? kQueries : 1) + (kI ? i : 0); }
    int seqlen_q() const { return kQueries; }
    int seqlen_k() const { return kKeys; }
    A unit() const { return A(kUnit); }
    u64* largest() const { return measuring ? &::largest : nullptr; }
    GradientSums sums() const { return {words, notes, kI || kJ ? kKeys * kQueries : 1}; }
};

double value(int j, int i) { return std::sin(1.0 + j * 31 + i * 7) / 3; }

template <class A, bool kI, bool kJ, int kCount> void show() {
    std::fill(std::begin(words), std::end(words), 0ull);
    std::fill(std::begin(notes), std::end(notes), 0u);
    largest = 0;
    for (bool measuring : {true, false}) {
        std::vector<std::thread> lanes;
        for (int lane = 0; lane < 32; ++lane)
            lanes.emplace_back([=] {
                threadIdx.x = lane;
                Fragment<A, kM, kN> ds, s;
                FragmentBits<kM, kN> seen;
                seen.fill(false);
                for_each_place<kM, kN>([&](int m, int n, int r) {
                    const int j = row_in_fragment(m, r), i = col_in_fragment(n, r);
                    ds.x[m][n][r] = A(value(j, i)), s.x[m][n][r] = A(0.5);
                    if (j == 3 && i == 4) ds.x[m][n][r] = A(INFINITY);
                    seen.add(m, n, r, j < kKeys && i < kQueries && (i + j) % 5 != 0);
                });
                add_gradient(Gradient<A, kI, kJ, kCount>{measuring}, ds, s, seen, 0, 0);
            });
        for (auto& lane : lanes) lane.join();
    }
    double most;
    __builtin_memcpy(&most, &largest, 8);
    const int count = kI || kJ ? kKeys * kQueries : 1;
    std::printf("%.17g", most);
    for (int n = 0; n < count; ++n) {
        const double low = kCount == 2 ? double(i64(words[count + n])) / (1ull << 40) : 0;
        const int kind = notes[n / 4] >> n % 4 * 8 & 0xff;
        std::printf(" %.17g", kind == 2 ? INFINITY : kind == 4 ? -INFINITY : kind ? NAN
                    : (double(i64(words[n])) + low) / kUnit);
    }
    std::printf("\n");
}
int main() {
    show<float, true, true, 1>(), show<float, false, true, 1>();
    show<float, true, false, 1>(), show<float, false, false, 1>();
    show<double, true, true, 2>(), show<double, false, true, 2>();
    show<double, true, false, 2>(), show<double, false, false, 2>();
}
"""
KEYS, QUERIES = 29, 21
ALONG = ((True, True), (False, True), (True, False), (False, False))  # query, key


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sums")
    skip = ("ptx/misc.cuh", "tile/fragment.cuh")
    text = PRELUDE + STANDINS + source.unit("attn/score_gradients.cuh", skip=skip) + PROGRAM
    (folder / "sums.cpp").write_text(text)
    command = [COMPILER, "-std=c++17", "-O1", "-w", "-pthread", "sums.cpp", "-o", "sums"]
    subprocess.run(command, cwd=folder, check=True)
    run = subprocess.run([folder / "sums"], check=True, capture_output=True, text=True)
    return [np.array(line.split(), float) for line in run.stdout.splitlines()]


@pytest.mark.parametrize("n", range(8))
def test_every_pattern_sums_its_pairs(lines, n):
    along_i, along_j = ALONG[n % 4]
    j, i = np.indices((KEYS, QUERIES))
    terms = np.sin(1.0 + j * 31 + i * 7) / 3 * 0.5 * (i - j)
    terms[3, 4] = np.inf
    terms = np.where((i + j) % 5 != 0, terms, 0)
    most, found = lines[n][0], lines[n][1:]
    tolerance = 1e-12 if n >= 4 else 1e-4
    assert abs(most - abs(terms[np.isfinite(terms)]).max()) < tolerance
    axes = tuple(axis for axis, on in enumerate((along_j, along_i)) if not on)
    want = terms.sum(axis=axes)
    # Entries lie by keys, then queries; the other places hold nothing.
    np.testing.assert_allclose(found[: want.size], want.reshape(-1), atol=tolerance)
    assert not found[want.size :].any()
