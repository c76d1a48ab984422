"""A mask in memory that grows with the length: which keys each query sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flash_attn.call.block_mask import BlockMask
from flash_attn.kernels.operation import SPARSE_BLOCK


@dataclass(frozen=True, eq=False)
class Mask:
    """A query sees a key that all parts of the mask show. A part that is None shows every key.

    blocks        which blocks of keys a block of queries sees. A block that is whole shows its keys whatever the other
                  parts, causal and the window hide
    ranges        int32 (1 or batch, 1 or heads, seqlen_q, 2, 2): two ranges of keys for each query, each as its first
                  key and the key behind its last one. The query sees the keys of both. A range whose end is not behind
                  its start is empty
    ids_q, ids_k  int32 (1 or batch, seqlen_q) and (1 or batch, seqlen_k): a query sees the keys with its own id. Equal
                  ids need not be neighbours
    hidden        int32 (1 or batch, 1 or heads, seqlen_k, 2, 2): for each key two ranges of queries that do
                  not see it
    bits          int32 (1 or batch, 1 or heads, seqlen_q, ceil(seqlen_k / 32)), in the place of ranges: bit j % 32 of
                  word j // 32 shows key j to the query
    """

    blocks: BlockMask | None = None
    ranges: torch.Tensor | None = None
    ids_q: torch.Tensor | None = None
    ids_k: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    bits: torch.Tensor | None = None

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """The tensors that the mask has, by name; its blocks as `seen`."""
        return {name: x for name, x in zip(_PARTS, parts_of(self), strict=True) if x is not None}

    @property
    def device(self) -> torch.device | None:
        """Where its parts are; None for a mask without parts."""
        return next((x.device for x in self.parts.values()), None)

    def of_entries(self, some: slice) -> Mask:
        """The mask of some entries of the batch."""
        return _mask([x[some] if x is not None and x.shape[0] > 1 else x for x in parts_of(self)], self.block_size)

    @property
    def block_size(self) -> tuple[int, int]:
        """Queries and keys of a block; any size where the mask has no blocks."""
        return (SPARSE_BLOCK, SPARSE_BLOCK) if self.blocks is None else self.blocks.block_size

    @property
    def planes(self) -> tuple[int, int]:
        """How many batch entries and heads have a mask of their own."""
        parts = self.parts
        heads = [x.shape[1] for name, x in parts.items() if not name.startswith("ids")]
        return max([x.shape[0] for x in parts.values()], default=1), max(heads, default=1)

    def check(self, batch: int, heads: int, seqlen_q: int, seqlen_k: int, device: torch.device) -> None:
        """Raises TypeError or ValueError unless the mask fits tensors of this batch, heads, lengths and device."""
        if self.blocks is not None:
            self.blocks.check(batch, heads, seqlen_q, seqlen_k, device)
        if (self.ids_q is None) is not (self.ids_k is None):
            missing, other = ("ids_q", "ids_k") if self.ids_q is None else ("ids_k", "ids_q")
            raise ValueError(f"{missing}: got None, wanted int32 ids beside {other}")
        shapes = {
            "ranges": ((batch, heads, seqlen_q, 2, 2), 2),
            "ids_q": ((batch, seqlen_q), 1),
            "ids_k": ((batch, seqlen_k), 1),
            "hidden": ((batch, heads, seqlen_k, 2, 2), 2),
            "bits": ((batch, heads, seqlen_q, -(-seqlen_k // 32)), 2),
        }
        if self.bits is not None and self.ranges is not None:
            raise ValueError("bits: got a tensor beside ranges, wanted None for one of them")
        for name, (shape, shared) in shapes.items():
            x = getattr(self, name)
            if x is not None:
                _check(name, x, shape, shared, device)


_PARTS = ("seen", "ranges", "ids_q", "ids_k", "hidden", "bits")
# A mask as arguments of a custom operator.
SCHEMA = ", ".join(f"Tensor? {name}" for name in _PARTS) + ", SymInt[2] block_size"


def parts_of(mask: Mask | None) -> tuple[torch.Tensor | None, ...]:
    """The tensors of a mask in the order of `SCHEMA`."""
    if mask is None:
        return (None,) * len(_PARTS)
    seen = None if mask.blocks is None else mask.blocks.seen
    return seen, mask.ranges, mask.ids_q, mask.ids_k, mask.hidden, mask.bits


def block_size_of(mask: Mask | None) -> tuple[int, int]:
    """The last argument of `SCHEMA`."""
    return (SPARSE_BLOCK, SPARSE_BLOCK) if mask is None else mask.block_size


def mask_of(parts: Sequence[torch.Tensor | None], block_size: Sequence[int]) -> Mask | None:
    """The mask of these arguments; None for a call without one."""
    return None if all(x is None for x in parts) else _mask(parts, block_size)


def _mask(parts: Sequence[torch.Tensor | None], block_size: Sequence[int]) -> Mask:
    seen, *others = parts
    block_q, block_k = block_size
    return Mask(None if seen is None else BlockMask(seen, (block_q, block_k)), *others)


def pack_bits(seen: torch.Tensor) -> torch.Tensor:
    """`Mask.bits` of a mask of every score, bool (..., seqlen_k)."""
    whole = torch.nn.functional.pad(seen.byte(), (0, -seen.shape[-1] % 32)).contiguous()
    # The product has the lowest bits of eight bytes as its highest byte.
    return (whole.view(torch.int64) * 0x0102040810204080 >> 56).byte().view(torch.int32)


def _check(name: str, x: torch.Tensor, shape: tuple[int, ...], shared: int, device: torch.device) -> None:
    """Raises unless x is int32 of this shape, in which each of the first `shared` axes may have size 1."""
    if not isinstance(x, torch.Tensor) or x.dtype is not torch.int32:
        got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        expected = _written(shape, shared)
        raise TypeError(f"{name}: got {got}, wanted an int32 tensor of shape {expected}: pass {name}.to(torch.int32)")
    fits = x.dim() == len(shape) and all(
        got == size or (got == 1 and axis < shared) for axis, (got, size) in enumerate(zip(x.shape, shape, strict=True))
    )
    if not fits:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, wanted {_written(shape, shared)}")
    if x.device != device:
        raise ValueError(f"{name}: got it on {x.device}, wanted {device} as q has: {name}.to(q.device)")


def _written(shape: tuple[int, ...], shared: int) -> str:
    """A shape for messages. Only there, because a compiler cannot write the sizes that change from call to call."""
    return f"({', '.join(f'1 or {size}' if axis < shared else f'{size}' for axis, size in enumerate(shape))})"
