"""Attention over a cache by Composable Kernel: appending, the keys in splits, and their sum."""

from __future__ import annotations

from functools import cache

import torch

from flash_attn.backends.ck_calls import (
    DIMS,
    NO_TENSOR,
    address,
    aligned,
    fields,
    instead,
    lacking,
    run,
    shape_fields,
    window_of,
)
from flash_attn.runtime import ck_planner, recording
from flash_attn.runtime.ck_planner import UnsupportedError

Tensors = tuple[torch.Tensor, ...]


def kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    rotary_cos: torch.Tensor | None,
    rotary_sin: torch.Tensor | None,
    cache_seqlens: int | torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    cache_leftpad: torch.Tensor | None,
    block_table: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    rotary_interleaved: bool,
    alibi_slopes: torch.Tensor | None,
    num_splits: int,
    *,
    out: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int = 0,
    cu_seqlens_k_new: torch.Tensor | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    attention_chunk: int = 0,
    sm_margin: int = 0,
    descales: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a cache, as in `backends.torch.kvcache`: (out, softmax_lse)."""
    given = (
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
        softmax_scale, causal, window_left, window_right, softcap, rotary_interleaved, alibi_slopes, num_splits,
    )  # fmt: skip
    options = {
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k_new": cu_seqlens_k_new, "rotary_seqlens": rotary_seqlens,
        "attention_chunk": attention_chunk or None, "descales": descales,
    }  # fmt: skip
    more = {
        "out": out,
        "max_seqlen_q": max_seqlen_q,
        "sm_margin": sm_margin,
        **options,
        "attention_chunk": attention_chunk,
    }
    reason = lacking(q)
    for option, value in options.items():
        if value is not None:
            reason = f"{option}: the kernels have none"
    if cache_leftpad is not None:
        reason = "cache_leftpad: the kernels have none"
    elif q.shape[-1] not in DIMS:
        reason = f"head_dim: a cache of {q.shape[-1]} would have to be copied"
    elif not (aligned(k_cache) is k_cache and aligned(v_cache) is v_cache):
        reason = "k_cache, v_cache: rows that do not start on 16 bytes"
    elif rotary_cos is not None and (rotary_cos.shape[-1] % 8 or not (rotary_cos.is_contiguous())):
        reason = "rotary_cos: rotary_dim is not a multiple of 16, or the rows do not lie dense"
    elif 0 in q.shape or k_cache.shape[1] == 0:
        reason = "q, k_cache: an empty one"
    elif num_splits > ck_planner.MAX_SPLITS:
        reason = f"num_splits: {num_splits} is above {ck_planner.MAX_SPLITS}"
    if reason is not None:
        return instead("kvcache", reason, *given, **more)

    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
    batch, seqlen_q, nheads, head_dim = q.shape
    nheads_k, page_size = k_cache.shape[2], k_cache.shape[1] if block_table is not None else 0
    seqlen_k = page_size * block_table.shape[1] if block_table is not None else k_cache.shape[1]
    window = window_of(causal, window_left, window_right, one_query=seqlen_q == 1)
    q = aligned(q)
    if rotary_cos is not None and k is not None:
        q = q.clone()  # it is turned in place
    result = torch.empty_like(q)
    lse = torch.empty((batch, nheads, seqlen_q), dtype=torch.float32, device=q.device)
    seqlens = cache_seqlens if k is None or cache_seqlens is None else cache_seqlens + k.shape[1]
    # Heads that share keys become queries of one head, where nothing tells queries apart: a block then reads the
    # keys once for all of them.
    group = nheads // nheads_k
    together = group > 1 and seqlen_q == 1 and window == (-1, -1) and alibi_slopes is None and rotary_cos is None
    folded_q, folded_out, lse_strides = q, result, (lse.stride(0), lse.stride(1))
    if together:
        folded_q, folded_out = (tensor.view(batch, nheads_k, group, head_dim).transpose(1, 2) for tensor in (q, result))
        lse_strides = (lse.stride(0), group)
    rows, heads = folded_q.shape[1:3]
    splits = num_splits or _splits(q, batch * heads * -(-rows // 64), seqlen_k)
    split_out = torch.empty((splits, batch, nheads, seqlen_q, head_dim), dtype=torch.float32, device=q.device)
    split_lse = torch.empty((splits, batch, nheads, seqlen_q), dtype=torch.float32, device=q.device)
    shape = shape_fields(
        folded_q, batch=batch, nheads_k=nheads_k, seqlen_q=rows, seqlen_k=seqlen_k, window=window, scale=softmax_scale,
        softcap=softcap, dropout_p=0.0, lse=lse_strides, alibi_slopes=alibi_slopes, cu_seqlens_q=None,
        cu_seqlens_k=None, rng_state=None,
    )  # fmt: skip
    new = (*NO_TENSOR, *NO_TENSOR) if k is None or v is None else (*fields(k := aligned(k)), *fields(v := aligned(v)))
    parameters = ck_planner.DECODE.pack(
        *shape, *fields(folded_q), *fields(k_cache), *fields(v_cache), *fields(folded_out), *new, lse.data_ptr(),
        address(cache_seqlens) if k is not None else 0, address(seqlens), address(cache_batch_idx),
        address(block_table), 0 if block_table is None else block_table.stride(0), 0,
        address(rotary_cos), address(rotary_sin), 0 if rotary_cos is None else 2 * rotary_cos.shape[-1],
        int(rotary_interleaved), 0 if k is None else k.shape[1], page_size, splits, 0,
        split_out.data_ptr(), split_lse.data_ptr(),
    )  # fmt: skip
    try:
        run(q, "decode", parameters)
    except UnsupportedError as error:
        return instead("kvcache", str(error), *given, **more)
    return (result if out is None else out.copy_(result)), lse


def _splits(q: torch.Tensor, blocks: int, seqlen_k: int) -> int:
    """Parts of the keys such that their blocks fill the compute units once, each part 256 keys or more."""
    units = _compute_units(q.get_device()) if recording.current is None else 304
    return max(1, min(units // max(1, blocks), -(-seqlen_k // 256), ck_planner.MAX_SPLITS))


@cache
def _compute_units(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
