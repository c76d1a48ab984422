"""The probabilities of a forward with dropout, S_dmask, by a kernel of their own."""

from __future__ import annotations

import torch

from flash_attn.attention.backends.triton.inputs import Inputs
from flash_attn.attention.backends.triton.kernels import find
from flash_attn.core.arguments import Values
from flash_attn.core.protocol import launch


def probabilities_of(inputs: Inputs, kind: str, values: Values) -> torch.Tensor:
    """(batch, heads, seqlen_q, seqlen_k) in q's dtype, negative where dropped. values: of the forward's launch."""
    q, seqlen_q, seqlen_k = inputs.call.q, inputs.seqlen_q, inputs.call.longest_k
    (kernel,) = find(("probabilities",), q.get_device(), q.dtype, q.shape[-1], kind)
    shape = (inputs.batch, inputs.heads, seqlen_q, seqlen_k)
    probabilities = torch.empty(shape, dtype=q.dtype, device=q.device)
    m_blocks, n_blocks = -(-seqlen_q // kernel.block_m), -(-seqlen_k // kernel.block_n)
    grid = (m_blocks * n_blocks * inputs.heads * inputs.batch, 1, 1)
    launch(kernel, grid, {**values, "dmask": probabilities, "m_blocks": m_blocks, "n_blocks": n_blocks})
    return probabilities
