"""Attention as modules without parameters: by flash_attn, and by the book.

Options of attention: flash_attn.flash_attn_interface. Dropout is active in training alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flash_attn.call.arguments import check_window, diagnose_switches
from flash_attn.flash_attn_interface import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_attn.ops.checks import check_number, check_switches, check_tensor

Window = tuple[int, int]
_MASKS = (torch.bool, torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


class _Inner(nn.Module):
    """What the four inner modules share. causal may be overridden in a call."""

    def __init__(self, causal: bool, softmax_scale: float | None, attention_dropout: float) -> None:
        super().__init__()
        diagnose_switches(softmax_scale, causal=causal)
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.drop = nn.Dropout(check_number("attention_dropout", attention_dropout, 0.0, 1.0))

    def _is_causal(self, causal: bool | None) -> bool:
        if causal is None:
            return self.causal
        check_switches(causal=causal)
        return causal


class _FlashInner(_Inner):
    alibi_slopes: torch.Tensor | None

    def __init__(
        self,
        causal: bool,
        softmax_scale: float | None,
        attention_dropout: float,
        window_size: Window,
        alibi_slopes: torch.Tensor | None,
        deterministic: bool,
    ) -> None:
        super().__init__(causal, softmax_scale, attention_dropout)
        check_window(window_size)
        check_switches(deterministic=deterministic)
        if alibi_slopes is not None:
            check_tensor("alibi_slopes", alibi_slopes)
            if alibi_slopes.dim() not in (1, 2):
                raise ValueError(
                    f"alibi_slopes: got shape {tuple(alibi_slopes.shape)}, wanted (heads,) or (batch, heads)"
                )
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)
        self.window_size = window_size
        self.deterministic = deterministic

    def _options(self, causal: bool | None) -> dict[str, Any]:
        slopes = self.alibi_slopes
        return {
            "dropout_p": self.drop.p if self.training else 0.0,
            "softmax_scale": self.softmax_scale,
            "causal": self._is_causal(causal),
            "window_size": self.window_size,
            "alibi_slopes": None if slopes is None else slopes.float(),
            "deterministic": self.deterministic,
        }


class FlashSelfAttention(_FlashInner):
    """Attention within a sequence."""

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        window_size: Window = (-1, -1),
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__(causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic)

    def forward(
        self,
        qkv: torch.Tensor,
        causal: bool | None = None,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> torch.Tensor:
        """qkv (batch, seqlen, 3, heads, head_dim), or with cu_seqlens int32 (batch + 1,) and max_seqlen (total, 3,
        heads, head_dim); returns it without the 3."""
        if (cu_seqlens is None) != (max_seqlen is None):
            raise ValueError("cu_seqlens, max_seqlen: got only one of them, wanted both or neither")
        if cu_seqlens is None or max_seqlen is None:
            out = flash_attn_qkvpacked_func(qkv, **self._options(causal))
        else:
            out = flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, **self._options(causal))
        assert isinstance(out, torch.Tensor)  # a tuple comes with return_attn_probs alone
        return out


class FlashCrossAttention(_FlashInner):
    """Attention of one sequence over another."""

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        window_size: Window = (-1, -1),
        deterministic: bool = False,
    ) -> None:
        super().__init__(causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic)

    def forward(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        causal: bool | None = None,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
        cu_seqlens_k: torch.Tensor | None = None,
        max_seqlen_k: int | None = None,
    ) -> torch.Tensor:
        """q (batch, seqlen_q, heads, head_dim), kv (batch, seqlen_k, 2, heads_k, head_dim), or packed, without batch,
        with cu_seqlens and max_seqlen of q and cu_seqlens_k and max_seqlen_k of kv; returns q's shape."""
        if cu_seqlens is None or cu_seqlens_k is None or max_seqlen is None or max_seqlen_k is None:
            lengths = {"cu_seqlens": cu_seqlens, "cu_seqlens_k": cu_seqlens_k, "max_seqlen": max_seqlen,
                       "max_seqlen_k": max_seqlen_k}  # fmt: skip
            missing = [name for name, each in lengths.items() if each is None]
            if len(missing) < len(lengths):
                raise ValueError(f"{', '.join(missing)}: got None, wanted all of {', '.join(lengths)} or none")
            out = flash_attn_kvpacked_func(q, kv, **self._options(causal))
        else:
            out = flash_attn_varlen_kvpacked_func(
                q, kv, cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k, **self._options(causal)
            )
        assert isinstance(out, torch.Tensor)  # a tuple comes with return_attn_probs alone
        return out


def check_mask(key_padding_mask: torch.Tensor | None, keys: torch.Tensor) -> None:
    """Checks a mask of keys (batch, seqlen, ...), bool or int, or None."""
    if key_padding_mask is not None:
        shape = tuple(keys.shape[:2])
        check_tensor("key_padding_mask", key_padding_mask, like=keys, shape=shape, dtypes=_MASKS)


def _by_the_book(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    key_padding_mask: torch.Tensor | None,
    drop: nn.Dropout,
    shift: torch.Tensor | int = 0,
) -> torch.Tensor:
    """softmax(scale * q k^T + masks) v in plain PyTorch; k and v are repeated over groups of heads. Causal:
    query i sees keys up to i + shift, an int or one for each sequence."""
    if q.shape[2] != k.shape[2]:
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bthd,bshd->bhts", q * scale, k)
    if key_padding_mask is not None:
        scores = scores.masked_fill(~key_padding_mask.bool()[:, None, None], torch.finfo(scores.dtype).min)
    if causal:
        rows, cols = (torch.arange(length, device=q.device) for length in scores.shape[-2:])
        hidden = cols > rows[:, None] + shift
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    weights = drop(scores.softmax(-1, dtype=torch.float32).to(v.dtype))
    return torch.einsum("bhts,bshd->bthd", weights, v)


class SelfAttention(_Inner):
    """FlashSelfAttention in plain PyTorch, with a mask of keys."""

    def __init__(
        self, causal: bool = False, softmax_scale: float | None = None, attention_dropout: float = 0.0
    ) -> None:
        super().__init__(causal, softmax_scale, attention_dropout)

    def forward(
        self, qkv: torch.Tensor, causal: bool | None = None, key_padding_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """qkv (batch, seqlen, 3, heads, head_dim); key_padding_mask (batch, seqlen): True where keys are kept."""
        check_tensor("qkv", qkv, ("batch", "seqlen", "3", "heads", "head_dim"))
        if qkv.shape[2] != 3:
            raise ValueError(f"qkv: got shape {tuple(qkv.shape)}, wanted (batch, seqlen, 3, heads, head_dim)")
        check_mask(key_padding_mask, qkv)
        q, k, v = qkv.unbind(2)
        return _by_the_book(q, k, v, self.softmax_scale, self._is_causal(causal), key_padding_mask, self.drop)


class CrossAttention(_Inner):
    """FlashCrossAttention in plain PyTorch, with a mask of keys."""

    def __init__(
        self, causal: bool = False, softmax_scale: float | None = None, attention_dropout: float = 0.0
    ) -> None:
        super().__init__(causal, softmax_scale, attention_dropout)

    def forward(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        causal: bool | None = None,
        key_padding_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q (batch, seqlen_q, heads, head_dim), kv (batch, seqlen_k, 2, heads_k, head_dim); key_padding_mask (batch,
        seqlen_k): True where keys are kept. Causal, the last query sees as many keys as are kept, or all of them
        without a mask, counted from the first."""
        check_tensor("q", q, ("batch", "seqlen", "heads", "head_dim"))
        check_tensor("kv", kv, ("batch", "seqlen", "2", "heads", "head_dim"), like=q, dtypes=(q.dtype,))
        batch, _, heads, dim = q.shape
        if (kv.shape[0], kv.shape[2], kv.shape[4]) != (batch, 2, dim) or not kv.shape[3] or heads % kv.shape[3]:
            raise ValueError(
                f"kv: got shape {tuple(kv.shape)}, wanted ({batch}, seqlen, 2, heads_k, {dim}), heads_k dividing the "
                f"{heads} heads of q"
            )
        check_mask(key_padding_mask, kv)
        k, v = kv.unbind(2)
        kept = k.shape[1] if key_padding_mask is None else key_padding_mask.bool().sum(-1)[:, None, None, None]
        return _by_the_book(
            q, k, v, self.softmax_scale, self._is_causal(causal), key_padding_mask, self.drop, kept - q.shape[1]
        )
