// What struct Score is written in for kernels that go through blocks of keys (score_rows.cuh): keys
// of a block, tanh without a call, elements read two at a time.
#pragma once
#include "../ptx/misc.cuh"
#include "../types.cuh"

// A key of a block: the first one that the lane holds, and how far this one is beyond, a constant
// where loops are unrolled.
struct Key {
    int first, beyond;
    __device__ __forceinline__ operator int() const { return first + beyond; }
};
// x - j as a float, by one subtraction a pair: exact up to 2^24.
__device__ __forceinline__ float distance(int x, Key j) {
    return float(x - j.first) - float(j.beyond);
}
__device__ __forceinline__ float inverse_of(float x) { return 1 / x; }
// Without a branch: within one unit in the last place. PTX ISA 9.7.3.14 (rcp.approx).
__device__ __forceinline__ float quick_inverse(float x) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
    return inverse;
}

// x / unit; finite where x is.
__device__ __forceinline__ float in_units(float x, float unit) {
    const float ratio = x / unit;
    return fabsf(x) <= -lowest<float>() ? fminf(fmaxf(ratio, lowest<float>()), -lowest<float>()) : ratio;
}
// s + slope * |x - j|. kNear: where the block's keys are on one side of x.
template <bool kNear> __device__ __forceinline__ float sloped(float s, float slope, int x, Key j) {
    if constexpr (!kNear) return s + slope * fabsf(distance(x, j));
    return fma_of(x < j.first ? -slope : slope, distance(x, j), s);
}
__device__ __forceinline__ bool on_one_side(int x, int first, int keys) {
    return x < first || x >= first + keys - 1;
}

// tanh(x) = x P(x^2) within 1.5e-7 of itself up to here; P by Lawson's iteration.
inline constexpr float kNearTanh = 0.42f;
inline constexpr int kTanhTerms = 4;
__device__ __forceinline__ constexpr float tanh_term(int n) {
    constexpr float kTerms[kTanhTerms] = {0.9999998569621088f, -0.33330725583707926f,
                                          0.13258403531793128f, -0.04695676063626681f};
    return kTerms[n];
}
__device__ __forceinline__ float near_tanh(float x) {
    const float square = x * x;
    float sum = tanh_term(kTanhTerms - 1);
#pragma unroll
    for (int n = kTanhTerms - 2; n >= 0; --n) sum = fma_of(sum, square, tanh_term(n));
    return x * sum;
}
// 1 - 2 / (exp(2 x) + 1), which is as precise elsewhere: within 2^-20 of itself.
__device__ __forceinline__ float far_tanh(float x) {
    return fma_of(quick_inverse(exp2_of(x * 2.885390081777927f) + 1), -2.f, 1.f);
}
__device__ __forceinline__ float quick_tanh(float x) {
    const float far = far_tanh(x);  // before the choice, which then is no branch
    return fabsf(x) <= kNearTanh ? near_tanh(x) : far;
}
// kNear: |x| is known to be near. Either way the same bits: what else a warp holds changes none.
template <bool kNear> __device__ __forceinline__ float bent(float x) {
    return kNear ? near_tanh(x) : quick_tanh(x);
}
inline constexpr float kLog2e = 1.44269504f;
// log2(e) * cap * tanh(scale * s / cap) with everything but s in the polynomial's terms.
struct CappedSeries {
    float terms[kTanhTerms];
    float cap, slope;
    float near;  // the largest |s| that the polynomial serves; -1: none, its terms could overflow

    CappedSeries() = default;
    __device__ __forceinline__ CappedSeries(float scale, float of_cap)
        : cap(of_cap * kLog2e), slope(fabsf(scale / of_cap)) {
        float power = scale * kLog2e;
#pragma unroll
        for (int n = 0; n < kTanhTerms; ++n) terms[n] = tanh_term(n) * power, power *= slope * slope;
        near = slope < 64 ? kNearTanh / slope : -1.f;
        if (scale < 0) slope = -slope;
    }
    template <bool kNear> __device__ __forceinline__ float at(float s) const {
        const float square = s * s;
        float sum = terms[kTanhTerms - 1];
#pragma unroll
        for (int n = kTanhTerms - 2; n >= 0; --n) sum = fma_of(sum, square, terms[n]);
        if constexpr (kNear) return s * sum;
        const float far = cap * far_tanh(s * slope);
        return fabsf(s) <= near ? s * sum : far;
    }
    // No smaller than |at(s)| for |s| up to `most`.
    __device__ __forceinline__ float bound(float most) const { return fabsf(cap * slope) * most; }
};

// A word, or two neighbours; volatile as read_two is.
__device__ __forceinline__ void read_words(u32 (&words)[1], const u32* address) {
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(words[0]) : "l"(address));
}
__device__ __forceinline__ void read_words(u32 (&words)[2], const u32* address) {
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1])
                 : "l"(address));
}
// The bits of a lane's keys in a row of a block of keys, two for each tile of eight: of 128
// neighbouring keys a quad's lanes have a word each (mask_bits.cu). Blocks that divide 128 keys lie
// in one; rows are long enough for whatever block begins in the sequence.
template <int kTiles> struct RowBits {
    static_assert(kTiles <= 16, "a word holds 128 keys of a quad");
    u32 bits;

    // first: the lane's first key.
    __device__ __forceinline__ void read(const u32* row, int first) {
        const u32* own = row + (first >> 7) * 4 + (first >> 1 & 3);
        u32 low[1], high[1] = {0};
        read_words(low, own);
        if constexpr (16 % kTiles != 0) read_words(high, own + 4);
        bits = kTiles == 16 ? low[0] : __funnelshift_r(low[0], high[0], (first >> 3 & 15) * 2);
    }
    __device__ __forceinline__ bool get(int n, int r) const { return bits >> (2 * n + r) & 1; }
};

// Two neighbours in memory, in as few registers as they need.
template <class Element> struct Two {
    static_assert(sizeof(Element) <= 4, "wider elements are read where they are used");
    u32 words[sizeof(Element) == 4 ? 2 : 1];
};
// The address is a multiple of their size. Volatile, so that the reads stay in front of the wait
// for the product. PTX ISA 9.7.9.9 (ld.global.nc).
template <class Element>
__device__ __forceinline__ Two<Element> read_two(const Element* address) {
    Two<Element> two;
    if constexpr (sizeof(Element) == 1)
        asm volatile("ld.global.nc.u16 %0, [%1];" : "=r"(two.words[0]) : "l"(address));
    else if constexpr (sizeof(Element) == 2)
        asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(two.words[0]) : "l"(address));
    else
        asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];"
                     : "=r"(two.words[0]), "=r"(two.words[1])
                     : "l"(address));
    return two;
}
template <class Element>
__device__ __forceinline__ Element one_of(const Two<Element>& two, int r) {
    if constexpr (kSame<Element, float>) {
        return __uint_as_float(two.words[r]);
    } else if constexpr (sizeof(Element) == 4) {
        return Element(two.words[r]);
    } else if constexpr (kSame<Element, f16> || kSame<Element, bf16>) {
        return Element{u16(two.words[0] >> 16 * r)};
    } else {
        return Element(two.words[0] >> int(8 * sizeof(Element)) * r);
    }
}
