"""Masks as bits on the way to kernels, without a GPU: the kernel in front, and what reads it."""

from __future__ import annotations

import numpy as np
from launches import arrays_of, gpu_side  # noqa: F401
from test_mask_bits import at_once, segments  # noqa: F401
from test_plan import problem_of

from cuflash import mask_bits
from cuflash.extras import Extras


def test_launches(gpu_side, at_once):
    """The kernel in front writes rows to their ends, and the next reads from where it wrote."""
    cupy, steps, launch = gpu_side
    problem = problem_of(batch=(2,), length=300, keys=500, program=segments())
    ids = [np.broadcast_to(np.zeros((2, 1, *n), np.int32), (2, 2, *n)) for n in ((300, 1), (1, 500))]
    extras = Extras(tuple(cupy.ndarray(None, base=x) for x in ids))
    q, k, v, out, lse = arrays_of(cupy, problem)
    launch.log.clear()
    launch.forward(problem, q, k, v, out, lse, extras=extras)
    (first, blocks, front), (main, _, fields) = (x for x in launch.log if isinstance(x, tuple))
    assert (first.kernel, first["kByKey"], main.kernel) == ("mask_bits", False, "fwd_sm90")
    words = mask_bits.row_words(500)
    assert front["row_words"] == words and front["num_heads"] == 1
    assert front["batch_sizes"] == [1, 1, 2] and front["arg0_strides"][:4] == [0, 0, 300, 0]
    assert (front["num_blocks"], front["num_key_blocks"]) == (2, words // 8)
    assert blocks == 2 * 2 * words // 8
    assert fields["arg0"] == front["bits"]
    assert fields["arg0_strides"] == [0, 0, 300 * words, 0, words, 1]
    assert "arg1" not in fields
    assert [plan.kernel for plan in launch.plans_of(problem, q, k, v, out, lse, extras=extras)] == [
        "fwd_sm90", "mask_bits",
    ]  # fmt: skip
    launch.log.clear()
    launch.backward(problem, out, q, k, v, out, lse, None, q, k, v, True, extras=extras)
    log = [x for x in launch.log if isinstance(x, tuple)]
    (first, blocks, front), (main, _, fields) = log[0], log[3]
    assert first["kByKey"] and main.kernel == "bwd_sm90"
    words = mask_bits.row_words(300)
    assert front["row_words"] == words and front["num_blocks"] == words // 8
    assert front["num_key_blocks"] == 2 and blocks == 2 * 2 * words // 8
    assert fields["arg0"] == front["bits"]
    assert fields["arg0_strides"] == [0, 0, 500 * words, 0, words, 1]


def test_other_calls_stay_as_they_are(gpu_side):
    cupy, _, launch = gpu_side
    problem = problem_of(batch=(2,), length=300, keys=500, program=segments())
    ids = [np.broadcast_to(np.zeros((2, 1, *n), np.int32), (2, 2, *n)) for n in ((300, 1), (1, 500))]
    extras = Extras(tuple(cupy.ndarray(None, base=x) for x in ids))
    launch.log.clear()
    launch.forward(problem, *arrays_of(cupy, problem), extras=extras)
    (plan, *_), = (x for x in launch.log if isinstance(x, tuple))
    assert plan.kernel == "fwd_sm90"
