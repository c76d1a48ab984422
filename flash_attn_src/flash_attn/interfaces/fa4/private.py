"""The private functions of flash_attn.cute.interface, as PyTorch's own implementation "FA4" and libraries call them.

    torch.nn.attention.activate_flash_attention_impl("FA4")  # torch 2.11 or newer, with the wheel flash-attn-4

Names and order of the parameters are upstream's. Tile sizes, stages and layouts change no result here. softmax_lse is
(batch, heads, seqlen_q), packed (heads, total_q).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from flash_attn.attention.operators.autograd import differentiate
from flash_attn.call import calls
from flash_attn.call.arguments import check_alike, check_dense, check_gradients, check_varlen
from flash_attn.call.calls import AttentionCall, maybe_contiguous
from flash_attn.interfaces.fa4.arguments import check_speed, mask_of, refuse
from flash_attn.interfaces.fa4.attention import Lengths, Options, Result, attend
from flash_attn.interfaces.fa4.block_sparsity import over_queries
from flash_attn.interfaces.fa4.rows import packed

_HEAD_DIM_STEP = 8


def _flash_attn_fwd(
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    v: torch.Tensor,
    qv: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,  # noqa: ARG001
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    learnable_sink: torch.Tensor | None = None,
    tile_mn: tuple[int, int] | None = None,  # noqa: ARG001
    mma_pv_is_rs: bool | None = None,  # noqa: ARG001
    intra_wg_overlap: bool | None = None,  # noqa: ARG001
    num_threads: int = 384,  # noqa: ARG001
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    _arch: int | None = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None,
    scheduler_metadata: Any = None,  # noqa: ARG001
    seqlen_k_per_split: int | None = None,  # noqa: ARG001
    disable_scheduler_metadata: bool = False,
) -> Result:
    """(out, softmax_lse) without a gradient; softmax_lse is None unless return_lse or lse asks for it.

    out, lse: the results are written there.
    """
    refuse(
        score_mod=score_mod, mask_mod=mask_mod, aux_tensors=aux_tensors, aux_scalars=aux_scalars,
        gather_kv_indices=gather_kv_indices,
    )  # fmt: skip
    for name, descale in (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale)):
        if descale is not None:
            raise NotImplementedError(f"{name}: got a tensor, wanted None: use flash_attn.flash_attn_fp8_func")
    check_speed(
        num_splits, pack_gqa, causal=causal, return_lse=return_lse,
        disable_scheduler_metadata=disable_scheduler_metadata,
    )  # fmt: skip
    options = Options(
        softmax_scale=softmax_scale, mask=mask_of((window_size_left, window_size_right), causal),
        learnable_sink=learnable_sink, softcap=softcap or 0.0, num_splits=num_splits, deterministic=False,
        return_lse=return_lse or lse is not None, qv=qv, block_sparse_tensors=block_sparse_tensors,
    )  # fmt: skip
    dense = cu_seqlens_q is None and cu_seqlens_k is None  # the shapes of dense tensors have the longest lengths
    lengths = Lengths(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=None if dense else max_seqlen_q,
        max_seqlen_k=None if dense else max_seqlen_k, seqused_q=seqused_q, seqused_k=seqused_k, page_table=page_table,
    )  # fmt: skip
    with torch.no_grad():
        result, softmax_lse = attend(q, k, v, lengths, options)
        if out is not None:
            check_alike("out", out, result, "the result")
            result = out.copy_(result)
        if lse is not None and softmax_lse is not None:
            check_alike("lse", lse, softmax_lse, "the result")
            softmax_lse = lse.copy_(softmax_lse)
    return result, softmax_lse


def _padded(x: torch.Tensor) -> torch.Tensor:
    missing = -x.shape[-1] % _HEAD_DIM_STEP
    return pad(x, (0, missing)) if missing else maybe_contiguous(x)


def _flash_attn_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    m_block_size: int = 64,  # noqa: ARG001
    n_block_size: int = 128,  # noqa: ARG001
    num_threads: int = 256,  # noqa: ARG001
    pack_gqa: bool = False,  # noqa: ARG001
    num_stages_Q: int = 2,  # noqa: ARG001
    num_stages_dO: int = 2,  # noqa: ARG001
    SdP_swapAB: bool = False,  # noqa: ARG001
    dKV_swapAB: bool = False,  # noqa: ARG001
    dQ_swapAB: bool = False,  # noqa: ARG001
    AtomLayoutMSdP: int = 2,  # noqa: ARG001
    AtomLayoutNdKV: int = 2,  # noqa: ARG001
    AtomLayoutMdQ: int = 2,  # noqa: ARG001
    V_in_regs: bool = False,  # noqa: ARG001
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = False,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    block_sparse_tensors: Any = None,
    dlse: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv), with learnable_sink (dq, dk, dv, dsink). dq, dk and dv are written where given.

    block_sparse_tensors: lists of the blocks of queries that see each block of keys, for dense tensors.
    """
    refuse(
        score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
    )  # fmt: skip
    for name, used in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        if used is not None:
            raise NotImplementedError(f"{name}: got a tensor, wanted None: end the sequences by cu_seqlens instead")
    mask = mask_of((window_size_left, window_size_right), causal)
    if mask.fewer_queries or mask.fewer_keys:
        raise NotImplementedError(
            f"window_size_left, window_size_right: got {window_size_left}, {window_size_right}, wanted None, 0 or more"
        )
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    options = calls.Options(scale, window_size=mask.window, softcap=softcap, s_aux=learnable_sink)
    call = AttentionCall(_padded(q), _padded(k), _padded(v), options, deterministic)
    if cu_seqlens_q is None and cu_seqlens_k is None:
        check_dense(call)
    else:
        refuse(block_sparse_tensors=block_sparse_tensors)
        queries, keys = packed("q", q, cu_seqlens_q, max_seqlen_q), packed("k", k, cu_seqlens_k, max_seqlen_k)
        call.cu_seqlens_q, call.cu_seqlens_k = queries.cu_seqlens, keys.cu_seqlens
        call.max_seqlen_q, call.max_seqlen_k = queries.longest, keys.longest
        check_varlen(call)
    out, dout, lse = _padded(out), _padded(dout), lse.masked_fill(lse == -torch.inf, torch.inf)
    check_gradients(call, dout, out, lse, (None, None, None))
    with torch.no_grad():
        if block_sparse_tensors is not None:
            call = over_queries(call, block_sparse_tensors)
        *computed, dsink, _ = differentiate(call, out, lse, dout, dlse)
        results: list[torch.Tensor] = []
        for name, gradient, like, buffer in zip(("dq", "dk", "dv"), computed, (q, k, v), (dq, dk, dv), strict=True):
            assert gradient is not None
            value = gradient[..., : like.shape[-1]]
            if buffer is not None:
                check_alike(name, buffer, like, name[1])
                value = buffer.copy_(value)
            results.append(value)
    return tuple(results) if dsink is None else (*results, dsink)
