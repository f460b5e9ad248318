// Whole-block copies between global rows and shared tiles. What does not exist becomes zero on the
// way in and is not written on the way out.
#pragma once
#include "../ptx/cp_async.cuh"
#include "../ptx/cvt.cuh"
#include "../ptx/misc.cuh"
#include "rows.cuh"
#include "smem_tile.cuh"

// Rows first .. first + kRows of `rows` into `tile`. kBytes is the widest piece that every row
// start and row length of the array allows (16, 8 or 4: asynchronous); 0 takes any strides, element
// by element.
template <int kBytes, int kThreads, class T, class Tile>
__device__ __forceinline__ void load_tile(Tile tile, const Rows<T>& rows, int first) {
    const int thread =
        detached(int(threadIdx.x));  // addresses are cheap to compute again, registers are not
    if constexpr (kBytes > 0) {
        constexpr int kPieces = Tile::kCols * int(sizeof(T)) / kBytes;  // a row
        constexpr int kTotal = kPieces * Tile::kRows;
        constexpr int kPerPiece = kBytes / int(sizeof(T));
        constexpr bool kColumnFixed = kThreads % kPieces == 0;
        constexpr int kRowStep = kColumnFixed ? kThreads / kPieces : 1;
        const int start_row = thread / kPieces;
        const int start_col = thread % kPieces * kPerPiece;
        const T* source = rows.at(i64(first) + start_row, start_col);
        const i64 step = kRowStep * rows.row_stride;
        const int start_bytes = min_of(max_of(rows.dim - start_col, 0), kPerPiece) * int(sizeof(T));
        const bool whole = first + Tile::kRows <= rows.count && rows.dim >= Tile::kCols;
        if (kColumnFixed && kTotal % kThreads == 0 && whole) {
#pragma unroll
            for (int i = 0; i < kTotal / kThreads; ++i) {
                cp_async<kBytes>(tile.address(start_row + i * kRowStep, start_col), source);
                source += step;
            }
            return;
        }
#pragma unroll 2
        for (int i = 0; i < (kTotal + kThreads - 1) / kThreads; ++i) {
            if (kTotal % kThreads != 0 && i * kThreads + thread >= kTotal) break;
            if constexpr (kColumnFixed) {
                const int row = start_row + i * kRowStep;
                cp_async<kBytes>(tile.address(row, start_col), source,
                                 first + row < rows.count ? start_bytes : 0);
                source += step;
            } else {
                const int row = (i * kThreads + thread) / kPieces;
                const int col = (i * kThreads + thread) % kPieces * kPerPiece;
                const int bytes = min_of(max_of(rows.dim - col, 0), kPerPiece) * int(sizeof(T));
                cp_async<kBytes>(tile.address(row, col), rows.at(i64(first) + row, col),
                                 first + row < rows.count ? bytes : 0);
            }
        }
    } else {
#pragma unroll 4
        for (int i = thread; i < Tile::kRows * Tile::kCols; i += kThreads) {
            const int row = i / Tile::kCols, col = i % Tile::kCols;
            typename Tile::Element x{};
            if (first + row < rows.count && col < rows.dim) x = *rows.at(i64(first) + row, col);
            tile.store(row, col, x);
        }
    }
}

// `tile` to rows first .. first + kRows. kBytes is 16 where rows start and end on 16 bytes, else 0.
// The caller has made the tile visible to all kThreads threads; `thread` counts them.
template <int kBytes, int kThreads, class T, class Tile>
__device__ __forceinline__ void store_tile(Tile tile, const Rows<T>& rows, int first, int thread) {
    if constexpr (kBytes == 16) {
        constexpr int kPerPiece = 16 / int(sizeof(T));
        constexpr int kPieces = Tile::kCols / kPerPiece;
        constexpr int kCount = ceil_div(kPieces * Tile::kRows, kThreads);
        constexpr int kBatch = kCount % 4 == 0 ? 4 : 1;  // reads of a batch overlap
#pragma unroll
        for (int i = 0; i < kCount; i += kBatch) {
            uint4 pieces[kBatch];
            const auto place = [&](int b) { return (i + b) * kThreads + thread; };
#pragma unroll
            for (int b = 0; b < kBatch; ++b)
                if (place(b) < kPieces * Tile::kRows)
                    pieces[b] = tile.load_piece(place(b) / kPieces, place(b) % kPieces * kPerPiece);
#pragma unroll
            for (int b = 0; b < kBatch; ++b) {
                const int row = place(b) / kPieces, col = place(b) % kPieces * kPerPiece;
                if (row < Tile::kRows && first + row < rows.count && col < rows.dim)
                    store_global_v4(rows.at(i64(first) + row, col), pieces[b]);
            }
        }
    } else {
#pragma unroll 4
        for (int i = thread; i < Tile::kRows * Tile::kCols; i += kThreads) {
            const int row = i / Tile::kCols, col = i % Tile::kCols;
            if (first + row < rows.count && col < rows.dim)
                *rows.at(i64(first) + row, col) = tile.load(row, col);
        }
    }
}

// True, for all threads of the block, when the tile holds inf or NaN; with kReplace they become
// zero. The barrier inside also shows the new tile to all threads. kUnroll: of the rare loop over
// a piece that holds one, how many elements are written out.
template <bool kReplace, int kThreads, int kUnroll = 8, class Tile>
__device__ __forceinline__ bool find_nonfinite(Tile tile) {
    using T = typename Tile::Element;
    constexpr int kPerPiece = 16 / int(sizeof(T));
    constexpr int kPieces = Tile::kCols / kPerPiece;
    bool found = false;
#pragma unroll 2
    for (int i = detached(int(threadIdx.x)); i < kPieces * Tile::kRows; i += kThreads) {
        const int row = i / kPieces, col = i % kPieces * kPerPiece;
        if (!has_nonfinite<T>(tile.load_piece(row, col))) continue;
        found = true;
        if constexpr (kReplace)
#pragma unroll(kUnroll)
            for (int c = 0; c < kPerPiece; ++c)
                if (is_nonfinite(tile.load(row, col + c))) tile.store(row, col + c, T{});
    }
    return __syncthreads_or(found);
}
