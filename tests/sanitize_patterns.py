"""Three patterns by the book that compute-sanitizer takes for errors, each in a kernel of its own,
without any of cuflash's code. Hopper's kernels are made of them, so reports of these kinds say
nothing about them:

    word   readers of a word in shared memory, __syncwarp, lane 0 arrives at a barrier; the writer
           waits for its phase, then writes the next word                    (racecheck)
    bulk   a bulk copy whose readers wait for its bytes at a barrier, and which waits for them as
           above                                                             (racecheck)
    meet   two warps that meet at one named barrier, each in its own branch  (synccheck)

    compute-sanitizer --tool racecheck python tests/sanitize_patterns.py

Each result is compared with what the order of events makes it. It needs a GPU.
"""

from __future__ import annotations

import sys

WARPS, ROUNDS = 4, 8  # warp 0 writes, the others read

SOURCE = r"""
__device__ unsigned shared(const volatile void* p) {
    return unsigned(__cvta_generic_to_shared(const_cast<const void*>(p)));
}
__device__ void init(unsigned long long* full, unsigned long long* empty) {
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(full)) : "memory");
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 3;" ::"r"(shared(empty)) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
}
__device__ void wait(unsigned bar, unsigned parity) {
    asm volatile("{\n.reg .pred done;\nagain:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}\n"
                 ::"r"(bar), "r"(parity) : "memory");
}
__device__ void arrive(unsigned bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ void release(unsigned bar) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(bar);
}
extern "C" __global__ void word(int* out, const int* in, int rounds) {
    __shared__ unsigned long long full, empty;
    __shared__ volatile int word;
    init(&full, &empty);
    if (threadIdx.x == 0) {
        for (int i = 0; i < rounds; ++i) {
            wait(shared(&empty), (i & 1) ^ 1);
            word = in[i];
            arrive(shared(&full));
        }
    } else if (threadIdx.x >= 32) {
        int sum = 0;
        for (int i = 0; i < rounds; ++i) {
            wait(shared(&full), i & 1);
            sum += word;
            release(shared(&empty));
        }
        out[threadIdx.x] = sum;
    }
}
extern "C" __global__ void bulk(int* out, const int* in, int rounds) {
    __shared__ unsigned long long full, empty;
    __shared__ __align__(16) volatile int row[128];
    init(&full, &empty);
    if (threadIdx.x == 0) {
        for (int i = 0; i < rounds; ++i) {
            wait(shared(&empty), (i & 1) ^ 1);
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 512;"
                         ::"r"(shared(&full)) : "memory");
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                         "[%0], [%1], 512, [%2];"
                         ::"r"(shared(row)), "l"(in + 128 * i), "r"(shared(&full)) : "memory");
        }
    } else if (threadIdx.x >= 32) {
        int sum = 0;
        for (int i = 0; i < rounds; ++i) {
            wait(shared(&full), i & 1);
            sum += row[threadIdx.x];
            release(shared(&empty));
        }
        out[threadIdx.x] = sum;
    }
}
extern "C" __global__ void meet(int* out, const int* in, int rounds) {
    __shared__ volatile int words[64];
    if (threadIdx.x >= 64) return;
    int sum = 0;
    for (int i = 0; i < rounds; ++i) {
        words[threadIdx.x] = in[64 * i + threadIdx.x];
        if (threadIdx.x < 32) {
            asm volatile("barrier.cta.sync.aligned 1, 64;" ::: "memory");
            sum += words[threadIdx.x + 32];
        } else {
            asm volatile("barrier.cta.sync.aligned 1, 64;" ::: "memory");
            sum -= words[threadIdx.x - 32];
        }
        asm volatile("barrier.cta.sync.aligned 2, 64;" ::: "memory");
    }
    out[threadIdx.x] = sum;
}
"""


def main():
    import cupy
    import numpy as np

    values = np.arange(128 * ROUNDS, dtype=np.int32)
    rows = values.reshape(ROUNDS, 128).sum(0)
    pairs = values[: 64 * ROUNDS].reshape(ROUNDS, 64).sum(0)
    expected = {
        "word": np.full(96, values[:ROUNDS].sum()),
        "bulk": rows[32:],
        "meet": np.concatenate([pairs[32:], -pairs[:32]]),
    }
    module = cupy.RawModule(code=SOURCE, options=("-std=c++17",))
    for name, right in expected.items():
        out = cupy.zeros(32 * WARPS, np.int32)
        module.get_function(name)((2,), (32 * WARPS,), (out, cupy.asarray(values), ROUNDS))
        found = cupy.asnumpy(out)
        found = found[:64] if name == "meet" else found[32:]
        assert np.array_equal(found, right), name
        print(f"{name}: right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
