"""Attention with a mask of blocks, ranges and ids, for `flash_attn.sparse` and `flash_attn.ranges`."""

from __future__ import annotations

from typing import Any

import torch

from flash_attn.attention.operators import dispatch
from flash_attn.attention.operators.autograd import keep, kept_gradients
from flash_attn.call.arguments import check_dense
from flash_attn.call.autocast import cast
from flash_attn.call.calls import AttentionCall, Options, maybe_contiguous
from flash_attn.call.mask import Mask
from flash_attn.call.options import WITH_MASK, option_tensors
from flash_attn.call.tracing import is_traced, refuse_tangents_of_an_op
from flash_attn.kernels.operations import OPERATIONS

MAX_HEAD_DIM = OPERATIONS["sparse-fwd"].sizes[-1]


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, options: Options, *, return_lse: bool = False
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of dense tensors over the keys that a mask shows.

    Raises what the public functions say, and NotImplementedError for an option that kernels with a mask lack.
    """
    if type(return_lse) is not bool:
        raise TypeError(f"return_lse: got {return_lse!r}, wanted True or False")
    q, k, v = cast(q, k, v)
    options.mask = mask
    call = AttentionCall(q, k, v, options)
    check_dense(call)
    WITH_MASK.refuse(call, "leave it out")
    batch, seqlen_q, heads, head_dim = q.shape
    if head_dim > MAX_HEAD_DIM or v.shape[-1] != head_dim:
        raise ValueError(
            f"head_dim: got {head_dim} and {v.shape[-1]} for v, wanted the same and at most {MAX_HEAD_DIM} with a mask"
        )
    mask.check(batch, heads, seqlen_q, k.shape[1], q.device)
    short = -head_dim % 8
    if short:
        q, k, v = (torch.nn.functional.pad(x, (0, short)) for x in (q, k, v))
    call.q, call.k, call.v = (maybe_contiguous(x) for x in (q, k, v))
    refuse_tangents_of_an_op(q, k, v)
    if is_traced(call.q, call.k, call.v, *option_tensors(options)):  # the operator has the gradient
        out, lse, *_ = dispatch.forward(call)
    else:
        out, lse = _Masked.apply(call, call.q, call.k, call.v, options.s_aux)
    out = out[..., :head_dim] if short else out
    return (out, lse) if return_lse else out


class _Masked(torch.autograd.Function):
    """The gradients of a checked call in eager mode: dispatching through a custom op costs more than a small kernel."""

    @staticmethod
    def forward(ctx: Any, call: AttentionCall, *_: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_others = dispatch.forward(call)
        keep(ctx, call, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        dout = None if dout is None else maybe_contiguous(dout)
        *gradients, _ = kept_gradients(ctx, dout, dlse, dispatch.backward)
        return None, *gradients
