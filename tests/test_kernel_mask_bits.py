"""The kernel that writes masks as bits, and what backward reads of them, on the host: the same
source, compiled as C++, a warp as 32 threads.
"""

import re
import subprocess

import numpy as np
import pytest
from test_kernel_dropout import COMPILER, PRELUDE
from test_score_rows import as_booleans

from cuflash import mask_bits, source

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler for the host")

LENGTHS = 70, 45
HEADS = 2
STANDINS = r"""
#define __global__
#define __grid_constant__
#define __launch_bounds__(n)
struct { unsigned x; } blockIdx;
struct uint4 { unsigned x, y, z, w; };
uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
unsigned __ballot_sync(unsigned, bool mine) {
    const int lane = threadIdx.x % 32;
    warp.values[lane] = mine;
    warp.meet();
    unsigned found = 0;
    for (int n = 0; n < 32; ++n) found |= warp.values[n] << n;
    warp.meet();
    return found;
}
struct Params {
    void* bits;
    int band_lo, band_hi, seqlen_q, seqlen_k, row_words;
    unsigned num_heads, num_blocks, num_key_blocks;
};
struct Plan { static constexpr bool kBand = false, kByKey = BY_KEY; };
template <bool kBand> struct Mask { int lo, hi, seqlen_q, seqlen_k; };
template <bool kBand> using MaskFor = Mask<kBand>;
using Accum = float;
struct Score {
    static constexpr bool kProgram = true, kHides = true, kDropout = false, kSinks = false;
    static constexpr bool kBitsByKey = true, kKeepsScore = false, kUnit = true;
    const Params& p;
    unsigned batch, head;
    float scaled(float x) const { return x; }
    float value(float s, int, int) const { return s; }
    float derivative(float, int, int) const { return 1; }
    void value_and_derivative(float s, int, int, float& value, float& slope) const {
        value = s, slope = 1;
    }
    struct None { template <class B> void keep_transposed(B&, int, int) const {} };
    None dropout() const { return {}; }
    template <class F> void for_each_gradient(F) const {}
    const unsigned* bits_of_key(int j) const {
        return (const unsigned*)p.bits + (head * p.seqlen_k + j) * p.row_words;
    }
};
inline bool pattern(int i, int j, int head) { return (i * 37 + j * 11 + head * 5) % 7 < 3; }
template <class M, class S> struct Visible {
    M mask;
    S score;
    bool operator()(int i, int j) const {
        return i < mask.seqlen_q && j < mask.seqlen_k && pattern(i, j, score.head);
    }
    int key(int j) const { return j < mask.seqlen_k ? j : mask.seqlen_k - 1; }
    int query(int i) const { return i; }
    bool transposed(int j, int i) const { return (*this)(i, j); }
};
template <int kWords> void read_words(unsigned (&words)[kWords], const unsigned* address) {
    __builtin_memcpy(words, address, sizeof words);
}
template <class A, int kR, int kC> struct Fragment {
    static constexpr int kRowTiles = kR, kColTiles = kC;
    A x[kR][kC][4];
};
"""
MAIN = r"""
template <class F> void as_warp(int first, F f) {
    std::vector<std::thread> lanes;
    for (int lane = 0; lane < 32; ++lane)
        lanes.emplace_back([=] { threadIdx.x = first + lane, f(); });
    for (auto& lane : lanes) lane.join();
}
int main() {
    Params p{};
    p.seqlen_q = LENGTH_Q, p.seqlen_k = LENGTH_K, p.num_heads = HEADS, p.row_words = ROW_WORDS;
    p.num_blocks = BLOCKS_Q, p.num_key_blocks = BLOCKS_K;
    const int rows = HEADS * (Plan::kByKey ? p.seqlen_k : p.seqlen_q);
    std::vector<u32> bits(rows * p.row_words, 0xdeadbeef);
    p.bits = bits.data();
    for (blockIdx.x = 0; blockIdx.x < HEADS * BLOCKS_Q * BLOCKS_K; ++blockIdx.x)
        for (int n = 0; n < kWarps; ++n) as_warp(32 * n, [&] { mask_bits(p); });
    for (u32 word : bits) std::printf("%u ", word);
    std::printf("\n");
    if (!Plan::kByKey) return 0;
    // The block of 16 keys and 64 queries at (32, 64), a part of it behind both ends.
    static bool seen[16][64];
    as_warp(0, [&] {
        const Visible<Mask<false>, Score> sees{{0, 0, p.seqlen_q, p.seqlen_k}, {p, 0, 1}};
        using Block = TransposedBlock<Fragment<float, 1, 8>>;
        Block::Kept kept;
        Block{sees, 32, 64}.see(kept);
        for_each_place<1, 8>([&](int m, int n, int r) {
            seen[row_in_fragment(m, r)][col_in_fragment(n, r)] = kept.seen.get(m, n, r);
        });
    });
    for (auto& row : seen)
        for (bool x : row) std::printf("%d ", x);
    std::printf("\n");
}
"""


def run(by_key, folder):
    length_q, length_k = LENGTHS
    words = mask_bits.row_words(LENGTHS[not by_key])
    blocks = [-(-n // mask_bits.TILE) for n in LENGTHS]
    blocks[not by_key] = words * 32 // mask_bits.TILE
    sizes = {
        "BY_KEY": str(by_key).lower(), "LENGTH_Q": length_q, "LENGTH_K": length_k, "HEADS": HEADS,
        "ROW_WORDS": words, "BLOCKS_Q": blocks[0], "BLOCKS_K": blocks[1],
    }  # fmt: skip
    skip = ("attn/mask.cuh", "attn/score.cuh")
    parts = source.unit("attn/transposed.cuh", skip=(*skip, "tile/fragment.cuh"))
    kernel = re.sub("#include.*", "", (source.folder() / "mask_bits.cu").read_text())
    kernel = re.sub(r"\bSees\b", "Pairs", kernel)  # transposed.cuh has one of its own
    text = PRELUDE + STANDINS + parts + kernel + MAIN
    for name, value in sizes.items():
        text = re.sub(rf"\b{name}\b", str(value), text)
    (folder / "bits.cpp").write_text(text)
    command = [COMPILER, "-std=c++17", "-O1", "-w", "-pthread", "bits.cpp", "-o", "bits"]
    subprocess.run(command, cwd=folder, check=True)
    done = subprocess.run([folder / "bits"], check=True, capture_output=True, text=True)
    lines = [np.array(line.split(), np.uint32) for line in done.stdout.splitlines()]
    return lines[0].reshape(HEADS, -1, words), lines[1:]


def pattern():
    head, i, j = np.ogrid[:HEADS, : LENGTHS[0], : LENGTHS[1]]
    return (i * 37 + j * 11 + head * 5) % 7 < 3


@pytest.mark.parametrize("by_key", (False, True))
def test_every_bit(by_key, tmp_path):
    """All words are written, those behind the end as 0; backward finds each pair's."""
    words, more = run(by_key, tmp_path)
    want = pattern().swapaxes(1, 2) if by_key else pattern()
    for found, seen in zip(words, want):
        every = as_booleans(np.ascontiguousarray(found), 32 * found.shape[1], by_key)
        assert np.array_equal(every[:, : seen.shape[1]], seen)
        assert not every[:, seen.shape[1] :].any()
    if by_key:
        block = np.zeros((16, 64), bool)
        block[: LENGTHS[1] - 32, : LENGTHS[0] - 64] = want[1, 32:, 64:]
        assert np.array_equal(more[0].reshape(16, 64) == 1, block) and block.any()
