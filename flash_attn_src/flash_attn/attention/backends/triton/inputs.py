"""What kernels take of a call: aligned tensors, strides, sizes, optional tensors, a window, flags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from flash_attn.call.calls import AttentionCall, CacheCall, replace
from flash_attn.call.options import Options
from flash_attn.core.arguments import Value
from flash_attn.kernels import flags as bits
from flash_attn.kernels.flags import MAX_ROW_STRIDE, OPEN_WINDOW
from flash_attn.kernels.modifiers import PER_HEAD

DTYPES: dict[torch.dtype, str] = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
FP8_TYPES: dict[torch.dtype, str] = {torch.float8_e4m3fn: "fp8e4nv", torch.float8_e4m3fnuz: "fp8e4b8"}
# Elements in 16 bytes: the kernels take strides and head dims in this unit.
VEC: dict[torch.dtype, int] = {dtype: 16 // dtype.itemsize for dtype in (*DTYPES, *FP8_TYPES)}

Strides = tuple[int, int, int]

_FAR = 1 << 31  # first value that an int32 argument cannot hold


# Tensor -> the names of its (batch, row, head) strides in the kernels, in units of 16 bytes.
STRIDES = {
    tensor: (f"stride_{letters}b", f"stride_{letters}{row}", f"stride_{letters}h")
    for tensor, letters, row in (
        *(("q", "q", "m"), ("k", "k", "n"), ("v", "v", "n"), ("out", "o", "m"), ("dout", "g", "m")),
        *(("dq", "dq", "m"), ("dk", "dk", "n"), ("dv", "dv", "n"), ("x", "x", "m"), ("y", "y", "m")),
        *(("k_new", "n", "m"), ("v_new", "w", "m"), ("q_turned", "r", "m")),
    )
}  # fmt: skip


class Inputs(NamedTuple):
    """A call and the arguments that its kernels have in common.

    call        with q, k and v aligned to 16 bytes
    batch, heads, seqlen_q, total_q   sequences, query heads, queries of the longest sequence, queries in all
    lse_shape   of softmax_lse: (batch, heads, seqlen_q) or (heads, total_q)
    values      name of an argument -> its value, without `flags` and what a grid decides
    flags       which of the optional tensors there are
    """

    call: AttentionCall
    batch: int
    heads: int
    seqlen_q: int
    total_q: int
    lse_shape: tuple[int, ...]
    values: dict[str, Value]
    flags: int


def inputs_of(call: AttentionCall) -> Inputs:
    """The inputs of a call. Tensors that are not aligned are copied; else `Inputs.call` is the call itself.

    Raises NotImplementedError for two options that each give every head a number.
    """
    vec, options, starts = VEC[call.q.dtype], call.options, call.cu_seqlens_q
    q, q_strides = rows(call.q, vec)
    k, k_strides = rows(call.k, vec)
    v, v_strides = rows(call.v, vec)
    if q is not call.q or k is not call.k or v is not call.v:
        call = replace(call, q=q, k=k, v=v)
    if starts is None:
        batch, seqlen_q, heads, head_dim = q.shape
        total_q, lse_b, lse_h = batch * seqlen_q, heads * seqlen_q, seqlen_q
        lse_shape: tuple[int, ...] = (batch, heads, seqlen_q)
    else:
        batch, seqlen_q = starts.shape[0] - 1, call.max_seqlen_q
        total_q, heads, head_dim = q.shape
        lse_shape, lse_b, lse_h = (heads, total_q), 0, total_q
    head_numbers, head_stride = head_numbers_of(call)
    left, right = window_of(call)
    stride_qb, stride_qm, stride_qh = q_strides
    stride_kb, stride_kn, stride_kh = k_strides
    stride_vb, stride_vn, stride_vh = v_strides
    values: dict[str, Value] = {
        "q": q, "k": k, "v": v, "cu_seqlens_q": starts, "cu_seqlens_k": call.cu_seqlens_k, "seqused_k": call.seqused_k,
        "leftpad_k": call.leftpad_k, "alibi_slopes": head_numbers, "rng_state": options.rng_state,
        "scale": options.scale, "softcap": options.softcap, "p_dropout": options.dropout_p,
        "stride_qb": stride_qb, "stride_qm": stride_qm, "stride_qh": stride_qh,
        "stride_kb": stride_kb, "stride_kn": stride_kn, "stride_kh": stride_kh,
        "stride_vb": stride_vb, "stride_vn": stride_vn, "stride_vh": stride_vh,
        "stride_lb": lse_b, "stride_lh": lse_h, "stride_ab": head_stride,
        "nheads": heads, "group": heads // k.shape[-2], "seqlen_q": seqlen_q, "seqlen_k": call.longest_k,
        "head_dim": head_dim // vec, "window_left": left, "window_right": right,
    }  # fmt: skip
    return Inputs(call, batch, heads, seqlen_q, total_q, lse_shape, values, flags_of(call))


def aligned(tensor: torch.Tensor, vec: int) -> torch.Tensor:
    """The tensor itself if its rows are dense, aligned to 16 bytes and with int32 strides, else such a copy."""
    return rows(tensor, vec)[0]


def rows(tensor: torch.Tensor, vec: int) -> tuple[torch.Tensor, Strides]:
    """The result of `aligned`, and its `strides_of`."""
    strides = tensor.stride()
    if len(strides) == 4:
        batch, row, head, last = strides
    else:
        batch = 0
        row, head, last = strides
    if batch | row | head >= _FAR:
        batch, row, head = near(tensor)
    misaligned = tensor.data_ptr() & 15 | (batch | row | head) & (vec - 1)
    if last == 1 and not misaligned and row < MAX_ROW_STRIDE * vec:
        return tensor, (batch // vec, row // vec, head // vec)
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return copy, strides_of(copy, vec)


def strides_of(tensor: torch.Tensor, vec: int) -> Strides:
    """(batch, row, head) strides in units of 16 bytes; packed tensors (total, heads, dim) have batch stride 0."""
    batch, row, head = tensor.stride()[:3] if tensor.dim() == 4 else (0, *tensor.stride()[:2])
    if batch | row | head >= _FAR:
        batch, row, head = near(tensor)
    return batch // vec, row // vec, head // vec


def named(tensor: str, strides: Sequence[int]) -> dict[str, Value]:
    """The (batch, row, head) strides of a tensor by their names in the kernels."""
    batch, row, head = STRIDES[tensor]
    return {batch: strides[0], row: strides[1], head: strides[2]}


def near(tensor: torch.Tensor) -> Strides:
    """(batch, row, head) strides in elements, 0 for an axis of size 1, whose stride may be any number."""
    outer = [step if size > 1 else 0 for size, step in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)]
    batch, row, head = outer if len(outer) == 3 else (0, *outer)
    return batch, row, head


def window_of(call: AttentionCall | CacheCall) -> tuple[int, int]:
    """(left, right), OPEN_WINDOW for an open side; causal ends the window at the query itself."""
    left, right = call.options.window_size
    left = OPEN_WINDOW if left < 0 else min(left, OPEN_WINDOW)
    return left, (0 if call.options.causal else OPEN_WINDOW if right < 0 else min(right, OPEN_WINDOW))


def flags_of(call: AttentionCall) -> int:
    """Flags that say which optional pointers are not null."""
    return (
        (bits.HAS_CU_SEQLENS_Q if call.cu_seqlens_q is not None else 0)
        | (bits.HAS_CU_SEQLENS_K if call.cu_seqlens_k is not None else 0)
        | (bits.HAS_SEQUSED_K if call.seqused_k is not None else 0)
        | (bits.HAS_LEFTPAD_K if call.leftpad_k is not None else 0)
        | head_flags_of(call.options)
    )


def head_flags_of(options: Options) -> int:
    """The flags of the score modifiers that have a number for each head."""
    return sum(row.flag for row in PER_HEAD if getattr(options, row.option) is not None)


def lse_of(call: AttentionCall | CacheCall) -> tuple[torch.Tensor, int, int]:
    """A new softmax_lse, fp32 (batch, heads, seqlen_q) or (heads, total_q), and its batch and head stride."""
    q = call.q
    if call.cu_seqlens_q is None:
        batch, seqlen_q, heads, _ = q.shape
        lse = torch.empty((batch, heads, seqlen_q), dtype=torch.float32, device=q.device)
        return lse, heads * seqlen_q, seqlen_q
    total_q, heads, _ = q.shape
    return torch.empty((heads, total_q), dtype=torch.float32, device=q.device), 0, total_q


def alibi_stride_of(alibi_slopes: torch.Tensor | None) -> int:
    """Elements from one batch entry's slopes to the next; (heads,) slopes serve every entry."""
    if alibi_slopes is None or alibi_slopes.dim() != 2:
        return 0
    return alibi_slopes.stride(0) if alibi_slopes.shape[0] > 1 else alibi_slopes.shape[1]


def table_stride_of(block_table: torch.Tensor) -> int:
    """Elements from one sequence's pages to the next; of a table (batch,), from one sequence's row to the next."""
    return block_table.stride(0) if block_table.shape[0] > 1 else block_table.numel()


def head_numbers_of(call: AttentionCall | CacheCall) -> tuple[torch.Tensor | None, int]:
    """The number of each head that a score modifier of a call takes, and its batch stride.

    Raises NotImplementedError for a call with two such modifiers, whose kernels have room for one.
    """
    used = {row.option: x for row in PER_HEAD if (x := getattr(call.options, row.option)) is not None}
    if len(used) > 1:
        raise NotImplementedError(f"{', '.join(used)}: a kernel takes one number for each head: leave one of them out")
    numbers = next(iter(used.values()), None)
    if numbers is not None and (numbers.dtype is not torch.float32 or numbers.stride(-1) != 1):
        numbers = numbers.to(torch.float32).contiguous()  # kernels read dense fp32 there, whatever an option allows
    return numbers, alibi_stride_of(numbers)


def sinks_of(s_aux: torch.Tensor | None, dtype: torch.dtype) -> tuple[torch.Tensor | None, int]:
    """The sinks as the kernels with a result of type dtype take them, and their flags."""
    if s_aux is None:
        return None, 0
    if s_aux.dtype is dtype:
        return s_aux.contiguous(), bits.HAS_SINKS | bits.SINKS_LIKE_OUT
    return s_aux.to(torch.float32).contiguous(), bits.HAS_SINKS


def pages_of(call: AttentionCall) -> dict[str, Value]:
    """The block table, its stride, and the rows of a page: 1 without pages."""
    table = call.block_table
    if table is None:
        return {"block_table": None, "stride_tb": 0, "page_size": 1}
    return {"block_table": table, "stride_tb": table_stride_of(table), "page_size": call.k.shape[1]}
