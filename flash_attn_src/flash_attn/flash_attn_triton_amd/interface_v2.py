"""The functions of upstream's extension module, under the path by which its Triton backend is told from others.

`flash_attn_interface.flash_attn_gpu` is this module where Triton's kernels serve GPU tensors.
"""

from __future__ import annotations

from flash_attn_2_cuda import bwd, fwd, fwd_kvcache, varlen_bwd, varlen_fwd

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]
