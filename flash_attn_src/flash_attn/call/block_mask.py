"""A block mask: which blocks of queries see which blocks of keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flash_attn.kernels.operation import SPARSE_BLOCK

_TYPES = (torch.bool, torch.uint8)


def check_block_size(name: str, sizes: object) -> None:
    """Raises ValueError unless sizes are two multiples of the smallest block."""
    is_pair = isinstance(sizes, tuple) and len(sizes) == 2 and all(type(size) is int for size in sizes)
    if not is_pair or any(size < SPARSE_BLOCK or size % SPARSE_BLOCK for size in sizes):  # type: ignore[attr-defined]
        raise ValueError(
            f"{name}: got {sizes!r}, wanted (queries, keys), two multiples of {SPARSE_BLOCK}: see BlockMask.of_tokens "
            "for other sizes"
        )


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Which blocks of keys a block of queries sees. Inside a visible block every query sees every key that causal, the
    window, ranges and ids of the call show.

    seen        bool (1 or batch, 1 or heads, q_blocks, k_blocks); or uint8, 0 for a hidden block, 1 for a visible one,
                2 for a whole one, whose keys are visible whatever causal, the window, ranges and ids hide
    block_size  (queries, keys) of a block, multiples of 64. The last block of a sequence may be shorter, so
                q_blocks is ceil(seqlen_q / queries) and k_blocks is ceil(seqlen_k / keys)

    TypeError for `seen` of another type. ValueError for another shape and for other block sizes.
    """

    seen: torch.Tensor
    block_size: tuple[int, int] = (128, 128)

    def __post_init__(self) -> None:
        if not isinstance(self.seen, torch.Tensor) or self.seen.dtype not in _TYPES:
            got = self.seen.dtype if isinstance(self.seen, torch.Tensor) else type(self.seen).__name__
            raise TypeError(f"seen: got {got}, wanted a tensor of bool or uint8: pass seen.bool()")
        if self.seen.dim() != 4:
            raise ValueError(
                f"seen: got shape {tuple(self.seen.shape)}, wanted (1 or batch, 1 or heads, q_blocks, k_blocks): a "
                "mask for all heads is seen[None, None]"
            )
        check_block_size("block_size", self.block_size)

    @property
    def density(self) -> float:
        """The share of blocks that are visible. Waits for the GPU."""
        return float((self.seen != 0).float().mean())

    def check(self, batch: int, heads: int, seqlen_q: int, seqlen_k: int, device: torch.device) -> None:
        """Raises ValueError unless the mask fits tensors of this batch, these heads, lengths and device."""
        blocks = (-(-seqlen_q // self.block_size[0]), -(-seqlen_k // self.block_size[1]))
        shape = tuple(self.seen.shape)
        if shape[0] not in (1, batch) or shape[1] not in (1, heads) or shape[2:] != blocks:
            raise ValueError(
                f"block_mask: got shape {shape} with blocks of {self.block_size[0]} x {self.block_size[1]}, wanted "
                f"(1 or {batch}, 1 or {heads}, {blocks[0]}, {blocks[1]}) for {seqlen_q} queries and {seqlen_k} keys"
            )
        if self.seen.device != device:
            raise ValueError(f"block_mask: got it on {self.seen.device}, wanted {device} as q has: seen.to(q.device)")

    def tokens(self, seqlen_q: int, seqlen_k: int) -> torch.Tensor:
        """The mask of every query and key, bool (1 or batch, 1 or heads, seqlen_q, seqlen_k): quadratic memory. Whole
        blocks are visible ones here."""
        rows = (self.seen != 0).repeat_interleave(self.block_size[0], 2)[:, :, :seqlen_q]
        return rows.repeat_interleave(self.block_size[1], 3)[..., :seqlen_k]

    @classmethod
    def of_tokens(cls, seen: torch.Tensor, block_size: tuple[int, int] = (128, 128)) -> BlockMask:
        """The block mask of a mask of single queries and keys, bool (1 or batch, 1 or heads, seqlen_q, seqlen_k).

        ValueError for a mask that changes inside a block, because a block mask cannot say that.
        """
        queries, keys = block_size
        batch, heads, seqlen_q, seqlen_k = seen.shape
        blocks = cls(seen[:, :, ::queries, ::keys].contiguous(), block_size)
        if not torch.equal(blocks.tokens(seqlen_q, seqlen_k), seen):
            raise ValueError(
                f"seen: got a mask of shape {(batch, heads, seqlen_q, seqlen_k)} that changes inside a block of "
                f"{queries} x {keys}: pass smaller blocks, or the mask as attn_bias of flash_attn_func"
            )
        return blocks

    @classmethod
    def of_lists(
        cls, counts: torch.Tensor, indices: torch.Tensor, k_blocks: int, block_size: tuple[int, int] = (128, 128)
    ) -> BlockMask:
        """The mask of lists of visible blocks of keys, as FlexAttention, FlashAttention-4 and MInference have them.

        counts (1 or batch, 1 or heads, q_blocks): how many blocks of keys a block of queries sees. indices
        (1 or batch, 1 or heads, q_blocks, any): their numbers, of which the first `counts` are read; integers.
        ValueError for other shapes. An index outside of the k_blocks is not seen on a GPU, and an IndexError on a CPU.
        """
        if counts.shape != indices.shape[:-1] or counts.dim() != 3:
            raise ValueError(
                f"counts, indices: got shapes {tuple(counts.shape)} and {tuple(indices.shape)}, wanted (batch, heads, "
                "q_blocks) and (batch, heads, q_blocks, any)"
            )
        listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
        if indices.device.type == "cpu" and bool((listed & ((indices < 0) | (indices >= k_blocks))).any()):
            raise IndexError(f"indices: got an index outside of the {k_blocks} blocks of keys")
        return cls(seen_in_lists(counts, indices, k_blocks), block_size)


def seen_in_lists(counts: torch.Tensor, indices: torch.Tensor, k_blocks: int) -> torch.Tensor:
    """The blocks that lists name, bool (batch, heads, q_blocks, k_blocks): see `BlockMask.of_lists`. An index of no
    block, or behind the counts, is skipped."""
    inside = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    inside = inside & (indices >= 0) & (indices < k_blocks)
    seen = torch.zeros((*counts.shape, k_blocks + 1), dtype=torch.bool, device=indices.device)
    seen.scatter_(-1, torch.where(inside, indices, k_blocks).long(), value=True)
    return seen[..., :k_blocks].contiguous()
