"""The C++ ``struct Score`` of a kernel: what one call's options make of a score.

Its functions are what kernels_cu/attn/program.cuh says. Arguments enter as rows that a plan adds to
its kernel's parameters; their values are put in by launch_extras.py, in the order of ``rows``.
"""

from __future__ import annotations

NAME = "arg{}"

# Without any option. The functions that would take part in arithmetic are never called.
PLAIN = """\
using Accum = AccumOf<Plan::Element>;
struct Score {
    static constexpr bool kProgram = false, kHides = false, kUnit = true, kKeepsScore = false;
    static constexpr bool kSinks = false, kDropout = false, kGradients = false;
    __device__ __forceinline__ Score(const Params&, u32, u32) {}
    __device__ __forceinline__ Accum scaled(Accum x) const { return x; }
    __device__ __forceinline__ Accum value(Accum s, int, int) const { return s; }
    __device__ __forceinline__ Accum derivative(Accum, int, int) const { return 1; }
    __device__ __forceinline__ bool visible(int, int) const { return true; }
    __device__ __forceinline__ Accum sink() const { return 0; }
    __device__ __forceinline__ Accum keep_scale() const { return 1; }
    __device__ __forceinline__ Dropout dropout() const { return {}; }
    template <class F> __device__ __forceinline__ void for_each_gradient(F) const {}
};
"""
