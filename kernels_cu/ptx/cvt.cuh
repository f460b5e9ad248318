// Conversions between storage and arithmetic types, one instruction each. PTX ISA 9.7.9 (cvt).
#pragma once
#include "../types.cuh"

__device__ __forceinline__ float to_float(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ double to_float(double x) { return x; }

template <class T> __device__ __forceinline__ T from_float(AccumOf<T> x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ double from_float<double>(double x) { return x; }
template <> __device__ __forceinline__ f16 from_float<f16>(float x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) {
    bf16 y;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else  // round to nearest even by hand; a NaN keeps its sign and becomes quiet
    const u32 bits = __float_as_uint(x);
    const u32 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    y.bits = u16((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded >> 16);
#endif
    return y;
}

// Two neighbours packed into one register, the lower index in the low half.
template <class T> __device__ __forceinline__ u32 pack(float low, float high);
template <> __device__ __forceinline__ u32 pack<f16>(float low, float high) {
#if __CUDA_ARCH__ >= 800
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
#else
    return u32(from_float<f16>(low).bits) | u32(from_float<f16>(high).bits) << 16;
#endif
}
template <> __device__ __forceinline__ u32 pack<bf16>(float low, float high) {
#if __CUDA_ARCH__ >= 800
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
#else
    return u32(from_float<bf16>(low).bits) | u32(from_float<bf16>(high).bits) << 16;
#endif
}

// The nearest tf32 value, ties away from zero, as a float. PTX: the low 13 bits of a tf32 operand
// are ignored.
__device__ __forceinline__ float round_tf32(float x) {
#if __CUDA_ARCH__ >= 800
    u32 y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return __uint_as_float(y);
#else
    return x;
#endif
}

// True for inf and NaN: all exponent bits set.
__device__ __forceinline__ bool is_nonfinite(f16 x) { return (x.bits & 0x7c00u) == 0x7c00u; }
__device__ __forceinline__ bool is_nonfinite(bf16 x) { return (x.bits & 0x7f80u) == 0x7f80u; }
__device__ __forceinline__ bool is_nonfinite(float x) {
    return (__float_as_uint(x) & 0x7f800000u) == 0x7f800000u;
}
__device__ __forceinline__ bool is_nonfinite(double x) {
    return (u64(__double_as_longlong(x)) & 0x7ff0000000000000ull) == 0x7ff0000000000000ull;
}

// Whether any of the elements in 16 bytes is inf or NaN: their product with zero is NaN, that of
// all others is zero, so one multiply-add a word finds out.
template <class T> __device__ __forceinline__ bool has_nonfinite(uint4 piece) {
    const u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
    if constexpr (sizeof(T) == 8) {
        double sum = 0;
        for (int w = 0; w < 4; w += 2)
            sum = fma(__hiloint2double(int(words[w + 1]), int(words[w])), 0.0, sum);
        return sum != 0;
    } else if constexpr (sizeof(T) == 4) {
        float sum = 0;
        for (int w = 0; w < 4; ++w) sum = fmaf(__uint_as_float(words[w]), 0.f, sum);
        return sum != 0;
    } else if constexpr (kSame<T, f16>) {
        u32 sum = 0;
        for (int w = 0; w < 4; ++w)
            asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(words[w]), "r"(0u));
        return (sum & 0x7fff7fffu) != 0;
    } else {
        u32 sum = 0;
#if __CUDA_ARCH__ >= 800
        for (int w = 0; w < 4; ++w)
            asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(words[w]), "r"(0u));
#else
        for (int w = 0; w < 4; ++w)
            sum |= u32(is_nonfinite(T{u16(words[w])}) || is_nonfinite(T{u16(words[w] >> 16)}));
#endif
        return (sum & 0x7fff7fffu) != 0;
    }
}
