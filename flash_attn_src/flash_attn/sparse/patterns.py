"""Block masks of published methods: tiles of a video, radial attention, bands, and vertical and slash lines.

Masks join by `either` and `both`. Sizes are Python numbers, so no function waits for the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from flash_attn.call.block_mask import BlockMask


def either(first: BlockMask, *others: BlockMask) -> BlockMask:
    """The mask that shows a block if any of the masks shows it, whole if one shows it whole. ValueError for masks of
    other block sizes."""
    seen = first.seen
    for other in others:
        _check_alike(first, other)
        seen = torch.maximum(seen, other.seen)
    return BlockMask(seen, first.block_size)


def both(first: BlockMask, *others: BlockMask) -> BlockMask:
    """The mask that shows a block if all of the masks show it, whole if all show it whole. ValueError for masks of
    other block sizes."""
    seen = first.seen
    for other in others:
        _check_alike(first, other)
        seen = torch.minimum(seen, other.seen)
    return BlockMask(seen, first.block_size)


def bands(
    seqlen_q: int,
    seqlen_k: int,
    offsets: Sequence[int],
    width: int,
    *,
    block_size: tuple[int, int] = (128, 128),
    device: torch.device | str = "cpu",
) -> BlockMask:
    """Diagonals: query i sees the blocks that hold a key less than `width` away from key i + seqlen_k - seqlen_q + o,
    for an offset o of `offsets`.

    offsets (0,) is a sliding window. Multiples of the tokens of a frame show the same place in other frames, as the
    temporal heads of Sparse VideoGen (Xi et al., arXiv 2502.01776) look.
    """
    _check_positive("width", width)
    first_q, last_q = _ends(seqlen_q, block_size[0], device)
    first_k, last_k = _ends(seqlen_k, block_size[1], device)
    seen = torch.zeros((len(first_q), len(first_k)), dtype=torch.bool, device=device)
    for offset in offsets:
        shift = seqlen_k - seqlen_q + offset
        seen |= _distance(first_q + shift, last_q + shift, first_k, last_k) < width
    return BlockMask(seen[None, None], block_size)


def sliding_tiles(
    tiles: tuple[int, int, int],
    window: tuple[int, int, int],
    tokens_per_tile: int,
    *,
    text: int = 0,
    block: int = 128,
    device: torch.device | str = "cpu",
) -> BlockMask:
    """Sliding tile attention of a video (Zhang et al., arXiv 2502.04507): a tile sees the tiles of a window around it.

    tiles: tiles along time, height and width. window: their number in a window, odd; at a border the window moves
    inside, so that every tile sees as many. tokens_per_tile: a multiple of `block`, which is the block size. The tokens
    of a tile stand next to each other: `tile_order`. text: tokens behind the video that see everything and that
    everything sees. ValueError for an even window, one that is larger than the video, and tiles of another size.
    """
    for count, size in zip(tiles, window, strict=True):
        if size < 1 or size % 2 == 0 or size > count:
            raise ValueError(f"window: got {window} for {tiles} tiles, wanted odd numbers up to the tiles of each axis")
    if tokens_per_tile % block:
        raise ValueError(f"tokens_per_tile: got {tokens_per_tile}, wanted a multiple of the block of {block} tokens")
    seen = torch.ones((1, 1), dtype=torch.bool, device=device)
    for count, size in zip(tiles, window, strict=True):
        place = torch.arange(count, device=device)
        centre = place.clamp(size // 2, count - 1 - size // 2)
        near = (place[None, :] - centre[:, None]).abs() <= size // 2  # [tiles, tiles] of the axis
        seen = torch.kron(seen.to(torch.uint8), near.to(torch.uint8)).bool()
    per_tile = tokens_per_tile // block
    seen = seen.repeat_interleave(per_tile, 0).repeat_interleave(per_tile, 1)
    more = -(-text // block)
    return BlockMask(torch.nn.functional.pad(seen, (0, more, 0, more), value=True)[None, None], (block, block))


def tile_order(
    video: tuple[int, int, int], tile: tuple[int, int, int], device: torch.device | str = "cpu"
) -> torch.Tensor:
    """The order of tokens in which the tiles of a video are contiguous, int64 (tokens,): x[:, order] is in tiles, and
    y[:, order.argsort()] is back in rows.

    video: frames, height and width in tokens, multiples of the tile's. ValueError otherwise.
    """
    if any(size % part for size, part in zip(video, tile, strict=True)):
        raise ValueError(f"tile: got {tile} for a video of {video} tokens, wanted divisors: pad the video")
    counts = [size // part for size, part in zip(video, tile, strict=True)]
    places = torch.arange(math.prod(video), device=device).view(
        counts[0], tile[0], counts[1], tile[1], counts[2], tile[2]
    )
    return places.permute(0, 2, 4, 1, 3, 5).flatten()


def radial(
    frames: int,
    tokens_per_frame: int,
    *,
    block: int = 128,
    decay: float = 1.0,
    device: torch.device | str = "cpu",
) -> BlockMask:
    """Radial attention of a video (Li et al., arXiv 2506.19852): the window between two frames halves each time their
    distance doubles.

    Between frames d apart, with w = tokens_per_frame * decay / 2 ** floor(log2(max(d, 1))): places k and l see each
    other if |k - l| < w. Where w is below 1 the diagonal k = l stays in every ceil(1 / w)-th frame. The first frame is
    seen by all. A block shows if any pair of its tokens does.
    """
    _check_positive("tokens_per_frame", tokens_per_frame)
    total = frames * tokens_per_frame
    first, last = _ends(total, block, device)
    seen = (first < tokens_per_frame)[None, :].expand(len(first), -1).clone()
    most = (block - 2) // tokens_per_frame + 2  # the frames that a block can touch
    for part_q in range(most):
        frame_q, low_q, high_q, has_q = _part(first, last, part_q, tokens_per_frame)
        for part_k in range(most):
            frame_k, low_k, high_k, has_k = _part(first, last, part_k, tokens_per_frame)
            apart = (frame_q[:, None] - frame_k[None, :]).abs().clamp_min(1)
            width = tokens_per_frame * decay / torch.exp2(torch.floor(torch.log2(apart.double())))
            kept = apart % torch.ceil(1 / width).long() == 0
            near = _distance(low_q, high_q, low_k, high_k)
            seen |= (has_q[:, None] & has_k[None, :]) & torch.where(width >= 1, near < width, (near == 0) & kept)
    return BlockMask(seen[None, None], (block, block))


def vertical_slash(
    seqlen: int, verticals: torch.Tensor, slashes: torch.Tensor, *, block_size: tuple[int, int] = (64, 64)
) -> BlockMask:
    """The vertical and slash lines of MInference (Jiang et al., arXiv 2407.02490): for causal attention.

    verticals (1 or batch, 1 or heads, any): keys that every later query sees. slashes (1 or batch, 1 or heads, any):
    distances o, so that query i sees key i - o. Integers; negative ones are not lines. Lines become blocks.
    """
    if verticals.dim() != 3 or slashes.dim() != 3 or verticals.shape[:2] != slashes.shape[:2]:
        raise ValueError(
            f"verticals, slashes: got shapes {tuple(verticals.shape)} and {tuple(slashes.shape)}, wanted (1 or batch, "
            "1 or heads, any) of the same batch and heads"
        )
    device = verticals.device
    first_q, last_q = _ends(seqlen, block_size[0], device)
    first_k, last_k = _ends(seqlen, block_size[1], device)
    seen = torch.zeros((*verticals.shape[:2], len(first_q), len(first_k)), dtype=torch.bool, device=device)
    for line in verticals.unbind(-1):
        holds = (first_k <= line[..., None]) & (line[..., None] <= last_k)  # [batch, heads, k_blocks]
        seen |= holds[:, :, None, :]
    for line in slashes.unbind(-1):
        low, high = first_q - line[..., None], last_q - line[..., None]  # [batch, heads, q_blocks]
        crosses = (low[..., None] <= last_k) & (first_k <= high[..., None])
        seen |= crosses & (line >= 0)[..., None, None]
    return BlockMask(seen & (first_k <= last_q[:, None]), block_size)


def _ends(seqlen: int, block: int, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the last token of each block."""
    first = torch.arange(0, seqlen, block, device=device)
    return first, (first + block).clamp_max(seqlen) - 1


def _part(
    first: torch.Tensor, last: torch.Tensor, part: int, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(frame, first place, last place, whether it exists) of the part-th frame that each block touches."""
    frame = first // tokens + part
    low, high = torch.maximum(first, frame * tokens), torch.minimum(last, (frame + 1) * tokens - 1)
    return frame, low - frame * tokens, high - frame * tokens, low <= high


def _distance(low_q: torch.Tensor, high_q: torch.Tensor, low_k: torch.Tensor, high_k: torch.Tensor) -> torch.Tensor:
    """The least distance between two ranges, [q_blocks, k_blocks]; 0 where they meet."""
    return torch.maximum(low_k[None, :] - high_q[:, None], low_q[:, None] - high_k[None, :]).clamp_min(0)


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name}: got {value}, wanted at least 1")


def _check_alike(first: BlockMask, other: BlockMask) -> None:
    if first.block_size != other.block_size:
        raise ValueError(f"block_size: got masks of {first.block_size} and {other.block_size}, wanted the same")
