// A row-major matrix in shared memory whose rows are an odd number of 16-byte pieces apart.
//
// The eight rows that one ldmatrix reads then start in eight different groups of four banks, as with an XOR swizzle, but
// the address stays linear in row and column: every fragment's address is one register plus a constant, and any head
// dimension works, not only powers of two. The price is at most 16 bytes a row.
#pragma once
#include "../ptx/cp_async.cuh"
#include "../types.cuh"

__device__ constexpr int padded_row_bytes(int row_bytes) {
    return (row_bytes / 16) % 2 == 0 ? row_bytes + 16 : row_bytes;
}

template <class T, int kRowCount, int kColCount>
struct SmemTile {
    using Element = T;
    static constexpr int kRows = kRowCount;
    static constexpr int kCols = kColCount;
    static constexpr int kRowBytes = padded_row_bytes(kCols * int(sizeof(T)));
    static constexpr int kBytes = kRows * kRowBytes;
    static_assert(kCols * sizeof(T) % 16 == 0, "a row is whole 16-byte pieces");

    u32 base;  // address in the shared window

    __device__ __forceinline__ u32 address(int row, int col) const {
        return base + row * kRowBytes + col * int(sizeof(T));
    }
    __device__ __forceinline__ T load(int row, int col) const {
        T x;
        if constexpr (sizeof(T) == 8) {
            asm volatile("ld.shared.f64 %0, [%1];" : "=d"(x) : "r"(address(row, col)) : "memory");
        } else if constexpr (sizeof(T) == 4) {
            asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address(row, col)) : "memory");
        } else {
            asm volatile("ld.shared.u16 %0, [%1];"
                         : "=h"(x.bits) : "r"(address(row, col)) : "memory");
        }
        return x;
    }
    // Columns col and col + 1, col even.
    __device__ __forceinline__ void load_two(int row, int col, T (&x)[2]) const {
        if constexpr (sizeof(T) == 8) {
            asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];"
                         : "=d"(x[0]), "=d"(x[1]) : "r"(address(row, col)) : "memory");
        } else {
            static_assert(sizeof(T) == 4, "pairs of 16-bit elements are one register: see store_pair");
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                         : "=f"(x[0]), "=f"(x[1]) : "r"(address(row, col)) : "memory");
        }
    }
    __device__ __forceinline__ void store(int row, int col, T x) const {
        if constexpr (sizeof(T) == 8) {
            asm volatile("st.shared.f64 [%0], %1;" :: "r"(address(row, col)), "d"(x) : "memory");
        } else if constexpr (sizeof(T) == 4) {
            asm volatile("st.shared.f32 [%0], %1;" :: "r"(address(row, col)), "f"(x) : "memory");
        } else {
            asm volatile("st.shared.u16 [%0], %1;"
                         :: "r"(address(row, col)), "h"(x.bits) : "memory");
        }
    }
    __device__ __forceinline__ void store_pair(int row, int col, u32 pair) const {
        asm volatile("st.shared.u32 [%0], %1;" :: "r"(address(row, col)), "r"(pair) : "memory");
    }
    // The 16 bytes that begin at column `col`, a multiple of 16 bytes.
    __device__ __forceinline__ uint4 load_piece(int row, int col) const {
        uint4 x;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address(row, col)) : "memory");
        return x;
    }
};
