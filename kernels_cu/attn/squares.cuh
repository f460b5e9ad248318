// The gradient of an array that is added to the score and has an entry for each pair: dS itself,
// summed over the heads that share the array.
//
// A step's dS^T of 64 keys and 64 queries lies in shared memory in the order of fragments. As such a
// square, 16 kB in a row, warp 3 of the producer's warpgroup has it written to global memory or added
// there, at [entry][block of queries][64 keys], entry counting the array's own heads; pair_gradient.cu
// makes the array of it. Squares of heads with entries of their own are written once. Shared ones are
// added in L2, and with kDeterministic in turns, of which the first writes: nothing need be zero.
//
// Heads that share a square take turns in the order of their sections (attn/work.cuh), in a section
// by the step at which they meet it: query head by query head of the groups, then by key/value head.
// Each therefore waits for steps that come before its own, of blocks with earlier tickets or in
// flight beside it: a section has no more blocks of the same keys than there are SMs, and without a
// band no more of those that go round together (Place). Turns at dq and at squares agree in that
// order, so nothing waits in a circle.
#pragma once
#include "../tile/rows.cuh"
#include "backward_sm90.cuh"

inline constexpr int kSquareBytes = 64 * 64 * 4;

template <class AnyParams>
__device__ __forceinline__ void add_squares(const AnyParams& p, const Shared& smem,
                                            const Work<1>& w) {
    HeadCounter heads(smem, w.head * p.group);
    u32 phase = 0, last = 0;  // the last step's flag, counted from 1
    // Once its additions are complete.
    const auto announce = [&] {
        bulk_wait_all();
        if (kSquareTurns && last > 0) raise_release(static_cast<u32*>(p.square_flags) + last - 1);
    };
#pragma unroll 1
    for (Walk walk(p, smem, w); walk.more() > 0; walk.next(), heads.next(), phase ^= 1) {
        // Anew for each step: there are hardly any registers.
        const u32 batch = u32(opaque(int(w.batch))), head = heads.of(walk);
        const u32 entry = u32(batch_offset(p.squares_strides, p.batch_sizes, batch)) +
                          head * u32(p.squares_strides.head);
        const u32 row = entry * p.num_m_blocks + u32(walk.block());
        bool writes = !Score::kSharedSquares;
        if constexpr (kSquareTurns) {
            const u32 place = row * p.num_blocks + u32(w.block);
            const u32* const flag = static_cast<u32*>(p.square_flags) + place;
            u32 seen = load_relaxed(flag);  // on its way while the last step's are waited for
            announce();
            last = place + 1;
            const u32 turn = square_turn(p, batch, w.head, head - w.head * p.group);
            while (seen != turn) seen = load_relaxed(flag);
            writes = turn == 0;
        }
        const i64 square = i64(row) * p.square_columns + w.block * kSquares;
        float* const to = static_cast<float*>(p.squares) + square * (kSquareBytes / 4);
#pragma unroll
        for (int n = 0; n < kSquares; ++n) {
            const u32 from = smem.exchange() + n * kSquareBytes;
            mbarrier_wait(smem.square_full(n), phase);
            if (writes)
                bulk_store(to + n * (kSquareBytes / 4), from, kSquareBytes);
            else
                bulk_add(to + n * (kSquareBytes / 4), from, kSquareBytes);
            bulk_commit_group();
            bulk_wait_read<0>();
            mbarrier_arrive(smem.square_empty(n));
        }
    }
    announce();
}
