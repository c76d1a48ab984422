"""Attention over a KV cache in pure PyTorch; see flash_attn.backends.torch."""

from __future__ import annotations

import torch

from flash_attn.backends import sequences
from flash_attn.backends import torch_tiles as tiles
from flash_attn.backends.torch_attention import options_of, slopes_of
from flash_attn.backends.torch_fp8 import round_trip, sequence_of_rows


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
    num_splits: int,  # noqa: ARG001 - a matter of speed, never of the result
    *,
    out: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int = 0,
    cu_seqlens_k_new: torch.Tensor | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    attention_chunk: int = 0,
    sm_margin: int = 0,  # noqa: ARG001 - as num_splits
    descales: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Appends k, v to the caches in place, then attends: (out as q, softmax_lse (batch, heads, seqlen_q)).

    Arguments as in flash_attn_with_kvcache, cache_seqlens an int, an int32 (batch,) tensor or None. With
    cu_seqlens_q, q is (total_q, heads, head_dim) and softmax_lse (heads, total_q); rows outside of every sequence
    give 0 and +inf. With cu_seqlens_k_new, k and v are (total_new, heads_k, head_dim). rotary_seqlens, int32
    (batch,), is where rotary angles start instead of at cache_seqlens. attention_chunk > 0: a query sees keys of
    its own chunk of so many only. descales, fp32 (batch, heads_k) of q, k and v, belong to FP8 tensors, whose
    result is bf16 and which have no rotary embedding.
    """
    if descales is not None:
        return _fp8_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, cache_leftpad, block_table, softmax_scale,
            causal, window_left, window_right, softcap, alibi_slopes, out, cu_seqlens_q, max_seqlen_q,
            cu_seqlens_k_new, attention_chunk, descales,
        )  # fmt: skip
    with torch.no_grad():
        varlen = cu_seqlens_q is not None
        heads = q.shape[-2]
        if cu_seqlens_q is None:
            batch, max_seqlen_q = q.shape[0], q.shape[1]
            spans = [(index * max_seqlen_q, (index + 1) * max_seqlen_q) for index in range(batch)]
        else:
            batch = cu_seqlens_q.numel() - 1
            spans = sequences.bounds("cu_seqlens_q", cu_seqlens_q, q.shape[0], max_seqlen_q)
        options = options_of(softmax_scale, causal, window_left, window_right, softcap, 0.0, None, attention_chunk)
        slopes = slopes_of(alibi_slopes, batch, heads)
        capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
        if cache_seqlens is None:
            cache_seqlens = capacity
        lengths = [cache_seqlens] * batch if isinstance(cache_seqlens, int) else cache_seqlens.tolist()
        lines = list(range(batch)) if cache_batch_idx is None else cache_batch_idx.tolist()
        leftpads = [0] * batch if cache_leftpad is None else cache_leftpad.tolist()
        new = [(0, 0)] * batch
        if k is not None and cu_seqlens_k_new is not None:
            new = sequences.bounds("cu_seqlens_k_new", cu_seqlens_k_new, k.shape[0], k.shape[0])
        elif k is not None:
            new = [(index * k.shape[1], (index + 1) * k.shape[1]) for index in range(batch)]
        for length, leftpad, (first, stop) in zip(lengths, leftpads, new, strict=True):
            sequences.check_range("cache_seqlens", [length], 0, capacity - (stop - first))
            sequences.check_range("cache_leftpad", [leftpad], 0, length + stop - first)
        if block_table is None:
            sequences.check_range("cache_batch_idx", lines, 0, k_cache.shape[0] - 1)
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        flat_q, flat_out = (x if varlen else x.flatten(0, 1) for x in (q, torch.zeros_like(out)))
        lse = torch.full((heads, flat_q.shape[0]), torch.inf, dtype=tiles.accumulation_dtype(q.dtype), device=q.device)
        moving = causal or window_left >= 0 or window_right >= 0 or attention_chunk > 0
        origins = lengths if rotary_seqlens is None else rotary_seqlens.tolist()
        for index, ((q0, q1), (k0, k1)) in enumerate(zip(spans, new, strict=True)):
            start, added = lengths[index], k1 - k0
            rows = sequences.Sequence(q0, q1, leftpads[index], start + added)
            queries = flat_q[q0:q1]
            if k is not None and v is not None:
                new_keys, new_values = ((x if cu_seqlens_k_new is not None else x.flatten(0, 1))[k0:k1] for x in (k, v))
                if rotary_cos is not None and rotary_sin is not None:
                    origin = origins[index]
                    places = torch.arange(origin, origin + max(added, q1 - q0), device=q.device)
                    new_keys = rotate(new_keys, rotary_cos, rotary_sin, places[:added], rotary_interleaved)
                    at = places[: q1 - q0] if moving else places.new_full((q1 - q0,), origin)
                    queries = rotate(queries, rotary_cos, rotary_sin, at, rotary_interleaved)
                for cache, fresh in ((k_cache, new_keys), (v_cache, new_values)):
                    sequences.append(cache, fresh, start, lines[index], block_table, index)
            keys, values = (
                sequences.keys_of(cache if block_table is not None else cache[lines[index]], rows, block_table, index)
                for cache in (k_cache, v_cache)
            )
            tiles.forward(
                queries[None],
                keys[None],
                values[None],
                flat_out[None, q0:q1],
                lse[None, :, q0:q1],
                None,
                None if slopes is None else slopes[index, None],
                options,
            )
        out.copy_(flat_out.view(out.shape))
        if not varlen:
            lse = lse.unflatten(1, (batch, max_seqlen_q)).transpose(0, 1).contiguous()
        return out, lse


def _fp8_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cache_seqlens: int | torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    cache_leftpad: torch.Tensor | None,
    block_table: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    out: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int,
    cu_seqlens_k_new: torch.Tensor | None,
    attention_chunk: int,
    descales: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kvcache` of FP8 tensors: in fp32, to which and from which they come without loss."""
    with torch.no_grad():
        group = q.shape[-2] // k_cache.shape[2]
        for_q, for_k, for_v = (descale.repeat_interleave(group, 1) for descale in descales)
        wide_k, wide_v = k_cache.float(), v_cache.float()
        new_k, new_v = (x if x is None else x.float() for x in (k, v))
        result, lse = kvcache(
            round_trip(q, for_q * for_k, q.dtype, cu_seqlens_q), wide_k, wide_v, new_k, new_v, None, None,
            cache_seqlens, cache_batch_idx, cache_leftpad, block_table, softmax_scale, causal, window_left,
            window_right, softcap, True, alibi_slopes, 0, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
            cu_seqlens_k_new=cu_seqlens_k_new, attention_chunk=attention_chunk,
        )  # fmt: skip
        if k is not None:
            k_cache.copy_(wide_k)
            v_cache.copy_(wide_v)
        if cu_seqlens_q is None:
            result *= for_v[:, None, :, None]
        else:
            result *= for_v[sequence_of_rows(q, cu_seqlens_q)][..., None]
        return (result.bfloat16() if out is None else out.copy_(result)), lse


def combine(partial: torch.Tensor, partial_lse: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Joins attention over parts of the keys; fills out (batch, seqlen, heads, head_dim), returns the whole lse.

    partial fp32 (parts, batch, seqlen, heads, head_dim) and partial_lse fp32 (parts, batch, seqlen, heads), -inf or
    +inf where a part holds no key. The lse is fp32 (batch, seqlen, heads), +inf where no part holds any.
    """
    with torch.no_grad():
        seen = partial_lse.masked_fill(partial_lse == torch.inf, -torch.inf)
        lse = torch.logsumexp(seen, 0)
        weights = torch.exp(seen - lse.masked_fill(lse == -torch.inf, 0.0))
        parts = partial.masked_fill((weights == 0.0)[..., None], 0.0)
        out.copy_((parts * weights[..., None]).sum(0))
        return lse.masked_fill(lse == -torch.inf, torch.inf)


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """x (s, h, d) with the first 2 * cos.shape[1] of its head dim rotated by the angles at positions (s,).

    Interleaved pairs are (0, 1), (2, 3), ...; else (i, i + cos.shape[1]). Computed in fp32 at least.
    ValueError if a position lies outside cos, sin (places, rotary_dim / 2).
    """
    if positions.numel() and int(positions.max()) >= cos.shape[0]:
        raise ValueError(f"rotary_cos: got {cos.shape[0]} places, wanted {int(positions.max()) + 1} or more")
    half = cos.shape[1]
    dtype = tiles.accumulation_dtype(x.dtype)
    c, s = (table[positions].to(dtype)[:, None] for table in (cos, sin))
    turned = x[..., : 2 * half].to(dtype)
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    parts = (first * c - second * s, first * s + second * c)
    joined = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat((joined.to(x.dtype), x[..., 2 * half :]), -1)
