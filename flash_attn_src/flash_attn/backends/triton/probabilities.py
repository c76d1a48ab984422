"""The probabilities of a forward with dropout, S_dmask, by a kernel of their own."""

from __future__ import annotations

import torch

from flash_attn.backends.triton.inputs import Inputs
from flash_attn.backends.triton.kernels import find


def probabilities_of(inputs: Inputs, kind: str, lse: torch.Tensor, rng_state: torch.Tensor, flags: int) -> torch.Tensor:
    """(batch, heads, seqlen_q, seqlen_k) in q's dtype, negative where dropped. flags: of the forward's launch."""
    q, k = inputs.call.q, inputs.call.k
    heads, _, seqlen_q, seqlen_k, _ = inputs.shapes
    (kernel,) = find(("probabilities",), q.get_device(), q.dtype, q.shape[-1], kind)
    probabilities = torch.empty((inputs.batch, heads, seqlen_q, seqlen_k), dtype=q.dtype, device=q.device)
    m_blocks, n_blocks = -(-seqlen_q // kernel.block_m), -(-seqlen_k // kernel.block_n)
    kernel.launch(
        (m_blocks * n_blocks * heads * inputs.batch, 1, 1),
        (
            q, k, lse,  # inputs
            probabilities,  # output
            *inputs.optional, rng_state,
        ),
        (
            *inputs.scores,
            *inputs.strides[:6], *inputs.lse_strides, inputs.head_stride,  # strides
            *inputs.shapes,
            *inputs.window,
            m_blocks, n_blocks, flags,  # grid
        ),
    )  # fmt: skip
    return probabilities
