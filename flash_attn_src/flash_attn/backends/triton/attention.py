"""Attention and its gradients by Triton kernels; see flash_attn.backends.triton."""

from __future__ import annotations

import torch

from flash_attn import rng
from flash_attn.backends.split_kv import as_cache_call
from flash_attn.backends.triton.decode import MAX_PAGE_UNITS, attend_in_parts
from flash_attn.backends.triton.kernels import (
    VEC,
    add_parts,
    alibi_stride_of,
    aligned,
    chunk_of,
    find,
    flags_of,
    grid_of,
    parts_of,
    score_kind,
    strides_of,
    window_of,
)
from flash_attn.runtime import launch

_FORWARD = ("fwd",)
_PAGED = ("fwd-paged",)
_WHOLE_BLOCKS = ("fwd-paged-whole",)
_PROBABILITIES = ("probabilities",)
_BACKWARD = ("bwd-dq", "bwd-dkdv")


def paged_ops(
    k: torch.Tensor, leftpad_k: torch.Tensor | None, device: int, dtype: torch.dtype, head_dim: int, kind: str
) -> tuple[str]:
    """The op for keys (pages, page_size, heads_k, head_dim): the faster one where no block of them crosses a page."""
    if leftpad_k is None and dtype is not torch.float32:
        (kernel,) = find(_WHOLE_BLOCKS, device, dtype, head_dim, kind)
        if k.shape[1] % kernel.block_n == 0 and launch.follows_pages(kernel):
            return _WHOLE_BLOCKS
    return _PAGED


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
    """Attention of q over k and v; shapes and meaning as in `flash_attn_interface`.

    Returns (out, softmax_lse, S_dmask, rng_state). Raises KernelError where neither the wheel nor a JIT has the
    kernel, NotImplementedError for S_dmask of a paged cache.
    """
    if return_softmax and dropout_p > 0.0 and block_table is not None:
        raise NotImplementedError("return_attn_probs with block_table: no S_dmask of a paged cache, leave one out")
    dtype = q.dtype
    device = q.get_device()
    head_dim = q.shape[-1]
    kind = score_kind(softcap, alibi_slopes, dropout_p, softmax_scale)
    ops = _FORWARD if block_table is None else paged_ops(k, leftpad_k, device, dtype, head_dim, kind)
    (kernel,) = find(ops, device, dtype, head_dim, kind)
    vec = VEC[dtype]
    q, k, v = aligned(q, vec), aligned(k, vec), aligned(v, vec)
    if dropout_p == 0.0 and (block_table is None or block_table.shape[1] * k.shape[1] < MAX_PAGE_UNITS):
        call = as_cache_call(
            kernel.block_m, q, k, v, out, softmax_scale, causal, window_left, window_right, softcap, alibi_slopes,
            cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, leftpad_k, block_table,
        )  # fmt: skip
        if call is not None:
            return *attend_in_parts(call), None, rng_state
    result = torch.empty_like(q) if out is None else aligned(out, vec)

    nheads_k = k.shape[-2]
    if cu_seqlens_q is None:
        batch, max_seqlen_q, nheads, _ = q.shape
        max_seqlen_k = k.shape[1]
        lse = torch.empty((batch, nheads, max_seqlen_q), dtype=torch.float32, device=q.device)
        lse_b, lse_h = nheads * max_seqlen_q, max_seqlen_q
        total_q = batch * max_seqlen_q
    else:
        total_q, nheads, _ = q.shape
        batch = cu_seqlens_q.shape[0] - 1
        lse = torch.empty((nheads, total_q), dtype=torch.float32, device=q.device)
        lse_b, lse_h = 0, total_q
    if dropout_p > 0.0 and rng_state is None:
        rng_state = rng.draw(q.device)

    even = (not causal or window_left >= 0) and cu_seqlens_q is None
    window_left, window_right = window_of(causal, window_left, window_right)
    pointer = kernel.pointer
    stream = launch.current_stream(device)
    m_blocks, planes, packed = grid_of(kernel.block_m, max_seqlen_q, batch, nheads, total_q)
    if m_blocks * planes == 0:  # no program, which would clear the rows outside of every sequence
        result.zero_()
        lse.fill_(float("inf"))
    flags = packed | flags_of(cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, alibi_slopes)
    group = nheads // nheads_k
    table_stride, page_size = (0, 1) if block_table is None else (block_table.stride(0), k.shape[1])
    kernel.launch(
        device, stream, m_blocks * planes, 1, 1,
        pointer(q), pointer(k), pointer(v), pointer(result), pointer(lse),
        *kernel.optional(cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, alibi_slopes, rng_state, block_table),
        softmax_scale, softcap, dropout_p,
        *strides_of(q, vec), *strides_of(k, vec), *strides_of(v, vec), *strides_of(result, vec),
        lse_b, lse_h, alibi_stride_of(alibi_slopes), table_stride, page_size,
        nheads, group, max_seqlen_q, max_seqlen_k, head_dim // vec, window_left, window_right,
        m_blocks, nheads * batch, chunk_of(planes, even, kernel), flags,
    )  # fmt: skip
    if out is not None and result is not out:
        out.copy_(result)
        result = out
    if not return_softmax or dropout_p == 0.0:
        return result, lse, None, rng_state

    dmask = torch.empty((batch, nheads, max_seqlen_q, max_seqlen_k), dtype=dtype, device=q.device)
    (kernel,) = find(_PROBABILITIES, device, dtype, head_dim, kind)
    m_blocks, n_blocks = -(-max_seqlen_q // kernel.block_m), -(-max_seqlen_k // kernel.block_n)
    kernel.launch(
        device, stream, m_blocks * n_blocks * nheads * batch, 1, 1,
        pointer(q), pointer(k), pointer(lse), pointer(dmask),
        *kernel.optional(cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, alibi_slopes, rng_state),
        softmax_scale, softcap, dropout_p,
        *strides_of(q, vec), *strides_of(k, vec), lse_b, lse_h, alibi_stride_of(alibi_slopes),
        nheads, group, max_seqlen_q, max_seqlen_k, head_dim // vec, window_left, window_right,
        m_blocks, n_blocks, flags,
    )  # fmt: skip
    return result, lse, dmask, rng_state


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    dropout_p: float,
    deterministic: bool,  # noqa: ARG001 - every sum here has a fixed order, so both values give the same
    rng_state: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> torch.Tensor:
    """Gradients of `forward` into dq, dk, dv; returns softmax_d = rowsum(dout * out)."""
    dtype = q.dtype
    device = q.get_device()
    head_dim = q.shape[-1]
    kind = score_kind(softcap, alibi_slopes, dropout_p, softmax_scale)
    dq_kernel, dkdv_kernel = find(_BACKWARD, device, dtype, head_dim, kind)
    vec = VEC[dtype]
    dout, q, k, v, out = (aligned(tensor, vec) for tensor in (dout, q, k, v, out))
    softmax_lse = softmax_lse.contiguous()
    if cu_seqlens_q is None:
        batch, max_seqlen_q, nheads, _ = q.shape
        max_seqlen_k, nheads_k = k.shape[1], k.shape[2]
        lse_b, lse_h = nheads * max_seqlen_q, max_seqlen_q
        total_q, total_k = batch * max_seqlen_q, batch * max_seqlen_k
    else:
        total_q, nheads, _ = q.shape
        batch = cu_seqlens_q.shape[0] - 1
        total_k, nheads_k, _ = k.shape
        lse_b, lse_h = 0, total_q
    # Its kernel writes the rows of sequences alone.
    delta = torch.empty_like(softmax_lse) if cu_seqlens_q is None else torch.zeros_like(softmax_lse)
    even = (not causal or window_left >= 0) and cu_seqlens_q is None
    window_left, window_right = window_of(causal, window_left, window_right)
    flags = flags_of(cu_seqlens_q, cu_seqlens_k, None, None, alibi_slopes)
    group = nheads // nheads_k
    stream = launch.current_stream(device)
    pointer = dq_kernel.pointer
    q_strides, k_strides, v_strides, g_strides = (strides_of(tensor, vec) for tensor in (q, k, v, dout))
    optional = dq_kernel.optional(cu_seqlens_q, cu_seqlens_k, None, None, alibi_slopes, rng_state)
    strides = lse_b, lse_h, alibi_stride_of(alibi_slopes)
    window = head_dim // vec, window_left, window_right

    m_blocks, planes, packed = grid_of(dq_kernel.block_m, max_seqlen_q, batch, nheads, total_q)
    computed = aligned(dq, vec)
    if m_blocks * planes == 0:
        computed.zero_()
    dq_kernel.launch(
        device, stream, m_blocks * planes, 1, 1,
        pointer(q), pointer(k), pointer(v), pointer(out), pointer(dout), pointer(softmax_lse), pointer(delta),
        pointer(computed), *optional, softmax_scale, softcap, dropout_p,
        *q_strides, *k_strides, *v_strides, *strides_of(out, vec), *g_strides, *strides_of(computed, vec),
        *strides, nheads, group, max_seqlen_q, max_seqlen_k, *window,
        m_blocks, nheads * batch, chunk_of(planes, even, dq_kernel), packed | flags,
    )  # fmt: skip
    if dq is not computed:
        dq.copy_(computed)

    n_blocks, planes, packed = grid_of(dkdv_kernel.block_n, max_seqlen_k, batch, nheads_k, total_k)
    # dk and dv of all parts, in fp32, take no more memory than dq would.
    most = nheads * total_q // max(2 * nheads_k * total_k, 1)
    parts = parts_of(group, n_blocks * planes, max_seqlen_q, most, device)
    planes *= parts
    if parts == 1:
        dk_parts, dv_parts = aligned(dk, vec), aligned(dv, vec)
    else:
        create = torch.empty if cu_seqlens_k is None else torch.zeros
        sums = create((2, *k.shape[:-1], parts, head_dim), dtype=torch.float32, device=q.device)
        dk_parts, dv_parts = sums.flatten(-3, -2)
    if n_blocks * planes == 0:
        dk_parts.zero_()
        dv_parts.zero_()
    dkdv_kernel.launch(
        device, stream, n_blocks * planes, 1, 1,
        pointer(q), pointer(k), pointer(v), pointer(dout), pointer(softmax_lse), pointer(delta),
        pointer(dk_parts), pointer(dv_parts), *optional, softmax_scale, softcap, dropout_p,
        *q_strides, *k_strides, *v_strides, *g_strides, *strides_of(dk_parts, vec), *strides_of(dv_parts, vec),
        *strides, nheads, group // parts, parts, max_seqlen_q, max_seqlen_k, total_k, *window,
        n_blocks, nheads_k * parts * batch, chunk_of(planes, even, dkdv_kernel), packed | flags,
    )  # fmt: skip
    for index, (grad, computed) in enumerate(((dk, dk_parts), (dv, dv_parts))):
        if parts > 1:
            add_parts(sums[index], grad)
        elif grad is not computed:
            grad.copy_(computed)
    return delta
