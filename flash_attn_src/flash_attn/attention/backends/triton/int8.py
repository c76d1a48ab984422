"""The Triton backend with INT8 queries and keys: casts, with one scale for a block of rows, and the forward."""

from __future__ import annotations

import torch

from flash_attn.attention.backends.triton.grid import chunk_of, is_even
from flash_attn.attention.backends.triton.inputs import VEC, inputs_of, named, rows, strides_of
from flash_attn.attention.backends.triton.kernels import find_one
from flash_attn.call.calls import AttentionCall
from flash_attn.call.options import INT8
from flash_attn.core import device
from flash_attn.core.protocol import launch
from flash_attn.kernels import targets
from flash_attn.kernels.operation import INT8_FAMILIES


def int8_forward(call: AttentionCall, mean: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """See `protocol.Backend.int8_forward`."""
    INT8.refuse(call, "call flash_attn_func")
    _check_target(device.of(call.q.get_device()).target)
    inputs = inputs_of(call)
    q = call.q
    q8, q_scales = _cast("int8-cast-q", q, None)
    k8, k_scales = _cast("int8-cast-k", call.k, mean)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if call.out is None else call.out
    lse = torch.empty(inputs.lse_shape, dtype=torch.float32, device=q.device)
    kernel = find_one("int8-fwd", q.get_device(), q.dtype, q.shape[-1])
    m_blocks, planes = -(-inputs.seqlen_q // kernel.block_m), inputs.batch * inputs.heads
    launch(
        kernel,
        (m_blocks * planes, 1, 1),
        {
            **inputs.values, **named("out", strides_of(out, VEC[q.dtype])),
            "q": q8, "k": k8, "out": out, "lse": lse, "q_scales": q_scales, "k_scales": k_scales,
            "m_blocks": m_blocks, "planes": planes, "chunk": chunk_of(planes, is_even(call), kernel),
        },
    )  # fmt: skip
    return out, lse


def _check_target(target: str) -> None:
    """Raises NotImplementedError for a GPU without these kernels."""
    if targets.get(target).family not in INT8_FAMILIES:
        names = [
            row.name for row in targets.TARGETS.values() if row.family in INT8_FAMILIES[:-1] and not row.is_generic
        ]
        raise NotImplementedError(
            f"attention with INT8 queries and keys has no kernels for {target}, only for {', '.join(names)}: call "
            "flash_attn_func"
        )


def _cast(op: str, x: torch.Tensor, mean: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """x (batch, seqlen, heads, head_dim) in INT8, dense (batch, heads, seqlen, head_dim); its scales.

    mean: fp32 (batch, heads, head_dim), subtracted from each row.
    """
    x, strides = rows(x, VEC[x.dtype])
    batch, seqlen, nheads, head_dim = x.shape
    kernel = find_one(op, x.get_device(), x.dtype, head_dim)
    blocks = -(-seqlen // kernel.block_m)
    y = torch.empty((batch, nheads, seqlen, head_dim), dtype=torch.int8, device=x.device)
    scales = torch.empty((batch, nheads, blocks), dtype=torch.float32, device=x.device)
    launch(
        kernel,
        (blocks * nheads * batch, 1, 1),
        {
            **named("x", strides), "x": x, "mean": mean, "y": y, "scales": scales,
            "nheads": nheads, "seqlen": seqlen, "head_dim": head_dim // VEC[x.dtype], "blocks": blocks,
            "smooth": int(mean is not None),
        },
    )  # fmt: skip
    return y, scales
