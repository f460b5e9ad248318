"""Checks of single arguments: each names the argument, its value and the rule it breaks."""

from __future__ import annotations

from numbers import Integral

DTYPES = ("float16", "bfloat16", "float32", "float64")
MAX_HEAD_DIM = 256


def check_operand(name: str, shape, dtype: str, want_shape, want_dtype: str, like: str) -> None:
    """An array that belongs to a result, as dout does to out, has its shape and dtype."""
    if shape != want_shape:
        raise ValueError(
            f"{name}: its shape is {tuple(shape)}, but it must be {want_shape}, the shape of {like}"
        )
    if dtype != want_dtype:
        raise TypeError(
            f"{name}: its dtype is {dtype}, but it must be {want_dtype}, the dtype of {like}"
        )


def check_flag(name: str, value) -> bool:
    """True or False (NumPy's bool counts); anything else is a TypeError."""
    if not is_bool(value):
        raise TypeError(f"{name}={show(value)}: it must be True or False")
    return bool(value)


def check_need(need, names=("q", "k", "v")) -> tuple[bool, ...]:
    """Which gradients are wanted, in the order of `names`."""
    if type(need) is tuple and need == ("q", "k", "v"):  # the default, on the way of every call
        return (True,) * 3 + (False,) * (len(names) - 3)
    rule = f"it must be a tuple of names out of {names}"
    if not isinstance(need, (tuple, list, set, frozenset)) or not all(
        isinstance(n, str) for n in need
    ):
        raise TypeError(f"need={show(need)}: {rule}")
    unknown = [n for n in need if n not in names]
    if unknown:
        raise ValueError(f"need={show(need)}: {unknown[0]!r} is no gradient; {rule}")
    return tuple(name in need for name in names)


def check_partials(out_shapes, out_dtypes, lse_shapes, lse_dtypes) -> None:
    """The operands of merge: equal shapes, one dtype; lse has out's shape without the last axis."""
    if len(out_shapes) != len(lse_shapes) or not out_shapes:
        raise ValueError(
            f"outs has {len(out_shapes)} and lses {len(lse_shapes)} arrays: they must be equally "
            "many, at least one"
        )
    shape, dtype = out_shapes[0], out_dtypes[0]
    if dtype not in DTYPES:
        raise TypeError(
            f"outs[0]: its dtype is {dtype}, but it must be one of {', '.join(DTYPES)}, in native "
            "byte order"
        )
    if len(shape) < 2:
        raise ValueError(
            f"outs[0]: its shape is {shape}, but it must have at least 2 axes, (..., L, Dv)"
        )
    check_head_dim("outs[0]", "head_dim_v", shape[-1], shape)
    lse_dtype = "float64" if dtype == "float64" else "float32"
    for n, (out_shape, out_dtype) in enumerate(zip(out_shapes, out_dtypes)):
        check_operand(f"outs[{n}]", out_shape, out_dtype, shape, dtype, "outs[0]")
    for n, (lse_shape, dtype_n) in enumerate(zip(lse_shapes, lse_dtypes)):
        like = f"the lse that belongs to outs[{n}]"
        check_operand(f"lses[{n}]", lse_shape, dtype_n, shape[:-1], lse_dtype, like)


def show(value) -> str:
    """repr, shortened: an array passed by mistake must not fill the screen."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def is_bool(value) -> bool:
    # NumPy's bool is no subclass of bool; its name changed between NumPy versions.
    return (
        isinstance(value, bool)
        or type(value).__name__ in ("bool", "bool_")
        and type(value).__module__ == "numpy"
    )


def is_int(value) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_head_dim(name: str, what: str, size: int, shape) -> None:
    rule = f"it must be from 1 to {MAX_HEAD_DIM}"
    if size < 1:
        raise ValueError(f"{name}: its {what} is {size} (shape {shape}): {rule}")
    if size > MAX_HEAD_DIM:
        raise NotImplementedError(f"{name}: its {what} is {size} (shape {shape}): {rule}")
