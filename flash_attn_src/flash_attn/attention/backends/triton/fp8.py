"""The Triton backend in FP8: casts, with one scale a batch entry and head, and the forward."""

from __future__ import annotations

import torch

from flash_attn.attention.backends.torch.fp8 import out_dtype
from flash_attn.attention.backends.triton.grid import chunk_of, grid_of, is_even
from flash_attn.attention.backends.triton.inputs import DTYPES, FP8_TYPES, aligned, inputs_of, named, rows, strides_of
from flash_attn.attention.backends.triton.kernels import find_one, score_kind
from flash_attn.call.calls import AttentionCall, Fp8Result, replace
from flash_attn.call.options import FP8, draw_rng_state
from flash_attn.core import device
from flash_attn.core.arguments import Value
from flash_attn.core.protocol import launch
from flash_attn.kernels import planning, targets
from flash_attn.kernels.flags import HAS_CU_SEQLENS_Q
from flash_attn.kernels.variants import bucket

_VEC = 16

TYPES = {name: dtype for dtype, name in FP8_TYPES.items()}


def fp8_format(x: torch.Tensor) -> torch.dtype:
    """See `protocol.Backend.fp8_format`."""
    target = device.of(x.get_device()).target
    name = targets.fp8_format(target)
    if name is None:
        names = ", ".join(row.name for row in targets.TARGETS.values() if row.fp8 and not row.is_generic)
        raise NotImplementedError(f"FP8: {target} has no matrix units for it, wanted one of {names}")
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
    index = x.get_device()
    vec = 16 // x.element_size()
    x, x_strides = rows(x, vec)
    nheads, head_dim = x.shape[-2:]
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    # For packed tensors, count all rows, not the caller's max_seqlen: if that is too small, the grid would lack blocks.
    seqlen = x.shape[1] if cu_seqlens is None else x.shape[0]
    if not transposed:
        y = torch.empty(x.shape, dtype=dtype, device=x.device)
        y_strides = strides_of(y, _VEC)
    else:
        unit = planning.FP8.columns
        columns = (-(-seqlen // unit) if cu_seqlens is None else seqlen // unit + batch + 1) * unit
        outer = (batch,) if cu_seqlens is None else ()
        y = torch.empty((*outer, nheads, head_dim, columns), dtype=dtype, device=x.device)
        *first, by_head, by_dim, _ = y.stride()
        y_strides = (first[0] // _VEC if first else 0, by_dim // _VEC, by_head // _VEC)
    op = "fp8-cast-v" if transposed else "fp8-cast"
    kernel = find_one(op, index, x.dtype, head_dim)
    blocks, planes, flags = grid_of(kernel.block_m, seqlen, batch, nheads, x.numel() // (nheads * head_dim))
    if cu_seqlens is not None:
        flags |= HAS_CU_SEQLENS_Q
    pieces, limit = -(-head_dim // bucket(head_dim, op)), planning.FP8.largest[FP8_TYPES[dtype]]
    grid = (blocks * planes, pieces, 1)
    # In chunks of one plane: no two programs read the same rows.
    values: dict[str, Value] = {
        **named("x", x_strides), **named("y", y_strides), "x": x, "y": y.view(torch.uint8), "cu_seqlens_q": cu_seqlens,
        "nheads": nheads, "seqlen": seqlen, "head_dim": head_dim // vec,
        "m_blocks": blocks, "planes": nheads * batch, "chunk": 1, "flags": flags,
    }  # fmt: skip
    if x.element_size() == 1:
        limit, amax = 0.0, None
    elif descale is not None:
        limit, amax = -limit, None
    else:
        descale = torch.empty((batch, nheads), dtype=torch.float32, device=x.device)
        if blocks * planes == 0:  # no program, which would write it
            descale.fill_(1.0)
        amax = torch.empty((planes, blocks, pieces), dtype=torch.float32, device=x.device)
        launch(find_one("fp8-amax", index, x.dtype, head_dim), grid, {**values, "amax": amax})
    assert descale is not None
    launch(kernel, grid, {**values, "amax": descale if amax is None else amax, "descale": descale, "limit": limit})
    return y, descale


def fp8_forward(call: AttentionCall) -> Fp8Result:
    """See `protocol.Backend.fp8_forward`."""
    FP8.refuse(call, "call flash_attn_func")
    q, rng_state = call.q, call.options.rng_state
    index, head_dim = q.get_device(), q.shape[-1]
    dtype = fp8_format(q)
    if q.element_size() == 1 and q.dtype is not dtype:
        raise TypeError(f"q: got {q.dtype}, wanted {dtype}, the format of this GPU")
    (q8, k8, v8), factors = _cast_inputs(call, dtype)
    inputs = inputs_of(replace(call, q=q8, k=k8, v=k8))
    result = torch.empty(q.shape, dtype=out_dtype(q), device=q.device)
    lse = torch.empty(inputs.lse_shape, dtype=torch.float32, device=q.device)
    if call.cu_seqlens_q is not None:
        result.zero_()  # no program writes rows outside of every sequence
        lse.fill_(float("inf"))
    if call.options.dropout_p > 0.0 and rng_state is None:
        rng_state = draw_rng_state(q.device)
    kernel = find_one("fp8-fwd", index, dtype, head_dim, score_kind(call))
    seqlen_q = q.shape[1] if call.cu_seqlens_q is None else q.shape[0]  # of packed rows all, as in `cast`
    m_blocks, planes, packed = grid_of(kernel.block_m, seqlen_q, inputs.batch, inputs.heads, inputs.total_q)
    *first, by_head, by_dim, _ = v8.stride()
    q_descale, k_descale, v_descale = factors
    launch(
        kernel,
        (m_blocks * planes, 1, 1),
        {
            **inputs.values, **named("out", strides_of(result, _VEC)), "v": v8, "out": result, "lse": lse,
            "stride_vb": first[0] // _VEC if first else 0, "stride_vd": by_dim // _VEC, "stride_vh": by_head // _VEC,
            "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale, "rng_state": rng_state,
            "seqlen_q": seqlen_q, "m_blocks": m_blocks, "planes": inputs.heads * inputs.batch,
            "chunk": chunk_of(planes, is_even(call), kernel), "kind": planning.FP8.results.index(DTYPES[result.dtype]),
            "flags": packed | inputs.flags,
        },
    )  # fmt: skip
    return Fp8Result(result, lse, rng_state, factors)


def _cast_inputs(call: AttentionCall, dtype: torch.dtype) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """q, k and transposed v in FP8, and the descale of each."""
    assert call.descales is not None
    small, factors = [], []
    for x, descale, cu_seqlens, transposed in (
        (call.q, call.descales[0], call.cu_seqlens_q, False),
        (call.k, call.descales[1], call.cu_seqlens_k, False),
        (call.v, call.descales[2], call.cu_seqlens_k, True),
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
    return tuple(small), tuple(factors)
