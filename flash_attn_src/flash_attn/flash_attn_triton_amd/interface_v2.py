"""The functions of upstream's extension module, at the module path that callers check to detect upstream's Triton
backend.

`flash_attn_interface.flash_attn_gpu` is this module if Triton's kernels serve GPU tensors.
"""

from __future__ import annotations

from flash_attn_2_cuda import bwd, fwd, fwd_kvcache, varlen_bwd, varlen_fwd

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]
