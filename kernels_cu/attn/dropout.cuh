// Which weights dropout keeps: a pure function of the seed and of (batch, head, query, key), so
// that no tile and no kernel changes a bit.
#pragma once
#include "../ptx/misc.cuh"
#include "../tile/bits.cuh"
#include "interval.cuh"

// Random bits as a pure function of a key and a counter: Philox4x32-10 (Salmon, Moraes, Dror and
// Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC11, section 3.3 and table 2). The same
// function as cuflash/philox.py.
__device__ __forceinline__ void philox(u32 (&counter)[4], u32 key_low, u32 key_high) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u64 first = u64(counter[0]) * 0xd2511f53u, second = u64(counter[2]) * 0xcd9e8d57u;
        counter[0] = u32(second >> 32) ^ counter[1] ^ key_low;
        counter[1] = u32(second);
        counter[2] = u32(first >> 32) ^ counter[3] ^ key_high;
        counter[3] = u32(first);
        key_low += 0x9e3779b9u;
        key_high += 0xbb67ae85u;
    }
}

// Which of the four bytes are below `limit`, 1 .. 255: bits 0 .. 3.
__device__ __forceinline__ u32 bytes_below(u32 bytes, u32 limit) {
    const u32 limits = limit * 0x01010101u, high = 0x80808080u;
    // Borrows of a bytewise subtraction, which stop at each byte's highest bit.
    const u32 difference = (bytes | high) - (limits & ~high);
    const u32 below = ((~bytes & limits) | (~(bytes ^ limits) & ~difference)) & high;
    return ((below >> 7) * 0x01020408u) >> 24;
}

// One call of Philox serves sixteen keys with a byte each. Lanes that hold parts of the same
// sixteen share their calls: each makes one and passes on which bytes are below the limit.
//
// kPacked: rows of packed sequences. A query's sequence is the batch, i and j count in it, and
// sixteen keys from a multiple of 16 on are parts of two such groups.
template <bool kPacked> struct DropoutOf {
    u64 seed;
    u32 limit;  // 1 .. 256; a weight is kept when its byte is below: keep = limit / 256
    u32 batch, head;
    const void* q_places;  // only where kPacked

    // Bit n: whether key 16 * group + n is kept for query i.
    __device__ __forceinline__ u32 sixteen(u32 group, u32 i) const {
        u32 bytes[4] = {group, i, head, batch};
        philox(bytes, u32(seed), u32(seed >> 32));
        u32 kept = 0;
#pragma unroll
        for (int n = 0; n < 4; ++n) kept |= bytes_below(bytes[n], limit) << 4 * n;
        return limit < 256 ? kept : 0xffffu;
    }
    // Bit n: whether key first_j + 16 * more + n is kept for query i. first_j: a multiple of 16.
    __device__ __forceinline__ u32 sixteen_of(int first_j, int more, u32 i) const {
        if constexpr (!kPacked) {
            return sixteen(u32(first_j) / 16 + more, i);
        } else {
            const Sequence sequence = sequence_at(q_places, int(i));
            const int j = first_j + 16 * more - sequence.k_start;
            const DropoutOf<false> own{seed, limit, batch + u32(sequence.number), head};
            const u32 group = u32(floor_div(j, 16)), row = i - u32(sequence.q_start);
            u32 kept = own.sixteen(group, row);
            if (j % 16 != 0) kept |= own.sixteen(group + 1, row) << 16;
            return kept >> (j & 15) & 0xffffu;
        }
    }

    // For scores with queries as rows: a quad shares its rows, sixteen keys are two column tiles.
    template <class Bits>
    __device__ __forceinline__ void keep(Bits& kept, int first_i, int first_j) const {
        static_assert(Bits::kColTiles % 2 == 0, "sixteen keys are two column tiles");
        constexpr int kCalls = Bits::kColTiles;  // a row tile's: two rows, half as many pairs
        const int g = lane_id() / 4, t = lane_id() % 4;
        kept.fill(false);
#pragma unroll
        for (int m = 0; m < Bits::kRowTiles; ++m)
#pragma unroll
            for (int first = 0; first < kCalls; first += 4) {
                const int own = first + t;
                const u32 mine =
                    sixteen_of(first_j, own / 2, u32(first_i + 16 * m + g + 8 * (own % 2)));
#pragma unroll
                for (int other = 0; other < min_of(4, kCalls - first); ++other) {
                    const int call = first + other, n = call / 2 * 2, r = call % 2 * 2;
                    const u32 bits =
                        __shfl_sync(kFullWarp, mine, (lane_id() & ~3) + other) >> 2 * t;
                    kept.add(m, n, r, bits & 3);
                    kept.add(m, n + 1, r, bits >> 8 & 3);
                }
            }
    }
    // For transposed scores: the lanes with the same t share queries, a row tile is sixteen keys.
    template <class Bits>
    __device__ __forceinline__ void keep_transposed(Bits& kept, int first_j, int first_i) const {
        constexpr int kCalls = 2 * Bits::kColTiles;  // a row tile's
        const int g = lane_id() / 4, t = lane_id() % 4;
        kept.fill(false);
#pragma unroll
        for (int m = 0; m < Bits::kRowTiles; ++m)
#pragma unroll
            for (int first = 0; first < kCalls; first += 8) {
                const int own = first + g;
                const u32 mine =
                    sixteen_of(first_j, m, u32(first_i + 8 * (own / 2) + 2 * t + own % 2));
#pragma unroll
                for (int other = 0; other < min_of(8, kCalls - first); ++other) {
                    const int call = first + other;
                    const u32 bits = __shfl_sync(kFullWarp, mine, 4 * other + t) >> g;
                    kept.add(m, call / 2, call % 2, bits & 1);
                    kept.add(m, call / 2, 2 + call % 2, bits >> 8 & 1);
                }
            }
    }
};
using Dropout = DropoutOf<false>;
using PackedDropout = DropoutOf<true>;
