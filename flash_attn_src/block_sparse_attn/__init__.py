"""The functions of mit-han-lab's Block-Sparse-Attention by name and signature, on the kernels of flash_attn.

This is not mit-han-lab's package `block_sparse_attn`: it has none of its code. See
`block_sparse_attn.block_sparse_attn_interface`.
"""

from block_sparse_attn.block_sparse_attn_interface import (
    block_sparse_attn_func,
    block_streaming_attn_func,
    token_streaming_attn_func,
)

__all__ = ["block_sparse_attn_func", "block_streaming_attn_func", "token_streaming_attn_func"]
