"""FlashAttention-4's functions by name and signature, on the kernels of flash_attn.

Options that both attention functions have:

softmax_scale        factor of q @ k^T; default head_dim ** -0.5
causal, window_size  query i sees keys i + seqlen_k - seqlen_q - left to ... + right. A side is open where it is None,
                     and may be negative. causal sets right to 0
learnable_sink       fp16, bf16 or fp32 (heads,): a score of each query head that joins the sum of the softmax and has
                     no value; it gets a gradient
softcap              > 0: scores become softcap * tanh(score / softcap)
qv                   shaped as out: a second query, for which the values are keys. The scores are softmax_scale *
                     (q @ k + qv @ v), softmax_scale's default (head_dim + head_dim_v) ** -0.5, and softmax_lse has
                     heads last. No gradient. q and k may be None then
return_lse           softmax_lse is returned, and has a gradient. Without it softmax_lse is None, unless autograd
                     records the call
num_splits           over pages and with qv: into how many parts the keys of a sequence are split, 0 chooses by shape,
                     which is faster for few queries of long sequences. It changes nothing elsewhere
pack_gqa, min_seqlen_k, scheduler_metadata, seqlen_k_per_split, disable_scheduler_metadata
                     change no result: there is no plan to make ahead

block_sparse_tensors lists of visible blocks of dense tensors: a query sees the keys that causal and window_size
                     leave in blocks of either list, since without mask_mod the partial blocks are whole ones. The lists
                     are read at every call. Gradients follow them. block_sparse_tensors_bwd, their transpose, is
                     checked and changes nothing. No qv, sink, softcap, negative side of a window, gradient of
                     softmax_lse, nor head dim above 256 or other than v's

score_mod, mask_mod, their backwards and tensors, and gather_kv_indices raise NotImplementedError, which says what to
use instead. softmax_lse is -inf in rows that see no key and no sink, and in rows from seqused_q on.
FP8 tensors (flash_attn_func alone) give bf16 and have no gradient. Other errors: flash_attn.flash_attn_interface.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flash_attn.call.arguments import renaming
from flash_attn.interfaces.fa4.arguments import OpenWindow, check_speed, mask_of, refuse
from flash_attn.interfaces.fa4.attention import Lengths, Options, Result, attend
from flash_attn.interfaces.fa4.block_sparsity import BlockSparseTensorsTorch
from flash_attn.interfaces.fa4.combine import flash_attn_combine
from flash_attn.interfaces.fa4.private import _flash_attn_bwd, _flash_attn_fwd

__all__ = ["_flash_attn_bwd", "_flash_attn_fwd", "flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func"]

# The functions behind these have FlashAttention-2's names.
_own_names = renaming(
    block_table="page_table", cache_seqlens="seqused_k", k_cache="k", v_cache="v", s_aux="learnable_sink"
)


@_own_names
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: OpenWindow = (None, None),
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: list[torch.Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    block_sparse_tensors: BlockSparseTensorsTorch | None = None,
    block_sparse_tensors_bwd: BlockSparseTensorsTorch | None = None,
    return_lse: bool = False,
) -> Result:
    """(out, softmax_lse) of q (batch, seqlen_q, heads, head_dim) over k (batch, seqlen_k, heads_k, head_dim) and v.

    out is shaped as q, with v's head dim; softmax_lse is fp32 (batch, heads, seqlen_q).
    """
    refuse(
        gather_kv_indices=gather_kv_indices, score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod,
        aux_tensors=aux_tensors, aux_scalars=aux_scalars,
    )  # fmt: skip
    check_speed(num_splits, pack_gqa, causal=causal, return_lse=return_lse)
    options = Options(
        softmax_scale=softmax_scale, mask=mask_of(window_size, causal), learnable_sink=learnable_sink,
        softcap=softcap, num_splits=num_splits, deterministic=deterministic, return_lse=return_lse,
        qv=qv, block_sparse_tensors=block_sparse_tensors, block_sparse_tensors_bwd=block_sparse_tensors_bwd,
    )  # fmt: skip
    return attend(q, k, v, Lengths(), options)


@_own_names
def flash_attn_varlen_func(
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    v: torch.Tensor,
    qv: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,  # noqa: ARG001
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: OpenWindow = (None, None),
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: BlockSparseTensorsTorch | None = None,
    aux_tensors: list[torch.Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,  # noqa: ARG001
    seqlen_k_per_split: int | None = None,  # noqa: ARG001
    disable_scheduler_metadata: bool = False,
) -> Result:
    """(out, softmax_lse) of sequences, each with a length of its own.

    q                 (total_q, heads, head_dim) with cu_seqlens_q, int32 (batch + 1,); else (batch, seqlen_q, ...)
    k, v              (total_k, heads_k, ...) with cu_seqlens_k, or (batch, seqlen_k, ...), or with page_table, int32
                      (batch, max_pages), pages (pages, page_size, heads_k, ...), over which there is no backward
    max_seqlen_*      the longest lengths of packed sequences; default: as many as there are rows, which is slower
    seqused_q, _k     int32 (batch,): how many rows of each sequence count; the others give 0, and get no gradient
    softmax_lse       fp32 (heads, total_q), or (batch, heads, seqlen_q) where q is not packed
    """
    refuse(
        gather_kv_indices=gather_kv_indices, score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod,
        aux_tensors=aux_tensors, aux_scalars=aux_scalars,
    )  # fmt: skip
    check_speed(
        num_splits, pack_gqa, causal=causal, return_lse=return_lse,
        disable_scheduler_metadata=disable_scheduler_metadata,
    )  # fmt: skip
    options = Options(
        softmax_scale=softmax_scale, mask=mask_of(window_size, causal), learnable_sink=learnable_sink,
        softcap=softcap, num_splits=num_splits, deterministic=deterministic, return_lse=return_lse,
        qv=qv, block_sparse_tensors=block_sparse_tensors,
    )  # fmt: skip
    lengths = Lengths(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        seqused_q=seqused_q, seqused_k=seqused_k, page_table=page_table,
    )  # fmt: skip
    return attend(q, k, v, lengths, options)
