"""The custom ops of attention with INT8 queries and keys, and `forward` and `varlen_forward`, which call them.

As in flash_attn.attention.operators.dispatch: eager calls go straight to the backend, traced ones through an op.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from flash_attn.attention import backends
from flash_attn.attention.operators import flops
from flash_attn.call.calls import AttentionCall, Options
from flash_attn.call.tracing import is_traced

# A row in INT8 is a multiple of 16 bytes.
_HEAD_DIM_STEP = 16


def _new(q: torch.Tensor, heads_first: bool) -> torch.Tensor:
    """A tensor like q (batch, seqlen, heads, head_dim); in memory heads come before or after queries."""
    batch, seqlen, heads, head_dim = q.shape
    shape = (batch, heads, seqlen, head_dim) if heads_first else q.shape
    out = torch.empty(shape, dtype=q.dtype, device=q.device)
    return out.transpose(1, 2) if heads_first else out


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    smooth_k: bool,
    heads_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = _new(q, heads_first)
    return out, _into(out, q, k, v, softmax_scale, causal, smooth_k)


def _into(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, smooth_k: bool
) -> torch.Tensor:
    """Writes out; returns the logsumexp, without the mean that smooth_k subtracts."""
    head_dim = q.shape[-1]
    mean = k.mean(1, dtype=torch.float32) if smooth_k and k.shape[1] else None
    missing = -head_dim % _HEAD_DIM_STEP
    if missing:
        wide_q, wide_k, wide_v = (pad(x, (0, missing)) for x in (q, k, v))
        call = AttentionCall(wide_q, wide_k, wide_v, Options(scale, causal))
        wide, lse = backends.select(q).int8_forward(call, None if mean is None else pad(mean, (0, missing)))
        out.copy_(wide[..., :head_dim])
    else:
        _, lse = backends.select(q).int8_forward(AttentionCall(q, k, v, Options(scale, causal), out=out), mean)
    if mean is not None:
        grouped = q.unflatten(2, (k.shape[2], -1)).float()  # [batch, seqlen_q, heads_k, group, head_dim]
        lse += scale * torch.einsum("bmhgd,bhd->bhgm", grouped, mean).flatten(1, 2)
    return lse


def _run_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    smooth_k: bool,
) -> torch.Tensor:
    starts_q, starts_k = torch.stack([cu_seqlens_q, cu_seqlens_k]).tolist()
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for row, end_row, key, end_key in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
        if not (0 <= end_row - row <= max_seqlen_q and 0 <= end_key - key <= max_seqlen_k):
            raise ValueError(
                f"max_seqlen_q, max_seqlen_k: got {max_seqlen_q} and {max_seqlen_k}, and a sequence of {end_row - row} "
                f"queries and {end_key - key} keys in cu_seqlens_q and cu_seqlens_k"
            )
        if end_row > row and end_key > key:
            rows, keys = slice(row, end_row), slice(key, end_key)
            _into(out[None, rows], q[None, rows], k[None, keys], v[None, keys], softmax_scale, causal, smooth_k)
    return out


_forward_op = torch.library.custom_op(
    "flash_attn::_int8_forward",
    _run,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal, bool smooth_k, bool heads_first) "
    "-> (Tensor, Tensor)",
)
_varlen_op = torch.library.custom_op(
    "flash_attn::_int8_varlen_forward",
    _run_varlen,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, float softmax_scale, bool causal, bool smooth_k) -> Tensor",
)


@_forward_op.register_fake
def _fake(
    q: torch.Tensor,
    k: torch.Tensor,  # noqa: ARG001
    v: torch.Tensor,  # noqa: ARG001
    softmax_scale: float,  # noqa: ARG001
    causal: bool,  # noqa: ARG001
    smooth_k: bool,  # noqa: ARG001
    heads_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, seqlen, heads, _ = q.shape
    return _new(q, heads_first), torch.empty((batch, heads, seqlen), dtype=torch.float32, device=q.device)


@_varlen_op.register_fake
def _varlen_fake(q: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


flops.offer()


def forward(call: AttentionCall, smooth_k: bool, heads_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, softmax_lse) of a checked call, eager or traced.

    out is (batch, seqlen_q, heads, head_dim). With heads_first, heads come before queries in its memory.
    """
    run = _forward_op if is_traced(call.q, call.k, call.v) else _run
    return run(call.q, call.k, call.v, call.options.scale, call.options.causal, smooth_k, heads_first)


def varlen_forward(call: AttentionCall, smooth_k: bool) -> torch.Tensor:
    """out of a checked call of packed sequences, eager or traced. The host reads where the sequences begin."""
    assert call.cu_seqlens_q is not None
    assert call.cu_seqlens_k is not None
    traced = is_traced(call.q, call.k, call.v, call.cu_seqlens_q, call.cu_seqlens_k)
    return (_varlen_op if traced else _run_varlen)(
        call.q, call.k, call.v, call.cu_seqlens_q, call.cu_seqlens_k, call.max_seqlen_q, call.max_seqlen_k,
        call.options.scale, call.options.causal, smooth_k,
    )  # fmt: skip
