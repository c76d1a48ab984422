"""A call of flex_attention whose functions are traced, and the values of these functions, computed at the call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from flash_attn.attention.backends.triton.sparse import mark_blocks
from flash_attn.call.block_mask import seen_in_lists
from flash_attn.flex import scores, terms
from flash_attn.flex.bounds import bounds_of
from flash_attn.flex.edges import Bounds, UnboundedError
from flash_attn.flex.scores import ADD, HIDE, SUBTRACT, Score
from flash_attn.flex.terms import Term
from flash_attn.flex.values import AXES, values
from flash_attn.kernels.flags import WHOLE_BLOCK

_SCORE = ("score", *AXES)


class Places(dict[str, torch.Tensor]):
    """Argument -> its integers along its own axis of four, made where they are asked for."""

    def __init__(self, ranges: dict[str, range], device: torch.device) -> None:
        self._ranges, self._device = ranges, device

    def __missing__(self, name: str) -> torch.Tensor:
        x = self._ranges[name]
        shape = [len(x) if axis == name else 1 for axis in AXES]
        self[name] = torch.arange(x.start, x.stop, x.step, device=self._device).view(shape)
        return self[name]


@dataclass(frozen=True)
class Request:
    """What modifies the scores of a call.

    score    what the score_mod does
    mask     the term of the mask_mod, or True
    lists    PyTorch's BlockMask, or None
    bounds   the mask as bounds, or None
    sizes    (batch, heads, seqlen_q, seqlen_k)
    """

    score: Score
    mask: Any
    lists: Any
    bounds: Bounds | None
    sizes: tuple[int, int, int, int]
    device: torch.device

    @property
    def is_learned(self) -> bool:
        """Whether the gradient of a tensor of the score's steps is asked for."""
        tensors = [x for _, step in self.score.steps for x in terms.facts(step)[1]]
        return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)

    @property
    def block_size(self) -> tuple[int, int]:
        """(queries, keys) of a block of the lists."""
        queries, keys = self.lists.BLOCK_SIZE
        return queries, keys

    @cached_property
    def seen(self) -> torch.Tensor:
        """The bytes of the listed blocks, uint8 (1 or batch, 1 or heads, q_blocks, k_blocks): the mask_mod hides keys
        in a partial block, and none in a whole one."""
        mask = self.lists
        q_blocks, k_blocks = (-(-n // size) for n, size in zip(self.sizes[2:], self.block_size, strict=True))
        lists = (mask.kv_num_blocks, mask.kv_indices)
        full = None if mask.full_kv_num_blocks is None else (mask.full_kv_num_blocks, mask.full_kv_indices)
        if any(x.shape[2] < q_blocks for x in (*lists, *(full or ()))):
            raise UnboundedError("fewer lists than blocks of queries")
        if self.device.type == "cuda":
            return mark_blocks(lists, full, q_blocks, k_blocks)
        seen = seen_in_lists(*lists, k_blocks)[:, :, :q_blocks].byte()
        return seen if full is None else torch.where(seen_in_lists(*full, k_blocks)[:, :, :q_blocks], WHOLE_BLOCK, seen)

    def places(self, start: int = 0, stop: int | None = None) -> Places:
        """The places of queries [start, stop) and of all else."""
        batch, heads, seqlen_q, seqlen_k = self.sizes
        queries = range(start, seqlen_q if stop is None else stop)
        return Places(dict(zip(AXES, (range(batch), range(heads), queries, range(seqlen_k)), strict=True)), self.device)

    @cached_property
    def block_places(self) -> Places:
        """The places of the first query and key of each block."""
        batch, heads, *lengths = self.sizes
        firsts = (range(0, n, size) for n, size in zip(lengths, self.block_size, strict=True))
        return Places(dict(zip(AXES, (range(batch), range(heads), *firsts), strict=True)), self.device)

    @property
    def mask_sizes(self) -> tuple[int, int, int, int]:
        """(1 or batch, 1 or heads, seqlen_q, seqlen_k) of the mask."""
        batch, heads = self.seen.shape[:2] if self.lists is not None else (1, 1)
        return self._widened(self.mask.names if isinstance(self.mask, Term) else frozenset(), batch, heads)

    @property
    def bias_sizes(self) -> tuple[int, int, int, int]:
        """The same of a bias."""
        return self._widened(self.score.names, *self.mask_sizes[:2])

    def _widened(self, names: frozenset[str], batch: int, heads: int) -> tuple[int, int, int, int]:
        return (self.sizes[0] if "b" in names else batch, self.sizes[1] if "h" in names else heads, *self.sizes[2:])

    @property
    def may_wait(self) -> bool:
        """Whether the call may wait for the GPU: not while a graph is captured."""
        return self.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()

    def seen_at(self, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """The bytes of the blocks at these places: see `seen`."""
        batch, heads = (x if size > 1 else 0 for x, size in zip((b, h), self.seen.shape, strict=False))
        return self.seen[batch, heads, q // self.block_size[0], kv // self.block_size[1]]

    def visible(self, places: dict[str, torch.Tensor], *, by_lists: bool = True) -> torch.Tensor:
        """Which keys the mask shows at these places, bool. by_lists: also by its lists of blocks."""
        shown = values(self.mask, places, self.device).bool()
        if not by_lists:
            return shown
        seen = self.seen_at(*(places[name] for name in AXES))
        return ((seen != 0) & shown) | (seen == WHOLE_BLOCK)

    def addend(self, places: Places) -> torch.Tensor:
        """What the steps of the score_mod add to the scores at these places, -inf where they hide a key.

        fp32 (1 or batch, 1 or heads, 1 or queries, 1 or keys).
        """
        total = torch.zeros((1, 1, 1, 1), device=self.device)
        for kind, term in self.score.steps:
            x = values(term, places, self.device)
            if kind in (ADD, SUBTRACT):
                total = total + x.float() if kind == ADD else total - x.float()
            else:
                total = torch.where(x if kind == HIDE else ~x, -torch.inf, total)
        return total

    def distances(self) -> torch.Tensor:
        """The addend of each distance, fp32 (1 or batch, 1 or heads, seqlen_q + seqlen_k - 1).

        Query i and key j have entry j - i + seqlen_q - 1.
        """
        batch, heads, seqlen_q, seqlen_k = self.sizes
        ranges = (range(batch), range(heads), range(seqlen_q - 1, -seqlen_k, -1), range(1))
        total = self.addend(Places(dict(zip(AXES, ranges, strict=True)), self.device))
        return total.expand(-1, -1, seqlen_q + seqlen_k - 1, -1)[..., 0].contiguous()


def request(
    score_mod: Callable[..., torch.Tensor] | None, block_mask: Any, sizes: tuple[int, int, int, int],
    device: torch.device,
) -> Request:  # fmt: skip
    """Traces the functions of a call.

    Raises UntraceableError for a function that cannot be written as a term, and a score_mod that no `Score` describes.
    """
    score = scores.of_term(terms.trace(score_mod, _SCORE, device)) if score_mod is not None else Score()
    if block_mask is None:
        return Request(score, True, None, Bounds(), sizes, device)
    try:
        mask = terms.trace(block_mask.mask_mod, AXES, device)
    except terms.UntraceableError as error:
        raise terms.UntraceableError(f"mask_mod: {error}") from error
    try:
        bounds = bounds_of(mask, block_mask.BLOCK_SIZE)
    except UnboundedError:
        bounds = None
    if bounds == Bounds():
        mask = True
    elif not isinstance(mask, Term):
        mask = torch.full((), mask, device=device)
    return Request(score, mask, block_mask, bounds, sizes, device)
