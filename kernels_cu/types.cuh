// Scalar types and the struct of strides that every kernel's Params uses. NVRTC needs no header for
// any of it.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

// Storage-only 16-bit floats: arithmetic happens in float, conversions are in ptx/cvt.cuh.
struct f16 {
    u16 bits;
};
struct bf16 {
    u16 bits;
};

template <bool kCondition, class True, class False> struct Select {
    using type = True;
};
template <class True, class False> struct Select<false, True, False> {
    using type = False;
};

template <class A, class B> inline constexpr bool kSame = false;
template <class A> inline constexpr bool kSame<A, A> = true;

// float, unless the element type is double.
template <class T> using AccumOf = typename Select<kSame<T, double>, double, float>::type;

inline constexpr int kWarpSize = 32;
inline constexpr int kBatchDims = 3;  // leading axes that could not be merged into one on the host

// Element strides of one array: leading axes, head, position in the sequence, position in the head
// dimension.
struct Strides {
    i64 batch[kBatchDims];
    i64 head;
    i64 row;
    i64 col;
};

template <class T> __device__ __forceinline__ constexpr T min_of(T a, T b) { return a < b ? a : b; }
template <class T> __device__ __forceinline__ constexpr T max_of(T a, T b) { return a > b ? a : b; }
// Rounded towards minus and plus infinity for any sign of a; b > 0.
__device__ __forceinline__ int floor_div(int a, int b) {
    return a >= 0 ? a / b : -((-a + b - 1) / b);
}
__device__ __forceinline__ constexpr int ceil_div(int a, int b) {
    return a > 0 ? (a + b - 1) / b : -(-a / b);
}
