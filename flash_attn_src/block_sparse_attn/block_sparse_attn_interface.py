"""Attention of packed sequences whose heads are dense, streaming or block-sparse, by mit-han-lab's names and arguments.

Blocks have 128 queries and 128 keys, counted from the first of each sequence. A head's type is 0 for dense, negative
for streaming, positive for a block mask. A query of a streaming head sees the first keys
(sinks) and the keys before itself.
"""

from __future__ import annotations

from itertools import pairwise
from operator import index
from typing import NamedTuple

import torch
from flash_attn.call.arguments.diagnosis import check_strided, diagnose_switches
from flash_attn.call.block_mask import BlockMask
from flash_attn.ranges import flash_attn_ranges_func

_BLOCK = 128
_Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def block_sparse_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    head_mask_type: torch.Tensor,
    streaming_info: torch.Tensor | None,
    base_blockmask: torch.Tensor | None,
    max_seqlen_q_: int,
    max_seqlen_k_: int,
    p_dropout: float,
    deterministic: bool = False,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    exact_streaming: bool = False,
    return_attn_probs: bool = False,
) -> _Result:
    """Attention of packed sequences, forward and backward.

    q (total_q, heads, head_dim), k and v (total_k, heads_k, head_dim): fp16, bf16 or fp32, head dims up to 256.
    cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,). max_seqlen_q_, max_seqlen_k_: at least the longest sequence.
    head_mask_type: integers (heads,). 0: dense. Negative: streaming. The heads of type 1 take the masks of
    base_blockmask in their order; type n > 1 takes mask n - 1.
    base_blockmask: bool or numbers (batch, heads of type 1, blocks of queries, blocks of keys), not 0 where visible.
    streaming_info: integers (2 * heads,), for each head the sinks and the local keys, in blocks. With exact_streaming,
    which is_causal must accompany, they count single keys, and a query is one of its local keys.
    is_causal is aligned to the last query and the last key of a sequence. A query that sees no key gets 0.

    Returns out like q. With return_attn_probs (out, softmax_lse (batch, heads, max_seqlen_q_) in fp32, an empty
    tensor); softmax_lse is +inf where there is no query or no key, and has no gradient. Results are deterministic in
    any case. The host waits once for the lengths and the types. ValueError and TypeError name the argument.
    NotImplementedError for p_dropout.
    """
    _check(p_dropout, deterministic, softmax_scale, is_causal, exact_streaming, return_attn_probs)
    if exact_streaming and not is_causal:
        raise ValueError("exact_streaming: got True without is_causal, wanted is_causal=True")
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_strided(name, x)
        if x.dim() != 3:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, wanted (total, heads, head_dim)")
    call = _read(q, k, cu_seqlens_q, cu_seqlens_k, head_mask_type)
    max_seqlen_q_, max_seqlen_k_ = index(max_seqlen_q_), index(max_seqlen_k_)
    for name, longest, limit in (("q", call.longest_q, max_seqlen_q_), ("k", call.longest_k, max_seqlen_k_)):
        if limit < longest:
            raise ValueError(f"max_seqlen_{name}_: got {limit}, wanted at least {longest}, the longest sequence")
    masks = _Masks(call.types, _streaming(call, streaming_info), base_blockmask, exact_streaming, is_causal)
    masks.check(call)
    out = q.new_zeros((*q.shape[:2], v.shape[-1]))
    lse = torch.full((len(call.q), q.shape[1], max_seqlen_q_), torch.inf, dtype=torch.float32, device=q.device)
    parts = []
    for entry, (rows_q, rows_k) in enumerate(zip(call.q, call.k, strict=True)):
        lengths = (_length(rows_q), _length(rows_k))
        part, part_lse = flash_attn_ranges_func(
            q[None, rows_q], k[None, rows_k], v[None, rows_k], masks.ranges(*lengths, q.device),
            block_mask=masks.blocks(entry, *lengths, q.device), softmax_scale=softmax_scale, causal=is_causal,
            return_lse=True,
        )  # fmt: skip
        parts.append(part[0])
        lse[entry, :, : lengths[0]] = part_lse[0].detach()
    behind = q.shape[0] - call.q[-1].stop
    out = torch.cat((*parts, out[:behind])) if behind or len(parts) != 1 else parts[0]
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def token_streaming_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    head_mask_type: torch.Tensor,
    streaming_info: torch.Tensor,
    max_seqlen_q_: int,
    max_seqlen_k_: int,
    deterministic: bool = False,
    softmax_scale: float | None = None,
    return_attn_probs: bool = False,
) -> _Result:
    """block_sparse_attn_func with exact_streaming and is_causal, without block masks."""
    return block_sparse_attn_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, head_mask_type, streaming_info, None, max_seqlen_q_, max_seqlen_k_, 0.0,
        deterministic, softmax_scale, True, True, return_attn_probs,
    )  # fmt: skip


def block_streaming_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    head_mask_type: torch.Tensor,
    streaming_info: torch.Tensor,
    max_seqlen_q_: int,
    max_seqlen_k_: int,
    p_dropout: float,
    deterministic: bool = False,
    softmax_scale: float | None = None,
    is_causal: bool = True,
    return_attn_probs: bool = False,
) -> _Result:
    """block_sparse_attn_func without block masks: streaming heads count blocks."""
    return block_sparse_attn_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, head_mask_type, streaming_info, None, max_seqlen_q_, max_seqlen_k_,
        p_dropout, deterministic, softmax_scale, is_causal, False, return_attn_probs,
    )  # fmt: skip


def _check(p_dropout: float, deterministic: bool, softmax_scale: float | None, *switches: bool) -> None:
    if type(p_dropout) not in (int, float) or p_dropout != 0:
        raise NotImplementedError(f"p_dropout: got {p_dropout!r}, wanted 0: use flash_attn.flash_attn_varlen_func")
    names = ("is_causal", "exact_streaming", "return_attn_probs")
    diagnose_switches(softmax_scale, deterministic=deterministic, **dict(zip(names, switches, strict=True)))


def _length(rows: slice) -> int:
    return int(rows.stop) - int(rows.start)


class _Call(NamedTuple):
    """What the host reads of a call: the rows of each sequence and the type of each head."""

    q: list[slice]
    k: list[slice]
    types: list[int]

    @property
    def longest_q(self) -> int:
        return max(_length(rows) for rows in self.q)

    @property
    def longest_k(self) -> int:
        return max(_length(rows) for rows in self.k)


def _read(
    q: torch.Tensor, k: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, types: torch.Tensor
) -> _Call:
    """Reads the lengths and the types, for which the host waits once."""
    tensors = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "head_mask_type": types}
    for name, x in tensors.items():
        check_strided(name, x)
        if x.dim() != 1 or x.is_floating_point():
            raise ValueError(f"{name}: got {x.dtype} {tuple(x.shape)}, wanted integers with one axis")
        if x.device != q.device:
            raise ValueError(f"{name}: got it on {x.device}, wanted {q.device} as q has: {name}.to(q.device)")
    if types.shape[0] != q.shape[1]:
        raise ValueError(f"head_mask_type: got {types.shape[0]} types, wanted {q.shape[1]}, one for each head of q")
    if cu_seqlens_q.shape[0] < 2 or cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_q, cu_seqlens_k: got {cu_seqlens_q.shape[0]} and {cu_seqlens_k.shape[0]} elements, wanted "
            "batch + 1 each, at least 2"
        )
    numbers = torch.cat([x.to(torch.int64) for x in tensors.values()]).tolist()
    count = cu_seqlens_q.shape[0]
    ends = {"cu_seqlens_q": (numbers[:count], q.shape[0]), "cu_seqlens_k": (numbers[count : 2 * count], k.shape[0])}
    for name, (cu, total) in ends.items():
        if cu[0] != 0 or cu[-1] > total or any(a > b for a, b in pairwise(cu)):
            raise ValueError(f"{name}: got {cu}, wanted 0 first, no decrease, and at most {total} last")
    of_q, of_k = ([slice(a, b) for a, b in pairwise(cu)] for cu, _ in ends.values())
    return _Call(of_q, of_k, numbers[2 * count :])


def _streaming(call: _Call, streaming_info: torch.Tensor | None) -> torch.Tensor | None:
    """int64 (2, heads): sinks and local keys of each head; None where no head needs them."""
    heads = len(call.types)
    if not any(kind < 0 for kind in call.types):
        return None
    check_strided("streaming_info", streaming_info)  # type: ignore[arg-type]
    assert streaming_info is not None
    if streaming_info.is_floating_point() or streaming_info.numel() != 2 * heads:
        raise ValueError(
            f"streaming_info: got {streaming_info.dtype} {tuple(streaming_info.shape)}, wanted integers "
            f"({2 * heads},), the sinks and the local keys of each head"
        )
    return streaming_info.reshape(heads, 2).T.to(torch.int64)


class _Masks(NamedTuple):
    """The masks of a call's heads."""

    types: list[int]
    streaming: torch.Tensor | None
    base: torch.Tensor | None
    is_exact: bool
    is_causal: bool

    def check(self, call: _Call) -> None:
        """Raises ValueError unless the block masks fit the types and the lengths."""
        ones = self.types.count(1)
        if self.base is None:
            if any(kind > 0 for kind in self.types):
                raise ValueError(f"base_blockmask: got None, wanted a block mask for the types {self.types}")
            return
        check_strided("base_blockmask", self.base)
        shape = tuple(self.base.shape)
        blocks = (-(-call.longest_q // _BLOCK), -(-call.longest_k // _BLOCK))
        fits = len(shape) == 4 and shape[0] == len(call.q) and shape[1] == ones
        if not fits or shape[2] < blocks[0] or shape[3] < blocks[1]:
            raise ValueError(
                f"base_blockmask: got shape {shape}, wanted ({len(call.q)}, {ones}, {blocks[0]}, {blocks[1]}): (batch, "
                "heads of type 1, blocks of queries, blocks of keys)"
            )
        if max(self.types, default=0) > max(ones, 1):
            raise ValueError(
                f"head_mask_type: got {max(self.types)}, wanted at most {ones}, the masks of base_blockmask"
            )

    def blocks(self, entry: int, seqlen_q: int, seqlen_k: int, device: torch.device) -> BlockMask | None:
        """The visible blocks of a sequence; None where every head sees all blocks."""
        of_blocks = self.streaming is not None and not self.is_exact
        if not of_blocks and not any(kind > 0 for kind in self.types):
            return None
        shape = (len(self.types), -(-seqlen_q // _BLOCK), -(-seqlen_k // _BLOCK))
        seen = torch.ones(shape, dtype=torch.bool, device=device)
        if self.base is not None:
            order = iter(range(len(self.types)))
            masks = {head: next(order) if kind == 1 else kind - 1 for head, kind in enumerate(self.types) if kind > 0}
            chosen = self.base[entry, list(masks.values()), : shape[1], : shape[2]]
            seen[list(masks)] = chosen.to(device) != 0
        if self.streaming is not None and not self.is_exact:
            heads = [head for head, kind in enumerate(self.types) if kind < 0]
            seen[heads] = self._of_streaming(seqlen_q, seqlen_k, shape[1:])[heads]
        return BlockMask(seen[None], (_BLOCK, _BLOCK))

    def _of_streaming(self, seqlen_q: int, seqlen_k: int, shape: tuple[int, int]) -> torch.Tensor:
        """bool (heads, *shape): sinks, and the local blocks before the last one that a row of blocks reaches."""
        assert self.streaming is not None
        sinks, local = self.streaming[:, :, None, None]
        rows, cols = (torch.arange(size, device=sinks.device) for size in shape)
        last = torch.full_like(rows, shape[1])
        if self.is_causal:
            behind = max((seqlen_q - seqlen_k) // _BLOCK, 0)
            last = rows - behind + -(-max(seqlen_k - seqlen_q, 0) // _BLOCK) + 1
            last = torch.where(rows < behind, 0, last)
        last = last[:, None]
        near = (cols >= (last - local).clamp_min(0)) & (cols < last)
        return torch.logical_or(near, (cols < sinks) & (last > 0))

    def ranges(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> torch.Tensor | None:
        """int32 (1, heads, seqlen_q, 2, 2): the sinks and the local keys of each query; None without exact
        streaming."""
        if self.streaming is None or not self.is_exact:
            return None
        end = torch.arange(seqlen_k - seqlen_q + 1, seqlen_k + 1, device=device).clamp_min(0)  # [seqlen_q]
        streams = torch.tensor([kind < 0 for kind in self.types], device=device)[:, None]
        sinks, local = self.streaming[:, :, None].to(device)
        begin = torch.where(streams, torch.maximum(end - local, sinks), 0)
        first = torch.where(streams, sinks, 0).expand_as(begin)
        bounds = torch.stack((torch.zeros_like(begin), first, begin, end.expand_as(begin)), -1)
        return bounds.to(torch.int32).view(1, *begin.shape, 2, 2)
