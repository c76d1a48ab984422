"""From a variant to something that launches: code object of the store, or Triton's JIT where the store has none.

Both kinds have `launch(device, stream, grid_x, grid_y, grid_z, *args)`, the tile sizes `block_m`, `block_n`, the
number of `num_xcds` that programs go to in turn, and `pointer(tensor)`, which turns a tensor into the form in which
`launch` takes it.
"""

from __future__ import annotations

import importlib
import os
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from flash_attn.kernels.targets import serving_targets
from flash_attn.kernels.variants import Variant
from flash_attn.runtime import recording, store
from flash_attn.runtime.store import KernelError

if TYPE_CHECKING:
    from flash_attn.kernels.tuning import Config


class StoreKernel:
    """A code object of the store, launched through the driver that torch has loaded."""

    __slots__ = ("block_m", "block_n", "launch", "num_xcds")
    pointer = staticmethod(torch.Tensor.data_ptr)

    @staticmethod
    def optional(*tensors: torch.Tensor | None) -> tuple[int | None, ...]:
        """Optional tensors (cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, alibi_slopes, rng_state) and, for
        the forward, block_table."""
        return tuple([None if tensor is None else tensor.data_ptr() for tensor in tensors])

    def __init__(self, archive: store.Store, name: str) -> None:
        try:
            from flash_attn import _launcher
        except ImportError as error:
            raise KernelError(f"the launcher does not load ({error}): reinstall the wheel") from error
        entry = archive.kernels[name]
        _launcher.bind("cuda" if archive.target.startswith("sm_") else "hip")
        kernel = _launcher.Kernel(
            archive.image(name), entry["symbol"], entry["params"], entry["shared"], entry["threads"], name
        )
        self.block_m: int = entry["constants"].get("BLOCK_M", 0)
        self.block_n: int = entry["constants"].get("BLOCK_N", 0)
        self.num_xcds: int = entry["constants"].get("NUM_XCDS", 1)
        self.launch: Callable[..., None] = kernel.launch


class JitKernel:
    """The same kernel, compiled by the installed Triton at its first call."""

    __slots__ = ("block_m", "block_n", "function", "name", "num_xcds", "options")

    def __init__(self, variant: Variant, target: str, config: Config | None = None) -> None:
        """With a launch configuration of the caller's, or that of the tuning table."""
        from flash_attn.kernels import launches

        spec = launches.specification(variant, target, config)
        module = importlib.import_module(f"flash_attn.kernels.{spec.module}")
        self.name = f"{variant.name} for {target}"
        self.block_m: int = spec.constants.get("BLOCK_M", 0)
        self.block_n: int = spec.constants.get("BLOCK_N", 0)
        self.num_xcds: int = spec.constants.get("NUM_XCDS", 1)
        self.function = getattr(module, spec.symbol)
        self.options = dict(spec.constants)
        if not interpreting():  # interpreters of older Tritons refuse the compiler's options
            self.options |= spec.options | {"enable_fp_fusion": True}  # no longer the default from Triton 3.10 on
            if _triton_version() == (3, 2) and not target.startswith("sm_"):
                self.options["num_stages"] = 1  # its pipeline for AMD GPUs moves loads before what they depend on

    @staticmethod
    def pointer(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    @staticmethod
    def optional(*tensors: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """As `StoreKernel.optional`. The JIT types a kernel by its arguments, so an absent one needs a stand-in
        of the right type; the kernel never reads it."""
        dtypes = (*(torch.int32,) * 4, torch.float32, torch.int64, torch.int32)
        device = "cpu" if interpreting() else "cuda"
        return tuple(
            torch.empty(1, dtype=dtype, device=device) if tensor is None else tensor
            for tensor, dtype in zip(tensors, dtypes, strict=False)
        )

    def launch(self, device: int, _stream: int, x: int, y: int, z: int, *args: Any) -> None:
        """Triton launches on torch's current stream by itself. Raises KernelError where it cannot compile."""
        if x * y * z == 0:
            return
        try:
            with torch.cuda.device(device) if device >= 0 else nullcontext():
                self.function[(x, y, z)](*args, **self.options)
        except RuntimeError as error:
            if "PassManager" not in str(error):
                raise
            import triton

            raise KernelError(
                f"Triton {triton.__version__} cannot compile {self.name} ({error}). The Triton of a newer torch may; "
                "a wheel with kernels for this GPU, where there is one, needs no Triton"
            ) from error


def device_target(device: int) -> str:
    """The GPU target of a torch device: "gfx942", "sm_90"; of a recording, the one that it pretends."""
    if recording.current is not None:
        return recording.current.target
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _device: 0)


def current_stream(device: int) -> int:
    """torch's current stream of a device, as the driver knows it; none on a CPU, where torch may not find a driver."""
    return _raw_stream(device) if device >= 0 else 0


def compute_units(device: int) -> int:
    """How many a device has, which for an NVIDIA GPU are its multiprocessors. A recording pretends an MI300X, and the
    interpreter a small GPU."""
    if device < 0:
        return 304 if recording.current is not None else 4
    return _multiprocessors(device)


@cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _triton_version() -> tuple[int, ...]:
    import triton

    return tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:2])


def follows_pages(kernel: StoreKernel | JitKernel) -> bool:
    """Whether a kernel that reads a number within its main loop compiles: for AMD GPUs not by Triton before 3.3."""
    return not isinstance(kernel, JitKernel) or interpreting() or _triton_version() >= (3, 3)


def triton_problem() -> str | None:
    """Why Triton's JIT cannot serve this process, or None when it can."""
    try:
        import triton
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    if _triton_version() < (3, 1):
        return f"Triton {triton.__version__} is older than 3.1"
    return None


# The target whose constants Triton's interpreter runs the kernels with.
INTERPRETED = "gfx950"

_kernels: dict[tuple[int, Variant], StoreKernel | JitKernel] = {}
_stored: dict[tuple[int, str], StoreKernel] = {}
_lock = threading.Lock()
_warned: set[str] = set()


def kernel(device: int, variant: Variant) -> StoreKernel | JitKernel:
    """The kernel of a variant for a device; found once, then remembered.

    Raises KernelError where neither the store nor a JIT has it.
    """
    found = _kernels.get((device, variant))
    if found is None:
        with _lock:
            found = _kernels.get((device, variant))
            if found is None:
                found = _kernels[device, variant] = _find(device, variant)
    return found


def stored(device: int, name: str) -> StoreKernel:
    """A kernel of the store by its name, which no JIT could make. Raises KernelError where the store lacks it."""
    found = _stored.get((device, name))
    if found is None:
        target = device_target(device)
        archive = _archive(target)
        if archive is None or name not in archive.kernels:
            raise KernelError(
                f"this flash_attn has no kernel {name} for {target} (device {device}). Build a wheel that has it: "
                f"PYTORCH_ROCM_ARCH={target} ./build_rocm.sh <flash-attn> <python> <torch> <rocm>"
            )
        with _lock:
            found = _stored.setdefault((device, name), StoreKernel(archive, name))
    return found


def _archive(target: str) -> store.Store | None:
    """The store whose code objects a device loads: of its own target, else of the generic target of its family."""
    stores = map(store.open_store, serving_targets(target, torch.version.hip))
    return next((found for found in stores if found is not None), None)


def _find(device: int, variant: Variant) -> StoreKernel | JitKernel:
    if device < 0:  # Triton's interpreter, which takes CPU tensors
        return JitKernel(variant, INTERPRETED)
    target = device_target(device)
    archive = _archive(target)
    if archive is not None and variant.name in archive.kernels:
        return StoreKernel(archive, variant.name)

    present = ", ".join(store.targets()) or "none"
    if archive is None:
        lack = f"this flash_attn has no kernels for {target} (device {device}); its targets: {present}"
    else:
        lack = f"this flash_attn has no kernel {variant.name} for {target}"
    reason = triton_problem()
    if reason is not None:
        raise KernelError(
            f"{lack}, and {reason}. Install the Triton that your torch requires, or build a wheel that has it, where "
            f"the target is known: PYTORCH_ROCM_ARCH={target} ./build_rocm.sh <flash-attn> <python> <torch> <rocm>"
        )
    if target not in _warned:
        _warned.add(target)
        warnings.warn(
            f"{lack}: Triton compiles kernels at their first call instead, which takes seconds each",
            RuntimeWarning,
            stacklevel=9,  # the caller of the public function
        )
    return JitKernel(variant, target)


def interpreting() -> bool:
    """Whether Triton interprets kernels on the CPU, as the tests do."""
    return os.environ.get("TRITON_INTERPRET") == "1"
