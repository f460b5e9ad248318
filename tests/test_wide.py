"""Wide heads on GPUs whose shared memory their tiles exceed: any GPU runs those kernels too."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest
from conftest import CUPY
from dense import Oracle, check_backward, check_forward
from running import check, differentiate
from strategies import Case

from cuflash.families import device_of

pytestmark = pytest.mark.skipif(CUPY is None, reason="needs a GPU")


@contextlib.contextmanager
def shared_memory_of(capability):
    """Kernels are those that a GPU with the shared memory of `capability` would run. Gives a
    function that tells whether one of them has read its inputs where they lie.
    """
    from cuflash import launch_steps

    def facts(device_id):
        return replace(device_facts(device_id), smem_per_block=room)

    def direct():
        steps = [getattr(first, "main", first) for first, *_ in launch_steps._prepared.values()]
        return any(dict(step.plan.constants).get("kDirect") for step in steps)

    device_facts = launch_steps.device_facts
    room = device_of(capability).smem_per_block
    launch_steps._prepared.clear()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch_steps, "device_facts", facts)
            yield direct
    finally:
        launch_steps._prepared.clear()


ODD = ("swap -1 -2", "reversed", "step2", "offset1", "pitch+3")
WIDE = (
    (75, Case(33, 150, 256, 256, 4, 2, (2,), (2,), (2,), dtype="float64", causal=True)),
    (75, Case(70, 65, 250, 131, 2, 1, dtype="float64", window=(9, 3), strides=ODD)),
    (75, Case(17, 130, 112, 112, 2, 2, dtype="float64", causal=True)),
    (75, Case(200, 70, 192, 100, dtype="float64")),
    (75, Case(64, 128, 256, 256, 2, 1, (2,), (2,), (2,), dtype="float32", causal=True)),
    (75, Case(130, 70, 193, 250, 3, 1, dtype="float32", strides=ODD)),
    (86, Case(65, 150, 256, 193, 2, 1, dtype="float64", causal=True)),
)


@pytest.mark.parametrize("capability, case", WIDE, ids=repr)
def test_inputs_without_tiles(gpu, capability, case):
    """Every head dim runs where its tiles exceed the shared memory (bug 231), NaN and inf that are
    hidden from some rows included.
    """
    arrays = case.arrays()
    oracle = Oracle(case, *(arrays[n] for n in ("q", "k", "v", "dout", "dlse")))
    spoiled = {name: array.copy() for name, array in arrays.items()}
    for name, row in (("q", 2), ("k", -1), ("v", -2), ("dout", 1)):
        spoiled[name][..., row, 7] = np.nan
    with shared_memory_of(capability) as direct:
        check(gpu, case)
        assert direct()
        results = differentiate(gpu, case, arrays, deterministic=False)
        check_forward(oracle, *results[:2])
        check_backward(oracle, results[2:])
        check(gpu, case, spoiled)
