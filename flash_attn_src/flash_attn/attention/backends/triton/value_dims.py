"""Pads calls whose v has another head dim than q and k for the compiled kernels: see `kernels.value_dims`."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from flash_attn.call.calls import AttentionCall, GradientCall, replace
from flash_attn.kernels.value_dims import served_pair


def padded(call: AttentionCall) -> AttentionCall | None:
    """The call padded with zeros to the head dims of a kernel. None if a kernel serves the call unpadded.

    Kernels with a bias need the same head dim for v as for q.
    """
    pair = call.q.shape[-1], call.v.shape[-1]
    served = served_pair(*pair) if call.options.attn_bias is None else (max(pair), max(pair))
    if served == pair:
        return None
    width, width_v = served
    return replace(call, q=widened(call.q, width), k=widened(call.k, width), v=widened(call.v, width_v), out=None)


def padded_gradients(gradients: GradientCall) -> GradientCall | None:
    """Pads a backward likewise.

    Its dq, dk and dv are new tensors, from which `cut` writes the caller's. dbias is the caller's tensor.
    """
    call = padded(gradients.forward)
    if call is None:
        return None
    width_v = call.v.shape[-1]
    return GradientCall(
        call, widened(gradients.dout, width_v), widened(gradients.out, width_v), gradients.softmax_lse,
        torch.empty_like(call.q), torch.empty_like(call.k), torch.empty_like(call.v), gradients.dbias,
    )  # fmt: skip


def cut(wide: GradientCall, gradients: GradientCall) -> None:
    """Writes the gradients of a call from the gradients of the padded call."""
    for narrow, computed in ((gradients.dq, wide.dq), (gradients.dk, wide.dk), (gradients.dv, wide.dv)):
        narrow.copy_(computed[..., : narrow.shape[-1]])


def widened(x: torch.Tensor, width: int) -> torch.Tensor:
    """x with zeros up to so many columns."""
    missing = width - x.shape[-1]
    return pad(x, (0, missing)) if missing else x
