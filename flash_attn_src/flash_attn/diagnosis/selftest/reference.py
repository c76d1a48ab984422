"""The reference of the selftest: attention in fp32 by whole matrices, and the error against it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

OPEN = (-1, -1)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = OPEN,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q k^T / sqrt(d)) v in fp32, (batch, seqlen_q, heads, head_dim of v), for k and v of heads_k heads.

    Query i sees key j if i + seqlen_k - seqlen_q - left <= j <= i + seqlen_k - seqlen_q + right. Causal sets right to
    0, and -1 means no bound. A query that sees no key gives 0. softcap c replaces a score s by c tanh(s / c). ALiBi
    subtracts slope times the distance, with one slope per head. A sink is one more score of every row of its head,
    without a value.
    """
    q, k, v = q.float(), k.float(), v.float()
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows = torch.arange(q.shape[1], device=q.device)[:, None] + k.shape[1] - q.shape[1]
    columns = torch.arange(k.shape[1], device=q.device)[None, :]
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[:, None, None] * (rows - columns).abs()
    if attn_bias is not None:
        scores = scores + attn_bias.float()
    left, right = window_size
    right = 0 if causal else right
    hidden = torch.zeros(rows.shape[0], columns.shape[1], dtype=torch.bool, device=q.device)
    if left >= 0:
        hidden |= columns < rows - left
    if right >= 0:
        hidden |= columns > rows + right
    # Finite, because the gradient of a softmax over -inf alone is NaN.
    scores = scores.masked_fill(hidden, -1e30)
    if s_aux is not None:
        scores = torch.cat((scores, s_aux.float()[:, None, None].expand(*scores.shape[:-1], 1)), -1)
    weights = torch.softmax(scores, -1)[..., : k.shape[1]]
    return torch.einsum("bhqk,bkhd->bqhd", torch.where(hidden, 0.0, weights), v)


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, relative to the largest value of `wanted`; infinity where `got` is not finite."""
    if got.shape != wanted.shape:
        raise AssertionError(f"the result has shape {tuple(got.shape)}, wanted {tuple(wanted.shape)}")
    if not bool(got.isfinite().all()):
        return float("inf")
    return float((got.detach().double() - wanted.detach().double()).abs().max() / wanted.detach().double().abs().max())


def gradients_error(
    out: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    wanted: torch.Tensor,
    exact: Sequence[torch.Tensor],
    dout: torch.Tensor,
) -> float:
    """The largest error of the gradients of `inputs` against those of `exact`, their fp32 copies."""
    got = torch.autograd.grad(out, inputs, dout)
    reference = torch.autograd.grad(wanted, exact, dout.float())
    return max(error(*pair) for pair in zip(got, reference, strict=True))
