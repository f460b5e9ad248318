// Barriers in shared memory that threads and the bulk copy engine arrive at. PTX ISA 9.7.13.15
// (mbarrier).
#pragma once
#include "../types.cuh"

// `bar` is an address in the shared window, a multiple of 8.
__device__ __forceinline__ void mbarrier_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
// After the inits, before any other thread or copy uses them.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
// One arrival, which also announces `bytes` that copies will bring.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}
// Returns once the phase of that parity is complete; on a fresh barrier parity 1 is.
__device__ __forceinline__ void mbarrier_wait(u32 bar, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(bar),
        "r"(parity)
        : "memory");
}

// Barriers for some of a block's threads, by number; 0 is __syncthreads. PTX ISA 9.7.13.1 (barrier).
// kThreads counts those that arrive and those that wait.
template <int kBarrier, int kThreads> __device__ __forceinline__ void barrier_sync() {
    asm volatile("barrier.cta.sync.aligned %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}
template <int kBarrier, int kThreads> __device__ __forceinline__ void barrier_arrive() {
    asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}
// All wait; true for all when any brings true.
template <int kBarrier, int kThreads> __device__ __forceinline__ bool barrier_any(bool x) {
    u32 result;
    asm volatile(
        "{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\n"
        "barrier.cta.red.or.pred.aligned q, %2, %3, p;\nselp.u32 %0, 1, 0, q;\n}\n"
        : "=r"(result)
        : "r"(u32(x)), "n"(kBarrier), "n"(kThreads)
        : "memory");
    return result != 0;
}
