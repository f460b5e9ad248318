"""Gradients of arrays with an entry for each pair, which leave Hopper's backward as squares of dS
(attn/backward_sm90.cuh), without a GPU: what is launched, turns, and the kernel that ends it on the host.
"""

import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from launches import arrays_of, gpu_side, on_host  # noqa: F401
from test_kernel_dropout import COMPILER, PRELUDE
from test_launch_scores import BIAS, program_of
from test_plan import HOPPER, problem_of

import cuflash
from cuflash import source
from cuflash.extras import Extras
from cuflash.problem import Band
from cuflash.score import Expr, element

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler for the host")
SMS = 132


def compiled(folder, text):
    (folder / "test.cpp").write_text(text)
    command = [COMPILER, "-std=c++17", "-O1", "-w", "-pthread", "test.cpp", "-o", "test"]
    subprocess.run(command, cwd=folder, check=True)

    def run(*numbers):
        done = subprocess.run(
            [folder / "test", *map(str, numbers)], check=True, capture_output=True, text=True
        )
        return [np.array(line.split(), float) for line in done.stdout.splitlines()]

    return run


# ---- what is launched ------------------------------------------------------------------------


def call_of(gpu_side, shape, *, batch=(2,), heads=4, group=1, lengths=(200, 300), band=None,
            deterministic=True, need_q=True):  # fmt: skip
    """Arguments of backward with a bias of that shape, *batch to S, and keywords."""
    cupy, _, _ = gpu_side
    problem = replace(
        problem_of("float16", 64, 64, *lengths, batch=batch, band=band, num_heads=heads),
        program=program_of(lambda s, i, j: s + Expr(element(0, BIAS)), [BIAS]),
        num_kv_heads=heads // group,
    )  # fmt: skip
    q, k, v, out, lse = arrays_of(cupy, problem)
    full = np.broadcast_to(np.zeros(shape, np.float16), (*batch, heads, *lengths))
    dbias = cupy.ndarray(shape, np.float16)
    grads = [cupy.ndarray(x.shape, x.dtype) if need_q else None for x in (q, k, v)]
    extras = Extras((cupy.ndarray(None, base=full),))
    given = problem, out, q, k, v, out, lse, None, *grads, deterministic
    return given, dict(extras=extras, dargs=(dbias,))


def launched(gpu_side, shape, **options):
    """(plan, blocks, fields) by kernel, and the bias's gradient."""
    given, keywords = call_of(gpu_side, shape, **options)
    launch = gpu_side[2]
    launch.log.clear()
    launch.backward(*given, **keywords)
    return {entry[0].kernel: entry for entry in launch.log}, keywords["dargs"][0]


@pytest.mark.parametrize("deterministic", (True, False))
@pytest.mark.parametrize(
    "shape, steps",
    [
        ((2, 4, 200, 300), (4, 1)),
        ((1, 4, 200, 300), (0, 1)),
        ((2, 1, 200, 300), (1, 0)),
        ((1, 1, 200, 300), (0, 0)),
    ],
)
def test_squares_are_those_of_the_array(gpu_side, shape, steps, deterministic):
    kernels, dbias = launched(gpu_side, shape, deterministic=deterministic)
    plan, _, main = kernels["bwd_sm90"]
    own = shape[:2] == (2, 4)
    assert "kSquares = true" in plan.score and "kGradients = false" in plan.score
    assert (main["square_batch"], main["square_head"]) == steps
    assert (main["square_flags"] != 0) == (deterministic and not own)
    plan, blocks, last = kernels["pair_gradient"]
    assert (last["squares"], last["gradient"]) == (main["squares"], dbias.data.ptr)
    assert blocks == shape[0] * shape[1] * 4 * 6
    assert (last["num_blocks"], last["num_key_blocks"]) == (4, 6)
    assert (last["batch_sizes"], last["num_heads"]) == ([1, 1, shape[0]], shape[1])
    assert plan["Element"] == "f16" and not plan["kBand"]


def test_others_stay_sums_of_integers(gpu_side):
    for shape, options in (
        ((1, 1, 1, 300), {}),
        ((1, 1, 200, 1), {}),
        ((1, 3, 1, 200, 300), dict(batch=(2, 3))),  # shared along one of two axes
    ):
        given, keywords = call_of(gpu_side, shape, **options)
        plans = sys.modules["cuflash.launch_backward"].plans_of(*given, **keywords)
        scores = {plan.kernel: plan.score for plan in plans}
        assert "pair_gradient" not in scores and "kGradients = true" in scores["bwd_sm90"]


def test_turns_need_tickets_without_dq(gpu_side):
    kernels, _ = launched(gpu_side, (1, 1, 200, 300), need_q=False)
    _, _, fields = kernels["bwd_sm90"]
    assert fields["ticket"] != 0 and fields["dk"] != 0 and "cast" not in kernels


def test_the_result_itself_is_written(on_host):
    cupy, launch = on_host
    q, bias = np.zeros((2, 4, 70, 64), np.float16), np.zeros((4, 70, 70), np.float32)
    q, bias = (cupy.ndarray(None, base=x) for x in (q, bias))
    _, pull = cuflash.attention_vjp(q, q, q, bias=bias)
    launch.log.clear()
    grads = pull(q, need=("bias",))
    plan, _, fields = launch.log[-1]
    assert plan.kernel == "pair_gradient" and plan["Element"] == "float"
    assert grads.dbias.shape == bias.shape and grads.dbias.dtype == bias.dtype
    assert fields["gradient"] == grads.dbias.data.ptr


def test_what_no_pair_adds_to_is_zero(on_host):
    """An array that the score does not read, and one of no pairs."""
    cupy, _ = on_host
    q, unused = cupy.ndarray((1, 2, 8, 64), np.float16), cupy.ndarray((3,), np.float32)
    _, pull = cuflash.attention_vjp(q, q, q, score_mod=lambda s, *_: s, score_args=(unused,))
    assert not pull(q, need=("score_args",)).dscore_args[0].base.any()
    none = cupy.ndarray((1, 2, 0, 64), np.float16)
    bias = cupy.ndarray((8, 1), np.float16)
    _, pull = cuflash.attention_vjp(q, none, none, bias=bias)
    assert not pull(q, need=("bias",)).dbias.base.any()


# ---- turns -----------------------------------------------------------------------------------

TURNS = r"""
#include "work.h"
struct Params {
    u32 num_heads, group, section, num_sectioned, num_blocks, square_batch, square_head;
};
int main(int count, char** words) {
    u32 x[8];
    for (int n = 0; n < 8; ++n) x[n] = std::atoi(words[n + 1]);
    const Params p{x[0], x[1], x[2], x[3], x[4], x[5], x[6]};
    gridDim.x = x[7];
    for (u32 index = 0; index < gridDim.x; ++index) {
        const Work<1> work(index, p.num_blocks, p.num_heads / p.group, p.section, p.num_sectioned);
        std::printf("%u %u %d", work.batch, work.head, work.block);
        for (u32 n = 0; n < p.group; ++n)
            std::printf(" %u", square_turn(p, work.batch, work.head, n));
        std::printf("\n");
    }
}
"""


@pytest.fixture(scope="module")
def tickets(tmp_path_factory):
    text = "#include <cstdlib>\n" + PRELUDE + "struct { unsigned x; } gridDim;\n"
    text += TURNS.replace('#include "work.h"\n', source.unit("attn/work.cuh"))
    return compiled(tmp_path_factory.mktemp("turns"), text)


class Place:
    """As in attn/backward_sm90.cuh, of a block without a band."""

    def __init__(self, fields, block, outer):
        group = fields["turn_group" if outer < fields["num_sectioned"] else "last_turn_group"]
        self.steps, self.place = fields["num_m_blocks"], block % group
        self.size = min(group, fields["num_blocks"] - (block - self.place))
        self.before = block - self.place

    def start(self):
        if self.steps >= self.size:
            return self.place * (self.steps // self.size)
        return self.place * self.steps // self.size

    def turn(self, m):
        if self.steps >= self.size:
            latest = min(m // (self.steps // self.size), self.size - 1)
        else:
            latest = ((m + 1) * self.size - 1) // self.steps
        wait = latest - self.place if latest >= self.place else latest + self.size - self.place
        return self.before + wait


def walks(found, fields, band):
    """For each block in the order of its start: its steps as (squares, their turn, sum of dq, its
    turn), and all blocks' squares and sums met the same number of times.
    """
    group, per_batch = fields["group"], fields["square_batch"]
    for batch, head, block, *turns in found.astype(int):
        outer = batch * (fields["num_heads"] // group) + head
        blocks, steps = fields["num_blocks"], fields["num_m_blocks"]
        if band:  # causal, of as many keys as queries: blocks are as long as those of queries
            block = blocks - 1 - block
            queries = range(block * fields["keys"] // 64, steps)
        else:
            place = Place(fields, block, outer)
            queries = [(place.start() + n) % steps for n in range(steps)]
        for_all = []
        for n, turn in enumerate(turns):
            shared = (head, n) if fields["square_head"] else batch * per_batch
            for m in queries:
                at_dq = m * 64 // fields["keys"] - block if band else place.turn(m)
                for_all.append(((shared, block, m), turn, (outer, n, m), at_dq))
        yield for_all


def finishes(blocks):
    """Whether all blocks end on so many SMs, each doing a step once both turns of the one before it
    have come; and that each turn comes once.
    """
    done, waiting, running = {}, list(blocks)[::-1], []
    while waiting or running:
        while waiting and len(running) < SMS:
            running.append([waiting.pop(), [0, 0]])
        moved = False
        for steps, at in running:
            for n in (0, 1):
                if at[n] < len(steps) and at[n] <= at[1 - n]:
                    key, turn = steps[at[n]][2 * n : 2 * n + 2]
                    assert done.get((n, key), 0) <= turn
                    if done.get((n, key), 0) == turn:
                        done[n, key] = turn + 1
                        at[n] += 1
                        moved = True
        if not moved:
            return False
        running = [x for x in running if min(x[1]) < len(x[0])]
    return True


@needs_compiler
@pytest.mark.parametrize("band", (None, Band(-100_000, 0)))
@pytest.mark.parametrize("shape", ((1, 1), (1, 8), (6, 1)))
@pytest.mark.parametrize("group", (1, 4))
@pytest.mark.parametrize("lengths", ((64, 100), (500, 500), (1500, 2500), (3000, 300)))
def test_turns_come_whatever_waits_for_them(
    gpu_side, tickets, monkeypatch, lengths, group, shape, band
):
    """Many heads share squares, and there are more blocks than SMs; turns at dq are waited for, too."""
    if band is not None:
        lengths = (lengths[0], lengths[0])
    _, steps, _ = gpu_side
    monkeypatch.setattr(steps, "device_facts", lambda _: replace(HOPPER, l2_bytes=50 << 20))
    steps._prepared.clear()
    batch, heads = (6,), (8 if max(lengths) > 500 else 30) * group
    shape = (shape[0], heads if shape[1] > 1 else 1, *lengths)
    kernels, _ = launched(
        gpu_side, shape, batch=batch, heads=heads, group=group, lengths=lengths, band=band
    )
    plan, blocks, fields = kernels["bwd_sm90"]
    fields["keys"] = plan["kBlockN"]
    names = "num_heads", "group", "section", "num_sectioned", "num_blocks"
    names = *names, "square_batch", "square_head"
    found = np.array(tickets(*(fields[name] for name in names), blocks))
    assert finishes(walks(found, fields, band is not None))


# ---- the kernel that ends it -----------------------------------------------------------------

STANDINS = r"""
#define __global__
#define __grid_constant__
#define __launch_bounds__(n)
struct { unsigned x; } blockIdx;
struct float2 { float x, y; };
template <class T> T from_float(float x) { return x; }
struct Plan {
    using Element = float;
    static constexpr bool kBand = true;
};
template <bool kBand> struct Mask {
    int lo, hi, seqlen_q, seqlen_k;
    bool operator()(int i, int j) const {
        return i < seqlen_q && j < seqlen_k && j - i >= lo && j - i <= hi;
    }
};
"""
ENTRIES, LENGTHS, BAND = (2, 3), (100, 150), (-70, 30)
MAIN = r"""
struct Params {
    const void* squares;
    void* gradient;
    Strides gradient_strides;
    int batch_sizes[3], seqlen_q, seqlen_k, band_lo, band_hi;
    u32 num_heads, num_blocks, num_key_blocks;
};
KERNEL
int main() {
    // Each value says where it lies; what the band hides is NaN.
    std::vector<float> squares(6 * 2 * 4 * 4096), gradient(6 * 100 * 150, -1);
    for (int n = 0; n < int(squares.size()); ++n) squares[n] = n;
    Params p{squares.data(), gradient.data()};
    p.gradient_strides = {{0, 0, 3}, 1, 6 * 150, 6};  // (L, S, B, H)
    p.batch_sizes[0] = p.batch_sizes[1] = 1, p.batch_sizes[2] = 2;
    p.seqlen_q = 100, p.seqlen_k = 150, p.band_lo = -70, p.band_hi = 30;
    p.num_heads = 3, p.num_blocks = 2, p.num_key_blocks = 4;
    for (blockIdx.x = 0; blockIdx.x < 6 * 2 * 4; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < 256; ++threadIdx.x) pair_gradient(p);
    for (float x : gradient) std::printf("%.0f ", x);
    std::printf("\n");
}
"""


@needs_compiler
def test_squares_become_rows(tmp_path):
    """In the order in which a warpgroup's 128 threads hold 64 keys by 64 queries, tile by tile of 8."""
    kernel = re.sub("#include.*", "", (source.folder() / "pair_gradient.cu").read_text())
    parts = source.unit("tile/rows.cuh")
    (found,) = compiled(tmp_path, PRELUDE + STANDINS + parts + MAIN.replace("KERNEL", kernel))()
    (rows, columns), (low, high) = LENGTHS, BAND
    found = found.reshape(rows, columns, 6).transpose(2, 0, 1)
    entry, i, j = np.ogrid[:6, :rows, :columns]
    square = (entry * 2 + i // 64) * 4 + j // 64
    warp, group, upper = j % 64 // 16, j % 8, j % 16 // 8
    lane = group * 4 + i % 8 // 2
    place = ((i % 64 // 8 * 4 + warp) * 32 + lane) * 4 + upper * 2 + i % 2
    want = np.where((j - i >= low) & (j - i <= high), square * 4096 + place, 0)
    assert np.array_equal(found, want)
