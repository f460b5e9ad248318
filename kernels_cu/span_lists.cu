// The lists of attn/block_map.cuh for segments: of a block's ids only the least and the largest are known
// (spans.cu), so that blocks meet where these ranges do, and need no look where both are one id. In the
// order of block_lists.lists in cuflash/block_lists.py; what lies behind a list's end is not written.
//
// A warp writes a row, each lane looks at every 32nd block.
#include "attn/block_map.cuh"
#include "ptx/misc.cuh"

struct Span {
    int first, last;  // ids, or rows; both included
};
enum Kind { kEmpty, kPartial, kFull };

// A batch entry's queries or keys.
struct Side {
    const int2* spans;  // of 32 neighbours each
    int length;

    template <int kBlock> __device__ __forceinline__ Span rows(int block) const {
        return {block * kBlock, min_of((block + 1) * kBlock, length) - 1};
    }
    __device__ __forceinline__ Span ids(const Span& rows) const {
        Span all{spans[rows.first / 32].x, spans[rows.first / 32].y};
        for (int n = rows.first / 32 + 1; n <= rows.last / 32; ++n)
            all = {min_of(all.first, spans[n].x), max_of(all.last, spans[n].y)};
        return all;
    }
};

struct Sides {
    const Params& p;
    const Side q, k;

    __device__ __forceinline__ Kind kind(int m, int n) const {
        const Span i = q.rows<Plan::kBlockM>(m), j = k.rows<Plan::kBlockN>(n);
        // Forward takes no notice of queries beyond the end.
        bool whole = j.last - j.first == Plan::kBlockN - 1 &&
                     (!Plan::kBackward || i.last - i.first == Plan::kBlockM - 1);
        if constexpr (Plan::kBand) {
            if (j.last < i.first + p.band_lo || j.first > i.last + p.band_hi) return kEmpty;
            whole = whole && j.first >= i.last + p.band_lo && j.last <= i.first + p.band_hi;
        }
        const Span of_q = q.ids(i), of_k = k.ids(j);
        if (of_q.last < of_k.first || of_k.last < of_q.first) return kEmpty;
        return whole && of_q.first == of_k.last && of_q.last == of_k.first ? kFull : kPartial;
    }
    // How many blocks of keys behind n visit m: they add to its sums before n does.
    __device__ __forceinline__ int turn(int m, int n) const {
        int count = 0;
        for (int other = n + 1; other < ceil_div(p.seqlen_k, Plan::kBlockN); ++other)
            count += kind(m, other) != kEmpty;
        return count;
    }
};

extern "C" __global__ void __launch_bounds__(Plan::kThreads)
    span_lists(const __grid_constant__ Params p) {
    const u32 index = blockIdx.x * (Plan::kThreads / 32) + threadIdx.x / 32;
    if (index >= p.count * p.num_rows) return;
    const int lane = int(threadIdx.x % 32), row = int(index % p.num_rows);
    const int2* spans = static_cast<const int2*>(p.spans) + i64(index / p.num_rows) * (p.pitch / 32);
    const Sides sides{p, {spans, p.seqlen_q}, {spans + p.first_key / 32, p.seqlen_k}};
    const int columns = Plan::kBackward ? ceil_div(p.seqlen_q, Plan::kBlockM)
                                        : ceil_div(p.seqlen_k, Plan::kBlockN);
    const int start = Plan::kSpread ? int(i64(row) * columns / p.num_rows) : 0;
    int* list = static_cast<int*>(p.lists) + i64(index) * p.row_length;
    // How many are full, then the places of full and of partial blocks.
    int full = 0, partial = 0;
    for (bool writes : {false, true}) {
        partial = full;
        full = 0;
        for (int first = 0; first < columns; first += 32) {
            const int column = (start + first + lane) % columns;
            const int m = Plan::kBackward ? column : row, n = Plan::kBackward ? row : column;
            const Kind kind = first + lane < columns ? sides.kind(m, n) : kEmpty;
            const u32 fulls = __ballot_sync(kFullWarp, kind == kFull);
            const u32 partials = __ballot_sync(kFullWarp, kind == kPartial);
            const u32 before = (1u << lane) - 1;
            if (writes && kind != kEmpty) {
                int* to = list + BlockList::kHead;
                to += kind == kFull ? full + __popc(fulls & before)
                                    : partial + __popc(partials & before);
                to[0] = column;
                if constexpr (Plan::kBackward) to[columns] = sides.turn(m, n);
            }
            full += __popc(fulls), partial += __popc(partials);
        }
    }
    if (lane == 0) list[0] = partial, list[1] = partial - full;
}
