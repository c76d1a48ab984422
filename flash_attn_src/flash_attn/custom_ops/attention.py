"""The custom ops flash_attn::* of attention, with their checks and fakes: what torch.compile and torch.export see.

Shapes, dtypes and units: flash_attn.backends.torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from flash_attn import dmask
from flash_attn.arguments import check_dense, check_gradients, check_per_sequence, check_varlen
from flash_attn.backends import select
from flash_attn.backends.torch.tiles import accumulation_dtype
from flash_attn.custom_ops import autograd as op_gradients

_Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]
_Fake = TypeVar("_Fake", bound=Callable[..., Any])

_OPTIONS = "float dropout_p, float softmax_scale, bool causal"
_DENSE_SCHEMA = (
    f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}, SymInt window_size_left, SymInt window_size_right, "
    "float softcap, Tensor? alibi_slopes, bool return_softmax) -> (Tensor, Tensor, Tensor, Tensor)"
)
_VARLEN_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    f"SymInt max_seqlen_k, {_OPTIONS}, SymInt window_size_left=-1, SymInt window_size_right=-1, "
    "float softcap=0.0, Tensor? alibi_slopes=None, bool return_softmax=False, Tensor? block_table=None, "
    "Tensor? leftpad_k=None, Tensor? seqused_k=None, bool zero_tensors=False) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
_GRADIENTS = (
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv"
)
_DENSE_BACKWARD_SCHEMA = (
    f"({_GRADIENTS}, {_OPTIONS}, SymInt window_size_left, SymInt window_size_right, float softcap, "
    "Tensor? alibi_slopes, bool deterministic, Tensor? rng_state=None) -> Tensor"
)
_VARLEN_BACKWARD_SCHEMA = (
    f"({_GRADIENTS}, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    f"{_OPTIONS}, SymInt window_size_left, SymInt window_size_right, float softcap, Tensor? alibi_slopes, "
    "bool deterministic, Tensor? rng_state=None, bool zero_tensors=False) -> Tensor"
)


def maybe_contiguous(x: torch.Tensor) -> torch.Tensor:
    """x, or a contiguous copy where its last dimension is strided."""
    return x.contiguous() if x.stride(-1) != 1 else x


def complete(q: torch.Tensor, results: _Results) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """An op returns tensors only: an empty S_dmask, a zero rng_state where there is no dropout."""
    out, softmax_lse, probabilities, rng_state = results
    if probabilities is None:
        s_dmask = torch.empty((0,), dtype=q.dtype, device=q.device)
    else:
        s_dmask = dmask.scaled(probabilities, q.shape[-1])
    if rng_state is None:
        rng_state = torch.zeros((2,), dtype=torch.int64, device=q.device)
    return out, softmax_lse, s_dmask, rng_state


def fake_results(
    q: torch.Tensor, lse_shape: tuple[int, ...], dmask_shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.empty(q.shape, dtype=q.dtype, device=q.device),
        torch.empty(lse_shape, dtype=accumulation_dtype(q.dtype), device=q.device),
        torch.empty(dmask_shape, dtype=q.dtype, device=q.device),
        torch.empty((2,), dtype=torch.int64, device=q.device),
    )


def gradients(inputs: tuple[torch.Tensor, ...], given: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor, ...]:
    """The tensors given for gradients, new ones for None."""
    return tuple(torch.empty_like(x) if y is None else y for x, y in zip(inputs, given, strict=True))


def _register_fake(op: Any) -> Callable[[_Fake], _Fake]:
    """Registers a fake of an op, which is also what runs where any tensor is on the meta device: it refuses tensors of
    several devices first."""
    signature = inspect.signature(op._init_fn)

    def register(fake: _Fake) -> _Fake:
        def checked(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            device = arguments["q"].device
            for name, x in arguments.items():
                if isinstance(x, torch.Tensor) and x.device != device:
                    raise ValueError(f"{name}: got a tensor on {x.device}, wanted {device} where q is")
            return fake(*args, **kwargs)

        op.register_fake(checked)
        return fake

    return register


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=(), schema=_DENSE_SCHEMA)
def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, softmax_lse, S_dmask, rng_state); S_dmask is (0,) unless asked for and dropout_p > 0."""
    left, right = check_dense(
        q, k, v, dropout_p, (window_size_left, window_size_right), softcap, alibi_slopes, softmax_scale, causal,
        False, return_softmax,
    )  # fmt: skip
    q, k, v = (maybe_contiguous(x) for x in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    results = select(q).forward(
        *(q, k, v, out, softmax_scale, causal, left, right, softcap),
        *(alibi_slopes, dropout_p, return_softmax, None),
        *(None, None, q.shape[1], k.shape[1], None, None, None),
    )
    return complete(q, results)


@_register_fake(_flash_attn_forward)
def _flash_attn_forward_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,  # noqa: ARG001
    dropout_p: float,
    softmax_scale: float,  # noqa: ARG001
    causal: bool,  # noqa: ARG001
    window_size_left: int,  # noqa: ARG001
    window_size_right: int,  # noqa: ARG001
    softcap: float,  # noqa: ARG001
    alibi_slopes: torch.Tensor | None,  # noqa: ARG001
    return_softmax: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, seqlen_q, heads, _ = q.shape
    dmask_shape = (batch, heads, seqlen_q, k.shape[1]) if return_softmax and dropout_p > 0.0 else (0,)
    return fake_results(q, (batch, heads, seqlen_q), dmask_shape)


@torch.library.custom_op("flash_attn::_flash_attn_varlen_forward", mutates_args=(), schema=_VARLEN_SCHEMA)
def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
    block_table: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    zero_tensors: bool = False,  # noqa: ARG001 - rows outside every sequence are always zero
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same for packed sequences; S_dmask is (batch, heads, max_seqlen_q, max_seqlen_k).

    leftpad_k, seqused_k: int32 (batch,), where each sequence's keys begin and how many there are.
    """
    left, right = check_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        (window_size_left, window_size_right), softcap, alibi_slopes, softmax_scale, causal, False, return_softmax,
        block_table,
    )  # fmt: skip
    check_per_sequence(q, cu_seqlens_q.shape[0] - 1, leftpad_k=leftpad_k, seqused_k=seqused_k)
    q, k, v = (maybe_contiguous(x) for x in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    results = select(q).forward(
        *(q, k, v, out, softmax_scale, causal, left, right, softcap),
        *(alibi_slopes, dropout_p, return_softmax, None),
        *(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, leftpad_k, block_table),
    )
    return complete(q, results)


@_register_fake(_flash_attn_varlen_forward)
def _flash_attn_varlen_forward_fake(
    q: torch.Tensor,
    k: torch.Tensor,  # noqa: ARG001
    v: torch.Tensor,  # noqa: ARG001
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,  # noqa: ARG001
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,  # noqa: ARG001
    causal: bool,  # noqa: ARG001
    window_size_left: int = -1,  # noqa: ARG001
    window_size_right: int = -1,  # noqa: ARG001
    softcap: float = 0.0,  # noqa: ARG001
    alibi_slopes: torch.Tensor | None = None,  # noqa: ARG001
    return_softmax: bool = False,
    block_table: torch.Tensor | None = None,  # noqa: ARG001
    leftpad_k: torch.Tensor | None = None,  # noqa: ARG001
    seqused_k: torch.Tensor | None = None,  # noqa: ARG001
    zero_tensors: bool = False,  # noqa: ARG001
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    total, heads, _ = q.shape
    batch = cu_seqlens_q.shape[0] - 1
    dmask_shape = (batch, heads, max_seqlen_q, max_seqlen_k) if return_softmax and dropout_p > 0.0 else (0,)
    return fake_results(q, (heads, total), dmask_shape)


@torch.library.custom_op(
    "flash_attn::_flash_attn_backward", mutates_args=("dq", "dk", "dv"), schema=_DENSE_BACKWARD_SCHEMA
)
def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor:
    """Writes dq, dk, dv (each that is not None); returns softmax_d (batch, heads, seqlen_q).

    softmax_lse may be transposed, (batch, seqlen_q, heads), if its memory is as the forward wrote it.
    """
    left, right = check_dense(
        q, k, v, dropout_p, (window_size_left, window_size_right), softcap, alibi_slopes, softmax_scale, causal,
        deterministic, False,
    )  # fmt: skip
    softmax_lse = check_gradients(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, rng_state)
    dq, dk, dv = gradients((q, k, v), (dq, dk, dv))
    dout, q, k, v, out = (maybe_contiguous(x) for x in (dout, q, k, v, out))
    return select(q).backward(
        *(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal),
        *(left, right, softcap, alibi_slopes, dropout_p, deterministic, rng_state),
        *(None, None, q.shape[1], k.shape[1]),
    )


@torch.library.custom_op(
    "flash_attn::_flash_attn_varlen_backward",
    mutates_args=("dq", "dk", "dv"),
    schema=_VARLEN_BACKWARD_SCHEMA,
)
def _flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
    zero_tensors: bool = False,  # noqa: ARG001
) -> torch.Tensor:
    """The same for packed sequences; softmax_d is (heads, total_q)."""
    left, right = check_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        (window_size_left, window_size_right), softcap, alibi_slopes, softmax_scale, causal, deterministic, False,
        None,
    )  # fmt: skip
    softmax_lse = check_gradients(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, rng_state)
    dq, dk, dv = gradients((q, k, v), (dq, dk, dv))
    dout, q, k, v, out = (maybe_contiguous(x) for x in (dout, q, k, v, out))
    return select(q).backward(
        *(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal),
        *(left, right, softcap, alibi_slopes, dropout_p, deterministic, rng_state),
        *(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
    )


@_register_fake(_flash_attn_backward)
@_register_fake(_flash_attn_varlen_backward)
def _backward_fake(
    dout: torch.Tensor,  # noqa: ARG001
    q: torch.Tensor,
    k: torch.Tensor,  # noqa: ARG001
    v: torch.Tensor,  # noqa: ARG001
    out: torch.Tensor,  # noqa: ARG001
    softmax_lse: torch.Tensor,
    *_: object,
    **__: object,
) -> torch.Tensor:
    *batch, rows, heads, _dim = q.shape
    return softmax_lse.new_empty((*batch, heads, rows))


_wrapped_flash_attn_forward = torch.ops.flash_attn._flash_attn_forward
_wrapped_flash_attn_varlen_forward = torch.ops.flash_attn._flash_attn_varlen_forward
_wrapped_flash_attn_backward = torch.ops.flash_attn._flash_attn_backward
_wrapped_flash_attn_varlen_backward = torch.ops.flash_attn._flash_attn_varlen_backward

_flash_attn_forward.register_autograd(op_gradients.dense_backward, setup_context=op_gradients.keep_dense)
_flash_attn_varlen_forward.register_autograd(op_gradients.varlen_backward, setup_context=op_gradients.keep_varlen)
