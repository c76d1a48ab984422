"""Who computes: `ck` or `triton` on the GPU, `torch` for everything else. One Protocol, chosen by the tensor.

The wheel says which of the two. ck means AMD's kernels where they win: assembly or Composable Kernel, by the table in
`kernels.providers`, and Triton's kernels for all other calls. FLASH_ATTENTION_TRITON_AMD_ENABLE overrides the wheel,
as upstream: TRUE asks for Triton, FALSE for Composable Kernel alone. FLASH_ATTENTION_KERNEL_SOURCE forces one source of
a ck wheel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch as _torch

from flash_attn.attention.backends import torch as _torch_backend
from flash_attn.attention.backends import triton as _triton
from flash_attn.attention.backends.ck import ComposableKernel
from flash_attn.attention.backends.ck.parameters import has_kernels
from flash_attn.attention.backends.protocol import Backend
from flash_attn.attention.backends.sources import VARIABLE, Sources
from flash_attn.attention.backends.triton import autotune
from flash_attn.call.tracing import refuse_transforms
from flash_attn.core import build_info, ck_planner, device
from flash_attn.core.environment import TRITON_ENABLE, switch
from flash_attn.kernels.providers import CK, SOURCES, TRITON

__all__ = ["Backend", "choose", "gpu_backend", "problem", "select", "using", "watched"]


def _source() -> str:
    """The kernel provider that the environment forces, "" for none.

    Upstream's variable has its own words for the same choice.
    """
    try:
        asked = {None: "", True: TRITON, False: CK}[switch(os.environ, TRITON_ENABLE)]
    except ValueError:  # see `problem`
        asked = ""
    return os.environ.get(VARIABLE, "").strip().lower() or asked


def problem() -> str | None:
    """The reason why no backend serves GPU tensors, with a remedy. None if a backend does."""
    has_ck = build_info.load().backend == "ck"
    try:
        asked = switch(os.environ, TRITON_ENABLE)
    except ValueError as error:
        return f"{error}: unset it, or set it to TRUE"
    if asked is False and not has_ck:
        return f"{TRITON_ENABLE}=FALSE asks for the CK backend, which this wheel does not have: unset it"
    source = _source()
    if source and source not in SOURCES:
        return f"{VARIABLE}={source} is none of {', '.join(SOURCES)}: unset it, or set it to one of them"
    if source not in ("", TRITON) and not has_ck:
        return f"{VARIABLE}={source} asks for kernels that this wheel does not have: unset it"
    if has_ck and source != TRITON:
        try:
            ck_planner.check(build_info.load().planner)
            ck_planner.library()
        except ImportError as error:
            return str(error)
    return None


class Choice(NamedTuple):
    """The backend for GPU tensors, or why there is none.

    elsewhere: the backend for GPUs without CK kernels, if it is another.
    """

    backend: Backend
    problem: str | None
    elsewhere: Backend | None = None


def choose() -> Choice:
    """The choice of the wheel and the environment."""
    triton: Backend = autotune if autotune.wanted() else _triton
    source = _source()
    if build_info.load().backend != "ck" or source == TRITON:
        return Choice(triton, problem())
    ck = ComposableKernel(_triton, alone=source == CK)
    backend = ck if source == CK else Sources(ck, _triton, forced=source or None)
    return Choice(backend, problem(), None if source else triton)


_chosen = choose()
_cpu: Backend = _torch_backend
_forced: Backend | None = None


def gpu_backend() -> Backend:
    """The backend that serves GPU tensors in this process. The environment is read when flash_attn is imported."""
    return _chosen.backend


def select(tensor: _torch.Tensor) -> Backend:
    """The backend that serves a tensor: pure PyTorch outside of GPUs, else the process's GPU backend.

    Triton's kernels alone serve a GPU for which a wheel of all GPUs has no other ones, such as a Radeon.

    Raises RuntimeError where the environment, when flash_attn was imported, asked for one that is not there, and
    NotImplementedError where torch.func transforms the call.
    """
    refuse_transforms("this call of attention")
    if _forced is not None:
        return _forced
    if not tensor.is_cuda:
        return _cpu
    if _chosen.problem is not None:
        raise RuntimeError(_chosen.problem)
    if _chosen.elsewhere is not None and not has_kernels(tensor):
        return _chosen.elsewhere
    return _chosen.backend


def has_plans(tensor: object) -> bool:
    """Whether the Triton backend alone serves a tensor. The others pass addresses to kernels, or launch nothing, so a
    plan of their calls would be looked for in vain."""
    if not isinstance(tensor, _torch.Tensor) or (_forced is None and (not tensor.is_cuda or _chosen.problem)):
        return False
    backend = _forced or _chosen.backend
    if _forced is None and _chosen.elsewhere is not None and not has_kernels(tensor):
        backend = _chosen.elsewhere
    return getattr(backend, "name", "") == _triton.name


@contextmanager
def watched(wrap: Callable[[Backend], Backend]) -> Iterator[None]:
    """Lets `wrap(backend)` serve calls in the place of each backend of this process."""
    global _chosen, _cpu
    device.plans().clear()
    before = _chosen, _cpu
    elsewhere = _chosen.elsewhere and wrap(_chosen.elsewhere)
    _chosen, _cpu = _chosen._replace(backend=wrap(_chosen.backend), elsewhere=elsewhere), wrap(_cpu)
    try:
        yield
    finally:
        _chosen, _cpu = before


@contextmanager
def using(backend: Backend) -> Iterator[None]:
    """Lets one backend serve every tensor, for tests and recordings."""
    global _forced
    device.plans().clear()
    before, _forced = _forced, backend
    try:
        yield
    finally:
        _forced = before
        device.plans().clear()
