// What surrounds the products of a warpgroup; the products themselves are written out by
// cuflash/wgmma.py, one overload for each width that a plan uses. PTX ISA 9.7.15 (wgmma).
#pragma once
#include "../types.cuh"

inline constexpr int kWarpgroupSize = 128;
inline constexpr int kPanelBytes = 128;  // a row of a panel: 64 elements of 16 bits

// Between ordinary use of accumulators or operands in registers and the next product.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most kPending of the youngest groups are unfinished.
template <int kPending> __device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// A matrix in shared memory as wgmma reads it: panels of 64 columns, a row of a panel 128 bytes,
// 16-byte pieces swizzled by the row (PTX ISA 9.7.15.5.1). panel_bytes matters where the columns
// are the operand's M or N and it spans several panels.
__device__ __forceinline__ u64 matrix_descriptor(u32 address, u32 panel_bytes) {
    constexpr u64 kSwizzle128 = 1ull << 62, kEightRows = u64(1024 >> 4) << 32;
    return kSwizzle128 | kEightRows | u64(panel_bytes >> 4) << 16 | u64(address >> 4);
}
// The same, `bytes` further on.
__device__ __forceinline__ u64 advance(u64 descriptor, u32 bytes) {
    return descriptor + (bytes >> 4);
}

// Ordinary writes to shared memory become visible to wgmma and to the copy engine.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
template <int kRegisters> __device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters> __device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
// `threads` threads meet at one of the hardware's 16 barriers; 0 is __syncthreads'.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
