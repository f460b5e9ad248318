"""The text of the warpgroup products (wgmma) that a plan uses: an overload for each width, since
the instruction names every accumulator register.
"""

from __future__ import annotations

_PTX_TYPES = {"f16": "f16", "bf16": "bf16"}


def _registers(first: int, count: int) -> str:
    return "{" + ", ".join(f"%{first + n}" for n in range(count)) + "}"


def overload(element: str, columns: int, *, a_in_registers: bool, transposed_b: bool) -> str:
    """``wgmma(c, a, b, add)``: c = a b, or c += a b, with m = 64 and k = 16 (PTX ISA,
    wgmma.mma_async); ``wgmma_transposed`` where both operands are descriptors and the right one is
    transposed, since their types do not tell.

    Parameters
    ----------
    element : {"f16", "bf16"}
    columns : int
        N, a multiple of 8 up to 256: c has columns / 2 floats a thread.
    a_in_registers : bool
        The left operand is four registers; else a descriptor of shared memory.
    transposed_b : bool
        The right operand lies with its columns contiguous.
    """
    count = columns // 2
    name = _PTX_TYPES[element]
    if a_in_registers:
        left, left_text, left_inputs = (
            "const u32 (&a)[4]",
            _registers(count, 4),
            ", ".join(f'"r"(a[{n}])' for n in range(4)),
        )
    else:
        left, left_text, left_inputs = "u64 a", f"%{count}", '"l"(a)'
    after = count + (4 if a_in_registers else 1)
    majors = f"{int(transposed_b)}" if a_in_registers else f"0, {int(transposed_b)}"
    outputs = ", ".join(f'"+f"(c[{n}])' for n in range(count))
    function = "wgmma_transposed" if transposed_b and not a_in_registers else "wgmma"
    return (
        f"__device__ __forceinline__ void {function}(float (&c)[{count}], {left}, u64 b, "
        f"bool add) {{\n"
        f'    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{after + 1}, 0;\\n"\n'
        f'        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{name}.{name} "\n'
        f'        "{_registers(0, count)}, {left_text}, %{after}, p, 1, 1, {majors};\\n}}\\n"\n'
        f"        : {outputs}\n"
        f'        : {left_inputs}, "l"(b), "r"(int(add)));\n'
        "}\n"
    )


def overloads(plan) -> list[str]:
    """The text of every product in ``plan.products``, which may name one twice."""
    return [
        overload(plan["Element"], n, a_in_registers=a, transposed_b=b)
        for n, a, b in dict.fromkeys(plan.products)
    ]
