// A row-major matrix in shared memory, laid out so that the eight rows that one ldmatrix reads
// start in eight different groups of four banks.
//
// Rows of whole 128-byte lines are swizzled: the index of each 16-byte piece is XORed with the
// row's. (Padding instead keeps addresses linear, but rows then start in the middle of a line and
// cp.async writes every line in two parts: 1.8 times the cycles, a fifth of all shared-memory time
// in forward at head_dim 128.) Other rows are padded to an odd number of pieces.
#pragma once
#include "../ptx/cp_async.cuh"
#include "../types.cuh"

__device__ constexpr int row_pitch(int row_bytes) {
    return row_bytes % 128 == 0 || row_bytes / 16 % 2 == 1 ? row_bytes : row_bytes + 16;
}

template <class Tile, int kWidth> struct TilePart;

template <class T, int kRowCount, int kColCount> struct SmemTile {
    using Element = T;
    static constexpr bool kDirect = false;  // see direct_tile.cuh
    static constexpr int kRows = kRowCount;
    static constexpr int kCols = kColCount;
    static constexpr bool kSwizzled = kCols * sizeof(T) % 128 == 0;
    static constexpr int kRowBytes = row_pitch(kCols * int(sizeof(T)));
    static constexpr int kBytes = kRows * kRowBytes;
    static_assert(kCols * sizeof(T) % 16 == 0, "a row is whole 16-byte pieces");

    u32 base;  // address in the shared window, a multiple of 128

    // Doubles are read by quads that cover 32 bytes of four rows, or of every second row of eight.
    static __device__ __forceinline__ int swizzle(int row) {
        return sizeof(T) == 8 ? ((row ^ row >> 2) & 3) << 5 : (row & 7) << 4;
    }

    __device__ __forceinline__ u32 address(int row, int col) const {
        const int offset = col * int(sizeof(T));
        return base + row * kRowBytes + (kSwizzled ? offset ^ swizzle(row) : offset);
    }
    // From (row, col) on. The columns are kWidth wide and begin at a multiple of kWidth.
    template <int kWidth = kColCount>
    __device__ __forceinline__ TilePart<SmemTile, kWidth> part(int row, int col) const {
        return {*this, row, col};
    }
    __device__ __forceinline__ T load(int row, int col) const {
        T x;
        if constexpr (sizeof(T) == 8) {
            asm volatile("ld.shared.f64 %0, [%1];" : "=d"(x) : "r"(address(row, col)) : "memory");
        } else if constexpr (sizeof(T) == 4) {
            asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address(row, col)) : "memory");
        } else {
            asm volatile("ld.shared.u16 %0, [%1];"
                         : "=h"(x.bits)
                         : "r"(address(row, col))
                         : "memory");
        }
        return x;
    }
    __device__ __forceinline__ void store(int row, int col, T x) const {
        store_at(address(row, col), x);
    }
    static __device__ __forceinline__ void store_at(u32 address, T x) {
        if constexpr (sizeof(T) == 8) {
            asm volatile("st.shared.f64 [%0], %1;" ::"r"(address), "d"(x) : "memory");
        } else if constexpr (sizeof(T) == 4) {
            asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
        } else {
            asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(x.bits) : "memory");
        }
    }
    // The two elements at `address`.
    static __device__ __forceinline__ void load_two(u32 address, T (&x)[2]) {
        if constexpr (sizeof(T) == 8) {
            asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];"
                         : "=d"(x[0]), "=d"(x[1])
                         : "r"(address)
                         : "memory");
        } else {
            static_assert(sizeof(T) == 4,
                          "pairs of 16-bit elements are one register: see store_pair");
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                         : "=f"(x[0]), "=f"(x[1])
                         : "r"(address)
                         : "memory");
        }
    }
    static __device__ __forceinline__ void store_pair(u32 address, u32 pair) {
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(pair) : "memory");
    }
    // The 16 bytes that begin at column `col`, a multiple of 16 bytes.
    __device__ __forceinline__ uint4 load_piece(int row, int col) const {
        uint4 x;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                     : "r"(address(row, col))
                     : "memory");
        return x;
    }
};

// A part of a tile as the lanes of a warp read and write it: each at its own place, and all move on
// by the same rows and columns, which are constants where loops are unrolled.
template <class Tile, int kWidth> struct TilePart {
    using Element = typename Tile::Element;
    static constexpr bool kDirect = Tile::kDirect;
    Tile tile;
    int row, col;

    __device__ __forceinline__ Element load(int r, int c) const {
        return tile.load(row + r, col + c);
    }
    // Of (r + lane_row, c + lane_col): r a multiple of 8, c of the columns that the lanes span. No
    // bit of c is then set in the lane's own offset, so one XOR moves the lane's address, once for
    // each c within a line, and the rest is a constant of the instruction that uses it.
    __device__ __forceinline__ u32 address(int r, int c, int lane_row, int lane_col) const {
        constexpr int kWidthBytes = kWidth * int(sizeof(Element));
        // Rows eight apart are swizzled alike, except those of doubles.
        constexpr bool kApart = sizeof(Element) < 8 &&
                                ((kWidthBytes & (kWidthBytes - 1)) == 0 || kWidthBytes % 128 == 0);
        if constexpr (Tile::kSwizzled && !kApart) {
            return tile.address(row + r + lane_row, col + c + lane_col);
        } else {
            const u32 lane = tile.address(row + lane_row, col + lane_col);
            const int offset = c * int(sizeof(Element)), below = Tile::kSwizzled ? offset % 128 : 0;
            return (lane ^ u32(below)) + (r * Tile::kRowBytes + offset - below);
        }
    }
};

// A value of 8 or 16 bytes that all threads of a block share, kept in shared memory where registers
// are full. One thread sets it; a barrier must follow before the first get().
template <class T> struct SharedValue {
    static_assert(sizeof(T) == 8 || sizeof(T) == 16, "one load");
    static constexpr int kBytes = 16;
    u32 address;

    union Words {
        T value;
        u32 x[4];
        __device__ Words() : x{} {}
    };
    __device__ __forceinline__ void set(T value) const {
        Words words;
        words.value = value;
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words.x[0]),
                     "r"(words.x[1]), "r"(words.x[2]), "r"(words.x[3])
                     : "memory");
    }
    __device__ __forceinline__ T get() const {
        Words words;
        if constexpr (sizeof(T) == 8) {
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                         : "=r"(words.x[0]), "=r"(words.x[1])
                         : "r"(address)
                         : "memory");
        } else {
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(words.x[0]), "=r"(words.x[1]), "=r"(words.x[2]), "=r"(words.x[3])
                         : "r"(address)
                         : "memory");
        }
        return words.value;
    }
};
