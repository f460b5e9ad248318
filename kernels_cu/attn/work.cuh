// Which piece of the problem a thread block works on.
#pragma once
#include "../types.cuh"

// Blocks of one head are neighbours, so that the block rows in flight read the same keys from L2.
// With slices, kSlices blocks share the rows and each computes its part of the result's columns: where all of them would
// not fit a warp's registers.
template <int kSlices>
struct Work {
    int slice;
    int block;  // of queries in forward, of keys in backward
    u32 head;
    u32 batch;

    __device__ __forceinline__ Work(u32 index, u32 num_blocks, u32 num_heads) {
        slice = int(index % kSlices);
        index /= kSlices;
        const u32 outer = index / num_blocks;
        block = int(index - outer * num_blocks);
        batch = outer / num_heads;
        head = outer - batch * num_heads;
    }
};
