"""From the facts of a call to the launch of one of AMD's assembly kernels, or the reason why none serves the call.

Pure functions: no tensor, no GPU. Sources of the grids and fields: the host code of the pinned amd-aiter package.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from flash_attn.backends.asm import table
from flash_attn.backends.asm.arguments import LAYOUTS

_LOG2E = math.log2(math.e)
_BYTES = 2  # of an element of fp16 or bf16
# The kernels add up offsets in 32 bits and multiply rows with strides in 24 bits.
_MAX_BYTES = 1 << 32
_MAX_ROW_BYTES = 1 << 23


class Operand(NamedTuple):
    """A tensor: its address, and strides in elements. Packed sequences have no batch stride."""

    address: int
    batch: int
    row: int
    head: int


class Launch(NamedTuple):
    """A launch of a kernel in blocks of `threads` with one argument, a structure."""

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    argument: bytes


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a launch is planned from. Lengths are the longest ones where sequences are packed: then starts_q, starts_k
    are the addresses of cu_seqlens and total_q, total_k the rows in all. left, right: the window, -1 for no limit; a
    causal mask has 0 on the right. dtype: fp16 or bf16."""

    target: str
    units: int
    dtype: str
    batch: int
    heads: int
    heads_k: int
    head_dim: int
    head_dim_v: int
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

    @property
    def mask(self) -> str:
        """The kind of mask that a kernel for this call needs."""
        left = -1 if self.left >= self.seqlen_k - 1 else self.left
        right = -1 if self.right >= self.seqlen_q - 1 else self.right
        if (left, right) == (-1, -1):
            return table.PLAIN
        return table.CAUSAL if (left, right) == (-1, 0) else table.WINDOW


def find(call: Call, op: str) -> table.Kernel | None:
    """The kernel that serves an op, fwd or bwd."""
    return table.find(
        call.target, op, call.dtype, call.head_dim, call.head_dim_v, call.mask, call.packed, call.units
    )  # fmt: skip


def unsupported_reason(call: Call, op: str, operands: Mapping[str, Operand]) -> str | None:
    """Why no kernel serves an op of this call, or None where one does."""
    if find(call, op) is None:
        form = "packed sequences" if call.packed else "sequences of one length"
        return (
            f"no {op} kernel for {call.target}, {call.dtype}, head_dim {call.head_dim}, a {call.mask} mask and {form}"
        )
    for name, operand in operands.items():
        rows = (call.total_q if name in _QUERY_SIDE else call.total_k) if call.packed else (
            call.seqlen_q if name in _QUERY_SIDE else call.seqlen_k
        )  # fmt: skip
        heads = call.heads if name in (*_QUERY_SIDE, "dk", "dv") else call.heads_k
        last = (call.batch - 1) * operand.batch + (rows - 1) * operand.row + heads * operand.head
        if last * _BYTES >= _MAX_BYTES or operand.row * _BYTES >= _MAX_ROW_BYTES:
            return f"size: {name} takes more bytes than the kernels can address"
    return None


_QUERY_SIDE = ("q", "out", "dout", "dq")


def forward(call: Call, q: Operand, k: Operand, v: Operand, out: Operand, lse: int, lse_head: int) -> Launch:
    """The launch of a forward that has a kernel. lse: an address, of float32 (batch, heads, seqlen_q), packed (heads,
    total_q); lse_head: the elements from one head to the next."""
    kernel = _need(call, "fwd")
    tiles = -(-call.seqlen_q // kernel.rows)
    if call.mask == table.CAUSAL:  # a program does the first tile and the last one, the next the ones within
        tiles = -(-tiles // 2)
    values = {
        **_common(call),
        **_strides("q", q), **_strides("k", k), **_strides("v", v), **_strides("out", out),
        "lse": lse, "lse_head": 4 * lse_head, "stores_lse": 1,
        "rows_q": kernel.rows * q.row * _BYTES,
        "options": _options(call),
    }  # fmt: skip
    grid = (call.heads, call.batch, tiles) if call.packed else (tiles, call.heads, call.batch)
    return Launch(kernel.name, grid, kernel.threads, LAYOUTS[kernel.layout].pack(values))


def _options(call: Call) -> int:
    """How a causal forward gives its programs to dies: by heads where every die gets as many."""
    by_heads = call.mask == table.PLAIN or (call.heads % 8 == 0 and call.seqlen_q <= 16384)
    return 5 if by_heads else 3


def backward(
    call: Call, operands: Mapping[str, Operand], lse: int, delta: int, sums: int, lse_head: int
) -> Launch:
    """The launch of a backward that has a kernel. operands: q, k, v, dout, dk and dv, of which the last two have a head
    for every head of q. lse, delta: addresses of float32 like `forward`'s lse. sums: the address of float32 zeros
    (batch, heads, seqlen_q, head_dim), packed (heads, total_q, head_dim), to which the kernel adds the gradient of q."""
    kernel = _need(call, "bwd")
    tiles = -(-call.seqlen_k // kernel.columns)
    if kernel.mask == table.CAUSAL:
        tiles = -(-tiles // 2)
    values: dict[str, float] = {
        **_common(call),
        "lse": lse, "delta": delta, "dq": sums, "lse_head": 4 * lse_head, "log2e": _LOG2E,
        "columns_k": kernel.columns * operands["k"].row * _BYTES,
        "seqlen_q_whole": call.seqlen_q, "total_k": call.total_k, "mask_x": 0, "mask_y": 0,
    }  # fmt: skip
    for name, operand in operands.items():
        values |= _strides(name, operand)
    if kernel.mask == table.WINDOW:
        left = call.seqlen_k - 1 if call.left < 0 else call.left
        right = call.seqlen_q - 1 if call.right < 0 else call.right
        values["mask_x"] = right + call.seqlen_k - call.seqlen_q + 1
        values["mask_y"] = left + call.seqlen_q - call.seqlen_k + 1
    grid = (tiles, call.heads, call.batch)
    return Launch(kernel.name, grid, kernel.threads, LAYOUTS[kernel.layout].pack(values))


def _need(call: Call, op: str) -> table.Kernel:
    kernel = find(call, op)
    if kernel is None:
        raise ValueError(f"no assembly kernel serves {op} of {call}: ask unsupported_reason() first")
    return kernel


def _common(call: Call) -> dict[str, float]:
    return {
        "scale": call.scale, "seqlen_q": call.seqlen_q, "seqlen_k": call.seqlen_k, "heads": call.heads,
        "group": call.heads // call.heads_k, "head_dim": call.head_dim, "head_dim_v": call.head_dim_v,
        "starts_q": call.starts_q, "starts_k": call.starts_k,
        "room_starts_q": call.starts_q, "room_starts_k": call.starts_k,
    }  # fmt: skip


def _strides(name: str, operand: Operand) -> dict[str, float]:
    return {
        name: operand.address, f"{name}_batch": operand.batch * _BYTES, f"{name}_row": operand.row * _BYTES,
        f"{name}_head": operand.head * _BYTES,
    }  # fmt: skip
