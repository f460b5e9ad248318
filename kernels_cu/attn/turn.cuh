// Taking turns: thread blocks add to the same sums in a fixed order, so that the sums repeat bit by
// bit.
//
// A flag in global memory, zero at first, counts who has added. Work comes from a counter in the
// order of the turns, so whoever is waited for has started earlier: no scheduling can deadlock.
#pragma once
#include "../ptx/misc.cuh"
#include "../tile/smem_tile.cuh"

// One warp's additions to one sum. The flag is read before the work that leads to the additions,
// and raised a while after them, so that neither the read nor the release is waited for. In between,
// lane 0 keeps the turn in the warp's 16 bytes of shared memory: registers are full.
template <bool kOrdered> struct Turn {
    struct Pending {
        u32* flag;  // null: nothing to announce
        u64 number;
    };
    SharedValue<Pending> pending;

    static __device__ __forceinline__ bool leads() { return threadIdx.x % kWarpSize == 0; }

    __device__ __forceinline__ void init() const {
        if (kOrdered && leads()) pending.set({nullptr, 0});
    }
    // Returns what wait() takes.
    __device__ __forceinline__ u32 look(u32* flag, u32 number) const {
        if (!kOrdered || !leads()) return 0;
        pending.set({flag, number});
        return load_relaxed(flag);
    }
    __device__ __forceinline__ void wait(u32 seen) const {
        if constexpr (kOrdered) {
            if (leads()) {
                const Pending turn = pending.get();
                while (seen != u32(turn.number)) seen = load_relaxed(turn.flag);
            }
            __syncwarp();
        }
    }
    __device__ __forceinline__ void announce() const {
        if constexpr (kOrdered) {
            __syncwarp();
            if (leads()) {
                const Pending turn = pending.get();
                if (turn.flag != nullptr) store_release(turn.flag, u32(turn.number) + 1);
                pending.set({nullptr, 0});
            }
        }
    }
};

// The place of this block in the order of work. `smem` is the address of four bytes that hold
// nothing yet.
template <bool kOrdered> __device__ __forceinline__ u32 take_ticket(void* counter, u32 smem) {
    if constexpr (!kOrdered) return blockIdx.x;
    if (threadIdx.x == 0) {
        const u32 ticket = atomicAdd(static_cast<u32*>(counter), 1u);
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(smem), "r"(ticket) : "memory");
    }
    __syncthreads();
    u32 index;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(index) : "r"(smem) : "memory");
    __syncthreads();
    return index;
}
