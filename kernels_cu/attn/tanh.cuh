// tanh and 1 / x in float without a branch, for kernels whose results have 16 bits.
#pragma once
#include "../ptx/misc.cuh"

// Within one unit in the last place. PTX ISA 9.7.3.14 (rcp.approx).
__device__ __forceinline__ float quick_inverse(float x) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
    return inverse;
}

// Within 2^-20 of itself: a polynomial near 0 (Lawson's iteration, within 1e-7 of the quotient up to
// 0.4), and 1 - 2 / (exp(2 x) + 1) where that loses no digits.
__device__ __forceinline__ float quick_tanh(float x) {
    const float inverse = quick_inverse(exp2_of(x * 2.885390081777927f) + 1), square = x * x;
    float sum = fma_of(square, -0.047553589822491575f, 0.13270976425137399f);
    sum = fma_of(sum, square, -0.33331362436490986f);
    sum = fma_of(sum, square, 0.9999999018973089f);
    return fabsf(x) < 0.4f ? x * sum : fma_of(inverse, -2.f, 1.f);
}
