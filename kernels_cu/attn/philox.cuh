// Random bits as a pure function of a key and a counter: Philox4x32-7 (Salmon, Moraes, Dror and
// Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC11, section 3.3 and table 2: of its round
// counts the smallest that passes all tests of BigCrush). The same function as cuflash/philox.py.
#pragma once
#include "../types.cuh"

__device__ __forceinline__ void philox(u32 (&counter)[4], u32 key_low, u32 key_high) {
#pragma unroll
    for (int round = 0; round < 7; ++round) {
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
