"""Multi-head attention with its projections, and the modules within it by the names that clients import here."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from flash_attn.call.arguments import check_window, diagnose_switches
from flash_attn.flash_attn_interface import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from flash_attn.layers.rotary import BASES, RotaryEmbedding
from flash_attn.modules.inner import (
    CrossAttention,
    FlashCrossAttention,
    FlashSelfAttention,
    SelfAttention,
    Window,
    check_mask,
)
from flash_attn.ops.checks import check_int, check_number, check_switches, check_tensor
from flash_attn.ops.fused_dense import ColumnParallelLinear, RowParallelLinear
from flash_attn.utils.distributed import get_dim_for_local_rank

__all__ = [
    "MHA", "CrossAttention", "FlashCrossAttention", "FlashSelfAttention", "ParallelMHA", "SelfAttention",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func", "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache", "get_alibi_slopes",
]  # fmt: skip

# The attributes of inference_params that MHA reads.
_PARAMETERS = (
    "key_value_memory_dict", "seqlen_offset", "batch_size_offset", "lengths_per_sample", "max_seqlen", "max_batch_size",
)  # fmt: skip


def get_alibi_slopes(nheads: int) -> list[float]:
    """Slopes of ALiBi (https://arxiv.org/abs/2108.12409): powers of 2 ** (-8 / n), and for a count that is no power
    of two every second slope of twice as many heads after those."""
    nheads = check_int("nheads", nheads, 1, 1 << 16)
    whole = 2 ** math.floor(math.log2(nheads))
    slopes = [2.0 ** (-8.0 * (i + 1) / whole) for i in range(whole)]
    return slopes if whole == nheads else slopes + get_alibi_slopes(2 * whole)[::2][: nheads - whole]


def _cache(kv: torch.Tensor, inference_params: Any, layer_idx: int) -> torch.Tensor:
    """The layer's cache for the sequences of kv (batch, seqlen, 2, heads, head_dim), made where there is none."""
    caches, first = inference_params.key_value_memory_dict, inference_params.batch_size_offset
    if layer_idx not in caches:
        caches[layer_idx] = kv.new_empty(inference_params.max_batch_size, inference_params.max_seqlen, *kv.shape[2:])
    return caches[layer_idx][first : first + kv.shape[0]]


def _update_kv_cache(kv: torch.Tensor, inference_params: Any, layer_idx: int) -> torch.Tensor:
    """kv (batch, seqlen, 2, heads, head_dim) goes into the layer's cache, at seqlen_offset of the sequences from
    batch_size_offset on. Returns their keys and values so far."""
    cache, start = _cache(kv, inference_params, layer_idx), inference_params.seqlen_offset
    room = (cache.shape[0], cache.shape[1] - start)
    if kv.shape[0] > room[0] or kv.shape[1] > room[1]:
        raise ValueError(
            f"kv: got shape {tuple(kv.shape)}, wanted at most {room[0]} sequences of {room[1]} tokens, as "
            "inference_params says"
        )
    cache[:, start : start + kv.shape[1]] = kv
    return cache[:, : start + kv.shape[1]]


class MHA(nn.Module):
    """Multi-head attention with its projections.

    num_heads_kv       heads of keys and values, of which num_heads is a multiple; default num_heads
    cross_attn         queries from x, keys and values from x_kv; no rotary embedding
    layer_idx          this layer's key in inference_params
    dwconv             a causal convolution of 3 tokens over each channel of q, k and v
    rotary_emb_*       RotaryEmbedding's options; dim 0 is off
    use_alibi, window_size, and packed sequences need use_flash_attn; key_padding_mask needs its absence
    return_residual    returns (out, x)
    checkpointing      computes attention anew in the backward
    fused_bias_fc      is refused: there is no fused linear layer here
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: int | None = None,
        cross_attn: bool = False,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: int | None = None,
        dwconv: bool = False,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_scale_base: float | None = None,
        rotary_emb_interleaved: bool = False,
        use_alibi: bool = False,
        window_size: Window = (-1, -1),
        fused_bias_fc: bool = False,
        use_flash_attn: bool = False,
        return_residual: bool = False,
        checkpointing: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        for name, number in (("embed_dim", embed_dim), ("num_heads", num_heads), ("num_heads_kv", heads_kv)):
            check_int(name, number, 1)
        for name, number, divisor in (("embed_dim", embed_dim, num_heads), ("num_heads", num_heads, heads_kv)):
            if number % divisor:
                raise ValueError(f"{name}: got {number}, wanted a multiple of {divisor}")
        diagnose_switches(
            softmax_scale, cross_attn=cross_attn, qkv_proj_bias=qkv_proj_bias, out_proj_bias=out_proj_bias,
            causal=causal, dwconv=dwconv, rotary_emb_interleaved=rotary_emb_interleaved, use_alibi=use_alibi,
            fused_bias_fc=fused_bias_fc, use_flash_attn=use_flash_attn, return_residual=return_residual,
            checkpointing=checkpointing,
        )  # fmt: skip
        check_number("dropout", dropout, 0.0, 1.0)
        check_window(window_size)
        if layer_idx is not None:
            check_int("layer_idx", layer_idx, 0)
        if check_int("rotary_emb_dim", rotary_emb_dim, 0, embed_dim // num_heads) % 2:
            raise ValueError(f"rotary_emb_dim: got {rotary_emb_dim}, wanted an even number")
        check_number("rotary_emb_base", rotary_emb_base, *BASES)
        if rotary_emb_scale_base is not None:
            check_number("rotary_emb_scale_base", rotary_emb_scale_base, *BASES)
        for name, asked in (("use_alibi", use_alibi), ("window_size", tuple(window_size) != (-1, -1))):
            if asked and not use_flash_attn:
                raise ValueError(f"{name}: needs use_flash_attn=True")
        if fused_bias_fc:
            raise NotImplementedError("fused_bias_fc: got True, wanted False: there is no fused linear layer here")
        if cross_attn and rotary_emb_dim > 0:
            raise ValueError(f"rotary_emb_dim: got {rotary_emb_dim}, wanted 0 with cross_attn")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_heads_kv = heads_kv
        self.head_dim = embed_dim // num_heads
        self.cross_attn = cross_attn
        self.causal = causal
        self.layer_idx = layer_idx
        self.dwconv = dwconv
        self.rotary_emb_dim = rotary_emb_dim
        self.use_flash_attn = use_flash_attn
        self.return_residual = return_residual
        self.checkpointing = checkpointing
        kv_dim = 2 * self.head_dim * heads_kv
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        if rotary_emb_dim > 0:
            self.rotary_emb = RotaryEmbedding(
                rotary_emb_dim,
                base=rotary_emb_base,
                interleaved=rotary_emb_interleaved,
                scale_base=rotary_emb_scale_base,
                device=device,
            )
        if cross_attn:
            self.Wq = nn.Linear(embed_dim, embed_dim, bias=qkv_proj_bias, **place)
            self.Wkv = nn.Linear(embed_dim, kv_dim, bias=qkv_proj_bias, **place)
        else:
            self.Wqkv = nn.Linear(embed_dim, embed_dim + kv_dim, bias=qkv_proj_bias, **place)
        self._one_projection = not cross_attn and heads_kv == num_heads
        if dwconv and self._one_projection:
            self.dwconv_qkv = self._convolution(embed_dim + kv_dim, place)
        elif dwconv:
            self.dwconv_q = self._convolution(embed_dim, place)
            self.dwconv_kv = self._convolution(kv_dim, place)
        options: dict[str, Any] = {"causal": causal, "softmax_scale": softmax_scale, "attention_dropout": dropout}
        self.inner_attn: nn.Module
        self.inner_cross_attn: nn.Module
        if use_flash_attn:
            slopes = torch.tensor(get_alibi_slopes(num_heads), device=device) if use_alibi else None
            options |= {"alibi_slopes": slopes, "window_size": window_size}
            self.inner_attn, self.inner_cross_attn = FlashSelfAttention(**options), FlashCrossAttention(**options)
        else:
            self.inner_attn, self.inner_cross_attn = SelfAttention(**options), CrossAttention(**options)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=out_proj_bias, **place)

    @staticmethod
    def _convolution(channels: int, place: dict[str, Any]) -> nn.Conv1d:
        return nn.Conv1d(channels, channels, kernel_size=3, padding=2, groups=channels, **place)

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """An empty cache (batch_size, max_seqlen, 2, num_heads_kv, head_dim) for inference_params."""
        check_int("batch_size", batch_size, 0)
        check_int("max_seqlen", max_seqlen, 0)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype: got {dtype!r}, wanted a torch.dtype or None")
        weight = self.out_proj.weight
        shape = (batch_size, max_seqlen, 2, self.num_heads_kv, self.head_dim)
        return torch.empty(shape, dtype=dtype or weight.dtype, device=weight.device)

    def forward(
        self,
        x: torch.Tensor,
        x_kv: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
        mixer_subset: Any = None,
        inference_params: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """out, shaped as x: (batch, seqlen, embed_dim), or with cu_seqlens and max_seqlen (total, embed_dim).

        x_kv               (batch, seqlen_k, embed_dim), of cross attention; default x
        key_padding_mask   bool (batch, seqlen): True where keys are kept
        mixer_subset       of cross attention: index of the tokens of x that ask
        inference_params   for generation, as flash_attn.utils.generation.InferenceParams: x is of the sequences from
                           batch_size_offset on, its first token at seqlen_offset
        kwargs             go to the inner attention
        """
        self._check(x, x_kv, key_padding_mask, cu_seqlens, max_seqlen, mixer_subset, inference_params)
        if self.use_flash_attn:
            kwargs = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, **kwargs}
            if not self._one_projection and cu_seqlens is not None:
                kwargs = {"cu_seqlens_k": cu_seqlens, "max_seqlen_k": max_seqlen, **kwargs}
        else:
            kwargs = {"key_padding_mask": key_padding_mask, **kwargs}
        if self._one_projection:
            qkv = self._heads(self.Wqkv(x), "dwconv_qkv", 3)
            if inference_params is None:
                if self.rotary_emb_dim > 0:
                    qkv = self.rotary_emb(qkv)
                context = self._attend(self.inner_attn, qkv, **kwargs)
            else:
                context = self._generate(qkv[:, :, 0], qkv[:, :, 1:], inference_params)
        else:
            if self.cross_attn:
                q = self.Wq(x if mixer_subset is None else x[:, mixer_subset])
                kv = self.Wkv(x if x_kv is None else x_kv)
            else:
                q, kv = self.Wqkv(x).tensor_split((self.embed_dim,), -1)
            q, kv = self._heads(q, "dwconv_q", 1).squeeze(-3), self._heads(kv, "dwconv_kv", 2)
            if inference_params is None:
                if self.rotary_emb_dim > 0:
                    q, kv = self.rotary_emb(q, kv)
                context = self._attend(self.inner_cross_attn, q, kv, **kwargs)
            else:
                context = self._generate(q, kv, inference_params)
        out = self.out_proj(context.flatten(-2))
        return (out, x) if self.return_residual else out

    def _heads(self, projected: torch.Tensor, convolution: str, parts: int) -> torch.Tensor:
        """(..., parts, heads, head_dim) of a projection, after the convolution over tokens, if any."""
        if self.dwconv:
            seqlen = projected.shape[1]
            projected = getattr(self, convolution)(projected.transpose(1, 2))[..., :seqlen].transpose(1, 2).contiguous()
        return projected.unflatten(-1, (parts, -1, self.head_dim))

    def _attend(self, inner: nn.Module, *tensors: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if self.checkpointing:
            return checkpoint(inner, *tensors, use_reentrant=False, **kwargs)
        return inner(*tensors, **kwargs)

    def _generate(self, q: torch.Tensor, kv: torch.Tensor, params: Any) -> torch.Tensor:
        """Attention over the cache of inference_params, after kv went into it."""
        assert self.layer_idx is not None  # checked by _check_generation
        rows = slice(params.batch_size_offset, params.batch_size_offset + q.shape[0])
        lengths = params.lengths_per_sample
        offset = params.seqlen_offset if lengths is None else lengths[rows]
        inner = self.inner_cross_attn
        first = params.seqlen_offset == 0
        rotary: dict[str, Any] = {}
        if self.rotary_emb_dim > 0:
            inside = self.use_flash_attn and not first and self.rotary_emb.scale is None
            if inside:
                cos, sin, *_ = self.rotary_emb.tables(params.max_seqlen, q.device, q.dtype)
                rotary = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": self.rotary_emb.interleaved}
            else:
                q, kv = self.rotary_emb(q, kv, seqlen_offset=offset, max_seqlen=params.max_seqlen)
        if first or not self.use_flash_attn:
            if lengths is not None and not first:
                raise NotImplementedError("lengths_per_sample: wanted None, because use_flash_attn is False")
            return inner(q, _update_kv_cache(kv, params, self.layer_idx))
        cache = _cache(kv, params, self.layer_idx)
        assert isinstance(inner, FlashCrossAttention)
        out = flash_attn_with_kvcache(
            q, cache[:, :, 0], cache[:, :, 1], kv[:, :, 0], kv[:, :, 1], **rotary, cache_seqlens=offset,
            softmax_scale=inner.softmax_scale, causal=inner.causal, window_size=inner.window_size,
            alibi_slopes=None if inner.alibi_slopes is None else inner.alibi_slopes.float(),
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)  # a tuple comes with return_softmax_lse alone
        return out

    def _check(
        self,
        x: torch.Tensor,
        x_kv: torch.Tensor | None,
        key_padding_mask: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        max_seqlen: int | None,
        mixer_subset: Any,
        inference_params: Any,
    ) -> None:
        check_tensor("x", x)
        if not self.cross_attn and (x_kv is not None or mixer_subset is not None):
            raise ValueError("x_kv, mixer_subset: got one of them, wanted None without cross_attn")
        if cu_seqlens is None and max_seqlen is not None:
            raise ValueError(f"max_seqlen: got {max_seqlen!r}, wanted None without cu_seqlens")
        if cu_seqlens is not None:
            if max_seqlen is None:
                raise ValueError("max_seqlen: got None, wanted the longest sequence, because cu_seqlens is set")
            refused = {"use_flash_attn=False": not self.use_flash_attn, "dwconv": self.dwconv,
                       "rotary_emb_dim": self.rotary_emb_dim > 0, "cross_attn": self.cross_attn,
                       "key_padding_mask": key_padding_mask is not None,
                       "inference_params": inference_params is not None}  # fmt: skip
            if conflicts := [name for name, conflict in refused.items() if conflict]:
                raise ValueError(f"cu_seqlens: got a tensor, wanted None with {', '.join(conflicts)}")
        if key_padding_mask is not None and (self.use_flash_attn or inference_params is not None):
            raise ValueError("key_padding_mask: got a tensor, wanted None with use_flash_attn or inference_params: "
                             "unpad the batch (flash_attn.bert_padding) and give cu_seqlens")  # fmt: skip
        if inference_params is not None:
            self._check_generation(inference_params)
        axes = ("batch", "seqlen", "embed_dim") if cu_seqlens is None else ("total", "embed_dim")
        for name, tokens in (("x", x), ("x_kv", x if x_kv is None else x_kv)):
            check_tensor(name, tokens, axes, like=x if name == "x_kv" else None)
            if tokens.shape[-1] != self.embed_dim or tokens.shape[0] != x.shape[0]:
                shape = (*x.shape[:1], *axes[1:-1], self.embed_dim)
                raise ValueError(f"{name}: got shape {tuple(tokens.shape)}, wanted ({', '.join(map(str, shape))})")
        if mixer_subset is not None:
            try:
                x[:, mixer_subset]
            except (IndexError, RuntimeError, TypeError) as error:
                raise IndexError(
                    f"mixer_subset: got {mixer_subset!r}, wanted an index of {x.shape[1]} tokens: {error}"
                ) from None
        check_mask(key_padding_mask, x if x_kv is None else x_kv)
        if inference_params is not None:
            params = inference_params
            cache = params.key_value_memory_dict.get(self.layer_idx)
            batch, seqlen = (params.max_batch_size, params.max_seqlen) if cache is None else cache.shape[:2]
            batch, seqlen = batch - params.batch_size_offset, seqlen - params.seqlen_offset
            if x.shape[0] > batch or x.shape[1] > seqlen:
                raise ValueError(
                    f"x: got shape {tuple(x.shape)}, wanted at most {batch} sequences of {seqlen} tokens, as "
                    "inference_params says"
                )

    def _check_generation(self, params: Any) -> None:
        if self.dwconv:
            raise ValueError(f"inference_params: got {type(params).__name__}, wanted None with dwconv")
        if self.layer_idx is None:
            raise ValueError("layer_idx: got None, wanted this layer's number for generation")
        if missing := [name for name in _PARAMETERS if not hasattr(params, name)]:
            raise TypeError(f"inference_params: got {type(params).__name__}, wanted one with {', '.join(missing)}")
        check_int("batch_size_offset", params.batch_size_offset, 0)


class ParallelMHA(MHA):
    """MHA whose heads are shared out over process_group; options as MHA has them.

    sequence_parallel: a rank has its part of the first dimension of x, and gets its part of the result; without it
    every rank has all of both.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        process_group: Any,
        num_heads_kv: int | None = None,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: int | None = None,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_scale_base: float | None = None,
        rotary_emb_interleaved: bool = False,
        use_alibi: bool = False,
        window_size: Window = (-1, -1),
        use_flash_attn: bool = False,
        checkpointing: bool = False,
        sequence_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, num_heads_kv, False, False, False, dropout, softmax_scale, causal, layer_idx, False,
            rotary_emb_dim, rotary_emb_base, rotary_emb_scale_base, rotary_emb_interleaved, use_alibi, window_size,
            False, use_flash_attn, False, checkpointing, "meta", dtype,
        )  # fmt: skip
        check_switches(sequence_parallel=sequence_parallel)
        ranks, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
        self.process_group, self.world_size, self.local_rank = process_group, ranks, rank
        self.num_heads_kv_per_rank = get_dim_for_local_rank(self.num_heads_kv, ranks, rank)
        group = num_heads // self.num_heads_kv
        self.num_heads_per_rank = self.num_heads_kv_per_rank * group
        if self.num_heads_kv < ranks:
            raise ValueError(f"num_heads_kv: got {self.num_heads_kv}, wanted at least {ranks}, one a rank")
        if rotary_emb_dim > 0:
            self.rotary_emb = RotaryEmbedding(
                rotary_emb_dim, base=rotary_emb_base, interleaved=rotary_emb_interleaved,
                scale_base=rotary_emb_scale_base, device=device,
            )  # fmt: skip
        if use_alibi:
            first = sum(get_dim_for_local_rank(self.num_heads_kv, ranks, other) for other in range(rank)) * group
            slopes = torch.tensor(get_alibi_slopes(num_heads)[first : first + self.num_heads_per_rank], device=device)
            for inner in (self.inner_attn, self.inner_cross_attn):
                inner.alibi_slopes = slopes
        place: dict[str, Any] = {"sequence_parallel": sequence_parallel, "device": device, "dtype": dtype}
        head_dim = self.head_dim
        self.Wqkv = ColumnParallelLinear(
            embed_dim, head_dim * (num_heads + 2 * self.num_heads_kv), process_group, qkv_proj_bias,
            multiple_of=head_dim * (group + 2), **place,
        )  # fmt: skip
        self.out_proj = RowParallelLinear(
            embed_dim, embed_dim, process_group, out_proj_bias, multiple_of=head_dim * group, **place
        )

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """An empty cache (batch_size, max_seqlen, 2, this rank's num_heads_kv, head_dim) for inference_params."""
        whole = super().allocate_inference_cache(batch_size, max_seqlen, dtype)
        return whole[..., : self.num_heads_kv_per_rank, :].contiguous()

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, seqlen: int | None = None, inference_params: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        """out, shaped as x: (batch, seqlen, embed_dim), or with seqlen (batch * seqlen, embed_dim).

        kwargs go to the inner attention.
        """
        check_tensor("x", x)
        if inference_params is not None:
            self._check_generation(inference_params)
        qkv = self.Wqkv(x)
        if seqlen is not None:
            qkv = qkv.unflatten(0, (-1, check_int("seqlen", seqlen, 1)))
        if qkv.dim() != 3:
            axes = "(batch, seqlen, embed_dim)" if seqlen is None else "(batch * seqlen, embed_dim)"
            raise ValueError(f"x: got shape {tuple(x.shape)}, wanted {axes}")
        if self._one_projection:
            qkv = qkv.unflatten(-1, (3, -1, self.head_dim))
            if inference_params is not None:
                context = self._generate(qkv[:, :, 0], qkv[:, :, 1:], inference_params)
            else:
                qkv = self.rotary_emb(qkv) if self.rotary_emb_dim > 0 else qkv
                context = self._attend(self.inner_attn, qkv, **kwargs)
        else:
            q, kv = qkv.tensor_split((self.num_heads_per_rank * self.head_dim,), -1)
            q, kv = q.unflatten(-1, (-1, self.head_dim)), kv.unflatten(-1, (2, -1, self.head_dim))
            if inference_params is not None:
                context = self._generate(q, kv, inference_params)
            else:
                q, kv = self.rotary_emb(q, kv) if self.rotary_emb_dim > 0 else (q, kv)
                context = self._attend(self.inner_cross_attn, q, kv, **kwargs)
        context = context.flatten(-2)
        out: torch.Tensor = self.out_proj(context if seqlen is None else context.flatten(0, 1))
        return out
