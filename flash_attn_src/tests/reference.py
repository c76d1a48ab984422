"""Reference attention: dense scores, an explicit mask, gradients by autograd. It imports nothing from the package."""

from __future__ import annotations

from typing import Any

import torch


def visible(seqlen_q: int, seqlen_k: int, causal: bool, window: tuple[int, int]) -> torch.Tensor:
    """(seqlen_q, seqlen_k) bool: which keys each query sees, aligned to the bottom right."""
    left, right = window
    if causal:
        right = 0
    rows = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    columns = torch.arange(seqlen_k)[None, :]
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if left >= 0:
        mask &= columns >= rows - left
    if right >= 0:
        mask &= columns <= rows + right
    return mask


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    kept: torch.Tensor | None = None,
    dtype: torch.dtype | None = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out (b, sq, h, d), lse (b, h, sq)), computed and returned in `dtype`; None computes in q's own.

    q (b, sq, h, d), k and v (b, sk, hk, d); kept (b, h, sq, sk) bool is the dropout mask.
    """
    dtype = dtype or q.dtype
    device = q.device
    q, k, v = (x.to(dtype) for x in (q, k, v))
    heads, group = q.shape[2], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (softmax_scale or q.shape[-1] ** -0.5)
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    seqlen_q, seqlen_k = scores.shape[-2:]
    if alibi_slopes is not None:
        rows = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
        distance = (rows - torch.arange(seqlen_k, device=device)).abs()
        scores = scores - alibi_slopes.reshape(-1, heads, 1, 1).to(dtype) * distance
    mask = visible(seqlen_q, seqlen_k, causal, window).to(device)
    if attn_bias is not None:
        scores = scores + attn_bias.to(dtype)
        mask = mask & (attn_bias > -torch.inf)
    scores = scores.masked_fill(~mask, -torch.inf)
    # A row without keys would be NaN, in its gradient too: take it out before the softmax.
    empty = ~mask.any(-1) if seqlen_k else torch.ones(seqlen_q, dtype=torch.bool, device=device)
    if s_aux is not None:  # one more column of scores, which has no value
        column = s_aux.to(dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), -1)
        empty = torch.zeros_like(empty)
    scores = scores.masked_fill(empty[..., None], 0.0)
    probabilities = torch.softmax(scores, -1).masked_fill(empty[..., None], 0.0)[..., :seqlen_k]
    lse = torch.logsumexp(scores, -1).masked_fill(empty, torch.inf)
    if kept is not None:
        probabilities = probabilities * kept.to(dtype) / (1.0 - dropout_p)
    return torch.einsum("bhqk,bkhd->bqhd", probabilities, v), lse


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: list[int], interleaved: bool
) -> torch.Tensor:
    """x (s, h, d) rotated pair by pair, one row of cos and sin (places, r / 2) a position, in fp64."""
    x = x.double().clone()
    half = cos.shape[1]
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + half) for i in range(half)]
    for row, position in enumerate(positions):
        for i, (a, b) in enumerate(pairs):
            first, second = x[row, :, a].clone(), x[row, :, b].clone()
            c, s = cos[position, i].double(), sin[position, i].double()
            x[row, :, a] = first * c - second * s
            x[row, :, b] = first * s + second * c
    return x


def public(options: dict[str, Any]) -> dict[str, Any]:
    """Options of `attention` as the public functions name them."""
    return {"window_size" if name == "window" else name: value for name, value in options.items()}
