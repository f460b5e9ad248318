// Asynchronous global -> shared copies. PTX ISA 9.7.9.25.3 (cp.async, non-bulk). sm_75 has none:
// there it copies in place.
#pragma once
#include "../types.cuh"

__device__ __forceinline__ u32 smem_address(const void* pointer) {
    return u32(__cvta_generic_to_shared(pointer));
}

template <int kBytes>
__device__ __forceinline__ void cp_async(u32 destination, const void* source, int bytes);

// Copies kBytes. The form without a byte count is a single instruction; the one with it needs five
// more.
template <int kBytes>
__device__ __forceinline__ void cp_async(u32 destination, const void* source) {
#if __CUDA_ARCH__ >= 800
    if constexpr (kBytes == 16) {  // .cg: past L1, which shared memory replaces
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(destination),
                     "l"(source)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(destination), "l"(source),
                     "n"(kBytes)
                     : "memory");
    }
#else
    cp_async<kBytes>(destination, source, kBytes);
#endif
}

// Copies `bytes` (<= kBytes) and fills the rest of the kBytes with zeros; a source of 0 bytes is
// never read.
template <int kBytes>
__device__ __forceinline__ void cp_async(u32 destination, const void* source, int bytes) {
    static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "cp.async moves 4, 8 or 16 bytes");
#if __CUDA_ARCH__ >= 800
    if constexpr (kBytes == 16) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination),
                     "l"(source), "r"(bytes)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(destination),
                     "l"(source), "n"(kBytes), "r"(bytes)
                     : "memory");
    }
#else
    u32 words[kBytes / 4] = {};
    if (bytes == kBytes) {
        const u32* from = static_cast<const u32*>(source);
        if constexpr (kBytes == 16) {
            const uint4 all = *reinterpret_cast<const uint4*>(from);
            words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
        } else {
#pragma unroll
            for (int w = 0; w < kBytes / 4; ++w) words[w] = from[w];
        }
    } else {  // the head dimension ends inside this piece
        const u16* from = static_cast<const u16*>(source);
#pragma unroll
        for (int h = 0; h < kBytes / 2; ++h)
            if (2 * h < bytes) words[h / 2] |= u32(from[h]) << 16 * (h & 1);
    }
#pragma unroll
    for (int w = 0; w < kBytes / 4; ++w)
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(destination + 4 * w), "r"(words[w])
                     : "memory");
#endif
}

__device__ __forceinline__ void cp_async_commit_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int kPending> __device__ __forceinline__ void cp_async_wait_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}
