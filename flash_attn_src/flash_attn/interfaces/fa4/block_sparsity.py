"""FlashAttention-4's lists of blocks, `block_sparse_tensors`, as block masks of flash_attn.sparse."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from flash_attn.attention.masked import MAX_HEAD_DIM, attend
from flash_attn.call.arguments import diagnose_switches
from flash_attn.call.arguments.diagnosis import check_strided
from flash_attn.call.block_mask import BlockMask, check_block_size
from flash_attn.call.calls import AttentionCall, Options, replace
from flash_attn.call.mask import Mask

_NAME = "block_sparse_tensors"


class BlockSparseTensorsTorch(NamedTuple):
    """Lists of the blocks of keys that blocks of queries see, with upstream's names and order.

    mask_block_cnt, full_block_cnt   int32 (1 or batch, 1 or heads, q_blocks): how many blocks are listed
    mask_block_idx, full_block_idx   int32 (1 or batch, 1 or heads, q_blocks, at most k_blocks): their numbers. The full
                                     lists are optional. A block is visible if one of its two lists has it
    block_size                       (queries, keys), multiples of 64; wanted, although upstream guesses it for None
    cu_total_m_blocks, cu_block_idx_offsets   of packed sequences: wanted None
    dq_write_order, dq_write_order_full, spt  upstream's order of sums in a deterministic backward; change nothing here,
                                     where every backward with a block mask is deterministic

    Lists for the backward have blocks of keys and of queries exchanged, block_size excepted.
    """

    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor | None = None
    full_block_idx: torch.Tensor | None = None
    cu_total_m_blocks: torch.Tensor | None = None
    cu_block_idx_offsets: torch.Tensor | None = None
    block_size: tuple[int, int] | None = None
    dq_write_order: torch.Tensor | None = None
    dq_write_order_full: torch.Tensor | None = None
    spt: bool | None = None


def mask_of_lists(
    tensors: Any, q: torch.Tensor, k: torch.Tensor, *, name: str = _NAME, by_keys: bool = False
) -> BlockMask:
    """The block mask of lists for q (batch, seqlen_q, heads, head_dim) and k (batch, seqlen_k, heads_k, head_dim).

    by_keys: the lists are of blocks of queries, for each block of keys, as a backward takes them. TypeError or
    ValueError, which name the field, for a field that does not fit. A number outside of the blocks is an IndexError on
    a CPU, and not seen on a GPU.
    """
    if not isinstance(tensors, BlockSparseTensorsTorch):
        raise TypeError(
            f"{name}: got {type(tensors).__name__}, wanted flash_attn.cute.block_sparsity.BlockSparseTensorsTorch"
        )
    for field in ("cu_total_m_blocks", "cu_block_idx_offsets"):
        if getattr(tensors, field) is not None:
            raise NotImplementedError(f"{name}.{field}: got a tensor, wanted None: packed sequences have no block mask")
    if tensors.block_size is None:
        raise ValueError(f"{name}.block_size: got None, wanted (queries, keys) of a block")
    size = tensors.block_size
    check_block_size(f"{name}.block_size", size)
    if tensors.spt is not None and type(tensors.spt) is not bool:
        raise TypeError(f"{name}.spt: got {tensors.spt!r}, wanted a bool or None")
    blocks = (-(-q.shape[1] // size[0]), -(-k.shape[1] // size[1]))
    rows, cols = blocks[::-1] if by_keys else blocks
    batch_heads = (q.shape[0], q.shape[2])
    seen = None
    for kind in ("mask", "full"):
        counts, indices = getattr(tensors, f"{kind}_block_cnt"), getattr(tensors, f"{kind}_block_idx")
        if kind == "full" and counts is None and indices is None:
            continue
        _check(f"{name}.{kind}_block_cnt", counts, (*batch_heads, rows), None, q.device)
        _check(f"{name}.{kind}_block_idx", indices, (*batch_heads, rows), cols, q.device)
        both = torch.broadcast_shapes(counts.shape, indices.shape[:3])
        listed = BlockMask.of_lists(counts.expand(both), indices.expand(*both, -1), cols).seen
        seen = listed if seen is None else seen | listed
    assert seen is not None
    for order in ("dq_write_order", "dq_write_order_full"):
        if (tensor := getattr(tensors, order)) is not None:
            _check(f"{name}.{order}", tensor, (*batch_heads, rows), cols, q.device)
    return BlockMask(seen.mT.contiguous() if by_keys else seen, size)


def _check(name: str, x: torch.Tensor, shape: tuple[int, int, int], longest: int | None, device: torch.device) -> None:
    """Checks a tensor of counts, or of lists of at most `longest` numbers."""
    check_strided(name, x, "an int32 tensor")
    if x.dtype is not torch.int32:
        raise TypeError(f"{name}: got {x.dtype}, wanted int32")
    if x.device != device:
        raise ValueError(f"{name}: got it on {x.device}, wanted {device} as q has")
    got = tuple(x.shape)
    fits = len(got) == (3 if longest is None else 4) and got[0] in (1, shape[0]) and got[1] in (1, shape[1])
    if not fits or got[2] != shape[2] or (longest is not None and got[3] > longest):
        numbers = "" if longest is None else f", at most {longest}"
        raise ValueError(f"{name}: got shape {got}, wanted (1 or {shape[0]}, 1 or {shape[1]}, {shape[2]}{numbers})")


def check_transposed(tensors_bwd: Any, mask: BlockMask, q: torch.Tensor, k: torch.Tensor) -> None:
    """Checks lists for the backward of `mask`, which the gradients follow. On a CPU they have to say the same blocks;
    on a GPU that would wait for it."""
    backward = mask_of_lists(tensors_bwd, q, k, name=f"{_NAME}_bwd", by_keys=True)
    if mask.seen.device.type != "cpu":
        return
    step = tuple(map(math.gcd, mask.block_size, backward.block_size))
    blocks = (-(-q.shape[1] // step[0]), -(-k.shape[1] // step[1]))
    finer = []
    for each in (mask, backward):
        rows = each.seen.repeat_interleave(each.block_size[0] // step[0], 2)[:, :, : blocks[0]]
        finer.append(rows.repeat_interleave(each.block_size[1] // step[1], 3)[..., : blocks[1]])
    if not bool((finer[0] == finer[1]).all()):
        raise ValueError(f"{_NAME}_bwd: got other blocks than {_NAME} has, wanted its transpose")


def over_queries(call: AttentionCall, tensors: Any) -> AttentionCall:
    """A checked call of dense tensors, for its gradients, with a mask of lists of blocks of queries."""
    head_dim = call.q.shape[-1]
    if head_dim > MAX_HEAD_DIM or call.v.shape[-1] != head_dim:
        raise ValueError(
            f"head_dim: got {head_dim} and {call.v.shape[-1]} for v, wanted the same and at most {MAX_HEAD_DIM} with "
            f"{_NAME}"
        )
    return replace(call, causal=False, mask=Mask(mask_of_lists(tensors, call.q, call.k, by_keys=True)))


def attend_to_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensors: Any,
    tensors_bwd: Any,
    options: Options,
    *,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, softmax_lse) of dense tensors over listed blocks. softmax_lse is +inf in rows that see no key."""
    diagnose_switches(None, deterministic=deterministic)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_strided(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, wanted (batch, seqlen, heads, head_dim)")
    if tensors is None:
        raise ValueError(f"{_NAME}_bwd: got lists, wanted None without {_NAME}")
    mask = mask_of_lists(tensors, q, k)
    if tensors_bwd is not None:
        check_transposed(tensors_bwd, mask, q, k)
    result = attend(q, k, v, Mask(mask), options, return_lse=True)
    assert isinstance(result, tuple)
    return result
