// Which piece of the problem a thread block works on.
#pragma once
#include "../types.cuh"

// Blocks of one head are neighbours, so that those in flight read the same arrays from L2. With a
// band they differ in length, and the last head's longest block would start late and run alone at
// the end; then all of a section of heads start with their longest blocks. Where blocks of one head
// take turns (attn/turn.cuh), those of a section make several short queues in place of a long one.
// A section is about as many heads as fit in L2 together, else 1.
//
// With slices, kSlices blocks share the rows and each computes its part of the result's columns:
// where all of them would not fit a warp's registers.
template <int kSlices> struct Work {
    int slice;
    int block;  // of queries in forward, of keys in backward
    u32 head;
    u32 batch;

    // num_heads of a batch entry; num_sectioned is how many of all heads lie in whole sections;
    // num_work is how many pieces there are.
    __device__ __forceinline__ Work(u32 index, u32 num_blocks, u32 num_heads, u32 section,
                                    u32 num_sectioned, u32 num_work = gridDim.x) {
        slice = int(index % kSlices);
        index /= kSlices;
        u32 first = index / (num_blocks * section) * section;
        const u32 size =
            first < num_sectioned ? section : num_work / (kSlices * num_blocks) - num_sectioned;
        index -= first * num_blocks;
        block = int(index / size);
        const u32 outer = first + index % size;
        batch = outer / num_heads;
        head = outer - batch * num_heads;
    }
    // A copy that went through memory, told what the compiler knew of the original.
    __device__ __forceinline__ Work folded() const {
        Work work = *this;
        if constexpr (kSlices == 1) work.slice = 0;
        return work;
    }
};

// How many add to a square that a query head shares, the n-th of its group, before it does: in the
// order of sections, in these of n, then of heads.
template <class AnyParams>
__device__ __forceinline__ u32 square_turn(const AnyParams& p, u32 batch, u32 head, u32 n) {
    if (p.square_head > 0) return batch;  // heads of one number share
    const u32 heads = p.num_heads / p.group, outer = batch * heads + head;
    const u32 sharing = p.square_batch > 0 ? heads : gridDim.x / p.num_blocks;
    const u32 first = outer / sharing * sharing;
    u32 begin = p.num_sectioned, end = first + sharing;
    if (outer < begin)
        begin = outer / p.section * p.section, end = min_of(end, begin + p.section);
    begin = max_of(begin, first);
    return (begin - first) * p.group + n * (end - begin) + outer - begin;
}
