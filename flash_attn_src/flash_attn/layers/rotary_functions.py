"""Rotary position embedding with autograd, by the names that clients import from flash_attn.layers.rotary.

Shapes, options and errors of everything here: flash_attn.ops.triton.rotary.apply_rotary. Functions whose name ends
in _ work in place, as upstream: gradients go through what is returned, and through the tensor that was given as if it
had not been turned. A backward that needs what the tensor held before raises, unless the tensor is a part of a split.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_compiling, is_dynamo_compiling

from flash_attn.call.arguments import renaming
from flash_attn.call.tracing import refuse_transforms
from flash_attn.core.api import parameters
from flash_attn.ops.checks import check_int, check_switches, check_tensor
from flash_attn.ops.triton.rotary import apply_rotary, turn

Offsets = int | torch.Tensor
# torch 2.7 and newer have this function, but in 2.11 it is also true under torch.compile.
_is_exporting = torch.compiler.is_exporting if torch.__version__ >= "2.13" else lambda: False

# Autograd's kinds of views: one of several views from an operation such as split, a view made under no_grad, DEFAULT.
_creation_of = torch._C._autograd._get_creation_meta


def rotate_half(x: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """A quarter turn of every pair of the last dimension: (a, b) -> (-b, a)."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def apply_rotary_emb_torch(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """x (batch, seqlen, heads, head_dim) turned by cos, sin (seqlen, rotary_dim / 2) or (batch, seqlen,
    rotary_dim / 2), in PyTorch alone and in x's dtype."""
    width = 2 * cos.shape[-1]
    if width > x.shape[-1]:
        raise ValueError(f"cos: got rotary_dim {width}, wanted at most {x.shape[-1]}, the head_dim of x")
    if interleaved:
        cos, sin = (table.repeat_interleave(2, -1).unsqueeze(-2) for table in (cos, sin))
    else:
        cos, sin = (torch.cat((table, table), -1).unsqueeze(-2) for table in (cos, sin))
    head, rest = x[..., :width], x[..., width:]
    return torch.cat((head * cos + rotate_half(head, interleaved) * sin, rest), -1)


def _keep(ctx: Any, tables: tuple[torch.Tensor | None, ...], offsets: Offsets, *more: torch.Tensor | None) -> None:
    """Saves tables and offsets, whichever kind these are."""
    ctx.offset = None if isinstance(offsets, torch.Tensor) else offsets
    ctx.save_for_backward(*tables, offsets if isinstance(offsets, torch.Tensor) else None, *more)


def _changed(x: torch.Tensor) -> torch.Tensor:
    """x, whose data were turned, as a tensor that is given a history of its own.

    Autograd would change the history of every tensor that shares x's memory. It refuses that for leaves and for parts
    of a split. So the memory is only counted as changed: a backward that needs what it held raises. Not for a part of
    a split, since autograd would then refuse the other parts too.
    """
    if not x._is_view() or _creation_of(x) == torch._C._autograd.CreationMeta.DEFAULT:
        torch.autograd.graph.increment_version(x)
    return x.detach()


def _written(x: torch.Tensor, turned: torch.Tensor) -> torch.Tensor:
    """Copies `turned` into x and returns it, which makes compiled code work in place."""
    # torch.export refuses changes of x.data, torch.compile refuses changes of detached parts of a split.
    exported = _is_exporting() or not is_dynamo_compiling()
    (x.detach() if exported else x.data).copy_(turned.detach())
    return turned


class ApplyRotaryEmb(torch.autograd.Function):
    """Autograd of apply_rotary_emb."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        interleaved: bool = False,
        inplace: bool = False,
        seqlen_offsets: Offsets = 0,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> torch.Tensor:
        check_tensor("x", x)
        check_switches(inplace=inplace)
        data = x.data if inplace else x
        out = apply_rotary(data, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace)
        _keep(ctx, (cos, sin), seqlen_offsets, cu_seqlens)
        ctx.interleaved, ctx.max_seqlen = interleaved, max_seqlen
        return _changed(x) if inplace else out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Never in place: autograd may hand the same tensor to others."""
        cos, sin, offsets, cu_seqlens = ctx.saved_tensors
        offsets = ctx.offset if offsets is None else offsets
        tracked = torch.is_grad_enabled()  # for a second derivative
        dx = turn(dout, None, cos, sin, offsets, cu_seqlens, ctx.max_seqlen, ctx.interleaved, True, tracked)
        return dx, *(None,) * 7


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Offsets = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """x (batch, seqlen, heads, head_dim), or with cu_seqlens (total, heads, head_dim), turned by position."""
    if is_compiling():  # Dynamo needs the custom op below, which has its own autograd
        check_switches(inplace=inplace)
        out = apply_rotary(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved)
        return _written(x, out) if inplace else out
    refuse_transforms("rotary embedding")
    return ApplyRotaryEmb.apply(x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen)


apply_rotary_emb_func = apply_rotary_emb


def _turn_qkv(
    qkv: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    interleaved: bool,
    offsets: Offsets,
    num_heads_q: int | None,
    conjugate: bool = False,
) -> None:
    """Rotates queries and keys in place, in one call if they share tables and are adjacent heads in memory."""
    cos, sin, cos_k, sin_k = tables
    parts: tuple[torch.Tensor, ...]
    if num_heads_q is not None:
        turned = num_heads_q + (qkv.shape[2] - num_heads_q) // 2
        parts = (qkv[:, :, :turned],) if cos_k is None else (qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q:turned])
    elif cos_k is None and qkv.stride(2) == qkv.shape[3] * qkv.stride(3):
        parts = (qkv[:, :, :2].view(*qkv.shape[:2], 2 * qkv.shape[3], qkv.shape[4]),)
    else:
        parts = (qkv[:, :, 0], qkv[:, :, 1])
    for index, part in enumerate(parts):
        c, s = (cos_k, sin_k) if index and cos_k is not None and sin_k is not None else (cos, sin)
        turn(part, part, c, s, offsets, None, None, interleaved, conjugate, conjugate and torch.is_grad_enabled())


def _check_qkv(
    qkv: torch.Tensor, cos_k: torch.Tensor | None, sin_k: torch.Tensor | None, num_heads_q: int | None
) -> None:
    if (cos_k is None) != (sin_k is None):
        raise ValueError("cos_k, sin_k: got only one of them, wanted both or neither")
    if num_heads_q is None:
        check_tensor("qkv", qkv, ("batch", "seqlen", "3", "heads", "head_dim"))
        if qkv.shape[2] != 3:
            raise ValueError(f"qkv: got shape {tuple(qkv.shape)}, wanted (batch, seqlen, 3, heads, head_dim)")
    else:
        check_tensor("qkv", qkv, ("batch", "seqlen", "heads_q + 2 * heads_k", "head_dim"))
        heads = check_int("num_heads_q", num_heads_q, 1, max(qkv.shape[2], 1))
        if (qkv.shape[2] - heads) % 2:
            raise ValueError(f"num_heads_q: got {heads} of {qkv.shape[2]} heads, wanted an even rest for k and v")


class ApplyRotaryEmbQKV_(torch.autograd.Function):  # noqa: N801 - the name that clients know
    """Autograd of apply_rotary_emb_qkv_."""

    @staticmethod
    @parameters(since={"num_heads_q": "2.7"})
    def forward(
        ctx: Any,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cos_k: torch.Tensor | None = None,
        sin_k: torch.Tensor | None = None,
        interleaved: bool = False,
        seqlen_offsets: Offsets = 0,
        num_heads_q: int | None = None,
    ) -> torch.Tensor:
        _check_qkv(qkv, cos_k, sin_k, num_heads_q)
        _turn_qkv(qkv.data, (cos, sin, cos_k, sin_k), interleaved, seqlen_offsets, num_heads_q)
        _keep(ctx, (cos, sin, cos_k, sin_k), seqlen_offsets)
        ctx.interleaved, ctx.num_heads_q = interleaved, num_heads_q
        return _changed(qkv)

    @staticmethod
    def backward(ctx: Any, dqkv: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *tables, offsets = ctx.saved_tensors
        offsets = ctx.offset if offsets is None else offsets
        grad = dqkv.clone(memory_format=torch.contiguous_format)
        _turn_qkv(grad, tuple(tables), ctx.interleaved, offsets, ctx.num_heads_q, conjugate=True)
        return grad, *(None,) * 7


@renaming(x="qkv")
@parameters(since={"num_heads_q": "2.7"})
def apply_rotary_emb_qkv_(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cos_k: torch.Tensor | None = None,
    sin_k: torch.Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: Offsets = 0,
    num_heads_q: int | None = None,
) -> torch.Tensor:
    """Turns q and k of qkv (batch, seqlen, 3, heads, head_dim) in place; with num_heads_q, qkv is (batch, seqlen,
    heads_q + 2 * heads_k, head_dim). cos_k, sin_k: tables for the keys, where they differ (xPos)."""
    if is_compiling():
        _check_qkv(qkv, cos_k, sin_k, num_heads_q)
        out = qkv.clone()
        _turn_qkv(out, (cos, sin, cos_k, sin_k), interleaved, seqlen_offsets, num_heads_q)
        return _written(qkv, out)
    refuse_transforms("rotary embedding")
    if num_heads_q is None:
        return ApplyRotaryEmbQKV_.apply(qkv, cos, sin, cos_k, sin_k, interleaved, seqlen_offsets)
    return ApplyRotaryEmbQKV_.apply(qkv, cos, sin, cos_k, sin_k, interleaved, seqlen_offsets, num_heads_q)


def _check_kv(kv: torch.Tensor) -> None:
    check_tensor("kv", kv, ("batch", "seqlen", "2", "heads", "head_dim"))
    if kv.shape[2] != 2:
        raise ValueError(f"kv: got shape {tuple(kv.shape)}, wanted (batch, seqlen, 2, heads, head_dim)")


class ApplyRotaryEmbKV_(torch.autograd.Function):  # noqa: N801
    """Autograd of apply_rotary_emb_kv_."""

    @staticmethod
    def forward(
        ctx: Any,
        kv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        interleaved: bool = False,
        seqlen_offsets: Offsets = 0,
    ) -> torch.Tensor:
        _check_kv(kv)
        apply_rotary(kv.data[:, :, 0], cos, sin, seqlen_offsets, interleaved=interleaved, inplace=True)
        _keep(ctx, (cos, sin), seqlen_offsets)
        ctx.interleaved = interleaved
        return _changed(kv)

    @staticmethod
    def backward(ctx: Any, dkv: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin, offsets = ctx.saved_tensors
        offsets = ctx.offset if offsets is None else offsets
        grad = dkv.clone(memory_format=torch.contiguous_format)
        keys = grad[:, :, 0]
        turn(keys, keys, cos, sin, offsets, None, None, ctx.interleaved, True, torch.is_grad_enabled())
        return grad, *(None,) * 4


@renaming(x="kv")
def apply_rotary_emb_kv_(
    kv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    seqlen_offsets: Offsets = 0,
) -> torch.Tensor:
    """Turns the keys of kv (batch, seqlen, 2, heads, head_dim) in place."""
    if is_compiling():
        _check_kv(kv)
        keys = apply_rotary(kv[:, :, 0], cos, sin, seqlen_offsets, interleaved=interleaved)
        return _written(kv, torch.stack((keys, kv[:, :, 1]), 2))
    refuse_transforms("rotary embedding")
    return ApplyRotaryEmbKV_.apply(kv, cos, sin, interleaved, seqlen_offsets)
