"""Attention and its gradients in pure PyTorch, sequence by sequence; see flash_attn.backends.torch."""

from __future__ import annotations

import torch

from flash_attn import rng
from flash_attn.backends.torch import sequences
from flash_attn.backends.torch import tiles as tiles


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
    with torch.no_grad(), in_own_types():
        if dropout_p > 0.0 and rng_state is None:
            rng_state = rng.draw(q.device)
        options = options_of(softmax_scale, causal, window_left, window_right, softcap, dropout_p, rng_state)
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        heads = q.shape[-2]
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.numel() - 1
        dmask_dtype = q.dtype if return_softmax and dropout_p > 0.0 else None
        slopes = slopes_of(alibi_slopes, batch, heads)
        lse_dtype = tiles.accumulation_dtype(q.dtype)
        if cu_seqlens_q is None and seqused_k is None and leftpad_k is None and block_table is None:
            lse = torch.empty((batch, heads, q.shape[1]), dtype=lse_dtype, device=q.device)
            dmask = _zeros((batch, heads, q.shape[1], k.shape[1]), dmask_dtype, q.device)
            tiles.forward(q, k, v, out, lse, dmask, slopes, options)
            return out, lse, dmask, rng_state
        varlen = cu_seqlens_q is not None
        found = sequences.locate(
            q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, leftpad_k, block_table
        )
        flat_q, flat_out = (x if varlen else x.reshape(-1, *x.shape[2:]) for x in (q, out))
        flat_out.zero_()
        lse = torch.full((heads, flat_q.shape[0]), torch.inf, dtype=lse_dtype, device=q.device)
        most_q, most_k = (max_seqlen_q, max_seqlen_k) if varlen else (q.shape[1], max_seqlen_k)
        dmask = _zeros((batch, heads, most_q, most_k), dmask_dtype, q.device)
        flat_k, flat_v = (x if x.dim() == 3 or block_table is not None else x.flatten(0, 1) for x in (k, v))
        for index, rows in enumerate(found):
            keys, values = (sequences.keys_of(x, rows, block_table, index) for x in (flat_k, flat_v))
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
    with torch.no_grad(), in_own_types():
        if dropout_p > 0.0 and rng_state is None:
            raise ValueError("rng_state: got None, wanted the int64[2] of the forward, as dropout_p > 0")
        options = options_of(softmax_scale, causal, window_left, window_right, softcap, dropout_p, rng_state)
        dq = torch.empty_like(q) if dq is None else dq
        dk = torch.empty_like(k) if dk is None else dk
        dv = torch.empty_like(v) if dv is None else dv
        heads = q.shape[-2]
        softmax_d = torch.zeros_like(softmax_lse)
        if cu_seqlens_q is None:
            slopes = slopes_of(alibi_slopes, q.shape[0], heads)
            tiles.backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_d, slopes, options)
            return softmax_d
        slopes = slopes_of(alibi_slopes, cu_seqlens_q.numel() - 1, heads)
        for gradient in (dq, dk, dv):
            gradient.zero_()
        found = sequences.locate(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, None, None, None)
        for index, rows in enumerate(found):
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


def in_own_types() -> torch.autocast:
    """No product in the type of a caller's autocast, which a backward is outside of."""
    return torch.autocast("cpu", enabled=False)


def options_of(
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


def slopes_of(alibi_slopes: torch.Tensor | None, batch: int, heads: int) -> torch.Tensor | None:
    return None if alibi_slopes is None else alibi_slopes.expand(batch, heads)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype | None, device: torch.device) -> torch.Tensor | None:
    return None if dtype is None else torch.zeros(shape, dtype=dtype, device=device)
