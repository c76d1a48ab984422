"""A bias of the scores for the Triton kernels, and its gradient."""

from __future__ import annotations

import torch

from flash_attn.attention.backends.triton.kernels import find_one
from flash_attn.attention.backends.triton.sums import add_up
from flash_attn.call.calls import AttentionCall, GradientCall
from flash_attn.core.arguments import Value, Values
from flash_attn.core.protocol import launch
from flash_attn.kernels.flags import BIAS_IS_FP32, MAX_BIAS_ROW


def bias_of(call: AttentionCall) -> tuple[dict[str, Value], int]:
    """The bias and its strides in elements (0 for a shared axis) as the kernels take them, by name, and its flag.

    A table of distances is a bias whose rows begin one element before each other: the tensor begins at the first key of
    the first query. A bias is copied if its last dimension is strided. Strides of axes of size 1 are ignored. Raises
    ValueError for rows that are too far apart.
    """
    bias = call.options.attn_bias
    assert bias is not None
    is_table = bias.dim() == 3
    if (bias.stride(-1) != 1 and bias.shape[-1] > 1) or (not is_table and _row_stride(bias) >= MAX_BIAS_ROW):
        bias = bias.contiguous()
    row_stride = -1 if is_table else _row_stride(bias)
    if row_stride >= MAX_BIAS_ROW:
        raise ValueError(f"attn_bias: got {bias.shape[-1]} keys, wanted less than {MAX_BIAS_ROW} with a bias")
    by_batch = bias.stride(0) if bias.shape[0] > 1 else 0
    by_head = bias.stride(1) if bias.shape[1] > 1 else 0
    if is_table:
        bias = bias[..., max(call.q.shape[1] - 1, 0) :]
    values: dict[str, Value] = {"bias": bias, "stride_sb": by_batch, "stride_sh": by_head, "stride_sm": row_stride}
    return values, BIAS_IS_FP32 if bias.dtype is torch.float32 else 0


def _row_stride(bias: torch.Tensor) -> int:
    return bias.stride(2) if bias.shape[2] > 1 else bias.shape[3]


def bias_gradient(gradients: GradientCall, values: Values) -> None:
    """Fills gradients.dbias, which is contiguous. values: of the launch of `attn_bwd_dkdv`. Every sum has a fixed
    order."""
    call, dbias = gradients.forward, gradients.dbias
    assert dbias is not None
    batch, nheads = call.batch, call.q.shape[-2]
    is_table = dbias.dim() == 3
    op = "bwd-ddiagonals" if is_table else "bwd-dbias"
    kernel = find_one(op, call.q.get_device(), call.q.dtype, call.q.shape[-1], "bias")
    m_blocks, n_blocks = -(-call.longest_q // kernel.block_m), -(-call.longest_k // kernel.block_n)
    tiles: dict[str, Value] = {
        "batch": batch, "group": nheads // call.k.shape[-2], "m_blocks": m_blocks, "n_blocks": n_blocks,
    }  # fmt: skip
    if is_table:
        diagonals = m_blocks + n_blocks - 1
        sums = dbias.new_zeros((batch, nheads, 2, (diagonals + 1) * kernel.block_m), dtype=torch.float32)
        programs = batch * nheads * diagonals if m_blocks * n_blocks else 0
        tiles |= {"sums": sums, "first": 1 - m_blocks, "diagonals": diagonals}
    else:
        planes_b, planes_h = dbias.shape[:2]
        programs = m_blocks * n_blocks * planes_b * planes_h
        tiles |= {"dbias": dbias, "planes_b": planes_b, "planes_h": planes_h}
        if batch == 0:  # no sum, which the kernel would store
            dbias.zero_()
    launch(kernel, (programs, 1, 1), {**values, **tiles})
    if is_table:
        planes_b, planes_h, _ = dbias.shape
        group, length = 2 * nheads // planes_h, (diagonals + 1) * kernel.block_m
        strides = group * length, 2 * nheads * length, length
        first = sums.flatten()[m_blocks * kernel.block_m - call.longest_q :]
        add_up(first, dbias[:, None], batch // max(planes_b, 1) * group, group, strides)
