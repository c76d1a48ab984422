"""Kernels that the installed Triton compiles at their first call, or interprets on the CPU."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING

import torch

from flash_attn.core.arguments import Arguments
from flash_attn.core.ck_planner import Launch
from flash_attn.core.jit_repair import repaired
from flash_attn.core.platform import PLATFORM
from flash_attn.core.store import KernelError
from flash_attn.kernels.switches import OLDEST_TORCH, OLDEST_TRITON, known, switched
from flash_attn.kernels.variants import Variant

if TYPE_CHECKING:
    from flash_attn.core.protocol import Tensors
    from flash_attn.kernels.tuning import Config

# Triton's types of the pointers whose elements are not of the variant's type.
_POINTERS = {"*i32": torch.int32, "*i64": torch.int64, "*fp32": torch.float32, "*u8": torch.uint8}


class JitKernel:
    """A variant's kernel, compiled by Triton at its first call. index: torch's of the device, -1 of CPU tensors."""

    def __init__(self, variant: Variant, target: str, config: Config | None = None, *, index: int = -1) -> None:
        """config: None takes the tuning table's."""
        from flash_attn.kernels import launches, targets

        spec = launches.specification(variant, target, config)
        module = importlib.import_module(f"flash_attn.kernels.{spec.module}")
        self.name = f"{variant.name} for {target}"
        self.failure = ""
        self.variant = variant
        self.index = index
        self.block_m: int = spec.constants.get("BLOCK_M", 0)
        self.block_n: int = spec.constants.get("BLOCK_N", 0)
        self.num_xcds: int = spec.constants.get("NUM_XCDS", 1)
        self.function = getattr(module, spec.symbol)
        self.repairs = targets.get(target).vopd_hazard and not interpreting()
        self.options = dict(spec.constants)
        parameters = [name for name in self.function.arg_names if name not in spec.constants]
        self.take(Arguments.of(variant, target), parameters)
        if not interpreting():  # interpreters of older Tritons refuse the compiler's options
            self.options |= known(spec.options, targets.get(target).vendor)
            self.options["enable_fp_fusion"] = True  # no longer the default from Triton 3.10 on

    def take(self, arguments: Arguments, parameters: Sequence[str]) -> None:
        """Looks where each parameter of the function stands in a launch's tensors and numbers."""
        self.arguments = arguments
        names = (*arguments.pointers, *arguments.numbers)
        # Behind the numbers of a launch stands None, for what this variant lacks.
        self._order = [names.index(name) if name in names else len(names) for name in parameters]
        types = (self.variant.operation.argument_type(name, self.variant.dtype) for name in arguments.pointers)
        self._element_types = [_POINTERS.get(type_) for type_ in types]  # None: that of the variant

    def launch(self, grid: tuple[int, int, int], tensors: Tensors, numbers: Sequence[int | float]) -> None:
        """See `protocol.Kernel.launch`. Triton launches on torch's current stream by itself."""
        if 0 in grid:
            return
        if self.failure:  # to try again would take seconds
            raise KernelError(self.failure)
        values = (*self._with_stand_ins(tensors), *numbers, None)
        arguments = [values[place] for place in self._order]
        try:
            with ExitStack() as stack:
                if self.index >= 0:
                    stack.enter_context(torch.cuda.device(self.index))
                if self.repairs:
                    stack.enter_context(repaired())
                options = stack.enter_context(switched(self.options))
                self.function[grid](*arguments, **options)
        except Exception as error:
            if not _is_of_compiler(error):
                raise
            import triton

            self.failure = (
                f"Triton {triton.__version__} cannot compile {self.name} ({_summary(error)}). A newer Triton "
                "may; a wheel with kernels for this GPU, where there is one, needs no Triton"
            )
            raise KernelError(self.failure) from error

    def _with_stand_ins(self, tensors: Tensors) -> list[torch.Tensor]:
        """The tensors, with one to pass for each absent pointer. Triton needs its type; the kernel never reads it."""
        real = [x for x in tensors if x is not None]
        if len(real) == len(tensors):
            return real
        made: dict[torch.dtype, torch.Tensor] = {}
        filled = []
        for x, element_type in zip(tensors, self._element_types, strict=True):
            if x is None:
                dtype = element_type or real[0].dtype
                x = made.get(dtype)
                if x is None:
                    x = made[dtype] = real[0].new_empty(1, dtype=dtype)
            filled.append(x)
        return filled


def _is_of_compiler(error: Exception) -> bool:
    """Whether Triton's compiler has failed: by an error of its own, such as shared memory that a GPU lacks, or by an
    error of MLIR. Errors of the interpreter are those of a kernel."""
    names = {each.__name__ for each in type(error).__mro__}
    return ("TritonError" in names and "InterpreterError" not in names) or "PassManager" in str(error)


def _summary(error: Exception) -> str:
    """The last line of an error that says something. Triton's begin with the source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


class Interpreter:
    """Triton's interpreter on the CPU, as a small GPU. Kernels have the constants of a target."""

    compute_units = 4

    def __init__(self, target: str = "gfx950") -> None:
        self.target = target

    def kernel(self, variant: Variant) -> JitKernel:
        return JitKernel(variant, self.target)

    def has_composable_kernel(self) -> bool:
        return False

    def has_stored(self, name: str) -> bool:  # noqa: ARG002
        return False

    def run(self, launches: Sequence[Launch], tensors: Tensors) -> None:  # noqa: ARG002
        raise KernelError("Triton's interpreter runs no kernel of Composable Kernel")


@cache
def triton_version() -> tuple[int, ...]:
    import triton

    return tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:2])


def triton_problem() -> str | None:
    """Why Triton's JIT cannot serve this process, or None when it can."""
    try:
        import triton
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    if triton_version() < tuple(map(int, OLDEST_TRITON.split("."))):
        # torch for Windows requires no Triton.
        remedy = "" if PLATFORM.is_windows else f": install torch {OLDEST_TORCH} or newer, which brings it"
        return f"Triton {triton.__version__} is older than {OLDEST_TRITON}, whose named tuples the kernels need{remedy}"
    return None


def interpreting() -> bool:
    """Whether Triton interprets kernels on the CPU, as the tests do."""
    return os.environ.get("TRITON_INTERPRET") == "1"
