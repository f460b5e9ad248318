// What the generated struct Score (cuflash/score_text.py) is written in: functions of float and
// double under one name, and reads of the caller's arrays.
//
// Score is one call's options per pair of a query and a key: with s the scaled product,
//
//     value(s, i, j)       the score that the softmax sees
//     derivative(s, i, j)  of value by s
//     visible(i, j)        whether the key counts at all
//     sink(), dropout()    of the row
//     for_each_gradient    what the score's array arguments receive
//
// all for pairs inside the sequences only.
#pragma once
#include "../ptx/cvt.cuh"
#include "../ptx/misc.cuh"
#include "../tile/rows.cuh"
#include "dropout.cuh"
#include "interval.cuh"
#include "score_keys.cuh"
#include "score_gradients.cuh"

__device__ __forceinline__ float tanh_of(float x) { return tanhf(x); }
__device__ __forceinline__ double tanh_of(double x) { return tanh(x); }
__device__ __forceinline__ float sqrt_of(float x) { return sqrtf(x); }
__device__ __forceinline__ double sqrt_of(double x) { return sqrt(x); }
__device__ __forceinline__ float sin_of(float x) { return sinf(x); }
__device__ __forceinline__ double sin_of(double x) { return sin(x); }
__device__ __forceinline__ float cos_of(float x) { return cosf(x); }
__device__ __forceinline__ double cos_of(double x) { return cos(x); }
__device__ __forceinline__ float pow_of(float x, float y) { return powf(x, y); }
__device__ __forceinline__ double pow_of(double x, double y) { return pow(x, y); }
__device__ __forceinline__ float floor_of(float x) { return floorf(x); }
__device__ __forceinline__ double floor_of(double x) { return floor(x); }
__device__ __forceinline__ float ceil_of(float x) { return ceilf(x); }
__device__ __forceinline__ double ceil_of(double x) { return ceil(x); }
__device__ __forceinline__ float log1p_of(float x) { return log1pf(x); }
__device__ __forceinline__ double log1p_of(double x) { return log1p(x); }
__device__ __forceinline__ float expm1_of(float x) { return expm1f(x); }
__device__ __forceinline__ double expm1_of(double x) { return expm1(x); }

// As NumPy's: NaN wins, integers round towards minus infinity, and dividing them by 0 gives 0.
template <class A> __device__ __forceinline__ A maximum_of(A a, A b) {
    return a != a || a > b ? a : b;
}
template <class A> __device__ __forceinline__ A minimum_of(A a, A b) {
    return a != a || a < b ? a : b;
}
__device__ __forceinline__ int div_floor(int a, int b) {
    if (b == 0) return 0;
    const int quotient = a / b;
    return quotient - (quotient * b != a && (a < 0) != (b < 0));
}
__device__ __forceinline__ int mod_floor(int a, int b) {
    return b == 0 ? 0 : a - div_floor(a, b) * b;
}
template <class Float> __device__ __forceinline__ Float float_mod_floor(Float a, Float b) {
    const Float rest = fmod(a, b);
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
__device__ __forceinline__ float mod_floor(float a, float b) { return float_mod_floor(a, b); }
__device__ __forceinline__ double mod_floor(double a, double b) { return float_mod_floor(a, b); }
template <class Float> __device__ __forceinline__ Float float_div_floor(Float a, Float b) {
    const Float whole = (a - float_mod_floor(a, b)) / b;  // but for its own rounding
    return b == 0 ? a / b : rint(whole);
}
__device__ __forceinline__ float div_floor(float a, float b) { return float_div_floor(a, b); }
__device__ __forceinline__ double div_floor(double a, double b) { return float_div_floor(a, b); }

__device__ __forceinline__ int abs_of(int x) { return x < 0 ? -x : x; }
__device__ __forceinline__ float abs_of(float x) { return fabsf(x); }
__device__ __forceinline__ double abs_of(double x) { return fabs(x); }
// NaN where x is NaN.
template <class A> __device__ __forceinline__ A sign_of(A x) {
    return x > A(0) ? A(1) : x < A(0) ? A(-1) : x;
}

// What a score function sees of a pair of packed sequences (attn/interval.cuh): the number of the
// query's sequence, and both places counted in their own. Only pairs of one sequence count.
struct PackedIndices {
    int b, i, j;
    __device__ __forceinline__ PackedIndices(const void* q_places, const void* k_places, int query,
                                             int key) {
        // No more than is needed, for pairs of which each has a query of its own.
        const int2 of_query = load_constant(static_cast<const int2*>(q_places) + 2 * i64(query));
        const int k_start = load_constant(static_cast<const int*>(k_places) + 4 * i64(key) + 2);
        b = of_query.x, i = query - of_query.y, j = key - k_start;
    }
};

// Elements of the caller's arrays as scores compute with them.
template <class Accum> __device__ __forceinline__ Accum read(f16 x) { return to_float(x); }
template <class Accum> __device__ __forceinline__ Accum read(bf16 x) { return to_float(x); }
template <class Accum> __device__ __forceinline__ Accum read(float x) { return Accum(x); }
template <class Accum> __device__ __forceinline__ Accum read(double x) { return Accum(x); }
// Wider integers saturate: as lengths and positions they then mean what they meant.
template <class Int> __device__ __forceinline__ int read_int(Int x) {
    if constexpr (sizeof(Int) < 4) return int(x);
    if constexpr (Int(-1) < Int(0)) {
        const i64 wide = min_of(max_of(i64(x), -i64(0x80000000ll)), i64(0x7fffffffll));
        return sizeof(Int) == 4 ? int(x) : int(wide);
    }
    return int(min_of(u64(x), u64(0x7fffffffull)));
}

// An index into an axis of `size`, negative ones counted from its end; -1 outside.
__device__ __forceinline__ i64 wrapped(i64 index, i64 size) {
    index += index < 0 ? size : 0;
    return index >= 0 && index < size ? index : -1;
}

// Numbers come in words of 64 bits, beside the pointers; floats in the lower half, their inverses in
// the other.
template <class Accum> __device__ __forceinline__ Accum number(u64 word) {
    if constexpr (kSame<Accum, float>)
        return __uint_as_float(u32(word));
    else
        return __longlong_as_double(i64(word));
}
__device__ __forceinline__ float inverse_number(u64 word) {
    return __uint_as_float(u32(word >> 32));
}
