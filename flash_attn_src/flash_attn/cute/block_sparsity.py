"""The lists of blocks that flash_attn.cute.flash_attn_func takes as block_sparse_tensors."""

from flash_attn.interfaces.fa4.block_sparsity import BlockSparseTensorsTorch

__all__ = ["BlockSparseTensorsTorch"]
