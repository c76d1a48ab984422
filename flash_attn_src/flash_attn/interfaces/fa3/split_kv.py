"""FlashAttention-3's functions about split-KV: joining attention over splits of the keys, and their number."""

from __future__ import annotations

import torch

from flash_attn.attention import backends
from flash_attn.attention.backends import torch as torch_backend
from flash_attn.call.arguments import check_index, check_per_sequence, check_whole, check_window, diagnose_switches
from flash_attn.call.calls import Window, maybe_contiguous
from flash_attn.call.memory import check_outputs
from flash_attn.call.tracing import is_traced, refuse_transforms
from flash_attn.core import device
from flash_attn.kernels.splits import profitable_splits

# What get_scheduler_metadata counts with on a CPU, where the keys are not split.
_CPU_UNITS = 4
_OUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, softmax_lse) of attention that was computed over splits of the keys.

    out_partial   fp32 (splits, batch, seqlen, heads, head_dim) or (splits, total, heads, head_dim)
    lse_partial   fp32 (splits, batch, seqlen, heads) or (splits, total, heads); -inf where a split holds no key
    out           written where given; else new, of out_dtype (fp32, fp16 or bf16; default fp32)
    softmax_lse   fp32 (batch, seqlen, heads) or (total, heads)
    """
    refuse_transforms("flash_attn_combine")
    for name, x, ranks in (("out_partial", out_partial, (4, 5)), ("lse_partial", lse_partial, (3, 4))):
        if not isinstance(x, torch.Tensor) or x.dtype is not torch.float32 or x.layout is not torch.strided:
            raise TypeError(f"{name}: got {getattr(x, 'dtype', type(x).__name__)}, wanted a dense float32 tensor")
        if x.dim() not in ranks:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, wanted {ranks[0]} or {ranks[1]} dimensions")
    shape = tuple(out_partial.shape[1:])
    if lse_partial.shape != out_partial.shape[:-1] or lse_partial.device != out_partial.device:
        raise ValueError(
            f"lse_partial: got {tuple(lse_partial.shape)} on {lse_partial.device}, wanted "
            f"{tuple(out_partial.shape[:-1])} on {out_partial.device}"
        )
    if out is None:
        out_dtype = out_dtype or torch.float32
        if out_dtype not in _OUT_DTYPES:
            raise TypeError(f"out_dtype: got {out_dtype}, wanted float32, float16 or bfloat16")
        out = torch.empty(shape, dtype=out_dtype, device=out_partial.device)
    elif not isinstance(out, torch.Tensor) or out.layout is not torch.strided or out.dtype not in _OUT_DTYPES:
        raise TypeError(f"out: got {getattr(out, 'dtype', type(out).__name__)}, wanted a dense floating-point tensor")
    elif out.device != out_partial.device:
        raise ValueError(f"out: got a tensor on {out.device}, wanted {out_partial.device} where out_partial is")
    elif tuple(out.shape) != shape or (out_dtype is not None and out.dtype is not out_dtype):
        raise ValueError(f"out: got {out.dtype} {tuple(out.shape)}, wanted {out_dtype or out.dtype} {shape}")
    shared = check_outputs({"out": out}, {"out_partial": out_partial, "lse_partial": lse_partial})
    packed = len(shape) == 3
    partial, partial_lse, result = maybe_contiguous(out_partial), lse_partial, out
    if packed:
        partial, partial_lse, result = partial[:, None], partial_lse[:, None], out[None]
    # Traced, or still on its way from other ranks, by PyTorch's operations.
    backend = torch_backend if is_traced(out_partial, lse_partial, out) else backends.select(out_partial)
    in_place = result.stride(-1) == 1 and not shared
    dense = result if in_place else torch.empty(result.shape, dtype=out.dtype, device=out.device)
    softmax_lse = backend.combine(partial, partial_lse, dense)
    if dense is not result:
        result.copy_(dense)
    softmax_lse = softmax_lse.masked_fill(softmax_lse == torch.inf, -torch.inf)
    return out, softmax_lse[0] if packed else softmax_lse


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> torch.Tensor:
    """int32 (1,) on the device of cache_seqlens: an estimate of the splits of the keys.

    flash_attn_with_kvcache takes it, and decides the same by itself: there is no plan to be made ahead here.
    """
    check_whole(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, max_seqlen_k_new=max_seqlen_k_new)
    check_whole(batch_size=batch_size, attention_chunk=attention_chunk, num_splits=num_splits, sm_margin=sm_margin)
    check_whole(num_heads_q=num_heads_q, num_heads_kv=num_heads_kv, headdim=headdim, page_size=page_size or 0)
    check_whole(headdim_v=0 if headdim_v is None else headdim_v)
    diagnose_switches(None, causal=causal, has_softcap=has_softcap, pack_gqa=False if pack_gqa is None else pack_gqa)
    check_window(window_size)
    if not isinstance(qkv_dtype, torch.dtype):
        raise TypeError(f"qkv_dtype: got {qkv_dtype!r}, wanted a torch.dtype")
    if num_heads_kv == 0 or num_heads_q % num_heads_kv:
        raise ValueError(f"num_heads_q: got {num_heads_q}, wanted a multiple of num_heads_kv = {num_heads_kv}")
    check_index("cache_seqlens", cache_seqlens, cache_seqlens, 1)
    check_per_sequence(cache_seqlens, batch_size, cache_leftpad=cache_leftpad)
    check_per_sequence(cache_seqlens, batch_size + 1, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new)
    if cache_seqlens.shape[0] != batch_size:
        raise ValueError(f"cache_seqlens: got {cache_seqlens.shape[0]} elements, wanted {batch_size} = batch_size")
    if num_splits == 0:
        packed = -(-max_seqlen_q * (num_heads_q // num_heads_kv) // 16)
        units = device.of(cache_seqlens.get_device()).compute_units if cache_seqlens.is_cuda else _CPU_UNITS
        blocks = -(-(max_seqlen_k + max_seqlen_k_new) // 64)
        programs = packed * num_heads_kv * batch_size
        num_splits = profitable_splits(programs, blocks, max(units - sm_margin, 1), 16)
    return torch.full((1,), num_splits, dtype=torch.int32, device=cache_seqlens.device)
