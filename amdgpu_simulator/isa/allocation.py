"""The registers that a kernel's descriptor allocates."""

from __future__ import annotations

from amdgpu_simulator.isa import targets
from amdgpu_simulator.isa.assembly import Instruction, Kernel
from amdgpu_simulator.isa.wave import register

_MAX_SCALARS = 106  # of any wave; VCC follows them


class Allocation:
    """The number of registers of each kind that a kernel's waves have; the maximum if the descriptor does not state
    it.
    """

    def __init__(self, kernel: Kernel) -> None:
        described = kernel.descriptor
        vectors = described.get("next_free_vgpr", 512)
        # From gfx90a on, accumulators follow the vector registers. Earlier GPUs have as many accumulators as vector
        # registers.
        first = described.get("accum_offset", 0)
        scalars = targets.get(kernel.target).row.scalar_registers or described.get("next_free_sgpr", _MAX_SCALARS)
        self._room = {"v": min(vectors, first or 256), "a": vectors - first if first else vectors, "s": scalars}

    def check(self, instruction: Instruction) -> None:
        """Raises NotImplementedError for a register that the kernel does not have."""
        for text in tuple(instruction.operands):
            bare = text.lstrip("-").strip("|")
            if (span := register(bare)) is None or bare[0] not in "vas" or bare.startswith("vcc"):
                continue
            kind, first, count = span
            if first + count > self._room[kind]:
                raise NotImplementedError(f"{kind}{first + count - 1}: the kernel allocates {self._room[kind]}")
