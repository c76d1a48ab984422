"""The GPU that torch sees, as a device: kernels of the wheel's store, or else of Triton's JIT."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from flash_attn.core import jit, protocol, store, stored
from flash_attn.core.build_info import VERSION, build_command, load
from flash_attn.core.ck_planner import Launch
from flash_attn.core.platform import PLATFORM
from flash_attn.core.store import KernelError
from flash_attn.core.stored import StoreKernel
from flash_attn.kernels.targets import TARGETS, serving_targets
from flash_attn.kernels.variants import Variant

_warned: set[str] = set()


def _address(properties: Any) -> str:
    """The PCI address of a GPU as Linux writes it, "" where torch is too old to tell it."""
    if not hasattr(properties, "pci_bus_id"):
        return ""
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


class Driver:
    """The GPU with torch's index."""

    def __init__(self, index: int) -> None:
        properties = torch.cuda.get_device_properties(index)
        self.index = index
        if torch.version.hip:
            self.target = str(properties.gcnArchName).split(":")[0]
        else:
            self.target = f"sm_{properties.major}{properties.minor}"
        row = TARGETS.get(self.target)
        self.compute_units: int = properties.multi_processor_count * (1 if row is None else row.multiprocessor_units)
        self.screen = _address(properties) if row is not None and row.family.startswith("rdna") else None

    def _archive(self) -> store.Store | None:
        """The store whose code objects the GPU loads: of its own target, else of the generic target of its family."""
        stores = map(store.open_store, serving_targets(self.target, torch.version.hip))
        return next((candidate for candidate in stores if candidate is not None), None)

    def kernel(self, variant: Variant) -> StoreKernel | jit.JitKernel:
        archive = self._archive()
        if archive is not None and variant.name in archive.kernels:
            return StoreKernel(archive, variant.name, self.index)
        present = ", ".join(store.targets()) or "none"
        if archive is None:
            lack = f"this flash_attn has no kernels for {self.target} (device {self.index}); its targets: {present}"
        else:
            lack = f"this flash_attn has no kernel {variant.name} for {self.target}"
            if load().some_kernels:
                raise NotImplementedError(f"{lack}: it has those that firstlight times")
        reason = jit.triton_problem()
        if reason is not None:
            raise KernelError(f"{lack}, and {reason}. {self._remedy()}")
        if self.target not in _warned:
            _warned.add(self.target)
            warnings.warn(
                f"{lack}: Triton compiles kernels at their first call instead, which takes seconds each",
                RuntimeWarning,
                stacklevel=9,  # the caller of the public function
            )
        return jit.JitKernel(variant, self.target, index=self.index)

    def _remedy(self) -> str:
        """What to do where neither the wheel nor Triton has a kernel."""
        if PLATFORM.is_windows:
            return f"`{PLATFORM.python} -m flash_attn.doctor` prints what to install on this machine"
        line = build_command(VERSION, self.target)
        wheel = f", or build a wheel that has it: {line}" if line else ""
        return f"Install the Triton that your torch requires{wheel}"

    def has_composable_kernel(self) -> bool:
        archive = self._archive()
        return archive is not None and any(entry["params"].startswith("B") for entry in archive.kernels.values())

    def has_stored(self, name: str) -> bool:
        archive = self._archive()
        return archive is not None and name in archive.kernels

    def queue(self) -> int:
        return stored.queue(self.target, self.index)

    def submit(self) -> bool:
        return stored.submit(self.target, self.index)

    def run(self, launches: Sequence[Launch], tensors: protocol.Tensors) -> None:  # noqa: ARG002 - held until then
        for launch in launches:
            self.stored(launch.kernel).launch_planned(launch.grid, launch.argument)

    def stored(self, name: str) -> StoreKernel:
        """A kernel of the store by its name, which no JIT could make. Raises KernelError if the store lacks it."""
        kernel: StoreKernel | None = protocol.kernels.get((self.index, name))
        if kernel is None:
            archive = self._archive()
            if archive is None or name not in archive.kernels:
                raise KernelError(
                    f"this flash_attn has no kernel {name} for {self.target} (device {self.index}). Build a wheel that "
                    f"has it: {build_command(VERSION, self.target)}"
                )
            kernel = protocol.kernels.setdefault((self.index, name), StoreKernel(archive, name, self.index))
        return kernel
