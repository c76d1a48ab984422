"""Device functions for a KV cache: how many keys it holds, and how many are new."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels import common
from flash_attn.kernels.common import HAS_CU_SEQLENS_K, HAS_LEFTPAD_K, HAS_SEQUSED_K

# See common.RUNTIME_ARGUMENTS.
RUNTIME_ARGUMENTS = (
    *common.RUNTIME_ARGUMENTS,
    "nheads_k", "seqlen_new", "capacity", "chunk", "lse_rows", "num_splits", "page_shift", "page_inverse",
    "rotary_half", "places", "k_blocks", "q_blocks",
    *(f"stride_{tensor}{axis}" for tensor in ("n", "w", "r", "c") for axis in "bmnh"),
)  # fmt: skip


@triton.jit
def cached_keys(batch, seqlen_k, seqused_k, leftpad_k, flags):
    """Where the keys of a sequence begin in its cache, and where they end before the new keys."""
    begin = batch * 0
    if flags & HAS_SEQUSED_K:
        seqlen_k = tl.load(seqused_k + batch)
    if flags & HAS_LEFTPAD_K:
        begin = tl.load(leftpad_k + batch)
    return begin, seqlen_k


@triton.jit
def new_keys(batch, seqlen_new, cu_seqlens_k, flags):
    """The first row and the number of a sequence's new keys."""
    start = batch * 0
    if flags & HAS_CU_SEQLENS_K:
        start = tl.load(cu_seqlens_k + batch)
        seqlen_new = tl.load(cu_seqlens_k + batch + 1) - start
    return start, seqlen_new
