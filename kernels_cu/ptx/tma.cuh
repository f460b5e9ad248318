// Boxes of a tensor between global and shared memory by the bulk copy engine. PTX ISA 9.7.9.27
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
// The box at shared address `from` to the corner (col, row, head, inner, outer); what lies outside
// the tensor is not written. Counts in this thread's group of bulk copies (ptx/bulk.cuh).
__device__ __forceinline__ void tma_store(const TensorMap& map, u32 from, i32 col, i32 row,
                                          i32 head, i32 inner, i32 outer) {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group"
        " [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(&map),
        "r"(from), "r"(col), "r"(row), "r"(head), "r"(inner), "r"(outer)
        : "memory");
}
