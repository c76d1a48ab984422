"""What every call of the Triton backend begins with: which kernels it needs, and the numbers they take from tensors.

Host time is part of the product: a call looks its kernels up once, in one dictionary, and touches every tensor's
metadata once.
"""

from __future__ import annotations

import torch

from flash_attn.calls import AttentionCall, CacheCall
from flash_attn.kernels.flags import (
    HAS_CU_SEQLENS_K,
    HAS_CU_SEQLENS_Q,
    HAS_LEFTPAD_K,
    HAS_SEQUSED_K,
    HAS_SINKS,
    MAX_ROW_STRIDE,
    OPEN_WINDOW,
    PACKED_BLOCKS,
    SINKS_LIKE_OUT,
)
from flash_attn.kernels.modifiers import MODIFIERS, PER_HEAD
from flash_attn.kernels.variants import Variant, bucket, serving
from flash_attn.options import TRITON, WITH_BIAS, WITH_BLOCK_MASK
from flash_attn.runtime import device
from flash_attn.runtime.device import Kernel

DTYPES: dict[torch.dtype, str] = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
FP8_TYPES: dict[torch.dtype, str] = {torch.float8_e4m3fn: "fp8e4nv", torch.float8_e4m3fnuz: "fp8e4b8"}
# Elements in 16 bytes: the kernels take strides and head dims in this unit.
VEC: dict[torch.dtype, int] = {dtype: 16 // dtype.itemsize for dtype in (*DTYPES, *FP8_TYPES)}

# Queries of all heads that a program of dk and dv needs before sharing them between programs is worth the sum.
_ROWS_WORTH_SPLITS = 4096


Strides = tuple[int, int, int]


def refuse_unserved(call: AttentionCall) -> None:
    """Raises NotImplementedError for a call of whole sequences that no kernel serves, by the name of an option."""
    TRITON.refuse(call, "leave it out")
    if call.options.attn_bias is not None:
        WITH_BIAS.refuse(call, "leave one of them out")
    if call.options.block_mask is not None:
        WITH_BLOCK_MASK.refuse(call, "leave one of them out")


def score_kind(call: AttentionCall | CacheCall) -> str:
    """The kind of kernel that a call needs for its scores, one of `operation.KINDS`."""
    options = call.options
    if options.attn_bias is not None:
        return "bias"
    if options.block_mask is not None:
        return "blocks"
    used = [row.kind for row in MODIFIERS if _is_used(getattr(options, row.option))]
    # Kernels of other kinds than `any` take the maximum of the scores before they scale them.
    if len(used) > 1 or options.scale <= 0.0:
        return "any"
    return used[0] if used else "plain"


def _is_used(value: torch.Tensor | float | None) -> bool:
    return value is not None and (isinstance(value, torch.Tensor) or value != 0.0)


def forward_kind(call: AttentionCall | CacheCall) -> str:
    """The kind of forward kernel that a call needs, one of `operation.FORWARD_KINDS`."""
    kind = score_kind(call)
    if call.options.s_aux is None or kind in ("bias", "blocks"):
        return kind
    return "sink" if kind == "plain" else "any"


def sinks_of(s_aux: torch.Tensor | None, dtype: torch.dtype) -> tuple[torch.Tensor | None, int]:
    """The sinks as the kernels with a result of type dtype take them, and their flags."""
    if s_aux is None:
        return None, 0
    if s_aux.dtype is dtype:
        return s_aux.contiguous(), HAS_SINKS | SINKS_LIKE_OUT
    return s_aux.to(torch.float32).contiguous(), HAS_SINKS


def variants(ops: tuple[str, ...], dtype: torch.dtype, head_dim: int, kind: str) -> tuple[Variant, ...]:
    """The variants that one kind of call needs."""
    if dtype not in DTYPES:
        raise TypeError(f"the Triton backend takes float16, bfloat16 or float32 on a GPU, got {dtype}")
    if head_dim % 8:
        raise ValueError(f"head_dim must be a multiple of 8 here, got {head_dim}: pad q, k and v with zeros")
    sizes = [bucket(head_dim, op) for op in ops]
    name = DTYPES[dtype]
    return tuple(Variant(op, name, size, serving(op, name, kind, size)) for op, size in zip(ops, sizes, strict=True))


def find(ops: tuple[str, ...], index: int, dtype: torch.dtype, head_dim: int, kind: str) -> tuple[Kernel, ...]:
    """The kernels of one kind of call on the device with torch's index."""
    key = (ops, index, dtype, head_dim, kind)
    found: tuple[Kernel, ...] | None = device.kernels.get(key)
    if found is None:
        wanted = variants(ops, dtype, head_dim, kind)
        found = device.kernels[key] = tuple(device.kernel(index, variant) for variant in wanted)
    return found


def find_one(op: str, index: int, dtype: torch.dtype, head_dim: int, kind: str = "plain") -> Kernel:
    """The kernel of an op for FP8 or a cache that serves a kind; head_dim is what its tensors have."""
    key = (op, index, dtype, head_dim, kind)
    found: Kernel | None = device.kernels.get(key)
    if found is None:
        name, size = (DTYPES | FP8_TYPES)[dtype], bucket(head_dim, op)
        variant = Variant(op, name, size, serving(op, name, kind, size))
        found = device.kernels[key] = device.kernel(index, variant)
    return found


def remember(key: tuple[object, ...], kernels: tuple[Kernel, ...]) -> None:
    """Makes `find` answer with these from now on; the key is its arguments."""
    if device.kernels.get(key) != kernels:
        device.kernels[key] = kernels
        device.plans().clear()  # they hold the kernels of before


_FAR = 1 << 31  # first value that an int32 argument cannot hold


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


def is_even(call: AttentionCall) -> bool:
    """Whether every block of queries has the same work."""
    return (not call.options.causal or call.options.window_size[0] >= 0) and call.cu_seqlens_q is None


def flags_of(call: AttentionCall) -> int:
    """Flags that say which optional pointers are not null."""
    return (
        (HAS_CU_SEQLENS_Q if call.cu_seqlens_q is not None else 0)
        | (HAS_CU_SEQLENS_K if call.cu_seqlens_k is not None else 0)
        | (HAS_SEQUSED_K if call.seqused_k is not None else 0)
        | (HAS_LEFTPAD_K if call.leftpad_k is not None else 0)
        | sum(row.flag for row in PER_HEAD if getattr(call.options, row.option) is not None)
    )


def lse_of(call: AttentionCall) -> tuple[torch.Tensor, int, int]:
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
    found = next(iter(used.values()), None)
    return found, alibi_stride_of(found)


def grid_of(block: int, max_seqlen: int, batch: int, heads: int, rows: int) -> tuple[int, int, int]:
    """(blocks, planes, flag) of a grid of blocks * planes programs. As many blocks for each sequence and head as the
    longest sequence has; or, where far fewer hold all packed `rows`, these for each head: see `common.schedule`.

    A program that has to find its sequence takes a microsecond more. Measured on an H200 (2026-11-22): it is profitable
    with 0.6 of the blocks and not with 0.8; 2000 sequences of 16 rows beside one of 4096 take 0.14 to 0.26 times as
    long.
    """
    blocks = -(-max(max_seqlen, min(rows, 1)) // block)  # One at least, which tells rows outside of every sequence.
    packed = rows // block + batch
    if 3 * packed < 2 * blocks * batch:
        return packed, heads, PACKED_BLOCKS
    return blocks, heads * batch, 0


def splits_of(group: int, programs: int, rows: int, most: int, index: int) -> int:
    """How many programs of dk and dv share the query heads of a key head.

    Without sharing there are `programs`, for `rows` queries each. It is the least number that keeps the GPU busy, at
    most half the group and `most`.

    Measured on an H200 (2026-11-22): three programs for each multiprocessor, where adding up takes less than is won.
    With 8 query heads to one key head of 128, causal, the whole backward of 2048 tokens takes 0.39 times as long, of
    8192 0.52, of 16384 0.72; with 32 and 2048 0.21.
    """
    if programs == 0 or group * rows < _ROWS_WORTH_SPLITS:
        return 1
    wanted = 3 * device.of(index).compute_units
    possible = [splits for splits in range(1, min(group // 2, most) + 1) if group % splits == 0] or [1]
    return next((splits for splits in possible if programs * splits >= wanted), possible[-1])


def add_splits(partial: torch.Tensor, result: torch.Tensor) -> None:
    """Writes the sum of partial (..., splits, head_dim) over the splits, at least two, to result. Overwrites partial.

    The order of the additions is fixed. All but the last are in the type of partial.
    """
    count = partial.shape[-2]
    while count > 2:
        half = count // 2
        partial[..., :half, :] += partial[..., count - half : count, :]
        count -= half
    torch.add(partial[..., 0, :], partial[..., 1, :], out=result)


def chunk_of(planes: int, even: bool, kernel: Kernel) -> int:
    """How many planes `common.program_order` takes at once, at most CHUNK_MASK. even: every block of a plane has the
    same work.

    Measured on an H200 (2026-11-21): uneven blocks gain 4 to 8 % with 8 planes over 1, even ones lose as much in
    dk and dv to a colder cache; taking all planes loses again.
    """
    return min(planes, 1 if even and kernel.num_xcds == 1 else 8)
