"""FP8 in plain PyTorch: what casting makes of a tensor, and attention of it; the oracle of the FP8 kernels."""

from __future__ import annotations

import torch

from flash_attn.backends.torch import attention as torch_attention

# What numbers are cast to.
FORMAT = torch.float8_e4m3fn

Descales = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


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


def fp8_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    descales: Descales,
    out_dtype: torch.dtype,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    dropout_p: float,
    rng_state: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, tuple[torch.Tensor, ...]]:
    """(out, softmax_lse, rng_state, descales): attention in fp32 of q, k, v as they come out of FP8 (e4m3fn)."""
    with torch.no_grad():
        rounded, factors = [], []
        for x, descale, cu in zip((q, k, v), descales, (cu_seqlens_q, cu_seqlens_k, cu_seqlens_k), strict=True):
            dtype = x.dtype if is_fp8(x) else FORMAT
            factors.append(descale_of(x, dtype, cu) if descale is None else descale)
            rounded.append(round_trip(x, factors[-1], dtype, cu))
        out, lse, _, rng_state = torch_attention.forward(
            rounded[0], rounded[1], rounded[2], None, softmax_scale, causal, window_left, window_right, softcap,
            alibi_slopes, dropout_p, False, rng_state, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            None, None, None,
        )  # fmt: skip
        return out.to(out_dtype), lse, rng_state, tuple(factors)
