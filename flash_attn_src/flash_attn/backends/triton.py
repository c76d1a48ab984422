"""The Triton backend: from validated tensors to launches. Kernels come from the wheel's store, else from the JIT.

Host time is part of the product: a call on small tensors is bound by this file, so a call looks its kernels up
once, in one dictionary, and touches every tensor's metadata once.
"""

from __future__ import annotations

import torch

from flash_attn.kernels.flags import (
    HAS_ALIBI,
    HAS_CU_SEQLENS_K,
    HAS_CU_SEQLENS_Q,
    HAS_LEFTPAD_K,
    HAS_SEQUSED_K,
    MAX_ROW_STRIDE,
    OPEN_WINDOW,
)
from flash_attn.runtime import launch
from flash_attn.runtime.variants import Variant, bucket, serving

name = "flash_attn.backends.triton"

_DTYPES: dict[torch.dtype, str] = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
# Elements in 16 bytes: the kernels take strides and head dims in this unit.
_VEC: dict[torch.dtype, int] = {torch.float16: 8, torch.bfloat16: 8, torch.float32: 4}

_FORWARD = ("fwd",)
_PAGED = ("fwd-paged",)
_PROBABILITIES = ("probabilities",)
_BACKWARD = ("bwd-delta", "bwd-dkdv", "bwd-dq")
Kernel = launch.StoreKernel | launch.JitKernel
_kernels: dict[tuple[object, ...], tuple[Kernel, ...]] = {}

_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _device: 0)


def score_kind(softcap: float, alibi_slopes: torch.Tensor | None, dropout_p: float, softmax_scale: float) -> str:
    """The kind of kernel that a call needs, one of `variants.KINDS`."""
    if softcap == 0.0 and dropout_p == 0.0 and alibi_slopes is None:
        # Plain kernels take the maximum of the scores before they scale them.
        return "plain" if softmax_scale > 0.0 else "any"
    if (softcap > 0.0) + (dropout_p > 0.0) + (alibi_slopes is not None) > 1 or softmax_scale <= 0.0:
        return "any"
    return "softcap" if softcap > 0.0 else "dropout" if dropout_p > 0.0 else "alibi"


def variants(ops: tuple[str, ...], device: int, dtype: torch.dtype, head_dim: int, kind: str) -> tuple[Variant, ...]:
    """The variants that one kind of call needs."""
    if dtype not in _DTYPES:
        raise TypeError(f"the Triton backend takes float16, bfloat16 or float32 on a GPU, got {dtype}")
    if head_dim % 8:
        raise ValueError(f"head_dim must be a multiple of 8 here, got {head_dim}: pad q, k and v with zeros")
    if device < 0 and not launch.interpreting():
        raise ValueError("the Triton backend runs on a GPU; CPU tensors belong to the torch backend")
    return tuple(Variant(op, _DTYPES[dtype], bucket(head_dim, op), serving(op, _DTYPES[dtype], kind)) for op in ops)


def find(ops: tuple[str, ...], device: int, dtype: torch.dtype, head_dim: int, kind: str) -> tuple[Kernel, ...]:
    """The kernels of one kind of call."""
    key = (ops, device, dtype, head_dim, kind)
    found = _kernels.get(key)
    if found is None:
        found = _kernels[key] = tuple(launch.kernel(device, variant) for variant in variants(*key))
    return found


def remember(key: tuple[object, ...], kernels: tuple[Kernel, ...]) -> None:
    """Makes `find` answer with these from now on; the key is its arguments."""
    _kernels[key] = kernels


def _aligned(tensor: torch.Tensor, vec: int) -> torch.Tensor:
    """The tensor itself where its rows start on 16 bytes, lie dense and not too far apart, else a copy that does."""
    *outer, last = tensor.stride()
    misaligned = tensor.data_ptr() & 15
    for stride in outer:
        misaligned |= stride & (vec - 1)
    if last == 1 and not misaligned and outer[-2] < MAX_ROW_STRIDE * vec:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _strides(tensor: torch.Tensor, vec: int) -> tuple[int, int, int]:
    """(batch, row, head) strides in units of 16 bytes; packed tensors (total, heads, dim) have batch stride 0."""
    strides = tensor.stride()
    if len(strides) == 4:
        return strides[0] // vec, strides[1] // vec, strides[2] // vec
    return 0, strides[0] // vec, strides[1] // vec


def _window(causal: bool, left: int, right: int) -> tuple[int, int]:
    left = OPEN_WINDOW if left < 0 else min(left, OPEN_WINDOW)
    return left, (0 if causal else OPEN_WINDOW if right < 0 else min(right, OPEN_WINDOW))


def _flags(
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    leftpad_k: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
) -> int:
    return (
        (HAS_CU_SEQLENS_Q if cu_seqlens_q is not None else 0)
        | (HAS_CU_SEQLENS_K if cu_seqlens_k is not None else 0)
        | (HAS_SEQUSED_K if seqused_k is not None else 0)
        | (HAS_LEFTPAD_K if leftpad_k is not None else 0)
        | (HAS_ALIBI if alibi_slopes is not None else 0)
    )


def _alibi_stride(alibi_slopes: torch.Tensor | None) -> int:
    """Elements from one batch entry's slopes to the next; (heads,) slopes serve every entry."""
    return alibi_slopes.stride(0) if alibi_slopes is not None and alibi_slopes.dim() == 2 else 0


def _chunk(planes: int, even: bool, kernel: Kernel) -> int:
    """How many planes `common.place` takes at once; `even`: every block of a plane has the same work.

    Measured on an H200 (2026-11-21): uneven blocks gain 4 to 8 % with 8 planes over 1, even ones lose as much in
    dk and dv to a colder cache; taking all planes loses again.
    """
    return min(planes, 1 if even and kernel.dies == 1 else 8)


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
        raise NotImplementedError("return_attn_probs with block_table: S_dmask of a paged cache is not there")
    dtype = q.dtype
    device = q.get_device()
    head_dim = q.shape[-1]
    kind = score_kind(softcap, alibi_slopes, dropout_p, softmax_scale)
    (kernel,) = find(_FORWARD if block_table is None else _PAGED, device, dtype, head_dim, kind)
    vec = _VEC[dtype]
    q, k, v = _aligned(q, vec), _aligned(k, vec), _aligned(v, vec)
    result = torch.empty_like(q) if out is None else _aligned(out, vec)

    nheads_k = k.shape[-2]
    if cu_seqlens_q is None:
        batch, max_seqlen_q, nheads, _ = q.shape
        max_seqlen_k = k.shape[1]
        lse = torch.empty((batch, nheads, max_seqlen_q), dtype=torch.float32, device=q.device)
        lse_b, lse_h = nheads * max_seqlen_q, max_seqlen_q
    else:
        total_q, nheads, _ = q.shape
        batch = cu_seqlens_q.shape[0] - 1
        lse = torch.empty((nheads, total_q), dtype=torch.float32, device=q.device)
        lse_b, lse_h = 0, total_q
    if dropout_p > 0.0 and rng_state is None:
        # Two words from torch's own generator: advances with it, and can be captured in a graph.
        rng_state = torch.randint(0, 2**31 - 1, (2,), dtype=torch.int64, device=q.device)

    even = (not causal or window_left >= 0) and cu_seqlens_q is None
    window_left, window_right = _window(causal, window_left, window_right)
    pointer = kernel.pointer
    stream = _current_stream(device)
    m_blocks = -(-max_seqlen_q // kernel.block_m)
    planes = nheads * batch
    if m_blocks * planes == 0:  # no program, which would clear the rows outside of every sequence
        result.zero_()
        lse.fill_(float("inf"))
    flags = _flags(cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, alibi_slopes)
    group = nheads // nheads_k
    table_stride, page_size = (0, 1) if block_table is None else (block_table.stride(0), k.shape[1])
    kernel.launch(
        device, stream, m_blocks * planes, 1, 1,
        pointer(q), pointer(k), pointer(v), pointer(result), pointer(lse),
        *kernel.optional(cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, alibi_slopes, rng_state, block_table),
        softmax_scale, softcap, dropout_p,
        *_strides(q, vec), *_strides(k, vec), *_strides(v, vec), *_strides(result, vec),
        lse_b, lse_h, _alibi_stride(alibi_slopes), table_stride, page_size,
        nheads, group, max_seqlen_q, max_seqlen_k, head_dim // vec, window_left, window_right,
        m_blocks, planes, _chunk(planes, even, kernel), flags,
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
        *_strides(q, vec), *_strides(k, vec), lse_b, lse_h, _alibi_stride(alibi_slopes),
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
    delta_kernel, dkdv_kernel, dq_kernel = find(_BACKWARD, device, dtype, head_dim, kind)
    vec = _VEC[dtype]
    dout, q, k, v, out = (_aligned(tensor, vec) for tensor in (dout, q, k, v, out))
    given = (dq, dk, dv)
    dq, dk, dv = (_aligned(grad, vec) for grad in given)
    softmax_lse = softmax_lse.contiguous()
    if cu_seqlens_q is None:
        batch, max_seqlen_q, nheads, _ = q.shape
        max_seqlen_k, nheads_k = k.shape[1], k.shape[2]
        lse_b, lse_h = nheads * max_seqlen_q, max_seqlen_q
        delta = torch.empty_like(softmax_lse)
    else:
        total_q, nheads, _ = q.shape
        batch, nheads_k = cu_seqlens_q.shape[0] - 1, k.shape[1]
        delta = torch.zeros_like(softmax_lse)  # its kernel writes the rows of sequences alone
        lse_b, lse_h = 0, total_q
    even = (not causal or window_left >= 0) and cu_seqlens_q is None
    window_left, window_right = _window(causal, window_left, window_right)
    flags = _flags(cu_seqlens_q, cu_seqlens_k, None, None, alibi_slopes)
    group = nheads // nheads_k
    stream = _current_stream(device)
    pointer = dq_kernel.pointer
    q_strides, k_strides, v_strides, g_strides = (_strides(tensor, vec) for tensor in (q, k, v, dout))
    optional = dq_kernel.optional(cu_seqlens_q, cu_seqlens_k, None, None, alibi_slopes, rng_state)
    strides = lse_b, lse_h, _alibi_stride(alibi_slopes)
    heads = nheads, group, max_seqlen_q, max_seqlen_k
    window = head_dim // vec, window_left, window_right

    m_blocks = -(-max_seqlen_q // delta_kernel.block_m)
    delta_kernel.launch(
        device, stream, m_blocks * nheads * batch, 1, 1,
        pointer(out), pointer(dout), pointer(delta), optional[0],
        *_strides(out, vec), *g_strides, lse_b, lse_h,
        nheads, max_seqlen_q, head_dim // vec, m_blocks, flags,
    )  # fmt: skip
    n_blocks = -(-max_seqlen_k // dkdv_kernel.block_n)
    planes = nheads_k * batch
    if n_blocks * planes == 0:
        dk.zero_()
        dv.zero_()
    dkdv_kernel.launch(
        device, stream, n_blocks * planes, 1, 1,
        pointer(q), pointer(k), pointer(v), pointer(dout), pointer(softmax_lse), pointer(delta),
        pointer(dk), pointer(dv), *optional, softmax_scale, softcap, dropout_p,
        *q_strides, *k_strides, *v_strides, *g_strides, *_strides(dk, vec), *_strides(dv, vec),
        *strides, *heads, k.shape[0], *window, n_blocks, planes, _chunk(planes, even, dkdv_kernel), flags,
    )  # fmt: skip
    m_blocks = -(-max_seqlen_q // dq_kernel.block_m)
    planes = nheads * batch
    if m_blocks * planes == 0:
        dq.zero_()
    dq_kernel.launch(
        device, stream, m_blocks * planes, 1, 1,
        pointer(q), pointer(k), pointer(v), pointer(dout), pointer(softmax_lse), pointer(delta), pointer(dq),
        *optional, softmax_scale, softcap, dropout_p,
        *q_strides, *k_strides, *v_strides, *g_strides, *_strides(dq, vec),
        *strides, *heads, *window, m_blocks, planes, _chunk(planes, even, dq_kernel), flags,
    )  # fmt: skip
    for grad, computed in zip(given, (dq, dk, dv), strict=True):
        if grad is not computed:
            grad.copy_(computed)
    return delta


# Down here, since it is built on this module.
from flash_attn.backends.fp8 import format_of, fp8_forward  # noqa: E402
from flash_attn.backends.kvcache import combine, kvcache  # noqa: E402

__all__ = ["backward", "combine", "format_of", "forward", "fp8_forward", "kvcache", "name"]
