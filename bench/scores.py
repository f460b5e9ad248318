"""Options on scores as they are measured: what a case's option passes to cuflash, and the same for
PyTorch's FlexAttention where it has it.
"""

from __future__ import annotations

import numpy as np

import cuflash

MAP_BLOCK = 128  # queries and keys of a block of the maps
DOCUMENTS = 12  # of a packed sequence, as equal as they get
_CAP = 30.0


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


def options(case, xp):
    """Keywords of attention for ``case.option``, arrays in the library ``xp``."""
    rows, rng = case.seqlen, xp.random.default_rng(1)
    made = {
        "": lambda: {},
        "softcap": lambda: {"softcap": _CAP},
        "score_mod": lambda: {"score_mod": _capped},
        "alibi": lambda: {"alibi_slopes": xp.asarray(_slopes(case.heads))},
        "bias": lambda: {"bias": rng.standard_normal((rows, rows), dtype=np.float32)},
        "mask": lambda: {"mask": rng.random((rows, rows), dtype=np.float32) < 0.9},
        "lengths": lambda: {"kv_lens": xp.full(case.batch, rows - rows // 8, np.int32)},
        "segments": lambda: {"q_segment_ids": xp.asarray(_documents(case)[None])},
        "dropout": lambda: {"dropout_p": 0.125, "seed": 1},
        "banded map": lambda: _map(case, xp),
        "document map": lambda: _map(case, xp),
        "random map": lambda: _map(case, xp),
    }
    found = made[case.option]()
    if case.option == "segments":
        found["kv_segment_ids"] = found["q_segment_ids"]
    return found


def need(case):
    """The gradients that are asked for: the bias's, too."""
    return ("q", "k", "v") + (("bias",) if case.option == "bias" else ())


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
    if case.option == "bias":
        bias = torch.randn(case.seqlen, case.seqlen, device=device, requires_grad=True)
        return (lambda s, b, h, i, j: s + bias[i, j]), None, (bias,)
    if case.option == "segments":
        ids = torch.asarray(_documents(case), device=device)
        return None, (lambda b, h, i, j: ids[i] == ids[j]), ()
    raise KeyError(case.option)
