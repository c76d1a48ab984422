"""A code object of the store as a kernel: launched by the C launcher through the driver that torch has loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from threading import get_ident
from typing import Any

import torch

from flash_attn.core import store
from flash_attn.core.arguments import Arguments
from flash_attn.core.environment import MAX_LAUNCH_SECONDS
from flash_attn.core.platform import PLATFORM
from flash_attn.core.store import KernelError

_PER_THREAD = 2  # names another stream in each thread, in both drivers
# torch's current stream of a device, as the driver knows it.
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _index: 0)


# What both drivers answer after the system has reset the GPU, and CUDA's of a launch that took too long.
_LOST = (719, 702)


def launcher(target: str) -> Any:
    """The launcher module, bound to the driver of a target's maker. Raises KernelError, or RuntimeError without one."""
    try:
        from flash_attn import _launcher
    except ImportError as error:
        raise KernelError(f"the launcher does not load ({error}): reinstall the wheel") from error
    _launcher.bind("cuda" if target.startswith("sm_") else "hip")
    return _launcher


@cache
def _capture(target: str) -> Callable[[int, int], int]:
    """The launcher's `capture`. Without a launcher no capture is noticed: `submit` says what is missing."""
    try:
        capture: Callable[[int, int], int] = launcher(target).capture
    except KernelError:
        return lambda _index, _stream: 0
    return capture


def queue(target: str, index: int) -> int:
    """See `protocol.Gpu.queue`, for the device with torch's index."""
    stream = _current_stream(index)
    return -_capture(target)(index, stream) or (get_ident() if stream == _PER_THREAD else stream)


def submit(target: str, index: int) -> bool:
    """See `protocol.Gpu.submit`, for the device with torch's index."""
    module = launcher(target)
    try:
        done: bool = module.submit(index, _current_stream(index))
    except RuntimeError as error:
        explain(error)
        raise
    return done


def explain(error: RuntimeError) -> None:
    """Raises an error of a lost GPU with its likely cause, on a system that resets a GPU whose kernel runs too long."""
    limit = PLATFORM.launch_limit("") if getattr(error, "code", None) in _LOST else None
    if limit is not None:
        raise RuntimeError(
            f"{error}. {limit.cause}, and then every call fails until Python starts again. Set {MAX_LAUNCH_SECONDS}="
            f"{limit.seconds / 5:g} before Python starts: flash_attn then launches long kernels in smaller pieces (now "
            f"{limit.seconds:g} s by an estimate)"
        ) from error


def _arguments(archive: store.Store, name: str) -> Arguments:
    """The arguments of a kernel by name; none of a kernel that takes one structure. Raises KernelError for a manifest
    whose names are not as many as the kernel's arguments."""
    letters, names = archive.kernels[name]["params"].rstrip("0"), archive.signature(name)
    if names is None:
        return Arguments(name, (), (), ())
    if len(names) != len(letters):
        raise KernelError(
            f"the kernel store {archive.path} names {len(names)} arguments of {name}, which takes {len(letters)}: "
            "reinstall the wheel"
        )
    pointers = [argument for argument, letter in zip(names, letters, strict=True) if letter == "P"]
    return Arguments(name, pointers, names[len(pointers) :], archive.vocabulary)


class StoreKernel:
    """A kernel of the store for the device with torch's index."""

    __slots__ = ("_index", "_launch", "arguments", "block_m", "block_n", "num_xcds")

    def __init__(self, archive: store.Store, name: str, index: int) -> None:
        entry = archive.kernels[name]
        kernel = launcher(archive.target).Kernel(
            archive.image(name), entry["symbol"], entry["params"], entry["shared"], entry["threads"], name
        )
        self._index = index
        self._launch: Callable[..., None] = kernel.launch
        self.block_m: int = entry["constants"].get("BLOCK_M", 0)
        self.block_n: int = entry["constants"].get("BLOCK_N", 0)
        self.num_xcds: int = entry["constants"].get("NUM_XCDS", 1)
        self.arguments = _arguments(archive, name)

    def launch(
        self, grid: tuple[int, int, int], tensors: Sequence[torch.Tensor | None], numbers: Sequence[int | float]
    ) -> None:
        """See `device.Kernel.launch`. The caller's tensors hold the memory until the driver has taken the launch; a
        later allocation on the same stream cannot overtake it."""
        try:
            self._launch(
                self._index, _current_stream(self._index), *grid,
                *[None if tensor is None else tensor.data_ptr() for tensor in tensors], *numbers,
            )  # fmt: skip
        except RuntimeError as error:
            explain(error)
            raise

    def launch_planned(self, grid: tuple[int, int, int], argument: bytes) -> None:
        """Launches a kernel of Composable Kernel with its one argument. The caller holds the tensors in it."""
        try:
            self._launch(self._index, _current_stream(self._index), *grid, argument)
        except RuntimeError as error:
            explain(error)
            raise
