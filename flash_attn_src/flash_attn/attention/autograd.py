"""Attention with a gradient: padding of the head dimension and the autograd functions, without checks.

Tensors and options mean what they mean in the public functions of flash_attn.flash_attn_interface.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_compiling
from torch.nn.functional import pad

from flash_attn.attention import second_derivative
from flash_attn.attention.operators import dispatch, sinks
from flash_attn.call.calls import AttentionCall, GradientCall, Options, kept, maybe_contiguous, restore
from flash_attn.call.first_derivative import Gradients, first_only
from flash_attn.call.options import FIELDS, learned
from flash_attn.call.tracing import is_transformed

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_transforms_active = torch._C._are_functorch_transforms_active

# The head dimension that backends get is a multiple of this.
_HEAD_DIM_STEP = 8


def _served(x: torch.Tensor) -> torch.Tensor:
    """x as backends take it: its last dimension dense, and a multiple of 8."""
    missing = -x.shape[-1] % _HEAD_DIM_STEP
    return pad(x, (0, missing)) if missing else maybe_contiguous(x)


def attend(ctx: Any, call: AttentionCall, packed: tuple[torch.Tensor, ...] | None = None) -> Result:
    """Runs the forward of a checked call and completes the call. With a ctx it saves what the backward needs.

    packed: the tensors that autograd tracks, if q, k, v are views of them: (qkv,) or (q, kv).
    """
    q, k, v = call.q, call.k, call.v
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    inputs = packed or (q, k, v)
    requested = call.return_softmax
    if is_transformed():
        out, softmax_lse = second_derivative.transformed(call)
        return (out, softmax_lse.detach(), q.new_empty((0,))) if requested else out
    is_padded = head_dim % _HEAD_DIM_STEP != 0 or head_dim_v % _HEAD_DIM_STEP != 0
    if is_padded or not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        call.q, call.k, call.v = _served(q), _served(k), _served(v)
    if call.options.softmax_scale is None:
        call.options.softmax_scale = head_dim**-0.5
    padded, softmax_lse, dmask, _ = dispatch.forward(call)
    if ctx is not None:
        tensors, ctx.rest = kept(call)
        ctx.save_for_backward(padded, softmax_lse, *tensors, *inputs)
        ctx.given = len(inputs)
        ctx.is_padded = is_padded
        ctx.paged = call.block_table is not None
    out = padded[..., :head_dim_v] if head_dim_v % _HEAD_DIM_STEP else padded
    if not requested:
        return out
    if dmask is None:
        dmask = q.new_empty((0,))
    if ctx is not None:
        ctx.mark_non_differentiable(softmax_lse, dmask)
    elif is_compiling():
        softmax_lse, dmask = softmax_lse.detach(), dmask.detach()
    return out, softmax_lse, dmask


def _gradients(ctx: Any, dout: torch.Tensor) -> Gradients:
    """The result of _first_gradients.

    If a second derivative may follow, PyTorch's operations compute it, which have one, or a guard makes a second
    derivative an error.
    """
    if ctx.paged:
        raise RuntimeError("block_table: attention over a paged cache has no backward; call it under no_grad")
    if is_compiling() or not torch.is_grad_enabled():
        return first_only("flash_attn", _first_gradients, ctx, dout)
    saved = ctx.saved_tensors
    _out, _softmax_lse, *tensors = saved[: -ctx.given]
    inputs = saved[-ctx.given :]
    q, k, v = inputs if len(inputs) == 3 else (*inputs[:-1], *inputs[-1].unbind(-3))
    call = restore(q, k, v, tuple(tensors), ctx.rest)
    what = second_derivative.refused(call)
    if what is None:
        with torch.no_grad():
            gradients = _first_gradients(ctx, saved, dout)
        return second_derivative.gradients(gradients, call, inputs, dout)
    return first_only(what, _first_gradients, ctx, dout, saved=saved)


def _first_gradients(ctx: Any, saved: tuple[torch.Tensor, ...], dout: torch.Tensor) -> Gradients:
    """The gradients of the tensors that autograd tracks (q, k, v, or q and kv, or qkv), then of `options.learned`."""
    out, softmax_lse, *tensors = saved[: -ctx.given]
    inputs = saved[-ctx.given :]
    packed = 4 - len(inputs)  # number of tensors packed in the last input: 1 = v, 2 = kv, 3 = qkv
    q, k, v = inputs if packed == 1 else (*inputs[:-1], *inputs[-1].unbind(-3))
    # Without padding the op handles strides itself. Dynamo of torch 2.5 cannot trace strides here.
    if ctx.is_padded or not (is_compiling() or dout.stride(-1) == q.stride(-1) == k.stride(-1) == v.stride(-1) == 1):
        dout, q, k, v = (_served(x) for x in (dout, q, k, v))
    results: tuple[torch.Tensor, ...]
    if packed == 1:
        results = dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    else:
        shape = k.shape
        joint = torch.empty((*shape[:-2], packed, *shape[-2:]), dtype=k.dtype, device=k.device)
        dk, dv = joint.select(-3, packed - 2), joint.select(-3, packed - 1)
        if packed == 3:
            dq = joint.select(-3, 0)
            results = (joint,)
        else:
            dq = torch.empty_like(q)
            results = (dq, joint)
    call = restore(q, k, v, tuple(tensors), ctx.rest)
    s_aux, attn_bias = call.options.s_aux, call.options.attn_bias
    dbias = None
    if attn_bias is not None and attn_bias.requires_grad:
        dbias = torch.empty_like(attn_bias, memory_format=torch.contiguous_format)
    softmax_d = dispatch.backward(GradientCall(call, dout, out, softmax_lse, dq, dk, dv, dbias))
    if ctx.is_padded:
        results = tuple(x[..., : of.shape[-1]] for x, of in zip(results, inputs, strict=True))
    extra = {
        "s_aux": None if s_aux is None else sinks.gradient(s_aux, softmax_lse, softmax_d),
        "attn_bias": dbias,
    }
    return *results, *(extra[name] for name in FIELDS[Options].learned)


class _Attention(torch.autograd.Function):
    """Autograd of a checked call. inputs: see `differentiable`; the last ones are `options.learned`."""

    @staticmethod
    def forward(ctx: Any, call: AttentionCall, *inputs: torch.Tensor) -> Result:
        return attend(ctx, call, inputs[: -len(FIELDS[Options].learned)])

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        return None, *_gradients(ctx, dout)


# `torch.autograd.Function.apply` calls this after two questions of transforms, which take a tenth of a call's time.
_apply = super(torch.autograd.Function, _Attention).apply


def differentiable(call: AttentionCall, *given: torch.Tensor) -> Result:
    """The forward of a checked call with its gradient; given: q, k, v, or the tensors that they are views of.

    For eager mode. Dynamo cannot trace a call that is made outside of an autograd function: it takes the classes below,
    which make the call within. To make it twice takes 2 us more.
    """
    if _transforms_active():
        return attend(None, call)
    result: Result = _apply(call, *given, *learned(call.options))
    return result


# What the classes below take besides tensors and lengths.
_OPTIONS = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_softmax"
_LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"


def _attend_by_name(ctx: Any, names: tuple[str, ...], arguments: tuple[Any, ...]) -> Result:
    """The forward of a class below. names: of the arguments; the last one, is_grad_enabled, may be missing."""
    if not len(names) - 1 <= len(arguments) <= len(names):
        raise TypeError(f"apply: got {len(arguments)} arguments, wanted {', '.join(names)}")
    ctx.num_arguments = len(arguments)
    named = dict(zip(names, arguments))  # noqa: B905
    tensors = tuple(named[name] for name in ("q", "k", "v", "kv", "qkv") if name in named)
    joint = 4 - len(tensors)  # as in _first_gradients
    views = () if joint == 1 else tuple(tensors[-1].detach().select(-3, part) for part in range(joint))
    options = Options(
        named["softmax_scale"], named["causal"], named["window_size"], named["softcap"], named["dropout_p"],
        alibi_slopes=named["alibi_slopes"],
    )  # fmt: skip
    q, k, v = (*tensors[: 3 - len(views)], *views)
    call = AttentionCall(q, k, v, options, named["deterministic"], named["return_softmax"])
    call.cu_seqlens_q = named.get("cu_seqlens_q", named.get("cu_seqlens"))
    call.cu_seqlens_k = named.get("cu_seqlens_k", named.get("cu_seqlens"))
    call.max_seqlen_q = named.get("max_seqlen_q", named.get("max_seqlen", 0))
    call.max_seqlen_k = named.get("max_seqlen_k", named.get("max_seqlen", 0))
    call.block_table = named.get("block_table")
    return attend(ctx if named.get("is_grad_enabled", True) else None, call, tensors if views else None)


def _upstream(name: str, parameters: str) -> Any:
    """The autograd function of a public function by upstream's name, without its checks, as upstream's takes them:
    `apply` has the parameters by position, and `options.learned` are none."""
    names = (*parameters.split(), "is_grad_enabled")

    class Upstream(torch.autograd.Function):
        PARAMETERS = names

        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Result:
            return _attend_by_name(ctx, names, arguments)

        @staticmethod
        def backward(ctx: Any, dout: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
            return *_gradients(ctx, dout)[: ctx.given], *(None,) * (ctx.num_arguments - ctx.given)

    Upstream.__name__ = Upstream.__qualname__ = name
    return Upstream


FlashAttnFunc = _upstream("FlashAttnFunc", f"q k v {_OPTIONS}")
FlashAttnQKVPackedFunc = _upstream("FlashAttnQKVPackedFunc", f"qkv {_OPTIONS}")
FlashAttnKVPackedFunc = _upstream("FlashAttnKVPackedFunc", f"q kv {_OPTIONS}")
FlashAttnVarlenFunc = _upstream("FlashAttnVarlenFunc", f"q k v {_LENGTHS} {_OPTIONS} block_table")
FlashAttnVarlenQKVPackedFunc = _upstream("FlashAttnVarlenQKVPackedFunc", f"qkv cu_seqlens max_seqlen {_OPTIONS}")
FlashAttnVarlenKVPackedFunc = _upstream("FlashAttnVarlenKVPackedFunc", f"q kv {_LENGTHS} {_OPTIONS}")
