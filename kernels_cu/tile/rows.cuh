// Where the rows of one head's matrix lie in global memory.
#pragma once
#include "../types.cuh"

// `batch` counts the flattened leading axes; `sizes` are their lengths, outermost first.
__device__ __forceinline__ i64 batch_offset(const Strides& strides, const i32 (&sizes)[kBatchDims],
                                            u32 batch) {
    i64 offset = 0;
#pragma unroll
    for (int d = kBatchDims - 1; d >= 0; --d) {
        const u32 size = u32(sizes[d]);
        const u32 outer = batch / size;
        offset += i64(batch - outer * size) * strides.batch[d];
        batch = outer;
    }
    return offset;
}

// Where one head's matrix begins.
template <class T, class Pointer>
__device__ __forceinline__ T* head_start(Pointer* array, const Strides& strides,
                                         const i32 (&sizes)[kBatchDims], u32 batch, u32 head) {
    return static_cast<T*>(array) + batch_offset(strides, sizes, batch) + i64(head) * strides.head;
}

// A (count x dim) matrix with any strides. Rows at or beyond `count` do not exist.
template <class T> struct Rows {
    T* data;
    i64 row_stride;
    i64 col_stride;
    i32 count;
    i32 dim;

    __device__ __forceinline__ Rows(T* start, const Strides& strides, i32 row_count, i32 row_dim)
        : data(start),
          row_stride(strides.row),
          col_stride(strides.col),
          count(row_count),
          dim(row_dim) {}

    __device__ __forceinline__ T* at(i64 row, i64 col) const {
        return data + row * row_stride + col * col_stride;
    }
    // The columns from `first` on.
    __device__ __forceinline__ Rows from_column(i32 first) const {
        Rows rest = *this;
        rest.data += first * col_stride;
        rest.dim -= first;
        return rest;
    }
};
