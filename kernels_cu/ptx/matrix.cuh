// Four 8x8 matrices of 16-bit elements (or 8x4 of 32-bit ones) from shared memory. PTX ISA
// 9.7.14.5.15 (ldmatrix).
#pragma once
#include "../types.cuh"

// Lanes 8i .. 8i + 7 give the addresses of the eight 16-byte rows of matrix i; lane l receives row
// l/4, pair l%4.
__device__ __forceinline__ void ldmatrix_x4(u32 (&x)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

// Each matrix transposed: lane l receives column l/4, rows 2(l%4) and 2(l%4) + 1.
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&x)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

// Four 8x8 matrices of 16-bit elements to shared memory. PTX ISA 9.7.14.5.16 (stmatrix).
// Lane l holds row l/4, columns 2(l%4) and 2(l%4) + 1 of each matrix, which is written transposed:
// lanes 8i .. 8i + 7 give the addresses of the 16 bytes that take the columns of matrix i.
__device__ __forceinline__ void stmatrix_x4_trans(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
        "r"(a), "r"(b), "r"(c), "r"(d)
        : "memory");
}
