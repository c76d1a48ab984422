"""A bias of the scores for the Triton kernels, and its gradient."""

from __future__ import annotations

import torch

from flash_attn.backends.triton.inputs import VEC, rows, window_of
from flash_attn.backends.triton.kernels import find_one
from flash_attn.calls import AttentionCall, GradientCall
from flash_attn.kernels.flags import BIAS_IS_FP32

# Rows of a tile of 256 span less than 2 GiB in fp32.
_MAX_ROW_STRIDE = 1 << 21

Strides = tuple[int, int, int]


def bias_of(call: AttentionCall) -> tuple[torch.Tensor, Strides, int]:
    """The bias for the kernels, its strides (batch, head, row) in elements (0 for a shared axis), and its flag.

    A table of distances is a bias whose rows begin one element before each other: the tensor begins at the first key of
    the first query. A bias is copied if its last dimension is strided. Strides of axes of size 1 are ignored. Raises
    ValueError for rows that are too far apart.
    """
    bias = call.options.attn_bias
    assert bias is not None
    is_table = bias.dim() == 3
    if (bias.stride(-1) != 1 and bias.shape[-1] > 1) or (not is_table and _row_stride(bias) >= _MAX_ROW_STRIDE):
        bias = bias.contiguous()
    row_stride = -1 if is_table else _row_stride(bias)
    if row_stride >= _MAX_ROW_STRIDE:
        raise ValueError(f"attn_bias: got {bias.shape[-1]} keys, wanted less than {_MAX_ROW_STRIDE} with a bias")
    by_batch = bias.stride(0) if bias.shape[0] > 1 else 0
    by_head = bias.stride(1) if bias.shape[1] > 1 else 0
    if is_table:
        bias = bias[..., max(call.q.shape[1] - 1, 0) :]
    return bias, (by_batch, by_head, row_stride), BIAS_IS_FP32 if bias.dtype is torch.float32 else 0


def _row_stride(bias: torch.Tensor) -> int:
    return bias.stride(2) if bias.shape[2] > 1 else bias.shape[3]


def bias_gradient(gradients: GradientCall, delta: torch.Tensor, norms: torch.Tensor | None) -> None:
    """Fills gradients.dbias, which is contiguous. delta: rowsum(dout * out), as the kernel of dq left it; norms: see
    `gradients`, None where the kernels take none. Every sum has a fixed order."""
    call, dbias = gradients.forward, gradients.dbias
    assert dbias is not None
    batch, seqlen_q, nheads, head_dim = call.q.shape
    seqlen_k, nheads_k = call.k.shape[1:3]
    dtype, index = call.q.dtype, call.q.get_device()
    is_table = dbias.dim() == 3
    kernel = find_one("bwd-ddiagonals" if is_table else "bwd-dbias", index, dtype, head_dim, "bias")
    vec = VEC[dtype]
    q, q_strides = rows(call.q, vec)
    k, k_strides = rows(call.k, vec)
    v, v_strides = rows(call.v, vec)
    dout, dout_strides = rows(gradients.dout, vec)
    bias, bias_strides, flags = bias_of(call)
    planes_b, planes_h = dbias.shape[:2]
    m_blocks, n_blocks = -(-seqlen_q // kernel.block_m), -(-seqlen_k // kernel.block_n)
    planes: tuple[int, ...] = (planes_b, planes_h)
    tiles: tuple[int, ...] = (m_blocks, n_blocks)
    programs, computed = m_blocks * n_blocks * planes_b * planes_h, dbias
    if is_table:
        planes, tiles = (), (m_blocks, n_blocks, 1 - m_blocks, m_blocks + n_blocks - 1)
        computed = dbias.new_zeros((batch, nheads, max(tiles[-1], 0), 2 * kernel.block_m), dtype=torch.float32)
        programs = batch * nheads * tiles[-1] if m_blocks * n_blocks else 0
    elif batch == 0:  # no sum, which the kernel would store
        dbias.zero_()
    kernel.launch(
        (programs, 1, 1),
        (
            q, k, v, dout, gradients.softmax_lse.contiguous(), delta, bias,  # inputs
            computed,  # output
            *(() if norms is None else (norms,)),  # optional input
        ),
        (
            call.options.scale, call.options.softcap,  # options
            *q_strides, *k_strides, *v_strides, *dout_strides, nheads * seqlen_q, seqlen_q, *bias_strides,  # strides
            batch, nheads, nheads // nheads_k, *planes, seqlen_q, seqlen_k, head_dim // vec,  # shapes
            *window_of(call),  # mask
            *tiles, flags,  # grid
        ),
    )  # fmt: skip
    if is_table:
        _add_diagonals(computed, m_blocks * kernel.block_m - seqlen_q, dbias)


def _add_diagonals(sums: torch.Tensor, skipped: int, dbias: torch.Tensor) -> None:
    """Fills dbias, a table of distances, from the sums of diagonals of tiles, whose halves overlap.

    sums: see `attn_bwd_ddiagonals`. skipped: distances before the first one of the table.
    """
    shared = [axis for axis in (0, 1) if dbias.shape[axis] == 1]
    sums = sums.sum(shared, keepdim=True) if shared else sums
    first, second = sums.chunk(2, -1)
    total = torch.nn.functional.pad(first, (0, 0, 0, 1))
    total[..., 1:, :] += second
    dbias.copy_(total.flatten(-2)[..., skipped : skipped + dbias.shape[-1]])
