// The lists of attn/block_map.cuh for segments: blocks meet where their ranges of ids do, and are full
// where both are one id. What lies behind a list's end is not written.
//
// A thread block finds all ranges; then its first warp writes a row, 32 blocks at a time.
#include "attn/block_map.cuh"
#include "ptx/misc.cuh"

struct Span {
    int first, last;  // rows or ids
};
__device__ __forceinline__ Span rows_of(int block, int size, int length) {
    return {block * size, min_of((block + 1) * size, length) - 1};
}
__device__ __forceinline__ void find(Span* spans, const void* of, int size, int length, u32 batch) {
    const int* ids = static_cast<const int*>(of) + i64(batch) * length;
    for (int n = int(threadIdx.x); n < ceil_div(length, size); n += Plan::kThreads) {
        const Span rows = rows_of(n, size, length);
        Span all{ids[rows.first], ids[rows.first]};
        for (int i = rows.first + 1; i <= rows.last; ++i)
            all = {min_of(all.first, ids[i]), max_of(all.last, ids[i])};
        spans[n] = all;
    }
}

extern "C" __global__ void __launch_bounds__(Plan::kThreads)
    span_lists(const __grid_constant__ Params p) {
    __shared__ Span q[2048], k[4096];  // SEGMENT_ROWS in blocks of 64 and 32
    const int row = int(blockIdx.x % p.num_rows), lane = int(threadIdx.x);
    find(q, p.q_ids, Plan::kBlockM, p.seqlen_q, blockIdx.x / p.num_rows);
    find(k, p.k_ids, Plan::kBlockN, p.seqlen_k, blockIdx.x / p.num_rows);
    __syncthreads();
    if (lane >= 32) return;

    // 0 where blocks of queries and of keys do not meet, 2 where they are full.
    const auto kind = [&](int m, int n) {
        const Span i = rows_of(m, Plan::kBlockM, p.seqlen_q);
        const Span j = rows_of(n, Plan::kBlockN, p.seqlen_k);
        if (q[m].first > k[n].last || k[n].first > q[m].last) return 0;
        if (j.last < i.first + p.band_lo || j.first > i.last + p.band_hi) return 0;
        return 1 + (q[m].first == k[n].last && q[m].last == k[n].first &&
                    j.first >= i.last + p.band_lo && j.last <= i.first + p.band_hi &&
                    j.last - j.first == Plan::kBlockN - 1 && i.last - i.first == Plan::kBlockM - 1);
    };
    const int n_blocks = ceil_div(p.seqlen_k, Plan::kBlockN);
    const int columns = Plan::kBackward ? ceil_div(p.seqlen_q, Plan::kBlockM) : n_blocks;
    int* const list = static_cast<int*>(p.lists) + i64(blockIdx.x) * p.row_length;
    // Places of the next full and partial blocks: the first round counts the full ones.
    int full = 0, partial = 0;
    for (bool writes : {false, true}) {
        partial = full, full = 0;
        for (int column = lane; column - lane < columns; column += 32) {
            const int m = Plan::kBackward ? column : row;
            int n = Plan::kBackward ? row : column;
            const int own = column < columns ? kind(m, n) : 0;
            const u32 fulls = __ballot_sync(kFullWarp, own == 2);
            const u32 partials = __ballot_sync(kFullWarp, own == 1);
            const u32 before = (1u << lane) - 1;
            if (writes && own > 0) {
                int* to = list + BlockList::kHead;
                to += own == 2 ? full + __popc(fulls & before) : partial + __popc(partials & before);
                *to = column;
                // The turn: blocks of keys behind this one add first.
                if (Plan::kBackward)
                    for (to[columns] = 0; ++n < n_blocks;) to[columns] += kind(m, n) > 0;
            }
            full += __popc(fulls), partial += __popc(partials);
        }
    }
    if (lane == 0) list[0] = partial, list[1] = partial - full;
}
