// tanh in float without a branch, for kernels whose results have 16 bits.
#pragma once
#include "../ptx/misc.cuh"

// Within 2^-21 of itself: a polynomial near 0 (Lawson's iteration, within 1.5e-7 up to 0.875), and
// 1 - 2 / (exp(2 x) + 1) where that loses no digits. PTX ISA 9.7.3.14 (rcp.approx).
__device__ __forceinline__ float quick_tanh(float x) {
    const float size = fabsf(x), square = x * x;
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;"
        : "=f"(inverse)
        : "f"(exp2_of(size * 2.885390081777927f) + 1));
    float sum = fma_of(square, -0.003840354283961592f, 0.018277448536766296f);
    sum = fma_of(sum, square, -0.052665787138745916f);
    sum = fma_of(sum, square, 0.1331109784856926f);
    sum = fma_of(sum, square, -0.3333191410932131f);
    sum = fma_of(sum, square, 0.9999998509659656f);
    return size < 0.5f ? x * sum : copysignf(fma_of(inverse, -2.f, 1.f), x);
}
