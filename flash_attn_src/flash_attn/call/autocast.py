"""The types that attention's inputs have under torch.autocast: as torch's scaled_dot_product_attention casts them."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

_LOW = (torch.float16, torch.bfloat16)
_is_any_enabled = torch._C._is_any_autocast_enabled


def cast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Casts the tensors to autocast's dtype if autocast is on and they are neither all fp16 nor all bf16.

    fp64 is kept.
    """
    if not (is_compiling() or _is_any_enabled()):
        return tensors
    if not all(isinstance(x, torch.Tensor) for x in tensors):  # The checks report it.
        return tensors
    kind, dtype = tensors[0].device.type, tensors[0].dtype
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return tensors
    if dtype in _LOW and all(x.dtype is dtype for x in tensors):
        return tensors
    cast_dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(cast_dtype) if x.dtype in (*_LOW, torch.float32) else x for x in tensors)
