"""What is compiled into a kernel: a frozen value whose text is the C++ ``struct Plan`` that the
kernel reads.
"""

from __future__ import annotations

from dataclasses import dataclass

CPP_TYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "float", "float64": "double"}
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Plan:
    """One kernel, completely: the key of the kernel cache and the text in front of its source.

    Everything that is structure stands here; every number that may change from call to call is a
    Params field instead.
    """

    kernel: str  # stem of the file in kernels_cu, and the name of its entry point
    params: str  # name of its table in params.py
    threads: int
    smem_bytes: int  # dynamic shared memory, the sum that the kernel asserts
    constants: tuple[
        tuple[str, int | bool | str], ...
    ]  # in the order of the text; a str is a C++ type
    # The warpgroup products that the kernel calls: (columns, a in registers, b transposed).
    products: tuple[tuple[int, bool, bool], ...] = ()
    score: str = ""  # the C++ struct Score of kernels that have one (score_text.py)
    operands: tuple[tuple[str, str], ...] = ()  # what it adds to the table, as its rows

    def text(self) -> str:
        """The C++ definition of ``struct Plan``."""
        lines = ["struct Plan {"]
        for name, value in self.constants:
            if isinstance(value, str):
                lines.append(f"    using {name} = {value};")
            elif isinstance(value, bool):
                lines.append(f"    static constexpr bool {name} = {str(value).lower()};")
            else:
                lines.append(f"    static constexpr int {name} = {value};")
        lines.append("};")
        return "\n".join(lines) + "\n"

    def __getitem__(self, name: str) -> int | bool | str:
        return dict(self.constants)[name]

    def __str__(self) -> str:
        values = ", ".join(f"{name}={value}" for name, value in self.constants)
        return (
            f"{self.kernel}({values}; {self.threads} threads, {self.smem_bytes} bytes of shared "
            "memory)"
        )


def tile_bytes(rows: int, cols: int, item_bytes: int) -> int:
    """Bytes of a shared-memory tile: rows of whole 128-byte lines, else padded to an odd number of
    16-byte pieces.

    The same rule as row_pitch in kernels_cu/tile/smem_tile.cuh.
    """
    row = cols * item_bytes
    return rows * (row if row % 128 == 0 or row // 16 % 2 == 1 else row + 16)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
