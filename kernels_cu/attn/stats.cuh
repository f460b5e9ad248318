// The two numbers of a row from which backward recomputes its weights without using lse where that
// would be inexact.
//
//     p = exp(scale * s - lse) = exp2((s - row_max) * scale_log2) / sum
//
// lse is rounded to float, an error of |lse| * 2^-25 in the exponent. 16-bit types tolerate that up
// to large |lse|: they keep row_max = 0 and row_sum = lse * log2(e), unless the row was refined.
// For float and double every row is refined.
#pragma once
#include "../ptx/misc.cuh"

// row_sum as it is stored: log2 of the sum for 16-bit types (one multiply-add a weight), else its
// inverse.
template <class T, class Accum> __device__ __forceinline__ Accum row_sum_of(Accum sum) {
    return sizeof(T) == 2 ? log2_of(sum) : 1 / sum;
}
// Of a row without a visible key: its weights are 0.
template <class T, class Accum> __device__ __forceinline__ Accum empty_row_sum() {
    return sizeof(T) == 2 ? infinity<Accum>() : Accum(0);
}
// p of a scaled score above row_max, to the base 2.
template <class T, class Accum> __device__ __forceinline__ Accum weight(Accum x, Accum row_sum) {
    return sizeof(T) == 2 ? exp2_of(x - row_sum) : exp2_of(x) * row_sum;
}
