"""Attention with a mask of blocks, ranges and ids: its custom ops and its gradient. The public functions are in
`flash_attn.sparse` and `flash_attn.ranges`.
"""

from __future__ import annotations

from typing import Any

import torch

from flash_attn.attention import backends
from flash_attn.attention.operators.autograd import gradients_of
from flash_attn.attention.operators.sharding import is_distributed
from flash_attn.call.arguments import check_dense
from flash_attn.call.autocast import cast
from flash_attn.call.block_mask import BlockMask
from flash_attn.call.calls import AttentionCall, GradientCall, Options, maybe_contiguous, new_out
from flash_attn.call.mask import Mask
from flash_attn.call.options import WITH_MASK
from flash_attn.call.tracing import is_traced, refuse_tangents_of_an_op
from flash_attn.kernels.operations import OPERATIONS

MAX_HEAD_DIM = OPERATIONS["sparse-fwd"].sizes[-1]
_OPTIONS = (
    "Tensor? seen, Tensor? ranges, Tensor? ids_q, Tensor? ids_k, Tensor? hidden, Tensor? s_aux, SymInt block_q, "
    "SymInt block_k, float softmax_scale, bool causal, SymInt left, SymInt right"
)
_TENSORS = 6  # the options that are tensors
_RESULTS = (("_masked_forward", ("out", "softmax_lse")), ("_masked_backward", ("dq", "dk", "dv", "softmax_d")))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, options: Options, *, return_lse: bool = False
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of dense tensors over the keys that a mask shows; options: scale, causal, window and sinks.

    Raises what the public functions say, and NotImplementedError for another option.
    """
    if type(return_lse) is not bool:
        raise TypeError(f"return_lse: got {return_lse!r}, wanted True or False")
    q, k, v = cast(q, k, v)
    call = AttentionCall(q, k, v, options)
    check_dense(call)
    WITH_MASK.refuse(call, "leave it out")
    batch, seqlen_q, heads, head_dim = q.shape
    if head_dim > MAX_HEAD_DIM or v.shape[-1] != head_dim:
        raise ValueError(
            f"head_dim: got {head_dim} and {v.shape[-1]} for v, wanted the same and at most {MAX_HEAD_DIM} with a mask"
        )
    if options.scale <= 0.0:
        raise ValueError(f"softmax_scale: got {options.scale}, wanted a positive number with a mask")
    mask.check(batch, heads, seqlen_q, k.shape[1], q.device)
    short = -head_dim % 8
    if short:
        q, k, v = (torch.nn.functional.pad(x, (0, short)) for x in (q, k, v))
    arguments = as_arguments(mask, options)
    refuse_tangents_of_an_op(q, k, v)
    if is_distributed(q, _RESULTS) or is_traced(q, k, v, *arguments[:_TENSORS]):
        out, lse = torch.ops.flash_attn._masked_forward(q, k, v, *arguments)
    else:  # dispatching through a custom op costs more than a small kernel
        out, lse = _Masked.apply(q, k, v, *arguments)
    out = out[..., :head_dim] if short else out
    return (out, lse) if return_lse else out


def as_arguments(mask: Mask, options: Options) -> tuple[Any, ...]:
    """A mask and checked options in the order of the operators' schema."""
    seen = None if mask.blocks is None else mask.blocks.seen
    # A window that reaches every key is open after the checks.
    return (
        seen, mask.ranges, mask.ids_q, mask.ids_k, mask.hidden, options.s_aux, *mask.block_size,
        options.scale, options.causal, *options.window_size,
    )  # fmt: skip


def _call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: tuple[Any, ...]) -> AttentionCall:
    seen, ranges, ids_q, ids_k, hidden, s_aux, block_q, block_k, softmax_scale, causal, left, right = arguments
    q, k, v = maybe_contiguous(q), maybe_contiguous(k), maybe_contiguous(v)
    blocks = None if seen is None else BlockMask(seen, (block_q, block_k))
    mask = Mask(blocks, ranges, ids_q, ids_k, hidden)
    options = Options(softmax_scale, causal, (left, right), s_aux=s_aux, mask=mask)
    return AttentionCall(q, k, v, options)


def _compute(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, softmax_lse). Where call.out is None, out has the strides of q if the head dims agree."""
    result = backends.select(call.q).forward(call)
    return result.out, result.softmax_lse


@torch.library.custom_op(
    "flash_attn::_masked_forward",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
)
def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = _call(q, k, v, arguments)
    call.out = new_out(call.q, call.v)  # as the fake has it
    return _compute(call)


@_forward.register_fake
def _forward_fake(
    q: torch.Tensor,
    k: torch.Tensor,  # noqa: ARG001
    v: torch.Tensor,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, seqlen_q, heads, _dim = q.shape
    lse_dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    return new_out(q, v), q.new_empty((batch, heads, seqlen_q), dtype=lse_dtype)


def _compute_gradients(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, softmax_lse: torch.Tensor,
    *arguments: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv, softmax_d)."""
    call = _call(q, k, v, arguments)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta = backends.select(q).backward(GradientCall(call, maybe_contiguous(dout), out, softmax_lse, dq, dk, dv))
    return dq, dk, dv, delta


_backward = torch.library.custom_op(
    "flash_attn::_masked_backward",
    mutates_args=(),
    schema=(
        "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
        f"{_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)(_compute_gradients)


@_backward.register_fake
def _backward_fake(
    dout: torch.Tensor,  # noqa: ARG001
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,  # noqa: ARG001
    softmax_lse: torch.Tensor,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    return dq, dk, dv, torch.empty_like(softmax_lse)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, *arguments = inputs
    ctx.save_for_backward(q, k, v, *output, *arguments[:_TENSORS])
    ctx.numbers = arguments[_TENSORS:]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    saved = ctx.saved_tensors
    q, k, v, _out, _lse, *tensors = saved
    call = _call(q, k, v, (*tensors, *ctx.numbers))
    dq, dk, dv, ds_aux, _ = gradients_of(ctx, call, saved, dout, dlse, _write_gradients)
    return (dq, dk, dv, *(None,) * (_TENSORS - 1), ds_aux, *(None,) * len(ctx.numbers))


def _write_gradients(gradients: GradientCall) -> torch.Tensor:
    """Writes dq, dk and dv, through the operator if a compiler has to see it; returns softmax_d."""
    call, dout, out, lse = gradients.forward, gradients.dout, gradients.out, gradients.softmax_lse
    mask = call.options.mask
    assert mask is not None
    into = gradients.dq, gradients.dk, gradients.dv
    if not is_traced(dout, call.q, call.k, call.v, *mask.parts.values()):
        return backends.select(call.q).backward(GradientCall(call, maybe_contiguous(dout), out, lse, *into))
    *computed, delta = torch.ops.flash_attn._masked_backward(
        dout, call.q, call.k, call.v, out, lse, *as_arguments(mask, call.options)
    )
    for x, y in zip(into, computed, strict=True):
        x.copy_(y)
    softmax_d: torch.Tensor = delta
    return softmax_d


_forward.register_autograd(_gradients, setup_context=_keep)


class _Masked(torch.autograd.Function):
    """The operator's forward and gradient, for eager mode."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, *arguments = inputs
        output = _compute(_call(q, k, v, tuple(arguments)))
        _keep(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return _gradients(ctx, dout, dlse)
