"""interface_v2 by its name in the releases 2.7 and 2.8 of flash-attn, which scripts for AMD GPUs import."""

from __future__ import annotations

from flash_attn.flash_attn_triton_amd.interface_v2 import bwd, fwd, fwd_kvcache, varlen_bwd, varlen_fwd

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]
