"""What cuflash.explain returns for GPU arrays."""

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
    packed: tuple[str, ...]  # inputs that are copied first: not readable in 16-byte pieces
    rejections: tuple[tuple[str, str], ...]
    backward_workspace: int  # bytes
    scores: str = ""  # what beside q and k decides them

    def __str__(self) -> str:
        values = dict(self.plan.constants)
        registers = f"{self.registers} registers"
        if "kProducerRegisters" in values:
            registers = (
                f"{values['kConsumerRegisters']} registers, {values['kProducerRegisters']} of the "
                "warps that load"
            )
        lines = [
            f"{self.family} family on {self.device}: kernel {self.plan.kernel}",
            f"  tile       {values['kBlockM']} queries x {values['kBlockN']} keys, "
            f"{values['kStages']} stages, {self.plan.threads} threads, {self.plan.smem_bytes} "
            "bytes of shared memory",
            f"  compiled   head_dim {values['kHeadDim']}, head_dim_v {values['kHeadDimV']} x "
            f"{values.get('kSlices', 1)}, {registers}, {self.spilled_bytes} bytes of local memory",
            f"  launch     {self.blocks} thread blocks",
            f"  reads      {self._reads()}",
            f"  workspace  forward none, backward {self.backward_workspace} bytes",
        ]
        if self.scores:
            listed = ", in blocks that lists name" if self.plan["kBlockMap"] else ""
            lines.append(f"  scores     {self.scores}{listed}")
        if self.packed:
            names = ", ".join(self.packed)
            lines.append(f"  copied     {names}: strides or alignment rule out 16-byte reads")
        lines += [f"  not        {name}: {reason}" for name, reason in self.rejections]
        return "\n".join(lines)

    def _reads(self) -> str:
        values = dict(self.plan.constants)
        if "kCopyBytes" not in values:
            return "boxes of rows, through tensor maps"
        if values["kDirect"]:
            return "single elements, where they are used: their tiles exceed the shared memory"
        if not values["kCopyBytes"]:
            return "single elements"
        return f"{values['kCopyBytes']} bytes at a time"
