// What a call's masks let through, block by block: 0 nothing, 1 some pairs, 2 all.
//
// One thread block looks at every pair of one block of the map that lies inside the sequences; the
// threads take neighbouring keys.
#include "attn/mask.cuh"
#include "attn/score.cuh"

extern "C" __global__ void __launch_bounds__(Plan::kThreads)
    block_map(const __grid_constant__ Params p) {
    const u32 columns = p.num_key_blocks;
    u32 index = blockIdx.x;
    const int n = int(index % columns);
    index /= columns;
    const int m = int(index % p.num_blocks);
    const u32 outer = index / p.num_blocks, batch = outer / p.num_heads;
    const Visible<Mask<Plan::kBand>, Score> sees{
        {p.band_lo, p.band_hi, p.seqlen_q, p.seqlen_k}, {p, batch, outer - batch * p.num_heads}};
    const int end_i = min_of(i64(m + 1) * p.map_block_q, i64(p.seqlen_q));
    const int end_j = min_of(i64(n + 1) * p.map_block_k, i64(p.seqlen_k));
    bool any = false, all = true;
    for (int i = m * p.map_block_q; i < end_i; ++i)
        for (int j = n * p.map_block_k + int(threadIdx.x); j < end_j; j += Plan::kThreads) {
            const bool seen = sees(i, j);
            any |= seen, all &= seen;
        }
    any = __syncthreads_or(any);
    all = __syncthreads_and(all);
    if (threadIdx.x == 0) static_cast<unsigned char*>(p.kinds)[blockIdx.x] = any ? all ? 2 : 1 : 0;
}
