"""vLLM's tensor of cached keys and values, and writing into it."""

from __future__ import annotations

import torch

FP8_CACHES = ("fp8", "fp8_e4m3")


def key_and_value(kv_cache: torch.Tensor, head_size: int, fp8: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Views (pages, page_size, heads_k, head_size) of kv_cache (pages, heads_k, page_size, 2 * head_size).

    The strides of kv_cache may be any. fp8: the type of the numbers where kv_cache is of bytes.
    """
    keys, values = kv_cache.transpose(1, 2).split(head_size, -1)
    return (keys, values) if fp8 is None else (keys.view(fp8), values.view(fp8))


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Writes row i of key and value (tokens, heads_k, head_size) to slot slot_mapping[i] of the caches.

    A slot counts keys from the start of the cache: page * page_size + place. Rows beyond slot_mapping and rows with a
    negative slot are not written. A cache in FP8 gets numbers divided by the fp32 scales of one element. On a GPU
    vLLM's own operator writes.
    """
    key_cache, value_cache = caches
    if key.is_cuda:
        from vllm import _custom_ops

        _custom_ops.reshape_and_cache_flash(
            key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
        )
        return
    used = (slot_mapping >= 0).nonzero()[:, 0]
    pages, places = slot_mapping[used] // key_cache.shape[1], slot_mapping[used] % key_cache.shape[1]
    for rows, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        chosen = rows[used]
        if kv_cache_dtype in FP8_CACHES:
            most = torch.finfo(cache.dtype).max
            chosen = (chosen.float() / scale.float()).clamp(-most, most).to(cache.dtype).view(torch.uint8)
            cache = cache.view(torch.uint8)
        cache[pages, places] = chosen
