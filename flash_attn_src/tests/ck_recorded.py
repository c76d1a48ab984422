"""Calls for the Composable Kernel backend, and the comparison of the results of its recorded launches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from assert_close import assert_close
from flash_attn.attention import backends
from flash_attn.attention.backends import recording
from flash_attn.attention.backends import torch as torch_backend
from flash_attn.core import ck_planner
from flash_attn.core.device import Tensors

BF16 = torch.bfloat16


@contextmanager
def running(request: pytest.FixtureRequest, *, alone: bool = False) -> Iterator[list[ck_planner.Launch]]:
    """Records the launches of the calls and runs each on the CPU:

    in PyTorch, or with --gfx the kernel's code. alone: no call may use the Triton kernels.
    """
    import ck_interpreter

    from amdgpu_simulator import gpu

    target = request.config.getoption("--gfx")

    def run(launches: Sequence[ck_planner.Launch], tensors: Tensors) -> None:
        if target is None:
            ck_interpreter.run(launches)
        else:
            gpu.run(target, launches, tensors)

    with recording.record(target or "gfx942", alone=alone, run=run) as launches:
        yield launches


def operations(launches: list[ck_planner.Launch]) -> list[str]:
    return [launch.kernel.split("-")[0] for launch in launches]


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = BF16, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def both(call: Any, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results and gradients of a call here and by PyTorch in fp32."""
    result = []
    for exact in (False, True):
        given = [(x.float() if exact else x).detach().requires_grad_() for x in inputs]
        with backends.using(torch_backend) if exact else nullcontext():
            out, lse, _ = call(*given, return_attn_probs=True)
            gradients = torch.autograd.grad(out, given, torch.ones_like(out) * 0.5 + out.detach())
        result.append([out.detach(), lse.detach(), *gradients])
    return result[0], result[1]


def compare(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for name, mine, exact in zip(("out", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
        assert_close(name, mine, exact, tiny=0.03 if mine.dtype is BF16 else 5e-3)
