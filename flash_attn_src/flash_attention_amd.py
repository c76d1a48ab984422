"""Attention in pure PyTorch under the names of the AMD build guides, for any device and any mask.

Exact, with memory linear in the sequence lengths: scores exist for a block of queries at a time, and the backward
computes them again. Without a mask flash_attn.flash_attn_func does the same on a GPU, many times faster.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import dropout as drop
from torch.utils.checkpoint import checkpoint

__all__ = ["FlashAttention", "FlashAttentionInterface", "flash_attn_func"]

# Scores that exist at a time: 64 MiB of fp32.
_BLOCK_SCORES = 1 << 24


class FlashAttention(torch.nn.Module):
    """softmax(q k^T / sqrt(head_dim)) v, with dropout of the probabilities in training.

    causal: query i sees keys up to i + seqlen_k - seqlen_q, as in flash_attn.
    """

    def __init__(self, dropout: float = 0.0, causal: bool = False) -> None:
        super().__init__()
        self.dropout = _probability("dropout", dropout)
        _check_switch("causal", causal)
        self.causal = causal

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """q (batch, seqlen_q, heads, head_dim); k, v (batch, seqlen_k, heads_k, head_dim), of whose heads q's are a
        multiple. Returns q's shape; a query that sees no key gives 0.

        mask, bool or int, true where a query sees a key: (batch, seqlen_k), (batch, seqlen_q, seqlen_k) or (batch or
        1, heads or 1, seqlen_q or 1, seqlen_k or 1). Raises TypeError or ValueError naming the argument, what came
        and what was wanted.
        """
        out, _ = _attend(q, k, v, mask, self.dropout if self.training else 0.0, self.causal, False)
        return out


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    causal: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention of q, k, v without a mask; dropout is active whenever dropout_p > 0.

    return_attn_probs: (out, probabilities (batch, heads, seqlen_q, seqlen_k) before dropout), whole, in q's dtype.
    """
    _check_switch("causal", causal)
    _check_switch("return_attn_probs", return_attn_probs)
    out, probabilities = _attend(q, k, v, None, _probability("dropout_p", dropout_p), causal, return_attn_probs)
    return out if probabilities is None else (out, probabilities)


class FlashAttentionInterface:
    """flash_attn_func with the signature of an autograd function."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ARG004 - nothing is kept: autograd differentiates what is called here
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dropout_p: float = 0.0,
        causal: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        return flash_attn_func(q, k, v, dropout_p=dropout_p, causal=causal)

    @classmethod
    def apply(
        cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, causal: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        return cls.forward(None, q, k, v, dropout_p, causal)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    causal: bool,
    return_probabilities: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    _check(q, k, v)
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k = k.shape[1]
    mask = None if mask is None else _expand(mask, q, seqlen_k)
    if heads != k.shape[2]:
        k, v = (x.repeat_interleave(heads // x.shape[2], 2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    rows = max(1, _BLOCK_SCORES // max(1, batch * heads * seqlen_k))
    # torch.func.grad differentiates no checkpoint: there all the scores are kept.
    recomputes = not torch._C._are_functorch_transforms_active()
    trained = recomputes and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    outs, probabilities = [], []
    for start in range(0, max(seqlen_q, 1), rows):  # without queries, too: the result has a history
        part = None if mask is None else mask[:, :, start : start + rows]
        # The last row sees all keys when causal: what a row sees starts from there.
        first = start + seqlen_k - seqlen_q if causal else None
        arguments = (q[:, :, start : start + rows], k, v, part, first, dropout_p)
        if trained and not return_probabilities:
            out, _ = checkpoint(_block, *arguments, use_reentrant=False, determinism_check="none")
        else:
            out, p = _block(*arguments)
            if return_probabilities:
                probabilities.append(p)
        outs.append(out)
    out = torch.cat(outs, 2).transpose(1, 2)
    return out, torch.cat(probabilities, 2) if return_probabilities else None


def _block(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`_scored`, in fp32 under autocast, too."""
    with torch.autocast(arguments[0].device.type, enabled=False):
        return _scored(*arguments)


def _scored(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, first: int | None, dropout_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, probabilities before dropout) of some queries (batch, heads, rows, head_dim); row i sees keys up to
    first + i, all where first is None."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.matmul(q.to(wide) * q.shape[-1] ** -0.5, k.to(wide).transpose(-2, -1))
    if first is not None:
        last = torch.arange(first, first + q.shape[2], device=q.device)[:, None]
        scores = scores.masked_fill(torch.arange(k.shape[2], device=q.device) > last, -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if first is None and mask is None:
        p = scores.softmax(-1)
    else:
        empty = (scores == -torch.inf).all(-1, keepdim=True)
        p = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    kept = drop(p, dropout_p) if dropout_p > 0.0 else p
    return torch.matmul(kept, v.to(wide)).to(v.dtype), p.to(v.dtype)


def _expand(mask: torch.Tensor, q: torch.Tensor, seqlen_k: int) -> torch.Tensor:
    """A mask as bool (batch, heads, seqlen_q, seqlen_k), a view."""
    batch, seqlen_q, heads, _ = q.shape
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"mask: got {type(mask).__name__}, wanted a tensor")
    if mask.is_floating_point() or mask.is_complex() or mask.layout is not torch.strided:
        raise TypeError(
            f"mask: got {mask.layout} of {mask.dtype}, wanted dense bool or int, true for a key that is seen"
        )
    if mask.device != q.device:
        raise ValueError(f"mask: got a tensor on {mask.device}, wanted {q.device} where q is")
    whole = (batch, heads, seqlen_q, seqlen_k)
    got = tuple(mask.shape)
    if mask.dim() == 2 and got == (batch, seqlen_k):
        mask = mask[:, None, None, :]
    elif mask.dim() == 3 and got == (batch, seqlen_q, seqlen_k):
        mask = mask[:, None]
    elif mask.dim() != 4 or any(size not in (1, full) for size, full in zip(got, whole, strict=True)):
        raise ValueError(
            f"mask: got shape {got}, wanted ({batch}, {seqlen_k}), ({batch}, {seqlen_q}, {seqlen_k}) or {whole}, "
            "any of these 1"
        )
    return mask.bool().expand(whole)


def _probability(name: str, p: float) -> float:
    if isinstance(p, (str, bool)) or not hasattr(p, "__float__"):
        raise TypeError(f"{name}: got {p!r}, wanted a float")
    if not 0.0 <= p < 1.0:
        raise ValueError(f"{name}: got {p}, wanted 0 <= {name} < 1")
    return float(p)


def _check_switch(name: str, switch: bool) -> None:
    try:
        fine = not isinstance(switch, (str, bytes)) and switch in (False, True)
    except (RuntimeError, TypeError, ValueError):  # of several elements
        fine = False
    if not fine:
        raise TypeError(f"{name}: got {switch!r}, wanted a bool")


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}, wanted a tensor")
        if x.layout is not torch.strided:
            raise TypeError(f"{name}: got a tensor of layout {x.layout}, wanted a dense one")
        if x.dim() != 4:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, wanted (batch, seqlen, heads, head_dim)")
        if not x.is_floating_point() or x.dtype is not q.dtype:
            raise TypeError(f"{name}: got {x.dtype}, wanted {q.dtype if q.is_floating_point() else 'a float'}")
        if x.device != q.device:
            raise ValueError(f"{name}: got a tensor on {x.device}, wanted {q.device} where q is")
    if k.shape != v.shape:
        raise ValueError(f"v: got shape {tuple(v.shape)}, wanted {tuple(k.shape)} as k has")
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(f"k: got shape {tuple(k.shape)}, wanted batch {q.shape[0]} and head_dim {q.shape[3]} as q has")
    if k.shape[2] == 0 or q.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"q: got {q.shape[2]} heads, wanted a positive multiple of the {k.shape[2]} of k")
    if q.shape[3] == 0:
        raise ValueError("q: got head_dim 0, wanted 1 or more")
