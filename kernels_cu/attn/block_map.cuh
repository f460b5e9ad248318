// A block map's lists: which blocks a block visits, in place of a range. cuflash/block_lists.py
// makes them, and says what is in a row.
#pragma once
#include "../tile/rows.cuh"
#include "band.cuh"

// One block's row. Its blocks are counted by their places in the list; those whose pairs must be
// looked at one by one stand last.
struct BlockList {
    static constexpr int kHead = 2;
    const int* row;

    // Of places, as band_range is of blocks.
    __device__ __forceinline__ BlockRange range() const {
        const int total = row[0], partial = row[1];
        return {0, 0, total - partial, total};
    }
    __device__ __forceinline__ int count() const { return row[0]; }
    __device__ __forceinline__ int block(int place) const { return row[kHead + place]; }
    // By search: for what hardly ever happens.
    __device__ __forceinline__ bool has(int block) const {
        for (int place = 0; place < row[0]; ++place)
            if (row[kHead + place] == block) return true;
        return false;
    }
    // Backward: when this block adds to the sums of the block at `place`, one of `num_blocks`.
    __device__ __forceinline__ u32 turn(int place, u32 num_blocks) const {
        return u32(row[kHead + int(num_blocks) + place]);
    }
};

// One block's lists for each query head of a group.
struct GroupLists {
    const int* first;
    i64 stride;

    __device__ __forceinline__ BlockList of(u32 head) const { return {first + head * stride}; }
};

// Where the lists of a head begin. A template, since only plans with kBlockMap have such fields.
template <class P>
__device__ __forceinline__ const int* head_lists(const P& p, u32 batch, u32 head) {
    return head_start<const int>(p.lists, p.lists_strides, p.batch_sizes, batch, head);
}
template <class P>
__device__ __forceinline__ BlockList list_of(const P& p, u32 batch, u32 head, int block) {
    return {head_lists(p, batch, head) + i64(block) * p.lists_strides.row};
}
// From where head 0 of batch entry 0 would be if all heads were a stride apart: `head` counts over
// all batch entries.
template <class P>
__device__ __forceinline__ const int* even_lists(const P& p, u32 batch) {
    return head_lists(p, batch, 0) - i64(batch) * p.num_heads * p.lists_strides.head;
}
template <class P>
__device__ __forceinline__ BlockList list_at(const P& p, const int* even, u32 head, int block) {
    return {even + i64(head) * p.lists_strides.head + i64(block) * p.lists_strides.row};
}
template <class P>
__device__ __forceinline__ GroupLists group_lists(const P& p, u32 batch, u32 kv_head, int block) {
    return {list_of(p, batch, kv_head * p.group, block).row, p.lists_strides.head};
}
