// Barriers for some of a block's threads, by number; 0 is __syncthreads. PTX ISA 9.7.13.1 (barrier).
#pragma once
#include "../types.cuh"

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
