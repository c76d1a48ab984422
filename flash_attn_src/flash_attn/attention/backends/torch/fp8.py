"""FP8 in plain PyTorch: the cast of a tensor, and attention of cast tensors. It is the oracle of the FP8 kernels."""

from __future__ import annotations

import torch

from flash_attn.attention.backends.torch import attention
from flash_attn.call.calls import AttentionCall, Fp8Result, replace
from flash_attn.call.options import FP8

# What numbers are cast to.
FORMAT = torch.float8_e4m3fn


def is_fp8(x: torch.Tensor) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def sequence_of_rows(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """(total,) the sequence that each row belongs to; rows outside of every one go to their neighbour."""
    rows = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
    return torch.bucketize(rows, cu_seqlens[1:], right=True).clamp(max=cu_seqlens.shape[0] - 2)


def descale_of(x: torch.Tensor, dtype: torch.dtype, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """fp32 (batch, heads): the largest magnitude of each sequence and head, over the largest number of dtype."""
    largest = x.abs().amax(-1).float()
    if cu_seqlens is None:
        largest = largest.amax(1) if largest.shape[1] else largest.new_zeros(largest.shape[0], largest.shape[2])
    else:
        sums = largest.new_zeros(cu_seqlens.shape[0] - 1, x.shape[1])
        rows = sequence_of_rows(x, cu_seqlens).long()[:, None].expand_as(largest)
        largest = sums.scatter_reduce_(0, rows, largest, "amax")
    return largest.clamp_min(2.0**-100) / torch.finfo(dtype).max


def round_trip(
    x: torch.Tensor, descale: torch.Tensor, dtype: torch.dtype, cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    """x as it comes out of FP8, in fp32; an x that is FP8 is only scaled."""
    factor = descale[:, None, :, None] if cu_seqlens is None else descale[sequence_of_rows(x, cu_seqlens)][..., None]
    if is_fp8(x):
        return x.float() * factor
    limit = torch.finfo(dtype).max
    return (x.float() / factor).clamp(-limit, limit).to(dtype).float() * factor


def fp8_format(x: torch.Tensor) -> torch.dtype:  # noqa: ARG001
    """See `protocol.Backend.fp8_format`."""
    return FORMAT


def out_dtype(q: torch.Tensor) -> torch.dtype:
    """The type of the result: bf16 for FP8 queries, else theirs."""
    return torch.bfloat16 if is_fp8(q) else q.dtype


def fp8_forward(call: AttentionCall) -> Fp8Result:
    """See `protocol.Backend.fp8_forward`: attention in fp32 of q, k, v as they come out of FP8 (e4m3fn)."""
    FP8.refuse(call, "call flash_attn_func")
    assert call.descales is not None
    with torch.no_grad():
        tensors, offsets = (call.q, call.k, call.v), (call.cu_seqlens_q, call.cu_seqlens_k, call.cu_seqlens_k)
        rounded, factors = [], []
        for x, descale, cu_seqlens in zip(tensors, call.descales, offsets, strict=True):
            dtype = x.dtype if is_fp8(x) else FORMAT
            factors.append(descale_of(x, dtype, cu_seqlens) if descale is None else descale)
            rounded.append(round_trip(x, factors[-1], dtype, cu_seqlens))
        q, k, v = rounded
        result = attention.forward(replace(call, q=q, k=k, v=v, descales=None))
        return Fp8Result(result.out.to(out_dtype(call.q)), result.softmax_lse, result.rng_state, tuple(factors))
