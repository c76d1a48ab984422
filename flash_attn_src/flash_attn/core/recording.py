"""A device that keeps planned launches instead of running them.

flash_attn.attention.backends.recording serves calls by it. What a recorded call returns is whatever its memory held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flash_attn.core.ck_planner import Launch
from flash_attn.core.protocol import Kernel, Tensors
from flash_attn.core.store import KernelError
from flash_attn.kernels.variants import Variant


class Recording:
    """A GPU with the compute units of an MI300X. It keeps its launches, and runs them by `run` alone."""

    compute_units = 304

    def __init__(self, target: str, run: Callable[[Sequence[Launch], Tensors], None] | None = None) -> None:
        """run: called for the launches of each call, while the memory that they name is there."""
        self.target = target
        self.launches: list[Launch] = []
        self._run = run

    def kernel(self, variant: Variant) -> Kernel:
        raise KernelError(f"{variant.name}: a recording has no Triton kernels")

    def has_composable_kernel(self) -> bool:
        return True

    def has_stored(self, name: str) -> bool:  # noqa: ARG002
        return True

    def run(self, launches: Sequence[Launch], tensors: Tensors) -> None:
        self.launches += launches
        if self._run is not None:
            self._run(launches, tensors)
