"""Which kernels a call of the Triton backend needs.

Host time is part of the product: a call looks its kernels up once, in one dictionary, and touches every tensor's
metadata once.
"""

from __future__ import annotations

import torch

from flash_attn.attention.backends.triton.inputs import DTYPES, FP8_TYPES
from flash_attn.call.calls import AttentionCall, CacheCall
from flash_attn.call.options import PROBABILITIES, TRITON, WITH_BIAS, WITH_MASK
from flash_attn.core import device
from flash_attn.core.device import Kernel
from flash_attn.kernels.modifiers import MODIFIERS
from flash_attn.kernels.variants import Variant, bucket, serving


def refuse_unserved(call: AttentionCall) -> None:
    """Raises NotImplementedError for a call of whole sequences that no kernel serves, by the name of an option."""
    TRITON.refuse(call, "leave it out")
    if call.options.attn_bias is not None:
        WITH_BIAS.refuse(call, "leave one of them out")
    if call.options.mask is not None:
        WITH_MASK.refuse(call, "leave one of them out")
    if call.return_softmax and call.options.dropout_p > 0.0:
        PROBABILITIES.refuse(call, "leave one of them out")


def score_kind(call: AttentionCall | CacheCall) -> str:
    """The kind of kernel that a call needs for its scores, one of `operation.KINDS`."""
    options = call.options
    if options.attn_bias is not None:
        return "bias"
    used = [row.kind for row in MODIFIERS if _is_used(getattr(options, row.option))]
    # Kernels of other kinds than `any` take the maximum of the scores before they scale them.
    has_bits = options.mask is not None and options.mask.bits is not None
    if len(used) > 1 or options.scale <= 0.0 or (used and options.mask is not None) or has_bits:
        return "any"
    return used[0] if used else "plain" if options.mask is None else "blocks"


def _is_used(value: torch.Tensor | float | None) -> bool:
    return value is not None and (isinstance(value, torch.Tensor) or value != 0.0)


def forward_kind(call: AttentionCall | CacheCall) -> str:
    """The kind of forward kernel that a call needs, one of `operation.FORWARD_KINDS`."""
    kind = score_kind(call)
    if call.options.s_aux is None or kind in ("bias", "blocks", "any"):
        return kind
    return "sink" if kind == "plain" else "any"


def variants(ops: tuple[str, ...], dtype: torch.dtype, head_dim: int, kind: str) -> tuple[Variant, ...]:
    """The variants that one kind of call needs."""
    if dtype not in DTYPES:
        raise TypeError(f"the Triton backend takes float16, bfloat16 or float32 on a GPU, got {dtype}")
    if head_dim % 8:
        raise ValueError(f"head_dim must be a multiple of 8 here, got {head_dim}: pad q, k and v with zeros")
    sizes = [bucket(head_dim, op) for op in ops]
    name = DTYPES[dtype]
    return tuple(Variant(op, name, size, serving(op, name, kind, size)) for op, size in zip(ops, sizes, strict=True))


def find(ops: tuple[str, ...], index: int, dtype: torch.dtype, head_dim: int, kind: str) -> tuple[Kernel, ...]:
    """The kernels of one kind of call on the device with torch's index."""
    key = (ops, index, dtype, head_dim, kind)
    kernels: tuple[Kernel, ...] | None = device.kernels.get(key)
    if kernels is None:
        needs = variants(ops, dtype, head_dim, kind)
        kernels = device.kernels[key] = tuple(device.kernel(index, variant) for variant in needs)
    return kernels


def find_one(op: str, index: int, dtype: torch.dtype, head_dim: int, kind: str = "plain") -> Kernel:
    """The kernel of an op for FP8 or a cache that serves a kind; head_dim is what its tensors have."""
    key = (op, index, dtype, head_dim, kind)
    kernel: Kernel | None = device.kernels.get(key)
    if kernel is None:
        name, size = (DTYPES | FP8_TYPES)[dtype], bucket(head_dim, op)
        variant = Variant(op, name, size, serving(op, name, kind, size))
        kernel = device.kernels[key] = device.kernel(index, variant)
    return kernel


def remember(key: tuple[object, ...], kernels: tuple[Kernel, ...]) -> None:
    """Makes `find` answer with these from now on; the key is its arguments."""
    if device.kernels.get(key) != kernels:
        device.kernels[key] = kernels
        device.plans().clear()  # they hold the kernels of before
