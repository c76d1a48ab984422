"""What the driver hands to the system at once, for systems that limit the time of it.

Windows limits the time of one submission, and HIP collects up to 256 commands of a stream in one (ROCm/clr,
palvirtual.hpp). So the pieces of a long launch, and short launches one after another, would count together. A replayed
graph counts as one task.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Sequence

from flash_attn.core.protocol import Gpu, Grid, Kernel, Tensors, kernels

Piece = tuple[Grid, Tensors, Sequence[int | float]]  # the arguments of `protocol.Kernel.launch`
_MAX_ACCOUNTS = 256  # then the accounts of graphs are forgotten


class _Account:
    """The seconds of what one stream holds back, or of what one graph has. The lock is held until a launch is made."""

    __slots__ = ("lock", "seconds")

    def __init__(self) -> None:
        self.lock, self.seconds = threading.RLock(), 0.0


class Submissions:
    """Submissions of a GPU, each with launches of flash_attn that take about `seconds` at most.

    A stream that takes the handle of a destroyed stream begins with its seconds, so it is submitted once too early.
    """

    def __init__(self, gpu: Gpu, seconds: float) -> None:
        self.seconds, self._gpu = seconds, gpu
        self._accounts: dict[int, _Account] = {}

    def launch(
        self, kernel: Kernel, name: str, grid: Grid, tensors: Tensors, numbers: Sequence[int | float], seconds: float
    ) -> None:
        """Launches a call of so many seconds. Where the stream then held back too many, it is submitted before."""
        queue = self._gpu.queue()
        account = self._accounts.get(queue) or self._open(queue)
        with account.lock:
            if account.seconds + seconds > self.seconds:
                self._submit(account, queue, name)
            account.seconds += seconds
            kernel.launch(grid, tensors, numbers)

    def launch_apart(self, kernel: Kernel, name: str, pieces: Iterable[Piece], seconds: float) -> None:
        """Launches the pieces of a call that takes too long, and submits each alone."""
        queue = self._gpu.queue()
        account = self._accounts.get(queue) or self._open(queue)
        with account.lock:
            self._submit(account, queue, name)
            account.seconds += seconds
            for piece in pieces:
                kernel.launch(*piece)
                self._submit(account, queue, name)

    def _submit(self, account: _Account, queue: int, name: str) -> None:
        """Submits what the stream holds back. A graph cannot be submitted in parts: warns once."""
        if queue >= 0:
            if self._gpu.submit():
                account.seconds = 0.0
        elif account.seconds <= self.seconds:
            warnings.warn(
                f"{name} makes a captured graph longer than {self.seconds:g} s by an estimate. A replay can hand the "
                "whole graph to the system at once, and Windows resets a GPU that is busy for two seconds: capture "
                "fewer layers or shorter sequences in a graph, or call flash_attn outside of it",
                RuntimeWarning,
                stacklevel=2,
            )

    def _open(self, queue: int) -> _Account:
        if len(self._accounts) >= _MAX_ACCOUNTS:
            self._accounts = {number: account for number, account in self._accounts.copy().items() if number >= 0}
        return self._accounts.setdefault(queue, _Account())


def of(gpu: Gpu, seconds: float) -> Submissions:
    """The submissions of a GPU, which all of its kernels share."""
    submissions: Submissions = kernels.setdefault(("submissions", gpu, seconds), Submissions(gpu, seconds))
    return submissions
