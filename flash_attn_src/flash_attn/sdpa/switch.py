"""Puts these kernels behind torch.nn.functional.scaled_dot_product_attention, and takes them away again."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.nn import functional

from flash_attn.sdpa import attention as kernels
from flash_attn.sdpa.report import count_passed_on, count_served

_NAME = "scaled_dot_product_attention"
_pytorch = functional.scaled_dot_product_attention
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """PyTorch's function of this name, on the kernels of flash_attn where they can serve, else by PyTorch itself."""
    q, k, v, mask = query, key, value, attn_mask
    traced = is_compiling()
    if traced or _is_any_autocast_enabled():
        q, k, v, mask = _under_autocast(query, key, value, attn_mask)
    reason = kernels.reason_to_pass_on(q, k, v, mask, dropout_p, is_causal, enable_gqa)
    if reason is None:
        if not traced:
            count_served()
        return kernels.attention(q, k, v, mask, dropout_p, is_causal, scale)
    if not traced:
        count_passed_on(reason)
    more: dict[str, Any] = {"enable_gqa": True} if enable_gqa else {}
    return _pytorch(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **more)


def _under_autocast(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """The tensors as autocast casts the arguments of SDPA: floating-point ones, except fp64, get its type."""
    if not torch.is_autocast_enabled("cuda"):
        return tensors
    wanted = torch.get_autocast_dtype("cuda")
    castable = (torch.float16, torch.bfloat16, torch.float32)
    return tuple(
        x.to(wanted) if isinstance(x, torch.Tensor) and kernels.is_on_gpu(x) and x.dtype in castable else x
        for x in tensors
    )


class Active:
    """SDPA on these kernels, from its creation on until `off()` or the end of a `with` block."""

    def __init__(self) -> None:
        self._replaced = [(module, name) for module, name in _holders() if getattr(module, name) is _pytorch]
        for module, name in self._replaced:
            setattr(module, name, scaled_dot_product_attention)

    def off(self) -> None:
        """Gives SDPA back to PyTorch in each module where this object replaced it. A second call does nothing."""
        while self._replaced:
            module, name = self._replaced.pop()
            if getattr(module, name, None) is scaled_dot_product_attention:
                setattr(module, name, _pytorch)

    def __enter__(self) -> Active:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.off()


def _holders() -> list[tuple[Any, str]]:
    """The modules that hold PyTorch's function, with its name there: torch.nn.functional, and modules outside of torch
    that imported it by name."""
    holders: list[tuple[Any, str]] = [(functional, _NAME)]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("torch", "flash_attn") or module is None:
            continue
        holders += [(module, key) for key, value in list(vars(module).items()) if value is _pytorch]
    return holders


def use_for_sdpa() -> Active:
    """Serves PyTorch's scaled_dot_product_attention by the kernels of this package, forward and backward.

    Served: tensors on a GPU in fp16, bf16 and fp32, 3 or 4 dimensions, head dims to 512, boolean and additive masks,
    is_causal, scale, dropout_p without a mask, enable_gqa, autocast, torch.compile. PyTorch computes every other call;
    `sdpa_report()` tells which and why. Modules that imported the function by name before are served too.

    The result turns it off again: by its method `off()`, or as a context manager.
    """
    return Active()
