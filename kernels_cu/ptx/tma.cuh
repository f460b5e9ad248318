// Boxes of a tensor from global to shared memory by the bulk copy engine. PTX ISA 9.7.9.27
// (cp.async.bulk.tensor).
#pragma once
#include "../types.cuh"

// What cuTensorMapEncodeTiled fills; the kernel only passes its address on.
struct alignas(64) TensorMap {
    u64 words[16];
};

__device__ __forceinline__ void prefetch_tensormap(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// The box whose corner is (col, row, head, inner, outer) to shared address `to`. Its bytes, all of
// them whatever lies outside the tensor and becomes zero, count at the barrier.
__device__ __forceinline__ void tma_load(u32 to, const TensorMap& map, u32 bar, i32 col, i32 row,
                                         i32 head, i32 inner, i32 outer) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
        "l"(&map), "r"(bar), "r"(col), "r"(row), "r"(head), "r"(inner), "r"(outer)
        : "memory");
}
