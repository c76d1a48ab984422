"""The custom ops flash_attn::*, and the two calls that everything else makes: `forward` and `backward`.

In eager mode those call the backend itself, as dispatching through a custom op costs more than a small
kernel. Under torch.compile, torch.export, a dispatch mode or with a tensor subclass they go through the
ops, which carry fakes. Shapes, dtypes and units: flash_attn.backends.torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.compiler import is_compiling
from torch.nn.functional import pad

from flash_attn import dmask
from flash_attn.arguments import check_dense, check_gradients, check_per_sequence, check_varlen
from flash_attn.backends import select

_Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]
_Fake = TypeVar("_Fake", bound=Callable[..., Any])
_dispatch_modes = torch._C._len_torch_dispatch_stack

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


def _lse_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def _scaled(q: torch.Tensor, results: _Results) -> _Results:
    """With S_dmask for the probabilities that a backend gives."""
    if results[2] is None:
        return results
    return *results[:2], dmask.scaled(results[2], q.shape[-1]), results[3]


def _complete(q: torch.Tensor, results: _Results) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """An op returns tensors only: an empty S_dmask, a zero rng_state where there is no dropout."""
    out, softmax_lse, probabilities, rng_state = _scaled(q, results)
    if probabilities is None:
        probabilities = torch.empty((0,), dtype=q.dtype, device=q.device)
    if rng_state is None:
        rng_state = torch.zeros((2,), dtype=torch.int64, device=q.device)
    return out, softmax_lse, probabilities, rng_state


def _fake_results(
    q: torch.Tensor, lse_shape: tuple[int, ...], dmask_shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.empty(q.shape, dtype=q.dtype, device=q.device),
        torch.empty(lse_shape, dtype=_lse_dtype(q), device=q.device),
        torch.empty(dmask_shape, dtype=q.dtype, device=q.device),
        torch.empty((2,), dtype=torch.int64, device=q.device),
    )


def _gradients(inputs: tuple[torch.Tensor, ...], given: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor, ...]:
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
    return _complete(q, results)


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
    return _fake_results(q, (batch, heads, seqlen_q), dmask_shape)


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
    return _complete(q, results)


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
    return _fake_results(q, (heads, total), dmask_shape)


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
    dq, dk, dv = _gradients((q, k, v), (dq, dk, dv))
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
    dq, dk, dv = _gradients((q, k, v), (dq, dk, dv))
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


def _differentiate(
    op: Any,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    tensors: tuple[torch.Tensor, ...],
    lengths: tuple[Any, ...],
    options: tuple[Any, ...],
    alibi_slopes: torch.Tensor | None,
    rng_state: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    """dq, dk, dv by a backward op, from the gradients of out and softmax_lse; None where neither reaches one.

    That of softmax_lse reaches the scores as p * dlse. The op gives them p * (dout @ v - rowsum(dout * out)), which is
    the same where the first column of dout holds dlse, that of v ones, and all else zeros. Dropout comes after
    softmax_lse.
    """
    q, k, v, out, softmax_lse = tensors
    dq = dk = dv = None
    if dout is not None:
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        op(dout, *tensors, dq, dk, dv, *lengths, *options, alibi_slopes, False, rng_state)
    if dlse is not None:
        more_q, more_k = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
        columns = (0, q.shape[-1] - 1)
        column = pad(dlse.transpose(-1, -2)[..., None].to(q.dtype), columns)
        ones = pad(torch.ones_like(v[..., :1]), columns)
        op(
            *(column, q, k, ones, torch.zeros_like(out), softmax_lse, more_q, more_k, None, *lengths),
            *(0.0, *options[1:], alibi_slopes, False),
        )
        dq, dk = (more_q, more_k) if dq is None or dk is None else (dq + more_q, dk + more_k)
    return dq, dk, dv


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, dropout_p, softmax_scale, causal, left, right, softcap, alibi_slopes, _ = inputs
    out, softmax_lse, dmask, rng_state = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(dmask, rng_state)
    ctx.save_for_backward(q, k, v, out, softmax_lse, alibi_slopes, rng_state)
    ctx.options = (dropout_p, softmax_scale, causal, left, right, softcap)


def _op_backward(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, *_: Any
) -> tuple[torch.Tensor | None, ...]:
    *tensors, alibi_slopes, rng_state = ctx.saved_tensors
    gradients = _differentiate(
        _wrapped_flash_attn_backward, dout, dlse, tensors, (), ctx.options, alibi_slopes, rng_state
    )
    return *gradients, *(None,) * 8


def _setup_varlen_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k = inputs[:5]
    alibi_slopes, _, block_table, leftpad_k, seqused_k, _ = inputs[13:]
    out, softmax_lse, dmask, rng_state = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(dmask, rng_state)
    ctx.save_for_backward(q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state)
    ctx.lengths = inputs[5:7]
    ctx.options = inputs[7:13]
    ctx.inference = block_table is not None or leftpad_k is not None or seqused_k is not None


def _varlen_op_backward(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, *_: Any
) -> tuple[torch.Tensor | None, ...]:
    if ctx.inference:
        raise RuntimeError("block_table, leftpad_k, seqused_k: attention with any of them has no backward")
    *tensors, cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state = ctx.saved_tensors
    lengths = (cu_seqlens_q, cu_seqlens_k, *ctx.lengths)
    gradients = _differentiate(
        _wrapped_flash_attn_varlen_backward, dout, dlse, tensors, lengths, ctx.options, alibi_slopes, rng_state
    )
    return *gradients, *(None,) * 16


_flash_attn_forward.register_autograd(_op_backward, setup_context=_setup_context)
_flash_attn_varlen_forward.register_autograd(_varlen_op_backward, setup_context=_setup_varlen_context)


def is_traced(q: torch.Tensor) -> bool:
    """Whether the call has to go through the custom ops."""
    if is_compiling():
        return True
    kind = type(q)
    return (kind is not torch.Tensor and kind is not torch.nn.Parameter) or _dispatch_modes() > 0 or q.is_meta


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    dropout_p: float,
    return_softmax: bool,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    block_table: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(out, softmax_lse, S_dmask or None or (0,), rng_state or None), eager or traced."""
    if is_traced(q):
        if cu_seqlens_q is None or cu_seqlens_k is None:
            return _wrapped_flash_attn_forward(
                q, k, v, dropout_p, softmax_scale, causal, left, right, softcap, alibi_slopes, return_softmax
            )
        return _wrapped_flash_attn_varlen_forward(
            *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale),
            *(causal, left, right, softcap, alibi_slopes, return_softmax, block_table),
        )
    results = select(q).forward(
        q, k, v, None, softmax_scale, causal, left, right, softcap, alibi_slopes, dropout_p, return_softmax,
        None, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, None, None, block_table,
    )  # fmt: skip
    return _scaled(q, results)


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    dropout_p: float,
    deterministic: bool,
    rng_state: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> None:
    """Writes dq, dk, dv, eager or traced."""
    if is_traced(q):
        gradients = (dout, q, k, v, out, softmax_lse, dq, dk, dv)
        options = (
            dropout_p,
            softmax_scale,
            causal,
            left,
            right,
            softcap,
            alibi_slopes,
            deterministic,
            rng_state,
        )
        if cu_seqlens_q is None:
            _wrapped_flash_attn_backward(*gradients, *options)
        else:
            lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            _wrapped_flash_attn_varlen_backward(*gradients, *lengths, *options)
        return
    select(q).backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, left, right, softcap,
        alibi_slopes, dropout_p, deterministic, rng_state,
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip
