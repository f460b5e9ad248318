"""Options on scores as they are measured: what a case's option passes to cuflash, and the same for
PyTorch's FlexAttention where it has it.
"""

from __future__ import annotations

import numpy as np

import cuflash

MAP_BLOCK = 128  # queries and keys of a block of the maps
DOCUMENTS = 12  # of a packed sequence, as equal as they get
_CAP = 30.0


def dtype_of(name):
    """NumPy's dtype of that name; bfloat16 comes from ml_dtypes."""
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def _slopes(heads):
    """Geometric, as Press et al. (2022) take them."""
    return (2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)).astype(np.float32)


def _documents(case):
    return (np.arange(case.seqlen) * DOCUMENTS // case.seqlen).astype(np.int32)


def map_kinds(option, seqlen):
    """The blocks of a map, full or empty, (blocks, blocks); KeyError for other options."""
    count = seqlen // MAP_BLOCK
    i, j = np.ogrid[:count, :count]
    made = {
        "banded map": lambda: abs(i - j) <= 8,
        "document map": lambda: i * DOCUMENTS // count == j * DOCUMENTS // count,
        "random map": lambda: np.random.default_rng(0).random((count, count)) < 0.25,
    }
    return 2 * made[option]()


def _map(case, xp):
    return {"block_map": cuflash.BlockMap(xp.asarray(map_kinds(case.option, case.seqlen)))}


def _capped(s, b, h, i, j):
    return _CAP * np.tanh(s / _CAP)


def _segments(case, xp):
    ids = xp.asarray(_documents(case)[None])
    return {"q_segment_ids": ids, "kv_segment_ids": ids}


def _with_map(masks, case, xp):
    """The masks and the map of their blocks, made once as FlexAttention's block mask is."""
    q, k = (xp.zeros((1, 1, rows, 1), np.float32) for rows in case.lengths)
    return {**masks, "block_map": cuflash.block_map(q, k, **masks)}


def options(case, xp):
    """Keywords of attention for ``case.option``, arrays in the library ``xp``."""
    rows, rng = case.seqlen, xp.random.default_rng(1)

    def bias():
        values = rng.standard_normal((rows, rows), dtype=np.float32)
        return {"bias": values if "float32" in case.option else values.astype(dtype_of(case.dtype))}

    made = {
        "": lambda: {},
        "packed": lambda: {},
        "softcap": lambda: {"softcap": _CAP},
        "score_mod": lambda: {"score_mod": _capped},
        "alibi": lambda: {"alibi_slopes": xp.asarray(_slopes(case.heads))},
        "bias": bias,
        "bias and its gradient": bias,
        "float32 bias": bias,
        "mask": lambda: {"mask": rng.random((rows, rows), dtype=np.float32) < 0.9},
        "lengths": lambda: {"kv_lens": xp.full(case.batch, rows - rows // 8, np.int32)},
        "segments": lambda: _segments(case, xp),
        "documents": lambda: _with_map(_segments(case, xp), case, xp),
        "dropout": lambda: {"dropout_p": 0.125, "seed": 1},
        "banded map": lambda: _map(case, xp),
        "document map": lambda: _map(case, xp),
        "random map": lambda: _map(case, xp),
    }
    return made[case.option]()


def need(case):
    """The gradients that are asked for."""
    return ("q", "k", "v") + (("bias",) if case.option == "bias and its gradient" else ())


def flex(case, torch):
    """(score_mod, mask_mod, tensors that want gradients) of FlexAttention; KeyError where it is not
    timed.
    """
    device = "cuda"
    if case.option in ("softcap", "score_mod"):
        return (lambda s, b, h, i, j: _CAP * torch.tanh(s / _CAP)), None, ()
    if case.option == "alibi":
        slopes = torch.asarray(_slopes(case.heads), device=device)
        return (lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()), None, ()
    if case.option.startswith("bias"):
        wanted = case.option != "bias"
        dtype = getattr(torch, case.dtype)
        shape = case.seqlen, case.seqlen
        bias = torch.randn(shape, device=device, dtype=dtype, requires_grad=wanted)
        return (lambda s, b, h, i, j: s + bias[i, j]), None, (bias,) if wanted else ()
    if case.option in ("segments", "documents"):
        ids = torch.asarray(_documents(case), device=device)
        return None, (lambda b, h, i, j: ids[i] == ids[j]), ()
    raise KeyError(case.option)
