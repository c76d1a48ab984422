"""Block-sparse attention: masks of blocks, helpers that make them for video and long texts, and the function."""

from flash_attn.call.block_mask import BlockMask
from flash_attn.sparse import patterns, similarity
from flash_attn.sparse.attention import flash_attn_block_sparse_func

__all__ = ["BlockMask", "flash_attn_block_sparse_func", "patterns", "similarity"]
