// Single instructions that belong to no other file: exponentials, reductions into memory, ordered
// flags.
#pragma once
#include "../types.cuh"

inline constexpr u32 kFullWarp = 0xffffffffu;

// x, but the compiler cannot tell: what is computed from it stays where it is, in place of being
// moved out of a loop into registers that the loop needs for itself.
__device__ __forceinline__ int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// The same for the assembler too, which sees through the above: every lane takes x from itself, so
// the whole warp must be here.
__device__ __forceinline__ int detached(int x) {
    asm volatile("shfl.sync.bfly.b32 %0, %0, 0, 31, 0xffffffff;" : "+r"(x));
    return x;
}

// x of the warp's first lane: the same in all lanes anyway, which the compiler then knows, and
// keeps what follows from it in uniform registers.
template <class X> __device__ __forceinline__ X uniform(X x) {
    return __shfl_sync(kFullWarp, x, 0);
}

__device__ __forceinline__ u32 load_shared(u32 address) {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ void store_shared(u32 address, u32 x) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
// From memory that no kernel writes meanwhile. Without `volatile`: equal reads are one, and those that
// nobody needs are none. PTX ISA 9.7.9.9 (ld.global.nc).
__device__ __forceinline__ int load_constant(const int* address) {
    int x;
    asm("ld.global.nc.s32 %0, [%1];" : "=r"(x) : "l"(address));
    return x;
}
__device__ __forceinline__ int2 load_constant(const int2* address) {
    int2 x;
    asm("ld.global.nc.v2.s32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(address));
    return x;
}
__device__ __forceinline__ int4 load_constant(const int4* address) {
    int4 x;
    asm("ld.global.nc.v4.s32 {%0, %1, %2, %3}, [%4];"
        : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
        : "l"(address));
    return x;
}
// 16 bytes at once, said so: a struct's assignment may be taken apart into its members. PTX ISA
// 9.7.9.12 (st).
__device__ __forceinline__ void store_global_v4(void* address, uint4 x) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(x.x), "r"(x.y),
                 "r"(x.z), "r"(x.w)
                 : "memory");
}

// 2^x. The float form flushes subnormal results to zero and is within 2^-22 of exact (PTX ISA
// 9.7.3.21, ex2.approx).
__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ double exp2_of(double x) { return exp2(x); }
__device__ __forceinline__ float exp_of(float x) { return expf(x); }
__device__ __forceinline__ double exp_of(double x) { return exp(x); }
__device__ __forceinline__ float log_of(float x) { return logf(x); }
__device__ __forceinline__ double log_of(double x) { return log(x); }
__device__ __forceinline__ float log2_of(float x) { return log2f(x); }
__device__ __forceinline__ double log2_of(double x) { return log2(x); }
template <class Accum> __device__ __forceinline__ Accum lowest();
template <> __device__ __forceinline__ float lowest<float>() { return __int_as_float(0xff7fffff); }
template <> __device__ __forceinline__ double lowest<double>() {
    return __longlong_as_double(0xffefffffffffffffll);
}

__device__ __forceinline__ float fma_of(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double fma_of(double a, double b, double c) { return fma(a, b, c); }

// A NaN loses against a number: scores that are NaN reach their row through exp, not through the
// maximum.
__device__ __forceinline__ float fmax_of(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double fmax_of(double a, double b) { return fmax(a, b); }

template <class Accum> __device__ __forceinline__ Accum infinity();
template <> __device__ __forceinline__ float infinity<float>() {
    return __int_as_float(0x7f800000);
}
template <> __device__ __forceinline__ double infinity<double>() {
    return __longlong_as_double(0x7ff0000000000000ll);
}

// Additions performed in L2; nothing is returned. PTX ISA 9.7.13.7 (red).
__device__ __forceinline__ void red_add(float* address, float x) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(address), "f"(x) : "memory");
}
__device__ __forceinline__ void red_add(double* address, double x) {
    asm volatile("red.global.add.f64 [%0], %1;" ::"l"(address), "d"(x) : "memory");
}
__device__ __forceinline__ void red_add_v4(float* address, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(x[0]),
                 "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
#else
    for (int r = 0; r < 4; ++r) red_add(address + r, x[r]);
#endif
}

// A flag in global memory that one warp raises and another waits for. The waiting side reads no
// data that the flag guards, it only adds to it in L2 once it has seen the flag, so the read need
// not be an acquire, which would also empty L1. (PTX ISA 9.7.9.8, 9.7.9.11, and 8.10 for what
// release orders.)
__device__ __forceinline__ u32 load_relaxed(const u32* address) {
    u32 x;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(address) : "memory");
    return x;
}
__device__ __forceinline__ void store_release(u32* address, u32 x) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(x) : "memory");
}
