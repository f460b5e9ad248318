"""What :func:`cuflash.explain` returns for GPU arrays."""

from __future__ import annotations

from dataclasses import dataclass

from .plan import Plan


@dataclass(frozen=True)
class Explanation:
    """The kernel that forward would run; ``str`` gives it line by line."""

    device: str
    family: str
    plan: Plan
    blocks: int
    registers: int
    spilled_bytes: int
    packed: tuple[str, ...]  # inputs that are copied first, since no kernel could read them in 16-byte pieces
    rejections: tuple[tuple[str, str], ...]
    backward_workspace: int  # bytes

    def __str__(self) -> str:
        values = dict(self.plan.constants)
        lines = [
            f"{self.family} family on {self.device}: kernel {self.plan.kernel}",
            f"  tile       {values['kBlockM']} queries x {values['kBlockN']} keys, {values['kStages']} stages, "
            f"{self.plan.threads} threads, {self.plan.smem_bytes} bytes of shared memory",
            f"  compiled   head_dim {values['kHeadDim']}, head_dim_v {values['kHeadDimV']} x {values['kSlices']}, "
            f"{self.registers} registers, {self.spilled_bytes} bytes of local memory",
            f"  launch     {self.blocks} thread blocks",
            f"  reads      {values['kCopyBytes'] or 'single elements'}"
            + (" bytes at a time" if values["kCopyBytes"] else ""),
            f"  workspace  forward none, backward {self.backward_workspace} bytes",
        ]
        if self.packed:
            lines.append(f"  copied     {', '.join(self.packed)}: strides or alignment rule out 16-byte reads")
        lines += [f"  not        {name}: {reason}" for name, reason in self.rejections]
        return "\n".join(lines)
