"""INT8 queries and keys in plain PyTorch:

the cast of a tensor, and attention of cast tensors. It is the kernels' oracle.
"""

from __future__ import annotations

import torch

from flash_attn.attention.backends.torch import attention
from flash_attn.call.calls import AttentionCall, replace
from flash_attn.call.options import INT8
from flash_attn.kernels.int8_rows import KEY_ROWS, QUERY_ROWS


def round_trip(x: torch.Tensor, block: int, mean: torch.Tensor | None) -> torch.Tensor:
    """x (batch, seqlen, heads, head_dim) as it comes out of INT8, fp32, with one scale for `block` rows of a head.

    mean: fp32 (batch, heads, head_dim), subtracted from each row first.
    """
    x = x.float() if mean is None else x.float() - mean[:, None]
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % block))
    blocks = padded.unflatten(1, (-1, block))
    scale = blocks.abs().amax((2, 4), keepdim=True).clamp_min(2.0**-100) / 127
    numbers = blocks / scale
    rounded = (numbers + torch.where(numbers < 0, -0.5, 0.5)).trunc()
    return (rounded * scale).flatten(1, 2)[:, : x.shape[1]]


def int8_forward(call: AttentionCall, mean: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """See `protocol.Backend.int8_forward`."""
    INT8.refuse(call, "call flash_attn_func")
    with torch.no_grad():
        q, k = round_trip(call.q, QUERY_ROWS, None), round_trip(call.k, KEY_ROWS, mean)
        result = attention.forward(replace(call, q=q, k=k, v=call.v.float(), out=None))
        out = result.out.to(call.q.dtype)
        return (out if call.out is None else call.out.copy_(out)), result.softmax_lse
