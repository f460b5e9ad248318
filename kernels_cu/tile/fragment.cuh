// Accumulator fragments and the one loop that multiplies tiles. A warp's fragment is kRowTiles x
// kColTiles tiles of 16 x 8 elements; features reach them through for_each(f(x, i, j)) and never
// see a thread.
#pragma once
#include "atom.cuh"

template <class Accum, int kRowTileCount, int kColTileCount> struct Fragment {
    static constexpr int kRowTiles = kRowTileCount;
    static constexpr int kColTiles = kColTileCount;
    Accum x[kRowTiles][kColTiles][4];

    __device__ __forceinline__ void fill(Accum value) {
        for_each(0, 0, [&](Accum& element, int, int) { element = value; });
    }
    // f(element, row, column) for this thread's elements; the fragment's corner is at (row, col).
    template <class F> __device__ __forceinline__ void for_each(int row, int col, F f) {
        const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
            for (int n = 0; n < kColTiles; ++n)
#pragma unroll
                for (int r = 0; r < 4; ++r)
                    f(x[m][n][r], row + 16 * m + g + 8 * (r / 2), col + 8 * n + 2 * t + r % 2);
    }
    // f(element, q): q counts the 2 * kRowTiles rows that this thread holds a part of.
    template <class F> __device__ __forceinline__ void for_each_row(F f) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
            for (int n = 0; n < kColTiles; ++n)
#pragma unroll
                for (int r = 0; r < 4; ++r) f(x[m][n][r], 2 * m + r / 2);
    }
};

// The left operand of a product, made of accumulators: columns become k.
template <class Atom, int kRowTiles, int kSteps> struct Operand {
    typename Atom::A a[kRowTiles][kSteps];

    template <class Accum, int kColTiles>
    __device__ __forceinline__ explicit Operand(const Fragment<Accum, kRowTiles, kColTiles>& c) {
        static_assert(kColTiles * 8 == kSteps * Atom::kK, "every column is one k");
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
            for (int k = 0; k < kSteps; ++k)
                if constexpr (Atom::kK == 8)
                    a[m][k] = Atom::a_from_c(c.x[m][k]);
                else
                    a[m][k] = Atom::a_from_c(c.x[m][2 * k], c.x[m][2 * k + 1]);
    }
};

// c += A B over kSteps steps of Atom::kK. load_a(m, k) gives the operand of row tile m, load_b(b,
// n, k) those of column tiles 2n and 2n + 1. kUnroll: where both operands come from shared memory
// the loop over k need not be unrolled, and for the wide types that keeps the code and the time to
// compile it small. (Reading operands ahead by hand changed nothing: the assembler orders the reads
// by itself.)
template <class Atom, int kSteps, int kUnroll, class C, class LoadA, class LoadB>
__device__ __forceinline__ void gemm(C& c, LoadA load_a, LoadB load_b) {
    constexpr int kPairs = C::kColTiles / 2;
    static_assert(C::kColTiles % 2 == 0, "operands come in pairs of column tiles");
#pragma unroll(kUnroll)
    for (int k = 0; k < kSteps; ++k) {
        typename Atom::A a[C::kRowTiles];
#pragma unroll
        for (int m = 0; m < C::kRowTiles; ++m) a[m] = load_a(m, k);
#pragma unroll
        for (int n = 0; n < kPairs; ++n) {
            typename Atom::B b[2];
            load_b(b, n, k);
#pragma unroll
            for (int m = 0; m < C::kRowTiles; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) Atom::mma(c.x[m][2 * n + half], a[m], b[half]);
        }
    }
}

// A warp's accumulators into a part of a tile of the output's type, each lane its own elements: as
// many column tiles as the part is wide, from `first` on, if there are so many.
template <class Tile, int kWidth, class Accum, int kRowTiles, int kColTiles>
__device__ __forceinline__ void store_fragment(TilePart<Tile, kWidth> part,
                                               const Fragment<Accum, kRowTiles, kColTiles>& c,
                                               int first = 0) {
    using T = typename Tile::Element;
    const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int n = 0; n < kWidth / 8; ++n)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if (first + n >= kColTiles) continue;
                const u32 address = part.address(16 * m + 8 * h, 8 * n, g, 2 * t);
                const Accum left = c.x[m][first + n][2 * h], right = c.x[m][first + n][2 * h + 1];
                if constexpr (sizeof(T) == 2) {
                    Tile::store_pair(address, pack<T>(left, right));
                } else {
                    Tile::store_at(address, left);
                    Tile::store_at(address + sizeof(T), right);
                }
            }
}

// Adds one 16 x 8 accumulator tile to 128 values in global memory. Their order is the fragment's
// own, so that a warp's additions are contiguous: [lane][r] where four can be added at once, else
// [r][lane].
template <bool kVector, class Accum>
__device__ __forceinline__ void add_fragment(Accum* destination, const Accum (&x)[4]) {
    if constexpr (kVector) {
        red_add_v4(destination + 4 * lane_id(), x);
    } else {
#pragma unroll
        for (int r = 0; r < 4; ++r) red_add(destination + kWarpSize * r + lane_id(), x[r]);
    }
}

// Where add_fragment puts element (row, col) of a matrix of kColTiles column tiles.
template <bool kVector, int kColTiles>
__device__ __forceinline__ i64 fragment_index(i64 row, int col) {
    const int r = int(row % 16) / 8 * 2 + col % 2, lane = int(row % 8) * 4 + col % 8 / 2;
    return (row / 16 * kColTiles + col / 8) * 128 + (kVector ? 4 * lane + r : kWarpSize * r + lane);
}
