"""A call of flex_attention whose functions are traced, and the values of these functions for every query and key."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from flash_attn.flex import masks, scores, terms
from flash_attn.flex.scores import Score

# PyTorch's eager FlexAttention evaluates its functions in this mode: under vmap, `tensor[index]` waits for nothing.
_HOMES = ("torch._higher_order_ops.flex_attention", "torch._dynamo._trace_wrapped_higher_order_op")  # torch 2.5; newer
_Indexing: Any = next(
    mode for home in _HOMES if (mode := getattr(importlib.import_module(home), "TransformGetItemToIndex", None))
)

_MASK = ("b", "h", "q", "kv")
_SCORE = ("score", *_MASK)
_DEFAULT_BLOCK = 128


@dataclass(frozen=True)
class Request:
    """What modifies the scores of a call.

    score        what the score_mod does
    score_mod    the function, or None
    block_mask   PyTorch's BlockMask, or None
    sizes        (batch, heads, seqlen_q, seqlen_k)
    mod_names    the arguments on which the mask_mod depends
    key          two requests with this key hide and add the same, as long as `tensors` live
    tensors      what the functions and the lists of blocks are made of
    """

    score: Score
    score_mod: Callable[..., torch.Tensor] | None
    block_mask: Any
    sizes: tuple[int, int, int, int]
    device: torch.device
    mod_names: frozenset[str]
    key: Any
    tensors: tuple[torch.Tensor, ...]

    @property
    def is_learned(self) -> bool:
        """Whether the gradient of a tensor of the score_mod is asked for."""
        return torch.is_grad_enabled() and any(x.requires_grad for x in self.tensors)

    @cached_property
    def mask_names(self) -> frozenset[str]:
        """The arguments on which the mask depends, the lists of blocks included. Waits for the GPU."""
        differ = {
            name
            for name, axis in (("b", 0), ("h", 1))
            if any(not torch.equal(x, x.narrow(axis, 0, 1).expand_as(x)) for x in _lists(self.block_mask))
        }
        return self.mod_names | differ

    def shared(self, names: frozenset[str]) -> tuple[int, int]:
        """(1 or batch, 1 or heads) of values that depend on these arguments."""
        return (self.sizes[0] if "b" in names else 1, self.sizes[1] if "h" in names else 1)

    def mask(self) -> masks.Mask:
        """What the mask is, without the keys that the score_mod hides."""
        mask = self.block_mask
        block_size = (_DEFAULT_BLOCK, _DEFAULT_BLOCK) if mask is None else mask.BLOCK_SIZE
        if max(block_size) > max(self.sizes[2:]):  # a mask of one block, which PyTorch makes for "no mask"
            block_size = (_DEFAULT_BLOCK, _DEFAULT_BLOCK)
        sizes = (*self.shared(self.mask_names), *self.sizes[2:])
        return masks.recognise(self.visible, sizes, block_size)

    def visible(self, start: int, stop: int) -> torch.Tensor:
        """Which keys the mask shows to queries [start, stop): bool (1 or batch, 1 or heads, queries, seqlen_k)."""
        mask, seqlen_k = self.block_mask, self.sizes[3]
        if mask is None:
            return torch.ones((1, 1, stop - start, seqlen_k), dtype=torch.bool, device=self.device)
        queries = torch.arange(start, stop, device=self.device) // mask.BLOCK_SIZE[0]
        keys = torch.arange(seqlen_k, device=self.device) // mask.BLOCK_SIZE[1]

        batch, heads = self.shared(self.mask_names)
        lists = [x[:batch, :heads] for x in _lists(mask)]
        partial, *full = (
            _blocks(*pair)[:, :, queries][..., keys] for pair in zip(lists[::2], lists[1::2], strict=True)
        )
        seen = partial & self._values(mask.mask_mod, _MASK, start, stop)
        return seen | full[0] if full else seen

    def addend(self, start: int, stop: int) -> torch.Tensor:
        """What the score_mod adds to the scores of queries [start, stop): fp32 (1 or batch, 1 or heads, queries,
        seqlen_k), -inf where it hides a key."""
        assert self.score_mod is not None
        return self._values(self.score_mod, _SCORE, start, stop).float()

    def _values(self, function: Callable[..., Any], names: tuple[str, ...], start: int, stop: int) -> torch.Tensor:
        used = self.score.names if names is _SCORE else self.mask_names
        batch, heads = self.shared(used)
        ranges = ((0, batch), (0, heads), (start, stop), (0, self.sizes[3]))
        arguments = [torch.arange(*ends, device=self.device) for ends in ranges]
        if names is _SCORE:
            score = torch.zeros((), device=self.device)
            function = _of_score(function, score)
        for axis in (3, 2, 1, 0):
            function = torch.vmap(function, in_dims=tuple(0 if x == axis else None for x in range(4)))
        with _Indexing():
            values: torch.Tensor = function(*arguments)
        return values


def _of_score(function: Callable[..., Any], score: torch.Tensor) -> Callable[..., Any]:
    return lambda *args: function(score, *args)


def _lists(block_mask: Any) -> list[torch.Tensor]:
    """Counts and indices of the blocks in which the mask_mod hides keys, and of those that are seen whole."""
    if block_mask is None:
        return []
    lists = [block_mask.kv_num_blocks, block_mask.kv_indices]
    if block_mask.full_kv_num_blocks is not None:
        lists += [block_mask.full_kv_num_blocks, block_mask.full_kv_indices]
    return lists


def _blocks(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The blocks of keys in a list, bool (1 or batch, 1 or heads, q_blocks, k_blocks)."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    seen = torch.zeros_like(indices, dtype=torch.uint8)
    return seen.scatter_reduce_(-1, indices.long(), listed.byte(), "amax").bool()


def request(
    score_mod: Callable[..., torch.Tensor] | None, block_mask: Any, sizes: tuple[int, int, int, int],
    device: torch.device,
) -> Request:  # fmt: skip
    """Traces the functions of a call.

    Raises UntraceableError for a function that cannot be written as a term, and a score_mod that no `Score` describes.
    """
    term = terms.trace(score_mod, _SCORE, device) if score_mod is not None else None
    score = scores.of_term(term) if score_mod is not None else Score()
    hides, lists, block_size = None, [], None
    if block_mask is not None:
        try:
            hides = terms.trace(block_mask.mask_mod, _MASK, device)
        except terms.UntraceableError as error:
            raise terms.UntraceableError(f"mask_mod: {error}") from error
        lists, block_size = _lists(block_mask), block_mask.BLOCK_SIZE
    _, tensors, key = terms.facts((term, hides, lists, block_size))
    mod_names, _, _ = terms.facts(hides)
    return Request(score, score_mod, block_mask, sizes, device, mod_names, (key, sizes, device), tensors)
