"""Launching the kernels of layers: from a tensor and an operation to a kernel."""

from __future__ import annotations

import torch

from flash_attn.core import device
from flash_attn.kernels.operation import LAYER_KINDS
from flash_attn.kernels.operations import OPERATIONS
from flash_attn.kernels.variants import Variant

_FAR = 1 << 31  # a stride of one row alone may be any number
_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def find(op: str, tensor: torch.Tensor, width: int, *sizes: int) -> tuple[device.Kernel, int]:
    """(kernel, unit) for rows of `width` elements: the smallest block that holds one, else the largest. `sizes` are all
    lengths and strides that the kernel takes in units of `unit` elements: 16 bytes where they are multiples of it,
    else 1.

    Raises KernelError where neither the wheel nor a JIT has the kernel.
    """
    unit = 16 // tensor.element_size()
    for size in sizes:
        if size % unit:
            unit = 1
            break
    index = tensor.get_device()
    key = (op, index, tensor.dtype, width, unit)
    kernel: device.Kernel | None = device.kernels.get(key)
    if kernel is None:
        kind = LAYER_KINDS[unit == 1]
        there = OPERATIONS[op].sizes_for(kind)
        block = next((block for block in there if width <= block), there[-1])
        kernel = device.kernels[key] = device.kernel(index, Variant(op, _DTYPES[tensor.dtype], block, kind))
    return kernel, unit


def dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor where its last dimension is dense, it starts on 16 bytes and int32 holds its strides, else a copy."""
    if tensor.stride(-1) == 1 and not tensor.data_ptr() & 15 and tensor.stride(0) < _FAR:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
