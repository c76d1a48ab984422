"""Ids of 64 bits as ids of 32 bits that are equal where they are, made on the device at each call."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.common import RUNTIME_ARGUMENTS

# An id of this size or more is wide. Keys that are compared together.
_WIDE, _STEP = tl.constexpr(1 << 30), tl.constexpr(64)


@triton.jit(do_not_specialize=RUNTIME_ARGUMENTS)
def narrow_ids(narrow, ids, keys, seqlen_q, seqlen_k, BLOCK_N: tl.constexpr):
    """One program: BLOCK_N ids of a batch entry. Grid: cdiv(seqlen_q, BLOCK_N) * batch.

    narrow: int32 (batch, seqlen_q), an id as it is. Of a wide one, _WIDE more than the place of the first key that has
    it, 2 ** 31 - 1 where none has. ids: int64 (batch, seqlen_q). keys: the ids of keys, int64 (batch, seqlen_k).
    """
    pid = tl.program_id(0)
    blocks = tl.cdiv(seqlen_q, BLOCK_N)
    entry64 = (pid // blocks).to(tl.int64)
    offs = pid % blocks * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    b_id = tl.load(ids + entry64 * seqlen_q + offs, mask=offs < seqlen_q, other=0)  # [BLOCK_N]
    b_wide = ((b_id < -_WIDE) | (b_id >= _WIDE)).to(tl.int32)  # [BLOCK_N]
    b_place = offs * 0 + (_WIDE - 1)  # [BLOCK_N]
    for start in tl.range(0, tl.where(tl.max(b_wide, 0) != 0, seqlen_k, 0), _STEP):
        places = start + tl.arange(0, _STEP)  # [_STEP]
        b_key = tl.load(keys + entry64 * seqlen_k + places, mask=places < seqlen_k, other=0)  # [_STEP]
        b_same = b_id[:, None] == b_key[None, :]  # [BLOCK_N, _STEP]
        b_place = tl.minimum(b_place, tl.min(tl.where(b_same, places[None, :], _WIDE - 1), 1))
    b_narrow = tl.where(b_wide != 0, b_place + _WIDE, b_id.to(tl.int32))
    tl.store(narrow + entry64 * seqlen_q + offs, b_narrow, mask=offs < seqlen_q)
