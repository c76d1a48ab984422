"""From the facts of a call to the launch of one of AMD's assembly kernels, or the reason why none serves the call.

Pure functions, without tensors and without a GPU. Grids and fields are the ones that the host code of the pinned
amd-aiter package uses. Calls repeat, so everything but the addresses is planned once for each shape.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from flash_attn.attention.backends.asm.arguments import LAYOUTS
from flash_attn.core.ck_planner import Launch
from flash_attn.kernels import assembly

_LOG2E = math.log2(math.e)
# Bytes of an element of fp16 or bf16.
_BYTES = 2
_SHAPES = 4096


class Operand(NamedTuple):
    """A tensor: its address, and strides in elements. Packed sequences have no batch stride."""

    address: int
    batch: int
    row: int
    head: int


_Strides = tuple[tuple[str, Operand], ...]


class Call(NamedTuple):
    """The facts of a call from which a launch is planned.

    dtype: fp16 or bf16. left, right: the window, aligned at the last query and the last key, -1 for no limit; a causal
    mask has 0 on the right. packed: sequences lie end to end; then seqlen_q and seqlen_k are the longest ones, starts_q
    and starts_k the addresses of cu_seqlens, total_q and total_k the rows in all. value_dim: the head dim of v where it
    is not head_dim, else 0.
    """

    target: str
    units: int
    dtype: str
    batch: int
    heads: int
    heads_k: int
    head_dim: int
    seqlen_q: int
    seqlen_k: int
    left: int
    right: int
    scale: float
    packed: bool = False
    starts_q: int = 0
    starts_k: int = 0
    total_q: int = 0
    total_k: int = 0
    value_dim: int = 0

    @property
    def mask(self) -> str:
        """The kind of mask of a kernel that serves the call. A window limit that no query reaches is ignored."""
        left = self.left if self.left < self.seqlen_k - 1 else -1
        right = self.right if self.right < self.seqlen_q - 1 else -1
        if left < 0 and right < 0:
            return assembly.PLAIN
        return assembly.CAUSAL if left < 0 and right == 0 else assembly.WINDOW

    @property
    def shape(self) -> Call:
        """The call without addresses."""
        return self._replace(starts_q=0, starts_k=0) if self.packed else self


def find(call: Call, op: str) -> assembly.Kernel | None:
    """The kernel that serves an op, fwd or bwd, of a call."""
    return assembly.find(call.target, op, call.dtype, call.head_dim, call.mask, call.packed, call.units, call.value_dim)


def unsupported_reason(call: Call, op: str, operands: Mapping[str, Operand]) -> str | None:
    """The reason why no kernel serves an op of this call on these tensors. None if a kernel does."""
    return _unsupported_reason(call.shape, op, _strides_of(operands))


def forward(call: Call, q: Operand, k: Operand, v: Operand, out: Operand, lse: int, lse_head: int) -> Launch:
    """The launch of a forward that has a kernel.

    lse: address of the log-sum-exp, float32 (batch, heads, seqlen_q) or, packed, (heads, total_q); lse_head: elements
    from one head of it to the next. A row without a key gets out 0 and lse -inf by a causal kernel. A plain kernel
    gives NaN to the rows of a sequence without keys.
    """
    operands = {"q": q, "k": k, "v": v, "out": out}
    return _plan_forward(call.shape, _strides_of(operands), lse_head).launch(call, operands, lse=lse)


def backward(call: Call, operands: Mapping[str, Operand], lse: int, delta: int, sums: int, lse_head: int) -> Launch:
    """The launch of a backward that has a kernel.

    operands: q, k, v, dout, dk, dv; dk and dv have a head for every head of q. lse, delta: addresses of float32 tensors
    of the shape in `forward`. A window kernel reads up to 128 bytes after the end of both. sums: address of float32
    zeros (batch, heads, seqlen_q, head_dim) or, packed, (heads, total_q, head_dim), to which the kernel adds dq.
    """
    plan = _plan_backward(call.shape, _strides_of(operands), lse_head)
    return plan.launch(call, operands, lse=lse, delta=delta, dq=sums)


def _strides_of(operands: Mapping[str, Operand]) -> _Strides:
    return tuple((name, Operand(0, *operand[1:])) for name, operand in operands.items())


class _Plan(NamedTuple):
    """A launch without addresses."""

    kernel: assembly.Kernel
    grid: tuple[int, int, int]
    argument: bytes

    def launch(self, call: Call, operands: Mapping[str, Operand], **addresses: int) -> Launch:
        content = bytearray(self.argument)
        offsets = LAYOUTS[self.kernel.layout].offsets
        for name, operand in operands.items():
            struct.pack_into("<Q", content, offsets[name], operand.address)
        for name, address in addresses.items():
            struct.pack_into("<Q", content, offsets[name], address)
        if call.packed:
            for prefix in ("", "room_"):
                struct.pack_into("<Q", content, offsets[f"{prefix}starts_q"], call.starts_q)
                struct.pack_into("<Q", content, offsets[f"{prefix}starts_k"], call.starts_k)
        return Launch(self.kernel.name, self.grid, bytes(content))


@lru_cache(_SHAPES)
def _unsupported_reason(call: Call, op: str, operands: _Strides) -> str | None:
    if find(call, op) is None:
        form = "packed sequences" if call.packed else "sequences of one length"
        dims = f"head_dim {call.head_dim}" + (f" with values of {call.value_dim}" if call.value_dim else "")
        return f"kernel: {call.target} has none for {op}, {call.dtype}, {dims}, {call.mask}, {form}"
    if not 0.0 <= call.scale < math.inf:
        return f"softmax_scale: {call.scale}, and the kernels take the largest product for the largest score"
    sums = 2 * call.heads * call.head_dim * (call.total_q if call.packed else call.batch * call.seqlen_q)
    if op == "bwd" and sums * _BYTES >= assembly.LIMITS.max_bytes:
        return "size: the sums of dq take 4 GiB or more, which the kernels cannot address"
    for name, operand in operands:
        row, last = operand.row * _BYTES, _last(call, name, operand) * _BYTES
        if row >= assembly.LIMITS.max_row_bytes or last >= assembly.LIMITS.max_bytes:
            return f"size: {name} reaches over more bytes than the kernels can address"
    return None


def _last(call: Call, name: str, operand: Operand) -> int:
    """The place of a tensor's last element, with a head to spare."""
    of_queries = name in ("q", "out", "dout")
    rows = (call.total_q if of_queries else call.total_k) if call.packed else 0
    rows = rows or (call.seqlen_q if of_queries else call.seqlen_k)
    heads = call.heads_k if name in ("k", "v") else call.heads
    return (call.batch - 1) * operand.batch + (rows - 1) * operand.row + heads * operand.head


@lru_cache(_SHAPES)
def _plan_forward(call: Call, operands: _Strides, lse_head: int) -> _Plan:
    kernel = _need(call, "fwd")
    tiles = -(-call.seqlen_q // kernel.rows)
    if kernel.mask == assembly.CAUSAL:  # a program serves a tile near the start and one near the end
        tiles = -(-tiles // 2)
    values = {
        **_common(call, operands, lse_head),
        "stores_lse": 1, "rows_q": kernel.rows * operands[0][1].row * _BYTES, "options": _options(call, kernel),
    }  # fmt: skip
    grid = (call.heads, call.batch, tiles) if call.packed else (tiles, call.heads, call.batch)
    return _Plan(kernel, grid, LAYOUTS[kernel.layout].pack(values))


def _options(call: Call, kernel: assembly.Kernel) -> int:
    """The order in which a forward goes through its tiles: by heads where every die gets equally many of them, else
    (and for long sequences) by tiles. A plain kernel does not read it."""
    is_short = call.seqlen_q <= assembly.LIMITS.max_queries_by_heads
    by_heads = kernel.mask == assembly.PLAIN or (call.heads % 8 == 0 and is_short)
    return 5 if by_heads else 3


@lru_cache(_SHAPES)
def _plan_backward(call: Call, operands: _Strides, lse_head: int) -> _Plan:
    kernel = _need(call, "bwd")
    tiles = -(-call.seqlen_k // kernel.columns)
    if kernel.mask == assembly.CAUSAL:
        tiles = -(-tiles // 2)
    values = {
        **_common(call, operands, lse_head),
        "log2e": _LOG2E, "columns_k": kernel.columns * dict(operands)["k"].row * _BYTES, "longest_q": call.seqlen_q,
        "total_k": call.total_k, "mask_x": 0, "mask_y": 0,
    }  # fmt: skip
    if kernel.mask == assembly.WINDOW:  # how far the band reaches from the first query and the first key
        left = call.seqlen_k - 1 if call.left < 0 else call.left
        right = call.seqlen_q - 1 if call.right < 0 else call.right
        values["mask_x"] = right + call.seqlen_k - call.seqlen_q + 1
        values["mask_y"] = left + call.seqlen_q - call.seqlen_k + 1
    return _Plan(kernel, (tiles, call.heads, call.batch), LAYOUTS[kernel.layout].pack(values))


def _need(call: Call, op: str) -> assembly.Kernel:
    kernel = find(call, op)
    if kernel is None:
        raise ValueError(f"no assembly kernel serves {op} of {call}: ask unsupported_reason() first")
    return kernel


def _common(call: Call, operands: _Strides, lse_head: int) -> dict[str, float]:
    """Fields of every layout. Addresses are 0."""
    values: dict[str, float] = dict.fromkeys(("lse", "delta", "dq"), 0)
    values |= dict.fromkeys(("starts_q", "starts_k", "room_starts_q", "room_starts_k"), 0)
    values |= {
        "scale": call.scale, "seqlen_q": call.seqlen_q, "seqlen_k": call.seqlen_k, "heads": call.heads,
        "group": call.heads // call.heads_k, "head_dim": call.head_dim, "head_dim_v": call.value_dim or call.head_dim,
        "lse_head": 4 * lse_head,
    }  # fmt: skip
    for name, operand in operands:
        values |= {
            name: 0, f"{name}_batch": operand.batch * _BYTES, f"{name}_row": operand.row * _BYTES,
            f"{name}_head": operand.head * _BYTES,
        }  # fmt: skip
    return values
