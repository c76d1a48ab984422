"""Attention over the blocks of a mask: flash_attn_block_sparse_func, its custom ops and its gradient."""

from __future__ import annotations

from typing import Any

import torch

from flash_attn import backends
from flash_attn.arguments import check_dense
from flash_attn.autocast import cast
from flash_attn.block_mask import BlockMask
from flash_attn.calls import AttentionCall, GradientCall, Options, maybe_contiguous, new_out
from flash_attn.kernels.operations import OPERATIONS
from flash_attn.tracing import refuse_tangents_of_an_op

MAX_HEAD_DIM = OPERATIONS["sparse-fwd"].sizes[-1]
_OPTIONS = "Tensor seen, SymInt block_q, SymInt block_k, float softmax_scale, bool causal, SymInt left, SymInt right"


def flash_attn_block_sparse_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_mask: BlockMask,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of q (batch, seqlen_q, heads, head_dim) and k, v (batch, seqlen_k, heads_k, head_dim) over the blocks
    that a mask shows: `flash_attn.sparse.BlockMask`, for all heads or for each.

    fp16, bf16 or fp32, head dims up to 256, heads a multiple of heads_k, forward and backward. softmax_scale: positive,
    1 / sqrt(head_dim) by default. causal and window_size hide single keys in visible blocks, aligned to the last query
    and the last key. A query that sees no key gets 0. Returns out like q; with return_lse also the logsumexp of the
    scaled scores, fp32 (batch, heads, seqlen_q), +inf for a query without a key.

    Time and memory follow the number of visible blocks. Nothing of a mask is kept: each call reads what it holds then.

    Under torch.autocast q, k and v are cast to its type, unless all are fp16 or all bf16. TypeError or ValueError,
    which name the argument, for shapes, types and devices that do not fit. NotImplementedError in forward mode.
    """
    if not isinstance(block_mask, BlockMask):
        raise TypeError(
            f"block_mask: got {type(block_mask).__name__}, wanted flash_attn.sparse.BlockMask: "
            "BlockMask(seen, block_size), or BlockMask.of_lists"
        )
    if type(return_lse) is not bool:
        raise TypeError(f"return_lse: got {return_lse!r}, wanted True or False")
    q, k, v = cast(q, k, v)
    call = AttentionCall(q, k, v, Options(softmax_scale, causal, window_size))
    check_dense(call)
    batch, seqlen_q, heads, head_dim = q.shape
    if head_dim > MAX_HEAD_DIM or v.shape[-1] != head_dim:
        raise ValueError(
            f"head_dim: got {head_dim} and {v.shape[-1]} for v, wanted the same and at most {MAX_HEAD_DIM} with a "
            "block mask"
        )
    if call.options.scale <= 0.0:
        raise ValueError(f"softmax_scale: got {call.options.scale}, wanted a positive number with a block mask")
    block_mask.check(batch, heads, seqlen_q, k.shape[1], q.device)
    # A window that reaches every key is open after the checks.
    options = (block_mask.seen, *block_mask.block_size, call.options.scale, causal, *call.options.window_size)
    short = -head_dim % 8
    if short:
        q, k, v = (torch.nn.functional.pad(x, (0, short)) for x in (q, k, v))
    out, lse = torch.ops.flash_attn._block_sparse_forward(q, k, v, *options)
    out = out[..., :head_dim] if short else out
    return (out, lse) if return_lse else out


def _call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: tuple[Any, ...]) -> AttentionCall:
    seen, block_q, block_k, softmax_scale, causal, left, right = options
    refuse_tangents_of_an_op(q, k, v)
    q, k, v = maybe_contiguous(q), maybe_contiguous(k), maybe_contiguous(v)
    mask = BlockMask(seen, (block_q, block_k))
    return AttentionCall(q, k, v, Options(softmax_scale, causal, (left, right), block_mask=mask))


@torch.library.custom_op(
    "flash_attn::_block_sparse_forward",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
)
def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = _call(q, k, v, options)
    call.out = new_out(call.q, call.v)
    result = backends.select(q).forward(call)
    return result.out, result.softmax_lse


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


@torch.library.custom_op(
    "flash_attn::_block_sparse_backward",
    mutates_args=(),
    schema=(
        "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
        f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)"
    ),
)
def _backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, softmax_lse: torch.Tensor,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    call = _call(q, k, v, options)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    backends.select(q).backward(GradientCall(call, maybe_contiguous(dout), out, softmax_lse, dq, dk, dv))
    return dq, dk, dv


@_backward.register_fake
def _backward_fake(
    dout: torch.Tensor,  # noqa: ARG001
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    return dq, dk, dv


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, seen, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, seen)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    if dlse is not None:
        raise RuntimeError("return_lse: attention with a block mask has no gradient of the logsumexp: detach it")
    gradients: tuple[torch.Tensor | None, ...] = (None, None, None)
    if dout is not None:
        q, k, v, out, lse, seen = ctx.saved_tensors
        gradients = torch.ops.flash_attn._block_sparse_backward(dout, q, k, v, out, lse, seen, *ctx.options)
    return *gradients, *(None,) * (1 + len(ctx.options))


_forward.register_autograd(_gradients, setup_context=_keep)
