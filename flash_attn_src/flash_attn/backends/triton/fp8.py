"""The Triton backend in FP8: casts, with one scale a batch entry and head, and the forward."""

from __future__ import annotations

import torch

from flash_attn import rng
from flash_attn.backends.triton.kernels import (
    FP8_TYPES,
    alibi_stride_of,
    aligned,
    chunk_of,
    find_one,
    flags_of,
    grid_of,
    score_kind,
    strides_of,
    window_of,
)
from flash_attn.kernels.flags import HAS_CU_SEQLENS_Q
from flash_attn.kernels.targets import TARGETS, fp8_format
from flash_attn.kernels.variants import serving
from flash_attn.runtime import launch

# Columns of the head dim that one cast takes, and what a sequence of transposed v is a multiple of: see
# kernels/fp8_cast.py.
_PIECE = 64
_COLUMNS = 128
_VEC = 16

TYPES = {name: dtype for dtype, name in FP8_TYPES.items()}
_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


def format_of(x: torch.Tensor) -> torch.dtype:
    """The FP8 type of the device of x. Raises NotImplementedError where its matrix units have none."""
    target = launch.device_target(x.get_device()) if x.is_cuda else launch.INTERPRETED
    name = fp8_format(target)
    if name is None:
        wanted = ", ".join(row.name for row in TARGETS.values() if row.fp8)
        raise NotImplementedError(f"FP8: {target} has no matrix units for it, wanted one of {wanted}")
    return TYPES[name]


def cast(
    x: torch.Tensor,
    dtype: torch.dtype,
    descale: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    transposed: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x (batch, seqlen, heads, head_dim), with cu_seqlens (total, heads, head_dim), in FP8; and its descale.

    descale, fp32 (batch, heads), undoes the scale; where given, it is what the cast divides by. transposed:
    (batch, heads, head_dim, columns), packed (heads, head_dim, columns). An x that is FP8 is only moved.
    """
    device = x.get_device()
    vec = 16 // x.element_size()
    x = aligned(x, vec)
    nheads, head_dim = x.shape[-2:]
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    # Of packed rows all, not the caller's longest length: where that is too small the grid would lack blocks.
    seqlen = x.shape[1] if cu_seqlens is None else x.shape[0]
    if not transposed:
        y = torch.empty(x.shape, dtype=dtype, device=x.device)
        y_strides = strides_of(y, _VEC)
    else:
        columns = -(-seqlen // _COLUMNS) * _COLUMNS
        if cu_seqlens is not None:
            columns = (x.shape[0] // _COLUMNS + batch + 1) * _COLUMNS
        outer = (batch,) if cu_seqlens is None else ()
        y = torch.empty((*outer, nheads, head_dim, columns), dtype=dtype, device=x.device)
        *first, by_head, by_dim, _ = y.stride()
        y_strides = (first[0] // _VEC if first else 0, by_dim // _VEC, by_head // _VEC)
    kernel = find_one("fp8-cast-v" if transposed else "fp8-cast", device, x.dtype, head_dim)
    blocks, planes, flags = grid_of(kernel.block_m, seqlen, batch, nheads, x.numel() // (nheads * head_dim))
    if cu_seqlens is not None:
        flags |= HAS_CU_SEQLENS_Q
    pieces = -(-head_dim // _PIECE)
    limit = float(torch.finfo(dtype).max)
    grid = (blocks * planes, pieces, 1)
    pointer = kernel.pointer
    stream = launch.current_stream(device)
    # In chunks of one plane: no two programs read the same rows.
    sizes = (nheads, seqlen, head_dim // vec, blocks, nheads * batch, 1, flags)
    if x.element_size() == 1:
        limit, amax = 0.0, None
    elif descale is not None:
        limit, amax = -limit, None
    else:
        descale = torch.empty((batch, nheads), dtype=torch.float32, device=x.device)
        if blocks * planes == 0:  # no program, which would write it
            descale.fill_(1.0)
        amax = torch.empty((planes, blocks, pieces), dtype=torch.float32, device=x.device)
        find_one("fp8-amax", device, x.dtype, head_dim).launch(
            device, stream, *grid, pointer(x), pointer(amax), *kernel.optional(cu_seqlens),
            *strides_of(x, vec), *sizes,
        )  # fmt: skip
    assert descale is not None
    kernel.launch(
        device, stream, *grid, pointer(x), pointer(y.view(torch.uint8)), pointer(descale if amax is None else amax),
        pointer(descale), *kernel.optional(cu_seqlens), limit, *strides_of(x, vec), *y_strides, *sizes,
    )  # fmt: skip
    return y, descale


def fp8_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    descales: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    out_dtype: torch.dtype,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    dropout_p: float,
    rng_state: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, tuple[torch.Tensor, ...]]:
    """Attention in FP8: (out, softmax_lse, rng_state, descales); head_dim is a multiple of 16.

    q, k, v are cast with their own largest magnitudes, or divided by the descales given, (batch, heads) each of
    its own; FP8 tensors, which need descales, are taken as they are.
    """
    device = q.get_device()
    head_dim = q.shape[-1]
    dtype = format_of(q)
    if q.element_size() == 1 and q.dtype is not dtype:
        raise TypeError(f"q: got {q.dtype}, wanted {dtype}, the format of this GPU")
    small, factors = [], []
    for x, descale, cu_seqlens, transposed in (
        (q, descales[0], cu_seqlens_q, False),
        (k, descales[1], cu_seqlens_k, False),
        (v, descales[2], cu_seqlens_k, True),
    ):
        if descale is not None:
            descale = descale.contiguous()
        if x.element_size() == 1 and not transposed:
            assert descale is not None
            small.append(aligned(x, _VEC))
        else:
            y, descale = cast(x, dtype, descale, cu_seqlens, transposed)
            small.append(y)
        factors.append(descale)
    q8, k8, v8 = small
    out = torch.empty(q.shape, dtype=out_dtype, device=q.device)
    nheads, nheads_k = q.shape[-2], k.shape[-2]
    if cu_seqlens_q is None:
        batch, max_seqlen_q = q.shape[0], q.shape[1]
        max_seqlen_k = k.shape[1]
        lse = torch.empty((batch, nheads, max_seqlen_q), dtype=torch.float32, device=q.device)
        lse_b, lse_h = nheads * max_seqlen_q, max_seqlen_q
    else:
        batch, max_seqlen_q = cu_seqlens_q.shape[0] - 1, q.shape[0]
        lse = torch.empty((nheads, q.shape[0]), dtype=torch.float32, device=q.device)
        lse_b, lse_h = 0, q.shape[0]
        out.zero_()  # no program writes rows outside of every sequence
        lse.fill_(float("inf"))
    if dropout_p > 0.0 and rng_state is None:
        rng_state = rng.draw(q.device)
    kind = serving("fp8-fwd", FP8_TYPES[dtype], score_kind(softcap, alibi_slopes, dropout_p, softmax_scale))
    kernel = find_one("fp8-fwd", device, dtype, head_dim, kind)
    pointer = kernel.pointer
    even = (not causal or window_left >= 0) and cu_seqlens_q is None
    left, right = window_of(causal, window_left, window_right)
    m_blocks, planes, packed = grid_of(kernel.block_m, max_seqlen_q, batch, nheads, q.numel() // (nheads * head_dim))
    *first, by_head, by_dim, _ = v8.stride()
    kernel.launch(
        device, launch.current_stream(device), m_blocks * planes, 1, 1,
        pointer(q8), pointer(k8), pointer(v8), pointer(out), pointer(lse), *map(pointer, factors),
        *kernel.optional(cu_seqlens_q, cu_seqlens_k, None),
        *kernel.optional(None, None, None, None, alibi_slopes, rng_state)[4:],
        softmax_scale, softcap, dropout_p, *strides_of(q8, _VEC), *strides_of(k8, _VEC),
        first[0] // _VEC if first else 0, by_dim // _VEC, by_head // _VEC, *strides_of(out, _VEC),
        lse_b, lse_h, alibi_stride_of(alibi_slopes),
        nheads, nheads // nheads_k, max_seqlen_q, max_seqlen_k, head_dim // _VEC, left, right,
        m_blocks, nheads * batch, chunk_of(planes, even, kernel), _KINDS[out_dtype],
        packed | flags_of(cu_seqlens_q, cu_seqlens_k, None, None, alibi_slopes),
    )  # fmt: skip
    return out, lse, rng_state, tuple(factors)
