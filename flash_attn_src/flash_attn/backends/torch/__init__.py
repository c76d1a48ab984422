"""The pure PyTorch backend: serves CPU tensors, runs on any device, and is the oracle of the others.

Layouts and argument order are those of every backend: q (batch, seqlen_q, heads, head_dim) and k, v
(batch, seqlen_k, heads_k, head_dim), or q (total_q, heads, head_dim) with cu_seqlens_q, and k, v
(total_k, heads_k, head_dim) with cu_seqlens_k or pages (pages, page_size, heads_k, head_dim) with
block_table. Arguments come checked by the interface, except the values inside index tensors: those
are checked here (ValueError). It reads index tensors on the host, so it synchronises with a GPU.
"""

from flash_attn.backends.torch.attention import backward, forward
from flash_attn.backends.torch.fp8 import fp8_forward
from flash_attn.backends.torch.kvcache import combine, kvcache, rotate

__all__ = ["backward", "combine", "forward", "fp8_forward", "kvcache", "rotate"]
