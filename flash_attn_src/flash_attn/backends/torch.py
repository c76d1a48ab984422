"""The pure PyTorch backend: serves CPU tensors, runs on any device, and is the oracle of the others.

Layouts and argument order are those of every backend: q (batch, seqlen_q, heads, head_dim) and k, v
(batch, seqlen_k, heads_k, head_dim), or q (total_q, heads, head_dim) with cu_seqlens_q, and k, v
(total_k, heads_k, head_dim) with cu_seqlens_k or pages (pages, page_size, heads_k, head_dim) with
block_table. Arguments come checked by the interface, except the values inside index tensors: those
are checked here (ValueError). It reads index tensors on the host, so it synchronises with a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from flash_attn.backends import tiles


@dataclass(frozen=True)
class _Sequence:
    """Rows q0..q1 of q; keys k0..k1 of k's rows, or of the pages that the block table names."""

    q0: int
    q1: int
    k0: int
    k1: int


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    dropout_p: float,
    return_softmax: bool,
    rng_state: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: torch.Tensor | None,
    leftpad_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Attention: (out, softmax_lse, S_dmask or None, rng_state or None).

    softmax_lse is fp32 (fp64 for fp64 inputs): (batch, heads, seqlen_q), varlen (heads, total_q);
    +inf for a row without keys, whose out is 0. S_dmask, with dropout and return_softmax only:
    (batch, heads, seqlen_q, seqlen_k) probabilities in q's dtype, negative where dropped.
    """
    with torch.no_grad():
        if dropout_p > 0.0 and rng_state is None:
            rng_state = torch.randint(1 << 62, (2,), dtype=torch.int64, device=q.device)
        options = _options(softmax_scale, causal, window_left, window_right, softcap, dropout_p, rng_state)
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        heads = q.shape[-2]
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.numel() - 1
        dmask_dtype = q.dtype if return_softmax and dropout_p > 0.0 else None
        slopes = _slopes(alibi_slopes, batch, heads)
        lse_dtype = tiles.accumulation_dtype(q.dtype)
        if cu_seqlens_q is None and seqused_k is None and leftpad_k is None and block_table is None:
            lse = torch.empty((batch, heads, q.shape[1]), dtype=lse_dtype, device=q.device)
            dmask = _zeros((batch, heads, q.shape[1], k.shape[1]), dmask_dtype, q.device)
            tiles.forward(q, k, v, out, lse, dmask, slopes, options)
            return out, lse, dmask, rng_state
        varlen = cu_seqlens_q is not None
        sequences = _sequences(
            q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, leftpad_k, block_table
        )
        flat_q, flat_out = (x if varlen else x.reshape(-1, *x.shape[2:]) for x in (q, out))
        flat_out.zero_()
        lse = torch.full((heads, flat_q.shape[0]), torch.inf, dtype=lse_dtype, device=q.device)
        most_q, most_k = (max_seqlen_q, max_seqlen_k) if varlen else (q.shape[1], max_seqlen_k)
        dmask = _zeros((batch, heads, most_q, most_k), dmask_dtype, q.device)
        flat_k, flat_v = (x if x.dim() == 3 or block_table is not None else x.flatten(0, 1) for x in (k, v))
        for index, rows in enumerate(sequences):
            keys, values = (_keys(x, rows, block_table, index) for x in (flat_k, flat_v))
            tiles.forward(
                flat_q[None, rows.q0 : rows.q1],
                keys[None],
                values[None],
                flat_out[None, rows.q0 : rows.q1],
                lse[None, :, rows.q0 : rows.q1],
                None if dmask is None else dmask[index, None, :, : rows.q1 - rows.q0, : rows.k1 - rows.k0],
                None if slopes is None else slopes[index, None],
                options,
                index,
            )
        if not varlen:
            lse = lse.unflatten(1, (batch, q.shape[1])).transpose(0, 1).contiguous()
            if flat_out.data_ptr() != out.data_ptr():
                out.copy_(flat_out.view(out.shape))
        return out, lse, dmask, rng_state


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    dropout_p: float,
    deterministic: bool,  # noqa: ARG001 - this backend always is, on a CPU
    rng_state: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> torch.Tensor:
    """Writes dq, dk, dv; returns softmax_d = rowsum(dout * out), laid out as softmax_lse.

    rng_state is the forward's; with dropout it is required (ValueError).
    """
    with torch.no_grad():
        if dropout_p > 0.0 and rng_state is None:
            raise ValueError("rng_state: got None, wanted the int64[2] of the forward, as dropout_p > 0")
        options = _options(softmax_scale, causal, window_left, window_right, softcap, dropout_p, rng_state)
        dq = torch.empty_like(q) if dq is None else dq
        dk = torch.empty_like(k) if dk is None else dk
        dv = torch.empty_like(v) if dv is None else dv
        heads = q.shape[-2]
        softmax_d = torch.zeros_like(softmax_lse)
        if cu_seqlens_q is None:
            slopes = _slopes(alibi_slopes, q.shape[0], heads)
            tiles.backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_d, slopes, options)
            return softmax_d
        slopes = _slopes(alibi_slopes, cu_seqlens_q.numel() - 1, heads)
        for gradient in (dq, dk, dv):
            gradient.zero_()
        sequences = _sequences(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, None, None, None)
        for index, rows in enumerate(sequences):
            queries, keys = slice(rows.q0, rows.q1), slice(rows.k0, rows.k1)
            tiles.backward(
                *(dout[None, queries], q[None, queries], k[None, keys], v[None, keys], out[None, queries]),
                softmax_lse[None, :, queries],
                *(dq[None, queries], dk[None, keys], dv[None, keys]),
                softmax_d[None, :, queries],
                None if slopes is None else slopes[index, None],
                options,
                index,
            )
        return softmax_d


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
        return fp8_kvcache(
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
            spans = _bounds("cu_seqlens_q", cu_seqlens_q, q.shape[0], max_seqlen_q)
        options = _options(softmax_scale, causal, window_left, window_right, softcap, 0.0, None, attention_chunk)
        slopes = _slopes(alibi_slopes, batch, heads)
        capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
        if cache_seqlens is None:
            cache_seqlens = capacity
        lengths = [cache_seqlens] * batch if isinstance(cache_seqlens, int) else cache_seqlens.tolist()
        lines = list(range(batch)) if cache_batch_idx is None else cache_batch_idx.tolist()
        leftpads = [0] * batch if cache_leftpad is None else cache_leftpad.tolist()
        new = [(0, 0)] * batch
        if k is not None and cu_seqlens_k_new is not None:
            new = _bounds("cu_seqlens_k_new", cu_seqlens_k_new, k.shape[0], k.shape[0])
        elif k is not None:
            new = [(index * k.shape[1], (index + 1) * k.shape[1]) for index in range(batch)]
        for length, leftpad, (first, stop) in zip(lengths, leftpads, new, strict=True):
            _check_range("cache_seqlens", [length], 0, capacity - (stop - first))
            _check_range("cache_leftpad", [leftpad], 0, length + stop - first)
        if block_table is None:
            _check_range("cache_batch_idx", lines, 0, k_cache.shape[0] - 1)
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        flat_q, flat_out = (x if varlen else x.flatten(0, 1) for x in (q, torch.zeros_like(out)))
        lse = torch.full((heads, flat_q.shape[0]), torch.inf, dtype=tiles.accumulation_dtype(q.dtype), device=q.device)
        moving = causal or window_left >= 0 or window_right >= 0 or attention_chunk > 0
        origins = lengths if rotary_seqlens is None else rotary_seqlens.tolist()
        for index, ((q0, q1), (k0, k1)) in enumerate(zip(spans, new, strict=True)):
            start, added = lengths[index], k1 - k0
            rows = _Sequence(q0, q1, leftpads[index], start + added)
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
                    _append(cache, fresh, start, lines[index], block_table, index)
            keys, values = (
                _keys(cache if block_table is not None else cache[lines[index]], rows, block_table, index)
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


def _options(
    scale: float,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    dropout_p: float,
    rng_state: torch.Tensor | None,
    chunk: int = 0,
) -> tiles.Options:
    seed, offset = (0, 0) if rng_state is None or dropout_p == 0.0 else rng_state.tolist()
    return tiles.Options(
        scale=scale,
        left=left,
        right=0 if causal else right,
        softcap=softcap,
        dropout_p=dropout_p,
        seed=(seed, offset),
        chunk=chunk,
    )


def _slopes(alibi_slopes: torch.Tensor | None, batch: int, heads: int) -> torch.Tensor | None:
    return None if alibi_slopes is None else alibi_slopes.expand(batch, heads)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype | None, device: torch.device) -> torch.Tensor | None:
    return None if dtype is None else torch.zeros(shape, dtype=dtype, device=device)


def _check_range(name: str, values: list[int], low: int, high: int) -> None:
    for index, value in enumerate(values):
        if not low <= value <= high:
            raise ValueError(f"{name}: got {value} at index {index}, wanted {low} to {high}")


def _bounds(name: str, cu_seqlens: torch.Tensor, rows: int, longest: int) -> list[tuple[int, int]]:
    """Checked (start, stop) of every sequence."""
    ends = cu_seqlens.tolist()
    _check_range(name, ends, 0, rows)
    pairs = list(pairwise(ends))
    for index, (start, stop) in enumerate(pairs):
        if stop < start:
            raise ValueError(f"{name}: got {stop} after {start} at index {index + 1}, wanted no decrease")
        if stop - start > longest:
            maximum = name.replace("cu_seqlens", "max_seqlen")
            raise ValueError(f"{maximum}: got {longest}, wanted at least {stop - start}, as {name} says")
    return pairs


def _sequences(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: torch.Tensor | None,
    leftpad_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
) -> list[_Sequence]:
    """The rows of each sequence, every index checked."""
    if cu_seqlens_q is None:
        queries = [(i * q.shape[1], (i + 1) * q.shape[1]) for i in range(q.shape[0])]
    else:
        queries = _bounds("cu_seqlens_q", cu_seqlens_q, q.shape[0], max_seqlen_q)
    if block_table is not None:
        capacity = block_table.shape[1] * k.shape[1]
        keys = [(0, capacity)] * len(queries)
        if cu_seqlens_k is not None:
            bounds = _bounds("cu_seqlens_k", cu_seqlens_k, capacity * len(queries), max_seqlen_k)
            keys = [(0, stop - start) for start, stop in bounds]
            _check_range("length of a paged sequence", [stop for _, stop in keys], 0, capacity)
    elif cu_seqlens_k is None:
        keys = [(i * k.shape[1], (i + 1) * k.shape[1]) for i in range(k.shape[0])]
    else:
        keys = _bounds("cu_seqlens_k", cu_seqlens_k, k.shape[0], max_seqlen_k)
    if seqused_k is not None:
        used = seqused_k.tolist()
        for index, ((start, stop), length) in enumerate(zip(keys, used, strict=True)):
            if not 0 <= length <= stop - start:
                raise ValueError(f"seqused_k: got {length} at index {index}, wanted 0 to {stop - start}")
        keys = [(start, start + length) for (start, _), length in zip(keys, used, strict=True)]
    if leftpad_k is not None:
        pads = leftpad_k.tolist()
        for (start, stop), pad in zip(keys, pads, strict=True):
            _check_range("leftpad_k", [pad], 0, stop - start)
        keys = [(start + pad, stop) for (start, stop), pad in zip(keys, pads, strict=True)]
    return [_Sequence(*rows, *span) for rows, span in zip(queries, keys, strict=True)]


def _pages(cache: torch.Tensor, block_table: torch.Tensor, index: int, stop: int) -> torch.Tensor:
    """Numbers of the pages that hold the first `stop` keys of a sequence."""
    pages = block_table[index, : -(-stop // cache.shape[1])]
    _check_range("block_table", pages.tolist(), 0, cache.shape[0] - 1)
    return pages.long()


def _keys(x: torch.Tensor, rows: _Sequence, block_table: torch.Tensor | None, index: int) -> torch.Tensor:
    """(seqlen_k, heads_k, head_dim) of one sequence; gathered from its pages if there are any."""
    if block_table is None:
        return x[rows.k0 : rows.k1]
    return x[_pages(x, block_table, index, rows.k1)].flatten(0, 1)[rows.k0 : rows.k1]


def _append(
    cache: torch.Tensor,
    new: torch.Tensor,
    start: int,
    line: int,
    block_table: torch.Tensor | None,
    index: int,
) -> None:
    """Writes new (s, heads_k, head_dim) at `start` of one sequence's cache."""
    stop = start + new.shape[0]
    if block_table is None:
        cache[line, start:stop] = new
        return
    places = torch.arange(start, stop, device=cache.device)
    pages = _pages(cache, block_table, index, stop)[places // cache.shape[1]]
    cache[pages, places % cache.shape[1]] = new


# Down here, since it is built on this module.
from flash_attn.backends.torch_fp8 import fp8_forward, fp8_kvcache  # noqa: E402

__all__ = ["backward", "combine", "forward", "fp8_forward", "kvcache", "rotate"]
