"""The public functions around attention: merging of partial results, explaining, compiling."""

from __future__ import annotations

import numpy as np

from .arrays import dtype_name, home_of
from .checks import check_partials
from .edge import inner_view, resolve, scored, split_options
from .options import arrays_of


def merge(outs, lses):
    """Attention over the union of several sets of keys, from the results over each.

    ``lse = log(sum_n exp(lse_n))`` and ``out = sum_n exp(lse_n - lse) * out_n``; a part in which a
    query saw no key (lse -inf) does not count.

    Parameters
    ----------
    outs : sequence of arrays (..., Dv)
        Results for the same queries; equal shapes and dtypes, Dv from 1 to 256.
    lses : sequence of arrays (...)
        Their lse: float32, or float64 for float64 outs.

    Returns
    -------
    out : array (..., Dv)
        Of the dtype of outs.
    lse : array (...)
        Of the dtype of lses.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, BufferError, ImportError, RuntimeError
        As :func:`attention`.
    """
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, (list, tuple)):
            raise TypeError(
                f"{name} is a {type(parts).__qualname__}, but it must be a list or tuple of arrays"
            )
    items = [(f"outs[{n}]", x) for n, x in enumerate(outs)] + [
        (f"lses[{n}]", x) for n, x in enumerate(lses)
    ]
    if not items:
        check_partials([], [], [], [])
    home = home_of(items)
    with home.scope():
        adopted = [home.adopt(name, x) for name, x in items]
        outs, lses = adopted[: len(outs)], adopted[len(outs) :]
        check_partials(
            [x.shape for x in outs],
            [dtype_name(x.dtype) for x in outs],
            [x.shape for x in lses],
            [dtype_name(x.dtype) for x in lses],
        )
        out, out_handle = home.new(outs[0].shape, outs[0].dtype)
        lse, lse_handle = home.new(lses[0].shape, lses[0].dtype)
        if out.size:
            home.backend.merge(outs, lses, out, lse)
        return home.finish(out_handle), home.finish(lse_handle)


def explain(q, k, v, /, **options):
    """Which code :func:`attention` would run for these arrays, and why.

    Parameters
    ----------
    q, k, v : array
        As in :func:`attention`; their contents do not matter.
    **options
        The keywords of :func:`attention`, except `out` and `return_lse`.

    Returns
    -------
    object
        Print it, or take its ``str``. On the GPU: the kernel, its tile, registers and workspace,
        and why other kernels were rejected. On the CPU: the facts of the call.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, BufferError, ImportError, RuntimeError
        As :func:`attention`.
    """
    shaping, scores = split_options("explain", options)
    items = [("q", q), ("k", k), ("v", v)]
    home = home_of(items + arrays_of(scores) if scores else items)
    with home.scope():
        q, k, v = (home.adopt(name, x) for name, x in items)
        call = resolve(q, k, v, shaping)
        problem, extra = call.problem, {}
        if scores:
            scores = scored(home, call, shaping, scores)
            problem, extra = scores.problem, {"extras": scores.extras}
        if home.xp is np:
            return f"{home.kind} arrays on the CPU: the blockwise NumPy path\n{problem}"
        views = (inner_view(home, call, x) for x in (q, k, v))
        return home.backend.explain(problem, *views, **extra)


def compile(
    arch=None,
    *,
    dtypes=("float16", "bfloat16"),
    head_dims=(64, 128),
    head_dims_v=None,
    causal=(False, True),
    backward=True,
    progress=None,
):
    """Compile kernels ahead of time into the cache, so that first calls start at once. No GPU is
    needed when `arch` is named.

    Parameters
    ----------
    arch : str, optional
        Architecture such as "sm_80" or "sm_90a"; None means that of the current device.
    dtypes : sequence of str
        Out of "float16", "bfloat16", "float32" and "float64".
    head_dims : sequence of int
        Head dims D.
    head_dims_v : sequence of int, optional
        Value head dims, one for each of `head_dims`; None means the same.
    causal : sequence of bool
        False for kernels that see every key, True for those with a causal mask or a window.
    backward : bool
        Whether to compile the gradients' kernels, too.
    progress : callable, optional
        Called after each kernel with its record.

    Returns
    -------
    list
        One record for each kernel.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        An argument that names no kernel.
    ImportError, RuntimeError
        CuPy or NVRTC is missing, a kernel does not compile, or there is no device and `arch` is
        None.
    """
    from .ahead import compile_ahead

    return compile_ahead(arch, dtypes, head_dims, head_dims_v, causal, backward, progress)
