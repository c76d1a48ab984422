"""A cache in FP8: its descales, and queries in another type."""

from __future__ import annotations

import torch

from flash_attn.attention import backends
from flash_attn.attention.backends.torch.fp8 import is_fp8
from flash_attn.call.arguments.diagnosis import refuse_gradients
from flash_attn.call.calls import CacheCall, Descales

_Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_QUERIES = (torch.float16, torch.bfloat16)


def descales_of(q: torch.Tensor, k: torch.Tensor, batch: int, given: Descales) -> _Three | None:
    """Descales (batch, heads_k) of q, k and v in FP8, 1 where there is none given; None where k is not FP8."""
    heads_k = k.shape[-2]
    descales = []
    for name, descale in zip(("q_descale", "k_descale", "v_descale"), given, strict=True):
        if descale is None:
            descale = torch.ones((batch, heads_k), dtype=torch.float32, device=q.device)
        elif not isinstance(descale, torch.Tensor):
            raise TypeError(f"{name}: got {type(descale).__name__}, wanted a float32 tensor or None")
        elif not is_fp8(q if name == "q_descale" else k):
            whose = f"q is {q.dtype}" if name == "q_descale" else f"k is {k.dtype}"
            raise ValueError(f"{name}: got a tensor, wanted None as {whose}, not FP8")
        elif descale.layout is not torch.strided:
            raise TypeError(f"{name}: got a tensor of layout {descale.layout}, wanted a dense one")
        elif descale.shape != (batch, heads_k) or descale.dtype is not torch.float32 or descale.device != q.device:
            raise ValueError(
                f"{name}: got {descale.dtype} {tuple(descale.shape)} on {descale.device}, wanted torch.float32 "
                f"({batch}, {heads_k}) on {q.device}"
            )
        refuse_gradients(**{name: descale})
        descales.append(descale)
    q_descale, k_descale, v_descale = descales
    return (q_descale, k_descale, v_descale) if is_fp8(k) else None


def has_wide_queries(call: CacheCall, given: Descales) -> bool:
    """Whether a call with these descales has a cache in FP8 and queries in fp16 or bf16.

    Raises TypeError where k_descale and v_descale are missing and for queries of another type, and
    NotImplementedError where the call appends keys, because nothing casts them.
    """
    if not isinstance(call.q, torch.Tensor) or not is_fp8(call.k_cache) or is_fp8(call.q):
        return False
    if given[0] is given[1] is given[2] is None:
        raise TypeError(
            f"k_cache: got {call.k_cache.dtype} without k_descale and v_descale, wanted them as float32 "
            "(batch, heads_k): torch.ones(batch, heads_k) for a cache that was cast without factors"
        )
    if call.q.dtype not in _QUERIES:
        raise TypeError(f"q: got {call.q.dtype}, wanted float16 or bfloat16 over a cache of {call.k_cache.dtype}")
    if call.k is not None or call.v is not None:
        raise NotImplementedError(
            f"k, v: got keys to append to a cache of {call.k_cache.dtype}, wanted None with queries of {call.q.dtype}: "
            "divide them by their descales, cast them, and write them into the cache before"
        )
    return True


def set_descales(call: CacheCall, given: Descales) -> None:
    """Gives a checked call the descales of its cache.

    Raises TypeError or ValueError for wrong descales, TypeError for an FP8 format that is not the GPU's.
    """
    k_cache = call.k_cache
    in_fp8 = is_fp8(k_cache)
    if in_fp8 and k_cache.is_cuda:
        expected = backends.select(call.q).fp8_format(call.q)
        if k_cache.dtype is not expected:
            name = "q" if is_fp8(call.q) else "k_cache"
            raise TypeError(f"{name}: got {k_cache.dtype}, wanted {expected}, the format of this GPU")
    if in_fp8 or not given[0] is given[1] is given[2] is None:
        call.descales = descales_of(call.q, k_cache, call.batch, given)
