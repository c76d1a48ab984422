"""A code object of the store as a kernel: launched by the C launcher through the driver that torch has loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from flash_attn.runtime import store
from flash_attn.runtime.store import KernelError

# torch's current stream of a device, as the driver knows it.
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _index: 0)


class StoreKernel:
    """A kernel of the store for the device with torch's index."""

    __slots__ = ("_index", "_launch", "block_m", "block_n", "num_xcds", "takes_sinks")

    def __init__(self, archive: store.Store, name: str, index: int, *, takes_sinks: bool = False) -> None:
        try:
            from flash_attn import _launcher
        except ImportError as error:
            raise KernelError(f"the launcher does not load ({error}): reinstall the wheel") from error
        entry = archive.kernels[name]
        _launcher.bind("cuda" if archive.target.startswith("sm_") else "hip")
        kernel = _launcher.Kernel(
            archive.image(name), entry["symbol"], entry["params"], entry["shared"], entry["threads"], name
        )
        self._index = index
        self._launch: Callable[..., None] = kernel.launch
        self.block_m: int = entry["constants"].get("BLOCK_M", 0)
        self.block_n: int = entry["constants"].get("BLOCK_N", 0)
        self.num_xcds: int = entry["constants"].get("NUM_XCDS", 1)
        self.takes_sinks = takes_sinks

    def launch(
        self, grid: tuple[int, int, int], tensors: Sequence[torch.Tensor | None], numbers: Sequence[int | float]
    ) -> None:
        """See `device.Kernel.launch`. The caller's tensors hold the memory until the driver has taken the launch; a
        later allocation on the same stream cannot overtake it."""
        self._launch(
            self._index, _current_stream(self._index), *grid,
            *[None if tensor is None else tensor.data_ptr() for tensor in tensors], *numbers,
        )  # fmt: skip

    def launch_planned(self, grid: tuple[int, int, int], argument: bytes) -> None:
        """Launches a kernel of Composable Kernel with its one argument. The caller holds the tensors in it."""
        self._launch(self._index, _current_stream(self._index), *grid, argument)
