"""Rotary position embedding of heads, dense or packed, without autograd: see flash_attn.layers.rotary."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from flash_attn.call.arguments import as_int
from flash_attn.call.memory import refuse_shared
from flash_attn.call.tracing import is_traced, refuse_transforms
from flash_attn.core import layer, protocol
from flash_attn.core.api import RELEASE
from flash_attn.kernels.flags import HAS_CU_SEQLENS_Q, HAS_OFFSETS
from flash_attn.ops.checks import FLOATS, check_switches, check_tensor

MAX_HEAD_DIM = 256
_INTS = (torch.int32, torch.int64)
_STRIDES = ("stride_xb", "stride_xm", "stride_xh", "stride_tb", "stride_tm", "stride_th")


def apply_rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> torch.Tensor:
    """x with the first 2 * cos.shape[1] elements of every head turned by the angles of their positions.

    x               (batch, seqlen, heads, head_dim), or with cu_seqlens (total, heads, head_dim); fp16, bf16, fp32
    cos, sin        (places, rotary_dim / 2), any float dtype; before flash-attn 2.8 x's dtype. All is computed in fp32,
                    for fp64 x in fp64: no table is rounded to x's dtype. With bf16 x and fp32 tables the error is that
                    of rounding the result alone, 1.7e-3 of its size by RMS, with bf16 tables 2.1e-3
    seqlen_offsets  int or int32/int64 (batch,): the position of each sequence's first row
    cu_seqlens      int32 (batch + 1,): where each sequence starts and the last one ends; max_seqlen, the longest
                    length, goes with it. Rows outside every sequence stay as they are
    interleaved     pairs are dims (0, 1), (2, 3), ..., else (i, i + rotary_dim / 2)
    inplace         writes into x and returns it
    conjugate       turns backwards: the gradient of turning

    Raises TypeError or ValueError naming the argument, what came and what was wanted. Positions beyond `places`
    raise too, where they are known on the host; on a GPU, rows at such positions stay as they are.
    """
    check_switches(inplace=inplace)
    y = x if inplace else None
    return turn(x, y, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, conjugate)


def turn(
    x: torch.Tensor,
    y: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    seqlen_offsets: int | torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
    interleaved: bool,
    conjugate: bool,
    tracked: bool = False,
) -> torch.Tensor:
    """Writes the result of apply_rotary into y, which may be x; None makes a new tensor.

    tracked: whether autograd records it.
    """
    refuse_transforms("rotary embedding")
    check_switches(interleaved=interleaved, conjugate=conjugate)
    longest = _check(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen)
    if y is x:
        offsets = seqlen_offsets if isinstance(seqlen_offsets, torch.Tensor) else None
        refuse_shared({"x": x}, {"cos": cos, "sin": sin, "seqlen_offsets": offsets, "cu_seqlens": cu_seqlens})
    offset, offsets = (0, seqlen_offsets) if isinstance(seqlen_offsets, torch.Tensor) else (seqlen_offsets, None)
    if tracked or is_traced(x, cos, sin, offsets, cu_seqlens):
        turned = torch.ops.flash_attn._apply_rotary(
            x, cos, sin, offset, offsets, cu_seqlens, longest, interleaved, conjugate
        )
        return turned if y is None else y.copy_(turned)
    if y is None:
        y = _output(x, cos, cu_seqlens)
    if x.numel() and cos.shape[1]:
        run = launch if x.is_cuda else reference
        run(x, y, cos, sin, offset, offsets, cu_seqlens, longest, interleaved, conjugate)
    return y


def _output(x: torch.Tensor, cos: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """The output tensor. The elements that are not rotated are already copied."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if cu_seqlens is not None or not cos.shape[1]:
        return y.copy_(x)
    if 2 * cos.shape[1] < x.shape[-1]:
        y[..., 2 * cos.shape[1] :] = x[..., 2 * cos.shape[1] :]
    return y


@torch.library.custom_op(
    "flash_attn::_apply_rotary",
    mutates_args=(),
    schema="(Tensor x, Tensor cos, Tensor sin, SymInt offset, Tensor? offsets, Tensor? cu_seqlens, "
    "SymInt max_seqlen, bool interleaved, bool conjugate) -> Tensor",
)
def _apply_rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    offset: int,
    offsets: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int,
    interleaved: bool,
    conjugate: bool,
) -> torch.Tensor:
    y = _output(x, cos, cu_seqlens)
    if x.numel() and cos.shape[1]:
        run = launch if x.is_cuda else reference
        run(x, y, cos, sin, offset, offsets, cu_seqlens, max_seqlen, interleaved, conjugate)
    return y


@_apply_rotary.register_fake
def _apply_rotary_fake(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001
    _, cos, sin, offset, offsets, cu_seqlens, max_seqlen, interleaved, conjugate = inputs
    ctx.save_for_backward(cos, sin, offsets, cu_seqlens)
    ctx.options = (offset, max_seqlen, interleaved, conjugate)


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    cos, sin, offsets, cu_seqlens = ctx.saved_tensors
    offset, max_seqlen, interleaved, conjugate = ctx.options
    dx = torch.ops.flash_attn._apply_rotary(
        dy, cos, sin, offset, offsets, cu_seqlens, max_seqlen, interleaved, not conjugate
    )
    return dx, *(None,) * 8


_apply_rotary.register_autograd(_backward, setup_context=_setup_context)


def launch(
    x: torch.Tensor,
    y: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    offset: int,
    offsets: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int,
    interleaved: bool,
    conjugate: bool,
) -> None:
    """The kernel, on checked arguments."""
    target, inplace = y, y is x
    x = layer.dense_rows(x)
    y = x if inplace else layer.dense_rows(y)
    if offsets is not None:
        offsets = offsets.to(torch.int32).contiguous()
    half = cos.shape[1]
    x_strides, y_strides = (
        tensor.stride()[:3] if cu_seqlens is None else (0, *tensor.stride()[:2]) for tensor in (x, y)
    )
    op = "rotary-interleaved" if interleaved else "rotary"
    if cos.dtype is not x.dtype or sin.dtype is not x.dtype:
        cos, sin = cos.float(), sin.float()
        op += "" if x.dtype is torch.float32 else "-t32"
    cos, sin = layer.dense_rows(cos.contiguous()), layer.dense_rows(sin.contiguous())
    kernel, unit = layer.find(op, x, 2 * half, half, *x_strides, *y_strides)
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    m_blocks = -(-max_seqlen // kernel.block_m)
    flags = (HAS_CU_SEQLENS_Q if cu_seqlens is not None else 0) | (HAS_OFFSETS if offsets is not None else 0)
    protocol.launch(
        kernel,
        (m_blocks * batch, 1, 1),
        {
            **{name: stride // unit for name, stride in zip(_STRIDES, (*x_strides, *y_strides), strict=True)},
            "x": x, "turned": y, "cosines": cos, "sines": sin, "cu_seqlens": cu_seqlens, "offsets": offsets,
            "sign": -1.0 if conjugate else 1.0, "seqlen": max_seqlen, "nheads": x.shape[-2], "half": half // unit,
            "places": cos.shape[0], "offset": offset, "m_blocks": m_blocks, "flags": flags,
        },
    )  # fmt: skip
    if y is not target:
        target.copy_(y)


def reference(
    x: torch.Tensor,
    y: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    offset: int,
    offsets: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int,
    interleaved: bool,
    conjugate: bool,
) -> None:
    """The same in PyTorch: serves CPU tensors, and is the oracle. Reads index tensors on the host."""
    starts = [offset] * (x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1)
    if offsets is not None:
        starts = offsets.tolist()
    if cu_seqlens is None:
        spans = [(x[index], y[index]) for index in range(x.shape[0])]
    else:
        ends = cu_seqlens.tolist()
        for index, (start, stop) in enumerate(pairwise(ends)):
            if not 0 <= start <= stop <= x.shape[0]:
                raise ValueError(f"cu_seqlens: got {start}, {stop} at {index}, wanted no decrease, 0 to {x.shape[0]}")
            if stop - start > max_seqlen:
                raise ValueError(
                    f"max_seqlen: got {max_seqlen}, wanted at least {stop - start}, the longest sequence in cu_seqlens"
                )
        spans = [(x[start:stop], y[start:stop]) for start, stop in pairwise(ends)]
    half = cos.shape[1]
    exact = torch.promote_types(x.dtype, torch.float32)
    for start, (rows, result) in zip(starts, spans, strict=True):
        stop = start + rows.shape[0]
        if start < 0 or stop > cos.shape[0]:
            raise ValueError(f"seqlen_offsets: got positions {start} to {stop}, wanted 0 to {cos.shape[0]}, as cos has")
        c, s = (table[start:stop].to(exact)[:, None] for table in (cos, -sin if conjugate else sin))
        head = rows[..., : 2 * half].to(exact)
        a, b = (head[..., ::2], head[..., 1::2]) if interleaved else (head[..., :half], head[..., half:])
        parts = (a * c - b * s, a * s + b * c)
        turned = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
        result[..., : 2 * half] = turned.to(x.dtype)


def _check(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    seqlen_offsets: int | torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
) -> int:
    """The longest sequence, an int."""
    axes = ("batch", "seqlen", "heads", "head_dim") if cu_seqlens is None else ("total", "heads", "head_dim")
    check_tensor("x", x, axes)
    dtypes = (x.dtype,) if RELEASE < (2, 8) else (*FLOATS, torch.float64)
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(name, table, ("places", "rotary_dim / 2"), like=x, dtypes=dtypes)
    if sin.shape != cos.shape:
        raise ValueError(f"sin: got shape {tuple(sin.shape)}, wanted {tuple(cos.shape)} as cos has")
    if x.shape[-1] > MAX_HEAD_DIM:
        raise ValueError(f"x: got head_dim {x.shape[-1]}, wanted at most {MAX_HEAD_DIM}")
    if 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(f"cos: got rotary_dim {2 * cos.shape[1]}, wanted at most {x.shape[-1]}, the head_dim of x")
    if cu_seqlens is None:
        batch, longest = x.shape[0], x.shape[1]
    else:
        check_tensor("cu_seqlens", cu_seqlens, ("batch + 1",), like=x, dtypes=(torch.int32,))
        if cu_seqlens.numel() == 0:
            raise ValueError("cu_seqlens: got 0 elements, wanted batch + 1")
        if cu_seqlens.stride(0) != 1:
            raise ValueError(f"cu_seqlens: got stride {cu_seqlens.stride(0)}, wanted 1")
        if max_seqlen is None:
            raise ValueError("max_seqlen: got None, wanted the longest sequence, because cu_seqlens is set")
        batch, longest = cu_seqlens.shape[0] - 1, as_int("max_seqlen", max_seqlen)
        if longest < 0:
            raise ValueError(f"max_seqlen: got {longest}, wanted 0 or more")
    if longest > cos.shape[0]:
        raise ValueError(f"cos: got {cos.shape[0]} places, wanted at least {longest}, the longest sequence")
    if isinstance(seqlen_offsets, torch.Tensor):
        check_tensor("seqlen_offsets", seqlen_offsets, like=x, shape=(batch,), dtypes=_INTS)
    else:
        offset = as_int("seqlen_offsets", seqlen_offsets)
        if not 0 <= offset <= cos.shape[0] - longest:
            raise ValueError(f"seqlen_offsets: got {offset}, wanted 0 to {cos.shape[0] - longest}: "
                             f"cos and sin have {cos.shape[0]} places, the longest sequence is {longest}")  # fmt: skip
    return longest
