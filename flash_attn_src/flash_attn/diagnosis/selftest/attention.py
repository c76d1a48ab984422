"""Checks of attention against fp32: dense, packed, over a cache, in FP8. Each returns errors, forward and backward."""

from __future__ import annotations

from typing import Any, Literal

import torch

import flash_attn
from flash_attn.diagnosis.selftest import reference
from flash_attn.diagnosis.selftest.inputs import Draw, angles, turned
from flash_attn.diagnosis.selftest.reference import OPEN, error, gradients_error

Errors = tuple[float, float | None]
_api: Any = flash_attn  # the types of its results depend on arguments


def attention(
    draw: Draw,
    *,
    head_dim: int,
    batch: int = 2,
    seqlen_q: int = 203,
    seqlen_k: int = 203,
    heads: int = 4,
    heads_k: int | None = None,
    value_dim: int | None = None,
    added: Literal["alibi", "bias"] | None = None,
    sinks: float | None = None,
    dout_scale: float = 1.0,
    **options: Any,
) -> Errors:
    """flash_attn_func with its gradients. Sinks have gradients too, and so has a bias that all heads share.

    added: what is added to the scores. sinks: how far the sinks lie above the scores, None for no sinks. dout_scale:
    standard deviation of the gradient of the result.
    """
    heads_k = heads_k or heads
    inputs: dict[str, Any] = {
        "q": draw(batch, seqlen_q, heads, head_dim),
        "k": draw(batch, seqlen_k, heads_k, head_dim),
        "v": draw(batch, seqlen_k, heads_k, value_dim or head_dim),
    }
    if sinks is not None:
        inputs["s_aux"] = (draw(heads, grad=False) + sinks).requires_grad_()
    if added == "bias":
        inputs["attn_bias"] = draw(batch, 1, seqlen_q, seqlen_k)
    if added == "alibi":
        options["alibi_slopes"] = draw.slopes(heads)
    out = _api.flash_attn_func(**inputs, **options)
    exact: dict[str, Any] = {name: x.detach().float().requires_grad_() for name, x in inputs.items()}
    expected = reference.attention(**exact, **options)
    dout = (draw(*out.shape, grad=False).float() * dout_scale).to(draw.dtype)
    return error(out, expected), gradients_error(out, (*inputs.values(),), expected, (*exact.values(),), dout)


def dominated(draw: Draw, *, head_dim: int, keys: int = 1024, lead: float = 9.8) -> Errors:
    """flash_attn_func with its gradients where the score of the first key is `lead` above all others.

    The value of that key is 0 and the others are near 1. The result, (keys - 1) / (keys - 1 + exp(lead)), is a sum of
    weights that are each below 2^-14 of the largest one: subnormal numbers of fp16.
    """
    q = torch.ones(1, 64, 2, head_dim, device=draw.device, dtype=draw.dtype, requires_grad=True)
    k, v = (torch.zeros(1, keys, 2, head_dim, device=draw.device, dtype=draw.dtype) for _ in range(2))
    k[:, 0] = lead / head_dim**0.5
    v[:, 1:] = 1 + draw(1, keys - 1, 2, head_dim, grad=False) / 16
    inputs = (q, k.requires_grad_(), v.requires_grad_())
    out = _api.flash_attn_func(*inputs)
    exact = [x.detach().float().requires_grad_() for x in inputs]
    expected = reference.attention(*exact)
    dout = draw(*out.shape, grad=False)
    return error(out, expected), gradients_error(out, inputs, expected, exact, dout)


def packed(draw: Draw, *, head_dim: int, causal: bool, window_size: tuple[int, int] = OPEN) -> Errors:
    """flash_attn_varlen_func and its gradients, with one sequence that has no query and one that has no key."""
    lengths_q, lengths_k = [5, 200, 0, 1, 37, 3], [9, 200, 4, 130, 20, 0]
    heads, heads_k = 4, 2
    q = draw(sum(lengths_q), heads, head_dim)
    k, v = draw(sum(lengths_k), heads_k, head_dim), draw(sum(lengths_k), heads_k, head_dim)
    offsets = [torch.tensor([0, *x]).cumsum(0).to(draw.device, torch.int32) for x in (lengths_q, lengths_k)]
    out = _api.flash_attn_varlen_func(
        q, k, v, *offsets, max(lengths_q), max(lengths_k), causal=causal, window_size=window_size
    )
    exact = [x.detach().float().requires_grad_() for x in (q, k, v)]
    lengths = (lengths_q, lengths_k, lengths_k)
    parts = zip(*(x.split(n) for x, n in zip(exact, lengths, strict=True)), strict=True)
    expected = torch.cat(
        [
            reference.attention(*(x[None] for x in part), causal=causal, window_size=window_size)[0]
            for part in parts
            if len(part[0])
        ]
    )
    dout = draw(*out.shape, grad=False)
    return error(out, expected), gradients_error(out, (q, k, v), expected, exact, dout)


def cache(
    draw: Draw,
    *,
    head_dim: int,
    seqlen_q: int = 1,
    seqlen_k: int = 700,
    heads: int = 4,
    heads_k: int = 2,
    page_size: int = 0,
    new: int = 0,
    rotary: bool = False,
    sinks: bool = False,
) -> Errors:
    """flash_attn_with_kvcache over caches of different lengths. It appends `new` keys and checks the cache."""
    batch = 3
    seqlen_q = new or seqlen_q
    room = -(-(seqlen_k + new) // 256) * 256
    lengths = [seqlen_k, seqlen_k // 2, 1]
    q = draw(batch, seqlen_q, heads, head_dim, grad=False)
    keys, values = (draw(batch, room, heads_k, head_dim, grad=False) for _ in range(2))
    options: dict[str, Any] = {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32, device=draw.device)}
    added = [draw(batch, new, heads_k, head_dim, grad=False) for _ in range(2)] if new else []
    s_aux = options["s_aux"] = draw(heads, grad=False) if sinks else None
    turned_q, added_keys = q.float(), added[0].float() if new else None
    if rotary:
        cos, sin = angles(draw, room, head_dim)
        options |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": False}
        turned_q = torch.stack([turned(q[i], cos[n:], sin[n:]) for i, n in enumerate(lengths)])
        added_keys = torch.stack([turned(added[0][i], cos[n:], sin[n:]) for i, n in enumerate(lengths)])
    k_cache, v_cache = keys.clone(), values.clone()
    table = None
    if page_size:
        count = room // page_size
        table = torch.arange(batch * count - 1, -1, -1, dtype=torch.int32, device=draw.device).reshape(batch, count)
        k_cache, v_cache = (_paged(x, table, page_size) for x in (keys, values))
        options["block_table"] = table
    out = _api.flash_attn_with_kvcache(q, k_cache, v_cache, *added, causal=True, **options)
    expected = []
    for i, length in enumerate(lengths):
        parts = [[keys[i, :length].float()], [values[i, :length].float()]]
        if added_keys is not None:
            parts[0].append(added_keys[i].to(draw.dtype).float())
            parts[1].append(added[1][i].float())
        parts_of_one = (torch.cat(x)[None] for x in parts)
        expected.append(reference.attention(turned_q[i][None], *parts_of_one, causal=True, s_aux=s_aux)[0])
    written = (added_keys, added[1]) if new else (None, None)
    for before, after, fresh in zip((keys, values), (k_cache, v_cache), written, strict=True):
        held = after if table is None else after[table].reshape(before.shape)
        for i, length in enumerate(lengths):
            if not torch.equal(held[i, :length], before[i, :length]):
                raise AssertionError(f"the first {length} keys or values of cache {i} have changed")
            if fresh is not None and error(held[i, length : length + new], fresh[i]) > 2**-7:
                raise AssertionError(f"cache {i} does not contain the appended keys and values")
    return max(error(*pair) for pair in zip(out, expected, strict=True)), None


def latent(draw: Draw, *, seqlen_q: int = 1, page_size: int = 64) -> Errors:
    """Multi-head latent attention in its absorbed form: a paged cache of 576 columns whose first 512 are the values."""
    batch, room, heads = 2, 768, 16
    lengths = [700, 65]
    q, keys = draw(batch, seqlen_q, heads, 576, grad=False), draw(batch, room, 1, 576, grad=False)
    table = torch.arange(batch * room // page_size - 1, -1, -1, dtype=torch.int32, device=draw.device).view(batch, -1)
    pages = _paged(keys, table, page_size)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=draw.device)
    out = _api.flash_attn_with_kvcache(
        q, pages, pages[..., :512], cache_seqlens=seqlens, block_table=table, causal=True
    )  # fmt: skip
    expected = [
        reference.attention(q[i : i + 1], keys[i : i + 1, :n], keys[i : i + 1, :n, :, :512], causal=True)[0]
        for i, n in enumerate(lengths)
    ]
    return max(error(*pair) for pair in zip(out, expected, strict=True)), None


def _paged(tensor: torch.Tensor, table: torch.Tensor, page_size: int) -> torch.Tensor:
    """The pages of a cache (batch, seqlen, heads, dim), in the order that the block table says."""
    pages = tensor.new_empty(table.numel(), page_size, *tensor.shape[2:])
    pages[table.flatten().long()] = tensor.reshape(-1, page_size, *tensor.shape[2:])
    return pages


def fp8(draw: Draw, *, head_dim: int) -> Errors:
    """flash_attn_fp8_func against fp32 attention of the same values, and its gradients."""
    q, k, v = (draw(2, 203, 4, head_dim) for _ in range(3))
    out = _api.flash_attn_fp8_func(q, k, v, causal=True)
    exact = [x.detach().float().requires_grad_() for x in (q, k, v)]
    expected = reference.attention(*exact, causal=True)
    return error(out, expected), gradients_error(out, (q, k, v), expected, exact, draw(*out.shape, grad=False))
