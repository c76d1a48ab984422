"""The arguments of multi-head latent attention: a second query, or keys whose first columns are the values."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from flash_attn.call.arguments.diagnosis import check_alike
from flash_attn.call.calls import CacheCall
from flash_attn.core.protocol import spoil
from flash_attn.kernels.value_dims import LATENT_DIM, LATENT_VALUE_DIM


def split_absorbed(call: CacheCall) -> None:
    """Writes the absorbed form of multi-head latent attention with a second query, for which the cache is read once.

    In that form v_cache is k_cache[..., :head_dim_v]. So q @ k is q[..., :head_dim_v] @ v plus the product of the other
    columns. Nothing changes where v_cache is no such view, or where the other columns are more than a kernel takes. New
    keys and values must have that form, too, because they share their place in the cache.
    """
    q, k_cache, v_cache, k, v = call.q, call.k_cache, call.v_cache, call.k, call.v
    try:
        width, width_q, width_k = v_cache.shape[-1], q.shape[-1], k_cache.shape[-1]
        is_fp8 = q.element_size() == 1
    except (AttributeError, IndexError, RuntimeError):
        return  # not tensors with rows: the checks report that
    if q.layout is not torch.strided:
        return
    if width == width_q or width_q != width_k or call.qv is not None or is_fp8 or is_compiling():
        return
    if not (0 < width_q - width <= LATENT_DIM and width <= LATENT_VALUE_DIM and _are_first(v_cache, k_cache)):
        return
    if call.options.softmax_scale is None:
        call.options.softmax_scale = q.shape[-1] ** -0.5
    if k is not None and v is not None:
        if v.shape[:-1] != k.shape[:-1] or k.shape[-1] != q.shape[-1] or not _are_first(v, k):
            raise ValueError(
                f"v: got a separate tensor, wanted the view k[..., :{width}], because v_cache is such a view of k_cache"
            )
        call.k = k[..., width:]
    call.q, call.qv, call.k_cache = q[..., width:], q[..., :width], k_cache[..., width:]


def _are_first(v: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether v is a view of the first columns of k."""
    spoil()
    try:
        same = v.untyped_storage()._cdata == k.untyped_storage()._cdata
    except (AttributeError, RuntimeError):  # not a tensor, or a tensor without memory of its own
        return False
    return same and v.storage_offset() == k.storage_offset() and v.stride() == k.stride() and v.dtype is k.dtype


def check_second_query(call: CacheCall) -> None:
    """Checks qv of a call whose other tensors are checked."""
    assert call.qv is not None
    check_alike("qv", call.qv, call.q, "q", call.v_cache.shape[-1])
    if call.q.element_size() == 1:
        raise NotImplementedError("qv: not supported by attention in FP8, pass fp16 or bf16")
