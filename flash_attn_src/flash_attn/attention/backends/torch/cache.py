"""Attention over a KV cache in pure PyTorch; see flash_attn.attention.backends.torch."""

from __future__ import annotations

import torch

from flash_attn.attention.backends.torch import scores, sequences, tiles
from flash_attn.attention.backends.torch.attention import in_own_types
from flash_attn.attention.backends.torch.fp8 import out_dtype, sequence_of_rows
from flash_attn.call.calls import CacheCall, new_out, replace
from flash_attn.call.options import CACHE


def kvcache(call: CacheCall) -> tuple[torch.Tensor, torch.Tensor]:
    """See `protocol.Backend.kvcache`."""
    CACHE.refuse(call, "leave it out")
    if call.descales is not None:
        return _fp8_kvcache(call, call.descales)
    q, k, v, cu_seqlens_k_new = call.q, call.k, call.v, call.cu_seqlens_k_new
    block_table, batch, capacity = call.block_table, call.batch, call.capacity
    with torch.no_grad(), in_own_types():
        varlen = call.cu_seqlens_q is not None
        heads = q.shape[-2]
        if call.cu_seqlens_q is None:
            spans = [(index * call.seqlen_q, (index + 1) * call.seqlen_q) for index in range(batch)]
        else:
            spans = sequences.bounds("cu_seqlens_q", call.cu_seqlens_q, q.shape[0], call.max_seqlen_q)
        options = scores.by_head(call.options, batch, heads)
        lengths = [call.length] * batch if call.lengths is None else call.lengths.tolist()
        lines = list(range(batch)) if call.cache_batch_idx is None else call.cache_batch_idx.tolist()
        leftpads = [0] * batch if call.cache_leftpad is None else call.cache_leftpad.tolist()
        new = [(0, 0)] * batch
        if k is not None and cu_seqlens_k_new is not None:
            new = sequences.bounds("cu_seqlens_k_new", cu_seqlens_k_new, k.shape[0], k.shape[0])
        elif k is not None:
            new = [(index * k.shape[1], (index + 1) * k.shape[1]) for index in range(batch)]
        for index, (length, leftpad, (first, stop)) in enumerate(zip(lengths, leftpads, new, strict=True)):
            sequences.check_value("cache_seqlens", index, length, 0, capacity - (stop - first))
            sequences.check_value("cache_leftpad", index, leftpad, 0, length + stop - first)
            if block_table is not None:
                sequences.pages_of(call.k_cache, block_table, index, length + stop - first)
        if block_table is None:
            sequences.check_range("cache_batch_idx", lines, 0, call.k_cache.shape[0] - 1)
        out = new_out(q, call.v_cache) if call.out is None else call.out
        flat_q, flat_out = (x if varlen else x.flatten(0, 1) for x in (q, torch.zeros_like(out)))
        flat_qv = call.qv if call.qv is None or varlen else call.qv.flatten(0, 1)
        lse = torch.full((heads, flat_q.shape[0]), torch.inf, dtype=tiles.accumulation_dtype(q.dtype), device=q.device)
        turned = _turned(call, spans, new, lengths)  # Before anything is written, as it may raise.
        for index, ((q0, q1), (k0, k1)) in enumerate(zip(spans, new, strict=True)):
            start, added = lengths[index], k1 - k0
            rows = sequences.Sequence(q0, q1, leftpads[index], start + added)
            queries, new_keys = (flat_q[q0:q1], None) if turned is None else turned[index]
            if flat_qv is not None:
                queries = torch.cat((queries, flat_qv[q0:q1]), -1)
            if k is not None and v is not None:
                rows_k, rows_v = ((x if cu_seqlens_k_new is not None else x.flatten(0, 1))[k0:k1] for x in (k, v))
                for cache, fresh in ((call.k_cache, rows_k if new_keys is None else new_keys), (call.v_cache, rows_v)):
                    sequences.append(cache, fresh, start, lines[index], block_table, index)
            keys, values = (
                sequences.keys_of(cache if block_table is not None else cache[lines[index]], rows, block_table, index)
                for cache in (call.k_cache, call.v_cache)
            )
            if flat_qv is not None:
                keys = torch.cat((keys, values), -1)
            inputs = tiles.Inputs(
                queries[None], keys[None], values[None], scores.of_sequences(options, slice(index, index + 1))
            )
            tiles.forward(inputs, flat_out[None, q0:q1], lse[None, :, q0:q1])
        out.copy_(flat_out.view(out.shape))
        if not varlen:
            lse = lse.unflatten(1, (batch, call.seqlen_q)).transpose(0, 1).contiguous()
        return out, lse


def _turned(
    call: CacheCall, spans: list[tuple[int, int]], new: list[tuple[int, int]], lengths: list[int]
) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """The queries and new keys of each sequence after rotary embedding; None without rotary embedding."""
    if call.rotary_cos is None or call.rotary_sin is None or call.k is None:
        return None
    origins = lengths
    if call.rotary_seqlens is not None:
        origins = call.rotary_seqlens.tolist()
        sequences.check_range("rotary_seqlens", origins, 0, call.rotary_cos.shape[0])
    q = call.q if call.cu_seqlens_q is not None else call.q.flatten(0, 1)
    k = call.k if call.cu_seqlens_k_new is not None else call.k.flatten(0, 1)
    results = []
    for (q0, q1), (k0, k1), origin in zip(spans, new, origins, strict=True):
        places = torch.arange(origin, origin + max(k1 - k0, q1 - q0), device=q.device)
        at = places[: q1 - q0] if call.rotates_each_query else places.new_full((q1 - q0,), origin)
        tables = (call.rotary_cos, call.rotary_sin)
        results.append((
            rotate(q[q0:q1], *tables, at, call.rotary_interleaved),
            rotate(k[k0:k1], *tables, places[: k1 - k0], call.rotary_interleaved),
        ))  # fmt: skip
    return results


def _fp8_kvcache(
    call: CacheCall, descales: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kvcache` of FP8 tensors: in fp32, to which and from which they come without loss."""
    with torch.no_grad():
        q, cu_seqlens_q = call.q, call.cu_seqlens_q
        group = q.shape[-2] // call.k_cache.shape[2]
        for_q, for_k, for_v = (descale.repeat_interleave(group, 1) for descale in descales)
        wide_k, wide_v = call.k_cache.float(), call.v_cache.float()
        new_k, new_v = (x if x is None else x.float() for x in (call.k, call.v))
        wide_q = _scaled(q, for_q * for_k, cu_seqlens_q)
        wide_qv = None if call.qv is None else _scaled(call.qv, for_q * for_v, cu_seqlens_q)
        result, lse = kvcache(replace(
            call, q=wide_q, k_cache=wide_k, v_cache=wide_v, k=new_k, v=new_v, out=None, descales=None, qv=wide_qv
        ))  # fmt: skip
        if new_k is not None:
            call.k_cache.copy_(wide_k)
            call.v_cache.copy_(wide_v)
        result = _scaled(result, for_v, cu_seqlens_q)
        return (result.to(out_dtype(q)) if call.out is None else call.out.copy_(result)), lse


def _scaled(x: torch.Tensor, factor: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """x in fp32, multiplied by factors (batch, heads)."""
    if cu_seqlens is None:
        return x.float() * factor[:, None, :, None]
    return x.float() * factor[sequence_of_rows(x, cu_seqlens)][..., None]


def combine(partial: torch.Tensor, partial_lse: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """See `protocol.Backend.combine`."""
    with torch.no_grad():
        seen = partial_lse.masked_fill(partial_lse == torch.inf, -torch.inf)
        lse = torch.logsumexp(seen, 0)
        weights = torch.exp(seen - lse.masked_fill(lse == -torch.inf, 0.0))
        splits = partial.masked_fill((weights == 0.0)[..., None], 0.0)
        out.copy_((splits * weights[..., None]).sum(0))
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
    dtype = tiles.accumulation_dtype(x.dtype)
    c, s = (table[positions].to(dtype)[:, None] for table in (cos, sin))
    return turn(x, c, s, interleaved)


def turn(x: torch.Tensor, c: torch.Tensor, s: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """`rotate` by the cosines and sines (s, 1, rotary_dim / 2) of each row, computed in their type."""
    half = c.shape[-1]
    turned = x[..., : 2 * half].to(c.dtype)
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    parts = (first * c - second * s, first * s + second * c)
    joined = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat((joined.to(x.dtype), x[..., 2 * half :]), -1)
