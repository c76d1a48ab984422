"""The parts of a launch, and how many operations one program has.

A part is a range of the programs of a grid where the kernel takes its first program. Elsewhere it is a smaller call
over some of the sequences, heads or rows: its pointers are moved, and some of its numbers are smaller. Each program
does what it does in the whole launch, so the results are the same bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch

from flash_attn.kernels.flags import CHUNK_BITS, HAS_BLOCK_TABLE, HAS_DESCALE

# Products of a tile of scores: 2 * queries * keys * head_dim operations each.
PRODUCTS = {"attn_fwd": 2, "attn_bwd_dq": 3, "attn_bwd_dkdv": 4, "fp8_fwd": 2, "int8_fwd": 2}
_MAX_PROGRAMS = 1 << (31 - CHUNK_BITS)
_ALIGNMENT = 4  # fp32 elements in the 16 bytes to which kernels expect some pointers to be aligned


# The numbers of a launch, its programs, the sizes of its tiles, and `unit`: elements in 16 bytes.
Numbers = Mapping[str, int]
# (programs, pointer -> elements to move it by, number -> its changed value) of a launch. Every pointer has an entry, or
# none has.
Part = tuple[int, dict[str, int], dict[str, int]]


def _operations_of_rows(products: int) -> Callable[[Numbers], int]:
    """Operations of one program that takes a tile of queries with the keys that its rows see."""

    def operations(numbers: Numbers) -> int:
        reach = numbers["window_left"] + numbers["window_right"] + numbers["block_m"]
        return products * _of_tile(numbers, numbers["block_m"] * min(numbers["seqlen_k"], reach))

    return operations


def _dkdv_operations(numbers: Numbers) -> int:
    """Operations of one program of `attn_bwd_dkdv`: a tile of keys with the queries of its heads."""
    reach = numbers["window_left"] + numbers["window_right"] + numbers["block_n"]
    rows = min(numbers["seqlen_q"], reach) * numbers["group"]
    return PRODUCTS["attn_bwd_dkdv"] * _of_tile(numbers, numbers["block_n"] * rows)


def _of_tile(numbers: Numbers, pairs: int) -> int:
    """Operations of one product of so many pairs of a query and a key, as if every sequence were the longest one."""
    return 2 * max(pairs, 1) * numbers["head_dim"] * numbers["unit"]


def _programs(numbers: Numbers, size: int) -> Iterator[Part]:
    """Ranges of the programs of a grid, whose first program is in the argument `chunk`."""
    programs = numbers["programs"]
    if programs > _MAX_PROGRAMS:
        raise ValueError(
            f"{programs} programs are too many for pieces, which take up to {_MAX_PROGRAMS}: pass fewer sequences or "
            "heads at once"
        )
    for first in range(0, programs, size):
        yield min(size, programs - first), {}, {"chunk": numbers["chunk"] | first << CHUNK_BITS}


def _decode_operations(numbers: Numbers) -> int:
    """Operations of one program of `attn_decode`. Every key inside the window counts as seen."""
    keys = min(numbers["seqlen_k"] + numbers["seqlen_new"], numbers["capacity"])
    keys = min(keys, numbers["window_left"] + numbers["window_right"] + numbers["seqlen_q"])
    columns = (numbers["head_dim"] + numbers["head_dim_v"]) * numbers["unit"]
    return 2 * numbers["block_m"] * max(-(-keys // numbers["num_splits"]), numbers["block_n"]) * columns


def _dbias_operations(numbers: Numbers) -> int:
    """Operations of one program of `attn_bwd_dbias`."""
    sharing = numbers["batch"] // numbers["planes_b"] * (numbers["nheads"] // numbers["planes_h"])
    tile = numbers["block_m"] * numbers["block_n"] * numbers["head_dim"] * numbers["unit"]
    return 2 * 2 * tile * max(sharing, 1)


def _diagonals_operations(numbers: Numbers) -> int:
    """Operations of one program of `attn_bwd_ddiagonals`, as if it had the longest diagonal and no window."""
    tile = numbers["block_m"] * numbers["block_n"] * numbers["head_dim"] * numbers["unit"]
    return 2 * 2 * tile * min(numbers["m_blocks"], numbers["n_blocks"])


def _decode(numbers: Numbers, size: int) -> Iterator[Part]:
    """The parts of a launch of `attn_decode`: several sequences, or several key heads of a sequence. A part has at
    least one key head, whose splits run side by side.
    """
    unit, heads, group, splits = numbers["unit"], numbers["nheads_k"], numbers["group"], numbers["num_splits"]
    programs, width = numbers["m_blocks"] * splits, numbers["head_dim_v"] * unit
    batch = numbers["programs"] // (programs * heads)
    lse_b, lse_h = numbers["stride_lb"], group * numbers["stride_lh"]
    # The kernel writes lse itself where there is one split. Its pointer stays aligned, and the others' always are.
    step_b, step_h = (_step(lse_b), _step(lse_h)) if splits == 1 else (1, 1)
    for first, some, head, few in _ranges(batch, heads, programs, size, step_b, step_h):
        rows = first * lse_b + head * lse_h
        keys = 0 if numbers["flags"] & HAS_BLOCK_TABLE else first
        descale = first * heads + head if numbers["flags"] & HAS_DESCALE else 0
        offsets = {
            "q": (first * numbers["stride_qb"] + head * group * numbers["stride_qh"]) * unit,
            "k": (keys * numbers["stride_kb"] + head * numbers["stride_kh"]) * unit,
            "v": (keys * numbers["stride_vb"] + head * numbers["stride_vh"]) * unit,
            "out": (first * numbers["stride_ob"] + head * group * numbers["stride_oh"]) * unit,
            "lse": rows if splits == 1 else 0,
            "partial": rows * width if splits > 1 else 0,
            "partial_lse": rows,
            **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k"), first),
            "alibi_slopes": first * numbers["stride_ab"] + head * group,
            "block_table": first * numbers["stride_tb"],
            **dict.fromkeys(("q_descale", "k_descale", "v_descale"), descale),
            "sinks": head * group,
        }
        yield some * few * programs, offsets, {"nheads_k": few}


def _dbias(numbers: Numbers, size: int) -> Iterator[Part]:
    """The parts of a launch of `attn_bwd_dbias`: several sequences of dbias, several heads of a sequence, or rows of a
    head. A part has at least one row of tiles.
    """
    planes_h, group, m_blocks, n_blocks = (numbers[name] for name in ("planes_h", "group", "m_blocks", "n_blocks"))
    plane, rows = m_blocks * n_blocks, max(size // n_blocks, 1)
    for first, some, first_head, few in _ranges(numbers["planes_b"], planes_h, plane, size, 1, group):
        blocks = [(first_head, 0, some * few * m_blocks)]
        if some * few * plane > size:
            heads = range(first_head, first_head + few)
            blocks = [(head, m, min(rows, m_blocks - m)) for head in heads for m in range(0, m_blocks, rows)]
        for head, block, count in blocks:
            row = block * numbers["block_m"]
            offsets = _offsets_of_bias(numbers, first, head, row)
            offsets["dbias"] = ((first * planes_h + head) * numbers["seqlen_q"] + row) * numbers["seqlen_k"]
            yield count * n_blocks, offsets, {"seqlen_q": numbers["seqlen_q"] - row}


def _diagonals(numbers: Numbers, size: int) -> Iterator[Part]:
    """The parts of a launch of `attn_bwd_ddiagonals`: several sequences, several heads of a sequence, or diagonals of a
    head.
    """
    nheads, group, diagonals = numbers["nheads"], numbers["group"], numbers["diagonals"]
    batch = numbers["programs"] // (diagonals * nheads)
    for entry, some, first_head, few in _ranges(batch, nheads, diagonals, size, 1, group):
        parts = [(first_head, 0, some * few * diagonals)]
        if some * few * diagonals > size:
            heads = range(first_head, first_head + few)
            parts = [(head, x, min(size, diagonals - x)) for head in heads for x in range(0, diagonals, size)]
        for head, diagonal, count in parts:
            offsets = _offsets_of_bias(numbers, entry, head, 0)
            offsets["sums"] = ((entry * nheads + head) * 2 * (diagonals + 1) + diagonal) * numbers["block_m"]
            yield count, offsets, {"first": numbers["first"] + diagonal}


def _offsets_of_bias(numbers: Numbers, entry: int, head: int, row: int) -> dict[str, int]:
    """Where the inputs of the kernels of a bias's gradient begin for a part that begins with this sequence, head and
    row."""
    unit, group = numbers["unit"], numbers["group"]
    kv_head, lse = head // group, entry * numbers["stride_lb"] + head * numbers["stride_lh"] + row
    return {
        "q": _offset(numbers, "q", entry, head, row) * unit,
        "k": (entry * numbers["stride_kb"] + kv_head * numbers["stride_kh"]) * unit,
        "v": (entry * numbers["stride_vb"] + kv_head * numbers["stride_vh"]) * unit,
        "dout": _offset(numbers, "g", entry, head, row) * unit,
        "lse": lse,
        "delta": lse,
        "bias": _offset(numbers, "s", entry, head, row),
        "norms": entry * (numbers["nheads"] // group) + kv_head,
    }


def _offset(numbers: Numbers, tensor: str, batch: int, head: int, row: int) -> int:
    places = {"b": batch, "h": head, "m": row}
    return sum(place * numbers[f"stride_{tensor}{axis}"] for axis, place in places.items())


def _ranges(
    outer: int, inner: int, programs: int, size: int, step: int, inner_step: int
) -> Iterator[tuple[int, int, int, int]]:
    """Ranges (first, count, first inner, inner count) of outer x inner cells of so many programs each.

    A range has at most `size` programs, or one step. It begins at a multiple of a step, and has every inner cell unless
    it has one outer cell.
    """
    if (run := size // (inner * programs) // step * step) or step > 1:
        run = max(run, step)
        yield from ((first, min(run, outer - first), 0, inner) for first in range(0, outer, run))
        return
    run = max(size // programs // inner_step * inner_step, inner_step)
    for first in range(outer):
        yield from ((first, 1, head, min(run, inner - head)) for head in range(0, inner, run))


def _step(stride: int) -> int:
    return _ALIGNMENT // math.gcd(_ALIGNMENT, stride)


def moved(tensor: torch.Tensor | None, elements: int, name: str) -> torch.Tensor | None:
    """The tensor from an element on. If that element is misaligned, lse and delta, which dbias reads, are copied with
    what follows them in their storage.
    """
    if tensor is None or not elements:
        return tensor
    first, length = int(tensor.storage_offset()) + elements, 1
    misaligned = name in ("lse", "delta") and elements % _ALIGNMENT
    if misaligned:
        length = tensor.untyped_storage().nbytes() // tensor.element_size() - first
    moved = tensor.as_strided((length,), (1,), first)
    return moved.clone() if misaligned else moved


# Function -> the operations of one program, and the parts of a launch.
FUNCTIONS: dict[str, tuple[Callable[[Numbers], int], Callable[[Numbers, int], Iterator[Part]]]] = {
    **{name: (_operations_of_rows(products), _programs) for name, products in PRODUCTS.items()},
    "attn_bwd_dkdv": (_dkdv_operations, _programs),
    "attn_decode": (_decode_operations, _decode),
    "attn_bwd_dbias": (_dbias_operations, _dbias),
    "attn_bwd_ddiagonals": (_diagonals_operations, _diagonals),
}
