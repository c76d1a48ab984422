"""The module of rotary embedding, and the functions by the names that clients import here."""

from __future__ import annotations

import torch

from flash_attn.core.api import parameters
from flash_attn.layers.rotary_functions import (
    ApplyRotaryEmb,
    ApplyRotaryEmbKV_,
    ApplyRotaryEmbQKV_,
    Offsets,
    apply_rotary_emb,
    apply_rotary_emb_func,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
    rotate_half,
)
from flash_attn.ops.checks import check_int, check_number, check_switches, check_tensor
from flash_attn.ops.triton.rotary import apply_rotary

__all__ = [
    "ApplyRotaryEmb", "ApplyRotaryEmbKV_", "ApplyRotaryEmbQKV_", "RotaryEmbedding", "apply_rotary", "apply_rotary_emb",
    "apply_rotary_emb_func", "apply_rotary_emb_kv_", "apply_rotary_emb_qkv_", "apply_rotary_emb_torch", "rotate_half",
]  # fmt: skip

_Tables = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]

# What is raised to a power: within these, fp32 holds the result.
BASES = (1e-9, 1e38)


class RotaryEmbedding(torch.nn.Module):
    """Rotary embedding, whose tables of cos and sin are made at each call, for the longest sequence so far.

    dim           elements of a head that are turned
    base          angles at position p are p * base ** (-2 i / dim), i = 0 ... dim / 2 - 1
    interleaved   pairs are dims (0, 1), (2, 3), ..., else (i, i + dim / 2)
    scale_base    xPos (https://arxiv.org/abs/2212.10554): queries grow and keys shrink with the position; None: off
    pos_idx_in_fp32  positions are fp32 (else the dtype of inv_freq, which a half-precision model makes inexact);
                  flash-attn 2.6 and 2.7 alone, later always so
    """

    inv_freq: torch.Tensor
    scale: torch.Tensor | None

    @parameters(until={"pos_idx_in_fp32": "2.8"})
    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        pos_idx_in_fp32: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if isinstance(dim, float) and float(dim).is_integer():  # head_dim times a fraction of it
            dim = int(dim)
        if check_int("dim", dim, 2) % 2:
            raise ValueError(f"dim: got {dim}, wanted an even number")
        check_switches(interleaved=interleaved, pos_idx_in_fp32=pos_idx_in_fp32)
        if scale_base is not None:
            scale_base = check_number("scale_base", scale_base, *BASES)
        self.dim = dim
        self.base = check_number("base", base, *BASES)
        self.interleaved = interleaved
        self.scale_base = scale_base
        self.pos_idx_in_fp32 = pos_idx_in_fp32
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        scale = None
        if scale_base is not None:
            scale = (torch.arange(0, dim, 2, device=device, dtype=torch.float32) + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: torch.Tensor | None = None
        self._sin_cached: torch.Tensor | None = None
        self._cos_k_cached: torch.Tensor | None = None
        self._sin_k_cached: torch.Tensor | None = None

    def _compute_inv_freq(self, device: torch.device | str | None = None) -> torch.Tensor:
        return self.base ** (-torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim)

    def tables(self, seqlen: int, device: torch.device, dtype: torch.dtype) -> _Tables:
        """cos and sin of queries, and of keys with xPos, for the most positions that were asked for so far.

        They are made at each call, because inv_freq and scale may change in any way between two calls.
        """
        seqlen = self._seq_len_cached = max(seqlen, self._seq_len_cached)
        inv_freq = self.inv_freq
        if self.pos_idx_in_fp32:
            if inv_freq.dtype is not torch.float32:
                inv_freq = self._compute_inv_freq(device)
            places = torch.arange(seqlen, device=device, dtype=torch.float32)
        else:
            places = torch.arange(seqlen, device=device, dtype=inv_freq.dtype)
        angles = torch.outer(places, inv_freq.to(device))
        cos, sin = angles.cos(), angles.sin()
        if self.scale is None or self.scale_base is None:
            return cos.to(dtype), sin.to(dtype), None, None
        power = (torch.arange(seqlen, device=device, dtype=torch.float32) - seqlen // 2) / self.scale_base
        scale = self.scale.to(device=device, dtype=torch.float32) ** power[:, None]
        return (cos * scale).to(dtype), (sin * scale).to(dtype), (cos / scale).to(dtype), (sin / scale).to(dtype)

    def _update_cos_sin_cache(
        self, seqlen: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Makes the tables under upstream's private names, for programs that read them. `forward` does not."""
        tables = self.tables(seqlen, device or self.inv_freq.device, dtype or torch.get_default_dtype())
        self._cos_cached, self._sin_cached, self._cos_k_cached, self._sin_k_cached = tables

    @parameters(since={"num_heads_q": "2.7"})
    def forward(
        self,
        qkv: torch.Tensor,
        kv: torch.Tensor | None = None,
        seqlen_offset: Offsets = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Turns in place: qkv (batch, seqlen, 3, heads, head_dim), or with num_heads_q (batch, seqlen, heads_q + 2 *
        heads_k, head_dim), and returns it; with kv (batch, seqlen, 2, heads_k, head_dim), qkv is q (batch, seqlen,
        heads, head_dim) and (q, kv) is returned.

        seqlen_offset: int or (batch,), the position of the first row. max_seqlen: positions that tables are made
        for; needed where seqlen_offset is a tensor and no call before had more positions than 0.
        """
        check_tensor("qkv", qkv)
        if kv is not None:  # before q is turned in place
            check_tensor("qkv", qkv, ("batch", "seqlen", "heads", "head_dim"))
            check_tensor("kv", kv, ("batch", "seqlen", "2", "heads", "head_dim"), like=qkv, dtypes=(qkv.dtype,))
            if kv.shape[0] != qkv.shape[0] or kv.shape[2] != 2:
                raise ValueError(
                    f"kv: got shape {tuple(kv.shape)}, wanted ({qkv.shape[0]}, seqlen, 2, heads, head_dim)"
                )
        seqlen = qkv.shape[1] if qkv.dim() > 1 else 0
        positions = 0
        if max_seqlen is not None:
            positions = check_int("max_seqlen", max_seqlen, 0)
        elif not isinstance(seqlen_offset, torch.Tensor):
            positions = seqlen + check_int("seqlen_offset", seqlen_offset, 0)
        elif not self._seq_len_cached:
            raise ValueError("max_seqlen: got None, wanted a number of positions, as seqlen_offset is a tensor")
        cos, sin, cos_k, sin_k = self.tables(positions, qkv.device, qkv.dtype)
        if kv is None:
            heads = {} if num_heads_q is None else {"num_heads_q": num_heads_q}
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, cos_k, sin_k, interleaved=self.interleaved, seqlen_offsets=seqlen_offset, **heads
            )
        q = apply_rotary_emb(qkv, cos, sin, interleaved=self.interleaved, inplace=True, seqlen_offsets=seqlen_offset)
        tables = (cos, sin) if cos_k is None or sin_k is None else (cos_k, sin_k)
        return q, apply_rotary_emb_kv_(kv, *tables, interleaved=self.interleaved, seqlen_offsets=seqlen_offset)
