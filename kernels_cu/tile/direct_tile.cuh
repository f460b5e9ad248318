// A matrix in global memory behind the reading half of a shared-memory tile's interface: for wide
// heads of wide types on devices with little shared memory. Every element is read where it is used;
// what does not exist reads as zero. The many reads of one element meet in L1 and L2, and the GPUs in
// question compute these types slowly enough not to wait for them.
#pragma once
#include "../ptx/cvt.cuh"
#include "../ptx/misc.cuh"
#include "rows.cuh"
#include "smem_tile.cuh"

template <class T, int kRowCount, int kColCount> struct DirectTile {
    using Element = T;
    static constexpr bool kDirect = true;
    static constexpr int kRows = kRowCount;
    static constexpr int kCols = kColCount;
    static constexpr int kBytes = 0;  // of shared memory
    static_assert(sizeof(T) > 2, "16-bit operands come from ldmatrix");

    Rows<const T> rows;
    int first;                 // the tile's row 0
    bool only_finite = false;  // inf and NaN read as zero

    __device__ __forceinline__ T load(int row, int col) const {
        row = opaque(first + row);  // addresses are cheap to compute again, registers are not
        T x{};
        if (row < rows.count && col < rows.dim) x = *rows.at(row, col);
        return only_finite && is_nonfinite(x) ? T{} : x;
    }
    template <int kWidth = kColCount>
    __device__ __forceinline__ TilePart<DirectTile, kWidth> part(int row, int col) const {
        return {*this, row, col};
    }
};

// Where a kernel reads its inputs from.
template <bool kDirect, class T, int kRows, int kCols>
using InputTile =
    typename Select<kDirect, DirectTile<T, kRows, kCols>, SmemTile<T, kRows, kCols>>::type;

// That input: a tile at `address` in shared memory, or the rows from first() on of rows(), which are
// asked only if need be.
template <class Tile, class MakeRows, class First>
__device__ __forceinline__ Tile input_tile(u32 address, MakeRows rows, First first) {
    if constexpr (Tile::kDirect)
        return {rows(), first()};
    else
        return {address};
}

// Nothing is copied: the tile is read where it lies.
template <int kBytes, int kThreads, class T, int kRows, int kCols>
__device__ __forceinline__ void load_tile(DirectTile<T, kRows, kCols>, const Rows<const T>&, int) {}

// As for tiles in shared memory (copy.cuh): with kReplace, `tile` itself reads inf and NaN as zero
// from here on.
template <bool kReplace, int kThreads, int kUnroll = 1, class T, int kRows, int kCols>
__device__ __forceinline__ bool find_nonfinite(DirectTile<T, kRows, kCols>& tile) {
    bool found = false;
#pragma unroll 1
    for (int i = threadIdx.x; i < kRows * kCols; i += kThreads)
        found |= is_nonfinite(tile.load(i / kCols, i % kCols));
    tile.only_finite = kReplace;
    return __syncthreads_or(found);
}
