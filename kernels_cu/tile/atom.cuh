// An atom: one m16n8kK product and the fragments that feed it. A dtype is an atom, never a kernel.
//
// All atoms share one accumulator layout. With g = lane / 4 and t = lane % 4, element r of c is at
//     row g + 8 (r / 2), column 2t + r % 2.
// Fragments come in two kinds. Plain ones (load_a, load_b) read tiles stored [row of the
// operand][k]. Transposed ones (load_a_trans, load_b_trans) read tiles stored [k][...], and
// a_from_c turns accumulators into an operand. The last three may order k as they like, since a
// product is a sum over k, as long as they agree: in the 32 and 64-bit atoms slots t, t + 4, ... of
// k hold columns 2t, 2t + 1, ..., so that an accumulator is an operand with no data movement.
#pragma once
#include "../ptx/cvt.cuh"
#include "../ptx/matrix.cuh"
#include "../ptx/mma_sync.cuh"
#include "../ptx/misc.cuh"
#include "lanes.cuh"
#include "smem_tile.cuh"

// Addresses for ldmatrix: lanes 8i .. 8i + 7 hold the rows of matrix i. `kDown` says whether matrix
// 1 lies below matrix 0 (and 2 beside it) or beside it (and 2 below).
template <bool kDown, class Part>
__device__ __forceinline__ u32 ldmatrix_address(Part part, int row, int col) {
    constexpr int kPerPiece = 16 / int(sizeof(typename Part::Element));
    const int lane = lane_id();
    const int first = lane / 8 % 2, second = lane / 16;
    return part.address(row, col, lane % 8 + 8 * (kDown ? first : second),
                        kPerPiece * (kDown ? second : first));
}
// The four 8 x 4 matrices of 32-bit elements at that address; element by element where the tile is
// not in shared memory.
template <bool kDown, class Part>
__device__ __forceinline__ void load_matrices(float (&x)[4], Part part, int row, int col) {
    if constexpr (Part::kDirect) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            x[i] = part.load(row + lane_id() / 4 + 8 * (kDown ? i % 2 : i / 2),
                             col + lane_id() % 4 + 4 * (kDown ? i / 2 : i % 2));
    } else {
        u32 bits[4];
        ldmatrix_x4(bits, ldmatrix_address<kDown>(part, row, col));
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = __uint_as_float(bits[i]);
    }
}

__device__ __forceinline__ void multiply_add(float& c, float a, float b) { c += a * b; }
__device__ __forceinline__ void multiply_add(double& c, double a, double b) { c += a * b; }
// Two products of bf16.
__device__ __forceinline__ void multiply_add(float& c, u32 a, u32 b) {
    c += __uint_as_float(a << 16) * __uint_as_float(b << 16);
    c += __uint_as_float(a & 0xffff0000u) * __uint_as_float(b & 0xffff0000u);
}

// Without a tensor core for the type: every lane gathers the operands of its four sums with
// shuffles, a quarter of k from each lane of a quad. A call and a loop, since a kernel has hundreds
// of these products: written out, one takes minutes to compile.
template <class Accum> struct Sums {
    Accum x[4];
};
template <class Accum, class A, class B>
__device__ __noinline__ Sums<Accum> mma_by_fma(Sums<Accum> c, A a, B b) {
    constexpr int kSteps = int(sizeof(B) / sizeof(b.x[0]));
    const int quad = lane_id() & ~3, column = lane_id() % 4 * 8;
#pragma unroll 1
    for (int t = 0; t < 4; ++t) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            const auto low = __shfl_sync(kFullWarp, a.x[2 * i], quad + t);
            const auto high = __shfl_sync(kFullWarp, a.x[2 * i + 1], quad + t);
            const auto left = __shfl_sync(kFullWarp, b.x[i], column + t);
            const auto right = __shfl_sync(kFullWarp, b.x[i], column + 4 + t);
            multiply_add(c.x[0], low, left), multiply_add(c.x[1], low, right);
            multiply_add(c.x[2], high, left), multiply_add(c.x[3], high, right);
        }
    }
    return c;
}
template <class Accum, class A, class B>
__device__ __forceinline__ void add_by_fma(Accum (&c)[4], const A& a, const B& b) {
    const Sums<Accum> sums = mma_by_fma(Sums<Accum>{{c[0], c[1], c[2], c[3]}}, a, b);
#pragma unroll
    for (int r = 0; r < 4; ++r) c[r] = sums.x[r];
}

// fp16 and bf16, sums in float.
template <class T> struct Atom16 {
    static constexpr int kK = 16;
#if __CUDA_ARCH__ >= 800
    static constexpr bool kTensorCore = true;
#else
    static constexpr bool kTensorCore = kSame<T, f16>;
#endif
    struct A {
        u32 x[4];
    };
    struct B {
        u32 x[2];
    };

    template <class Part> static __device__ __forceinline__ A load_a(Part part, int row, int k) {
        A a;
        ldmatrix_x4(a.x, ldmatrix_address<true>(part, row, k));
        return a;
    }
    template <class Part>
    static __device__ __forceinline__ A load_a_trans(Part part, int row, int k) {
        A a;
        ldmatrix_x4_trans(a.x, ldmatrix_address<false>(part, k, row));
        return a;
    }
    template <class Part>
    static __device__ __forceinline__ void load_b(B (&b)[2], Part part, int col, int k) {
        u32 x[4];
        ldmatrix_x4(x, ldmatrix_address<false>(part, col, k));
        b[0].x[0] = x[0], b[0].x[1] = x[1], b[1].x[0] = x[2], b[1].x[1] = x[3];
    }
    template <class Part>
    static __device__ __forceinline__ void load_b_trans(B (&b)[2], Part part, int col, int k) {
        u32 x[4];
        ldmatrix_x4_trans(x, ldmatrix_address<true>(part, k, col));
        b[0].x[0] = x[0], b[0].x[1] = x[1], b[1].x[0] = x[2], b[1].x[1] = x[3];
    }
    static __device__ __forceinline__ A a_from_c(const float (&left)[4], const float (&right)[4]) {
        return {{pack<T>(left[0], left[1]), pack<T>(left[2], left[3]), pack<T>(right[0], right[1]),
                 pack<T>(right[2], right[3])}};
    }
    static __device__ __forceinline__ void mma(float (&c)[4], const A& a, const B& b) {
#if __CUDA_ARCH__ >= 800
        mma_m16n8k16<T>(c, a.x, b.x);
#else
        if constexpr (kTensorCore) {
            mma_m16n8k8_f16(c, a.x[0], a.x[1], b.x[0]);
            mma_m16n8k8_f16(c, a.x[2], a.x[3], b.x[1]);
        } else {
            add_by_fma(c, a, b);
        }
#endif
    }
};

// float32: each factor is hi + lo in tf32 and the product lo*hi + hi*lo + hi*hi (3xTF32), or hi*hi
// alone. The tensor core truncates as it accumulates, always towards zero, so no chain is longer
// than these three: their sum starts from zero and is added to c in float32.
template <bool kTf32> struct Atom32 {
    static constexpr int kK = 8;
    static constexpr bool kTensorCore = __CUDA_ARCH__ >= 800;
    struct A {
        float x[4];
    };
    struct B {
        float x[2];
    };

    template <class Part> static __device__ __forceinline__ A load_a(Part part, int row, int k) {
        A a;
        load_matrices<true>(a.x, part, row, k);
        return a;
    }
    template <class Part>
    static __device__ __forceinline__ A load_a_trans(Part part, int row, int k) {
        const int g = lane_id() / 4, t = lane_id() % 4;
        return {{part.load(k + 2 * t, row + g), part.load(k + 2 * t, row + g + 8),
                 part.load(k + 2 * t + 1, row + g), part.load(k + 2 * t + 1, row + g + 8)}};
    }
    template <class Part>
    static __device__ __forceinline__ void load_b(B (&b)[2], Part part, int col, int k) {
        float x[4];
        load_matrices<false>(x, part, col, k);
        b[0] = {{x[0], x[1]}};
        b[1] = {{x[2], x[3]}};
    }
    template <class Part>
    static __device__ __forceinline__ void load_b_trans(B (&b)[2], Part part, int col, int k) {
        const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
        for (int n = 0; n < 2; ++n)
            b[n] = {
                {part.load(k + 2 * t, col + 8 * n + g), part.load(k + 2 * t + 1, col + 8 * n + g)}};
    }
    static __device__ __forceinline__ A a_from_c(const float (&c)[4]) {
        return {{c[0], c[2], c[1], c[3]}};
    }
    static __device__ __forceinline__ void mma(float (&c)[4], const A& a, const B& b) {
#if __CUDA_ARCH__ >= 800
        float a_high[4], a_low[4], b_high[2], b_low[2];
#pragma unroll
        for (int r = 0; r < 4; ++r) split(a.x[r], a_high[r], a_low[r]);
#pragma unroll
        for (int r = 0; r < 2; ++r) split(b.x[r], b_high[r], b_low[r]);
        float part[4] = {};
        if constexpr (!kTf32) {
            mma_m16n8k8_tf32(part, a_low, b_high);
            mma_m16n8k8_tf32(part, a_high, b_low);
#pragma unroll
            for (int r = 0; r < 4; ++r)
                part[r] = fabsf(part[r]) <= __int_as_float(0x7f7fffff) ? part[r] : 0.f;
        }
        mma_m16n8k8_tf32(part, a_high, b_high);
#pragma unroll
        for (int r = 0; r < 4; ++r) c[r] += part[r];
#else
        add_by_fma(c, a, b);
#endif
    }

 private:
    // x = high + low. inf and NaN take part in the product of the high parts only: times a low
    // part, which may be zero, an infinity would become NaN.
    static __device__ __forceinline__ void split(float x, float& high, float& low) {
        high = round_tf32(x);
        low = round_tf32(x - high);
    }
};

// float64. The sum over one step starts from zero and is added to c: long sums are then done in
// blocks of 16.
struct Atom64 {
    static constexpr int kK = 16;
    static constexpr bool kTensorCore = __CUDA_ARCH__ >= 800;
    struct A {
        double x[8];
    };
    struct B {
        double x[4];
    };

    template <class Part> static __device__ __forceinline__ A load_a(Part part, int row, int k) {
        const int g = lane_id() / 4, t = lane_id() % 4;
        A a;
#pragma unroll
        for (int i = 0; i < 8; ++i) a.x[i] = part.load(row + g + 8 * (i % 2), k + t + 4 * (i / 2));
        return a;
    }
    template <class Part>
    static __device__ __forceinline__ A load_a_trans(Part part, int row, int k) {
        const int g = lane_id() / 4, t = lane_id() % 4;
        A a;
#pragma unroll
        for (int i = 0; i < 8; ++i) a.x[i] = part.load(k + slot(i / 2, t), row + g + 8 * (i % 2));
        return a;
    }
    template <class Part>
    static __device__ __forceinline__ void load_b(B (&b)[2], Part part, int col, int k) {
        const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
        for (int i = 0; i < 8; ++i)
            b[i / 4].x[i % 4] = part.load(col + 8 * (i / 4) + g, k + t + 4 * (i % 4));
    }
    template <class Part>
    static __device__ __forceinline__ void load_b_trans(B (&b)[2], Part part, int col, int k) {
        const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
        for (int i = 0; i < 8; ++i)
            b[i / 4].x[i % 4] = part.load(k + slot(i % 4, t), col + 8 * (i / 4) + g);
    }
    static __device__ __forceinline__ A a_from_c(const double (&left)[4],
                                                 const double (&right)[4]) {
        return {{left[0], left[2], left[1], left[3], right[0], right[2], right[1], right[3]}};
    }
    static __device__ __forceinline__ void mma(double (&c)[4], const A& a, const B& b) {
        double part[4] = {};
#if __CUDA_ARCH__ >= 900
        mma_m16n8k16_f64(part, a.x, b.x);
#elif __CUDA_ARCH__ >= 800
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            mma_m8n8k4_f64(part[0], part[1], a.x[2 * i], b.x[i]);
            mma_m8n8k4_f64(part[2], part[3], a.x[2 * i + 1], b.x[i]);
        }
#else
        add_by_fma(c, a, b);
#endif
#pragma unroll
        for (int r = 0; r < 4; ++r) c[r] += part[r];
    }

 private:
    // The column of an accumulator pair that slot i of lane t stands for.
    static __device__ __forceinline__ int slot(int i, int t) { return 8 * (i / 2) + 2 * t + i % 2; }
};

template <class T, bool kTf32> struct AtomFor {
    using type = Atom16<T>;
};
template <bool kTf32> struct AtomFor<float, kTf32> {
    using type = Atom32<kTf32>;
};
template <bool kTf32> struct AtomFor<double, kTf32> {
    using type = Atom64;
};

// How far loops over k with both operands in shared memory are unrolled: products of wide types are
// long already.
template <class T> inline constexpr int kSmemUnroll = sizeof(T) == 2 ? 16 : sizeof(T) == 4 ? 1 : 2;
