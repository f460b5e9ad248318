// Contiguous bytes between global and shared memory by the bulk copy engine. PTX ISA 9.7.9.25
// (cp.async.bulk, cp.reduce.async.bulk).
#pragma once
#include "../types.cuh"

// `bytes`, a multiple of 16, from global `from` to shared address `to`; they count at the barrier.
__device__ __forceinline__ void bulk_load(u32 to, const void* from, u32 bytes, u32 bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(bar)
        : "memory");
}
// Adds the floats at shared address `from` to those at `to`, in L2.
__device__ __forceinline__ void bulk_add(float* to, u32 from, u32 bytes) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
        "r"(from), "r"(bytes)
        : "memory");
}
// Writes them there in place of a sum that would begin with zero.
__device__ __forceinline__ void bulk_store(float* to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}
// Closes a group of this thread's additions and writes.
__device__ __forceinline__ void bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until all but the kPending youngest groups have read their shared memory...
template <int kPending> __device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// ... and until all have been added or written.
__device__ __forceinline__ void bulk_wait_all() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
