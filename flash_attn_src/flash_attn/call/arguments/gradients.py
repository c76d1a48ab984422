"""The arguments that a backward has and its forward has not."""

from __future__ import annotations

import torch

from flash_attn.call.arguments.diagnosis import DENSE, check_alike, check_strided
from flash_attn.call.calls import AttentionCall, GradientCall, maybe_contiguous
from flash_attn.call.memory import refuse_shared
from flash_attn.call.options import FIELDS, option_tensors


def check_gradients(
    forward: AttentionCall,
    dout: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    given: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
) -> GradientCall:
    """Computes the gradients of a checked call into the given tensors; for None it allocates a tensor.

    rng_state is read, and checked, with dropout only. Raises ValueError for gradients that share memory with each other
    or with an input.
    """
    q, rng_state = forward.q, forward.options.rng_state
    head_dim_v = forward.v.shape[-1]
    check_alike("dout", dout, q, "q", head_dim_v)
    check_alike("out", out, q, "q", head_dim_v)
    inputs = (q, forward.k, forward.v)
    for name, gradient, like in zip(("dq", "dk", "dv"), given, inputs, strict=True):
        if gradient is not None:
            check_alike(name, gradient, like, name[1])
    rows = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
    exact = torch.promote_types(q.dtype, torch.float32)
    softmax_lse = _turned_back(softmax_lse, rows)
    _check_given("softmax_lse", softmax_lse, rows, exact, q)
    if rng_state is not None and not isinstance(rng_state, torch.Tensor):
        raise TypeError(f"rng_state: got {type(rng_state).__name__}, wanted what the forward returned")
    if forward.options.dropout_p > 0.0:
        if rng_state is None:
            raise ValueError("rng_state: got None, wanted what the forward returned, as dropout_p > 0")
        _check_given("rng_state", rng_state, (2,), torch.int64, q)
        if not rng_state.is_contiguous():
            raise ValueError(f"rng_state: got stride {rng_state.stride(0)}, wanted 1")
    read = {
        "dout": dout, "q": q, "k": forward.k, "v": forward.v, "out": out, "softmax_lse": softmax_lse,
        "cu_seqlens_q": forward.cu_seqlens_q, "cu_seqlens_k": forward.cu_seqlens_k,
    }  # fmt: skip
    read |= zip(FIELDS[type(forward.options)].tensors, option_tensors(forward.options), strict=True)
    refuse_shared(dict(zip(("dq", "dk", "dv"), given, strict=True)), read)
    dq, dk, dv = (torch.empty_like(x) if y is None else y for x, y in zip(inputs, given, strict=True))
    forward.q, forward.k, forward.v = maybe_contiguous(q), maybe_contiguous(forward.k), maybe_contiguous(forward.v)
    return GradientCall(
        forward, maybe_contiguous(dout), maybe_contiguous(out), softmax_lse.contiguous(), dq=dq, dk=dk, dv=dv
    )


def _turned_back(softmax_lse: torch.Tensor, rows: tuple[int, ...]) -> torch.Tensor:
    """softmax_lse, or its transpose if the caller passed a transposed view of what the forward wrote.

    Upstream reads the memory whatever the view, and diffusers 0.36 passes a transposed view. If heads and seqlen are
    equal, only the strides show it.
    """
    if isinstance(softmax_lse, torch.Tensor) and softmax_lse.layout is DENSE and softmax_lse.dim() == len(rows):
        turned = softmax_lse.transpose(-1, -2)
        as_written = tuple(softmax_lse.shape) == rows and softmax_lse.is_contiguous()
        if not as_written and tuple(turned.shape) == rows and turned.is_contiguous():
            return turned
    return softmax_lse


def _check_given(name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, q: torch.Tensor) -> None:
    """Checks that x can be the result of a forward of q."""
    check_strided(name, x, "what the forward returned")
    if tuple(x.shape) != shape or x.dtype is not dtype or x.device != q.device:
        raise ValueError(
            f"{name}: got {x.dtype} {tuple(x.shape)} on {x.device}, wanted {dtype} {shape} on {q.device}, "
            "what the forward returned"
        )
