"""The Composable Kernel kernels in plain PyTorch. Its only inputs are the names of the kernels and their argument
bytes.

It reads and writes the CPU memory that the argument's pointers name, as the kernels would a GPU's: a wrong stride,
length or pointer gives a wrong result or ends the process. The layouts are those of ck_tile's Kargs structures.
Without dropout, whose random numbers it does not draw.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from typing import Any

import torch
from flash_attn.core.ck_planner import Launch

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Fields:
    """Reads the fields of a structure one after another, each at its alignment."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.place = 0

    def read(self, letters: str) -> Any:
        result = []
        for letter in letters:
            size = struct.calcsize(letter)
            self.place += -self.place % size
            result.append(struct.unpack_from(letter, self.content, self.place)[0])
            self.place += size
        return result if len(result) > 1 else result[0]

    def align(self) -> None:
        """A part of the structure that holds pointers ends on 8 bytes."""
        self.place += -self.place % 8


def view(address: int, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor over the memory at an address."""
    if 0 in sizes:
        return torch.empty(sizes, dtype=dtype)
    count = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(sizes, strides)


def ints(address: int, count: int) -> list[int]:
    return [int(value) for value in view(address, torch.int32, (count,), (1,))]


def run(launches: Sequence[Launch]) -> None:
    for launch in launches:
        operation, dtype, *_ = launch.kernel.split("-")
        options = set(launch.kernel.split("-")[3:])
        assert "dropout" not in options
        fields = Fields(launch.argument)
        globals()[f"_{operation}"](fields, _DTYPES[dtype], int(launch.kernel.split("-")[2][1:]), options, launch.grid)
        assert len(launch.argument) - fields.place < 8, f"{launch.kernel}: fields are left"


def _features(fields: Fields, options: set[str]) -> dict[str, Any]:
    """ALiBi and the window, which lie behind the common part."""
    result: dict[str, Any] = {"slopes": None, "window": (-1, -1)}
    if "alibi" in options:
        result["slopes"] = fields.read("Qi")
        fields.align()
    if "mask" in options:
        left, right, kind = fields.read("iii")
        assert kind == 2  # aligned to the last query and key
        # Else the kernels would add slope * key instead of slope * distance.
        assert not ("alibi" in options and left < 0 and right == 0)
        result["window"] = (left, right)
    return result


def _scores(
    q: torch.Tensor,
    k: torch.Tensor,
    scale: float,
    features: dict[str, Any],
    batch: int,
    head: int,
    softcap: float = 0.0,
) -> torch.Tensor:
    """fp32 scores of one head (queries, keys), -inf where masked."""
    rows, columns = q.shape[0], k.shape[0]
    scores = q.float() @ k.float().T * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(columns) - torch.arange(rows)[:, None] - (columns - rows)
    if features["slopes"] is not None:
        address, stride = features["slopes"]
        slope = float(view(address + 4 * (batch * stride + head), torch.float32, (1,), (1,)))
        scores -= slope * distance.abs()
    left, right = features["window"]
    if left >= 0:
        scores[distance < -left] = -math.inf
    if right >= 0:
        scores[distance > right] = -math.inf
    return scores


def _attend(scores: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of one head; 0 and -inf in a row without keys."""
    lse = torch.logsumexp(scores, -1) if scores.shape[-1] else torch.full(scores.shape[:1], -math.inf)
    weights = torch.exp(scores - lse.nan_to_num(neginf=0.0)[:, None])
    return weights @ v.float(), lse


def _positive(lse: torch.Tensor) -> torch.Tensor:
    return lse.masked_fill(lse == -math.inf, math.inf)


def _fwd(fields: Fields, dtype: torch.dtype, bucket: int, options: set[str], grid: tuple[int, int, int]) -> None:
    q, k, v, out, sq, sk, dim, dim_v, nheads, group, scale2, *strides = fields.read("QQQQiiiiiif" + "i" * 8)
    fields.align()
    assert dim == dim_v <= bucket
    features = _features(fields, options)
    lse, lse_head, lse_batch = fields.read("Qii")
    softcap = fields.read("ff")[0] if "softcap" in options else 0.0
    (rq, rk, rv, ro), (hq, hk, hv, ho) = strides[:4], strides[4:]
    if "group" in options:
        cu_q, cu_k, used = fields.read("QQQ")
        batch = grid[1] if used else grid[2]
        starts_q, starts_k = ints(cu_q, batch + 1), ints(cu_k, batch + 1)
    else:
        bq, bk, bv, bo = fields.read("iiii")
        batch = grid[2]
    assert grid[0] == nheads
    scale = scale2 / math.log2(math.e)
    for b in range(batch):
        if "group" in options:
            sq, sk = starts_q[b + 1] - starts_q[b], starts_k[b + 1] - starts_k[b]
            sk = ints(used, batch)[b] if used else sk
            places = (starts_q[b] * rq, starts_k[b] * rk, starts_k[b] * rv, starts_q[b] * ro, starts_q[b])
        else:
            places = (b * bq, b * bk, b * bv, b * bo, b * lse_batch)
        for h in range(nheads):
            queries = view(q + 2 * (places[0] + h * hq), dtype, (sq, dim), (rq, 1))
            keys = view(k + 2 * (places[1] + h // group * hk), dtype, (sk, dim), (rk, 1))
            values = view(v + 2 * (places[2] + h // group * hv), dtype, (sk, dim), (rv, 1))
            result, row_lse = _attend(_scores(queries, keys, scale, features, b, h, softcap), values)
            view(out + 2 * (places[3] + h * ho), dtype, (sq, dim), (ro, 1)).copy_(result)
            view(lse + 4 * (places[4] + h * lse_head), torch.float32, (sq,), (1,)).copy_(_positive(row_lse))


def _dot(fields: Fields, dtype: torch.dtype, _bucket: int, options: set[str], grid: tuple[int, int, int]) -> None:
    out, dout, delta, undrop, sq, dim, rd, ro, hd, ho, hl = fields.read("QQQfiiiiiii")
    assert undrop == 1.0
    if "group" in options:
        fields.align()
        starts = ints(fields.read("Q"), grid[2] + 1)
    else:
        bd, bo, bl = fields.read("iii")
    for b in range(grid[2]):
        if "group" in options:
            sq = starts[b + 1] - starts[b]
            places = (starts[b] * ro, starts[b] * rd, starts[b])
        else:
            places = (b * bo, b * bd, b * bl)
        for h in range(grid[1]):
            o = view(out + 2 * (places[0] + h * ho), dtype, (sq, dim), (ro, 1)).float()
            do = view(dout + 2 * (places[1] + h * hd), dtype, (sq, dim), (rd, 1)).float()
            view(delta + 4 * (places[2] + h * hl), torch.float32, (sq,), (1,)).copy_((o * do).sum(-1))


def _dqdkdv(fields: Fields, dtype: torch.dtype, bucket: int, options: set[str], grid: tuple[int, int, int]) -> None:
    q, k, v, lse, dout, delta, sums, dk, dv = fields.read("Q" * 9)
    sq, sk, dim, dim_v, nheads, group, scale, _scale2 = fields.read("iiiiiiff")
    rq, rk, rv, rd, rs, rdk, rdv = fields.read("i" * 7)
    hq, hk, hv, hd, hl, hs, hdk, hdv = fields.read("i" * 8)
    fields.align()
    assert dim == dim_v == bucket
    features = _features(fields, options | {"mask"})
    split = fields.read("i") if "deterministic" in options else 0
    if "group" in options:
        fields.align()
        cu_q, cu_k, used = fields.read("QQQ")
        assert used == 0
        starts_q, starts_k = ints(cu_q, grid[2] + 1), ints(cu_k, grid[2] + 1)
    else:
        batches = fields.read("i" * 8)
    block = 64 if bucket == 256 else 128
    for b in range(grid[2]):
        if "group" in options:
            sq, sk = starts_q[b + 1] - starts_q[b], starts_k[b + 1] - starts_k[b]
            a, c = starts_q[b], starts_k[b]
            places = [a * rq, c * rk, c * rv, a * rd, a, a * rs, c * rdk, c * rdv]
        else:
            places = [b * stride for stride in batches]
        for h in range(nheads):
            queries = view(q + 2 * (places[0] + h * hq), dtype, (sq, dim), (rq, 1)).float()
            keys = view(k + 2 * (places[1] + h // group * hk), dtype, (sk, dim), (rk, 1)).float()
            values = view(v + 2 * (places[2] + h // group * hv), dtype, (sk, dim), (rv, 1)).float()
            do = view(dout + 2 * (places[3] + h * hd), dtype, (sq, dim), (rd, 1)).float()
            row_lse = view(lse + 4 * (places[4] + h * hl), torch.float32, (sq,), (1,))
            row_delta = view(delta + 4 * (places[4] + h * hl), torch.float32, (sq,), (1,))
            p = torch.exp(_scores(queries, keys, scale, features, b, h) - row_lse[:, None])
            ds = p * (do @ values.T - row_delta[:, None]) * scale
            view(dk + 2 * (places[6] + h * hdk), dtype, (sk, dim), (rdk, 1)).copy_(ds.T @ queries)
            view(dv + 2 * (places[7] + h * hdv), dtype, (sk, dim), (rdv, 1)).copy_(p.T @ do)
            # One block of keys after another adds to the sums, or writes a part of its own.
            for part, start in enumerate(range(0, sk, block)):
                address = sums + 4 * (part * split + places[5] + h * hs)
                rows = view(address, torch.float32, (sq, dim), (rs, 1))
                rows += (ds[:, start : start + block] / scale) @ keys[start : start + block] * scale


def _convert(fields: Fields, dtype: torch.dtype, bucket: int, options: set[str], grid: tuple[int, int, int]) -> None:
    sums, dq, sq, sk, dim, rd, rs, hd, hs = fields.read("QQiiiiiii")
    fields.align()
    split = fields.read("i") if "deterministic" in options else 0
    if "group" in options:
        fields.align()
        cu_q, cu_k = fields.read("QQ")
        starts_q, starts_k = ints(cu_q, grid[2] + 1), ints(cu_k, grid[2] + 1)
    else:
        bd, bs = fields.read("ii")
    block = 64 if bucket == 256 else 128
    for b in range(grid[2]):
        if "group" in options:
            sq, sk = starts_q[b + 1] - starts_q[b], starts_k[b + 1] - starts_k[b]
            places = (starts_q[b] * rd, starts_q[b] * rs)
        else:
            places = (b * bd, b * bs)
        parts = -(-sk // block) if "deterministic" in options else 1
        for h in range(grid[1]):
            each = [
                view(sums + 4 * (part * split + places[1] + h * hs), torch.float32, (sq, dim), (rs, 1))
                for part in range(parts)
            ]
            view(dq + 2 * (places[0] + h * hd), dtype, (sq, dim), (rd, 1)).copy_(sum(each, torch.zeros(sq, dim)))


def _pages(
    table: tuple[int, int, int],
    address: int,
    batch: int,
    page: int,
    row: int,
    place: int,
    rows: int,
    dim: int,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """The pieces of one sequence and head over its pages; place is where the head begins in a page."""
    pointer, stride, size = table
    numbers = ints(pointer + 4 * batch * stride, -(-rows // size))
    return [
        view(address + 2 * (number * page + place), dtype, (min(size, rows - index * size), dim), (row, 1))
        for index, number in enumerate(numbers)
    ]


def _appendkv(fields: Fields, dtype: torch.dtype, _bucket: int, options: set[str], grid: tuple[int, int, int]) -> None:
    q, k, k_new, v, v_new, before, sq, _sk, new, dim, dim_v, nheads, group = fields.read("Q" * 6 + "i" * 7)
    rows, heads, batches = fields.read("i" * 5), fields.read("i" * 5), fields.read("i" * 5)
    fields.align()
    assert dim == dim_v
    turn = options & {"interleaved", "half"}
    if turn:
        cos, sin, rotary, masked, _, _, _ = fields.read("QQibbbb")
        fields.align()
    if "paged" in options:
        table = fields.read("Qii")
    else:
        chosen = fields.read("Q")

    def turned(x: torch.Tensor, place: int, moving: bool) -> torch.Tensor:
        if not turn:
            return x
        half = rotary // 2
        angles = [
            torch.stack(
                [view(base + 2 * (place + i * moving) * half, dtype, (half,), (1,)).float() for i in range(len(x))]
            )
            for base in (cos, sin)
        ]
        first = slice(0, rotary, 2) if "interleaved" in options else slice(0, half)
        second = slice(1, rotary, 2) if "interleaved" in options else slice(half, rotary)
        result = x.clone().float()
        a, b = x[:, first].float(), x[:, second].float()
        result[:, first] = a * angles[0] - b * angles[1]
        result[:, second] = a * angles[1] + b * angles[0]
        return result.to(x.dtype)

    for b in range(grid[2]):
        length = ints(before, grid[2])[b]
        row = ints(chosen, grid[2])[b] if "paged" not in options and chosen else b
        for h in range(nheads):
            if turn:
                queries = view(q + 2 * (b * batches[0] + h * heads[0]), dtype, (sq, dim), (rows[0], 1))
                queries.copy_(turned(queries, length, bool(masked)))
            for part, source, target in ((1, k_new, k), (3, v_new, v)):
                fresh = view(
                    source + 2 * (b * batches[part + 1] + h // group * heads[part + 1]),
                    dtype,
                    (new, dim),
                    (rows[part + 1], 1),
                )
                fresh = turned(fresh, length, True) if part == 1 else fresh
                place = h // group * heads[part]
                if "paged" in options:
                    pieces = _pages(table, target, b, batches[part], rows[part], place, length + new, dim, dtype)
                    for index in range(new):
                        page, inside = divmod(length + index, table[2])
                        pieces[page][inside] = fresh[index]
                else:
                    begin = target + 2 * (row * batches[part] + place + length * rows[part])
                    view(begin, dtype, (new, dim), (rows[part], 1)).copy_(fresh)


def _splitkv(fields: Fields, dtype: torch.dtype, bucket: int, options: set[str], grid: tuple[int, int, int]) -> None:
    q, k, v, lse, out, batch, sq, sk, dim, dim_v, nheads, group, splits, scale2 = fields.read("QQQQQiiiiiiiif")
    rq, rk, rv, ro, hq, hk, hv, hl, ho, sl, so = fields.read("i" * 11)
    fields.align()
    assert dim == dim_v == bucket
    assert grid[2] == batch
    features = _features(fields, options | {"mask"})
    table = chosen = None
    if "paged" in options:
        table = fields.read("Qii")
        if "group" in options:
            fields.read("bbbbbbbb")
    else:
        chosen = fields.read("Q")
    softcap = fields.read("ff")[0] if "softcap" in options else 0.0
    if "group" in options:
        cu_q, cu_k, used, bk, bv = fields.read("QQQii")
        starts_q, starts_k = ints(cu_q, batch + 1), ints(cu_k, batch + 1)
    else:
        used, bq, bk, bv, bl, bo = fields.read("Qiiiii")
    longest = sk
    for b in range(batch):
        if "group" in options:
            sq, longest = starts_q[b + 1] - starts_q[b], starts_k[b + 1] - starts_k[b]
            places = (starts_q[b] * rq, starts_q[b], starts_q[b] * ro)
        else:
            places = (b * bq, b * bl, b * bo)
        sk = ints(used, batch)[b] if used else longest
        row = ints(chosen, batch)[b] if chosen else b
        for h in range(nheads):
            queries = view(q + 2 * (places[0] + h * hq), dtype, (sq, dim), (rq, 1))
            if table is not None:
                keys = torch.cat(_pages(table, k, b, bk, rk, h // group * hk, sk, dim, dtype))
                values = torch.cat(_pages(table, v, b, bv, rv, h // group * hv, sk, dim, dtype))
            else:
                keys = view(k + 2 * (row * bk + h // group * hk), dtype, (sk, dim), (rk, 1))
                values = view(v + 2 * (row * bv + h // group * hv), dtype, (sk, dim), (rv, 1))
            scores = _scores(queries, keys, scale2 / math.log2(math.e), features, b, h, softcap)
            width = -(-sk // splits)
            for split in range(splits):
                part = slice(split * width, (split + 1) * width)
                result, row_lse = _attend(scores[:, part], values[part])
                view(out + 4 * (split * so + places[2] + h * ho), torch.float32, (sq, dim), (ro, 1)).copy_(result)
                view(lse + 4 * (split * sl + places[1] + h * hl), torch.float32, (sq,), (1,)).copy_(row_lse)


def _combine(fields: Fields, dtype: torch.dtype, _bucket: int, options: set[str], grid: tuple[int, int, int]) -> None:
    parts_lse, parts, out, batch, sq, dim, splits, rp, ro, hl, hp, ho, sl, sp = fields.read("QQQ" + "i" * 11)
    fields.align()
    lse, lse_head, lse_batch = fields.read("Qii")
    assert splits <= (16 if "splits4" in options else 128)
    if "group" in options:
        starts = ints(fields.read("Q"), batch + 1)
    else:
        bl, bp, bo = fields.read("iii")
    for b in range(batch):
        if "group" in options:
            sq = starts[b + 1] - starts[b]
            places = (starts[b], starts[b] * rp, starts[b] * ro, starts[b])
        else:
            places = (b * bl, b * bp, b * bo, b * lse_batch)
        for h in range(grid[1]):
            each_lse = view(parts_lse + 4 * (places[0] + h * hl), torch.float32, (splits, sq), (sl, 1))
            each = view(parts + 4 * (places[1] + h * hp), torch.float32, (splits, sq, dim), (sp, rp, 1))
            total = torch.logsumexp(each_lse, 0)
            weights = torch.exp(each_lse - total.nan_to_num(neginf=0.0))
            view(out + 2 * (places[2] + h * ho), dtype, (sq, dim), (ro, 1)).copy_((weights[..., None] * each).sum(0))
            view(lse + 4 * (places[3] + h * lse_head), torch.float32, (sq,), (1,)).copy_(_positive(total))
