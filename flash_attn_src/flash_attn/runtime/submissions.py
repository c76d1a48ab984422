"""What the driver hands to the system at once, for systems that limit the time of it.

Windows limits the time of one submission, and HIP collects up to 256 commands in one (ROCm/clr, palvirtual.hpp). So the
pieces of a long launch, and short launches one after another, would count together.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

from flash_attn.runtime.protocol import Device, Grid, Kernel, Tensors, kernels

Piece = tuple[Grid, Tensors, Sequence[int | float]]  # the arguments of `protocol.Kernel.launch`


class Submissions:
    """The submissions of a device, each with launches of flash_attn that take about `seconds` at most."""

    def __init__(self, device: Device, seconds: float) -> None:
        self._device, self.seconds = device, seconds
        self._pending = 0.0  # seconds of what was launched and not submitted

    def launch(self, kernel: Kernel, whole: Piece, seconds: float) -> None:
        """Launches a kernel that takes so many seconds. What was launched before is submitted if both take too long."""
        if self._pending + seconds > self.seconds:
            self._submit()
        self._pending += seconds
        kernel.launch(*whole)

    def launch_apart(self, kernel: Kernel, name: str, pieces: Iterable[Piece]) -> None:
        """Launches each piece as a submission of its own. In a capture of a graph they cannot be kept apart: warns."""
        apart = self._submit()
        for piece in pieces:
            kernel.launch(*piece)
            self._submit()
        if not apart:
            warnings.warn(
                f"{name} is captured into a graph in pieces of {self.seconds} s. A replay can hand all of them to the "
                "system at once, and Windows resets a GPU that is busy for two seconds: capture calls of shorter "
                "sequences, or call flash_attn outside of the graph",
                RuntimeWarning,
                stacklevel=2,
            )

    def _submit(self) -> bool:
        self._pending = 0.0
        return self._device.submit()


def of(device: Device, seconds: float) -> Submissions:
    """The submissions of a device, which all of its kernels share."""
    found: Submissions | None = kernels.get(("submissions", device))
    if found is None or found.seconds != seconds:
        found = kernels["submissions", device] = Submissions(device, seconds)
    return found
