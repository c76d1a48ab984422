"""The Composable Kernel backend: from validated tensors to planned launches of the wheel's CK kernels.

Composable Kernel has no kernel for FP8 or for the sum of partial results. The Triton kernels do those.
"""

from flash_attn.backends.ck.attention import backward, forward, name
from flash_attn.backends.ck.kvcache import kvcache
from flash_attn.backends.triton import combine, format_of, fp8_forward

__all__ = ["backward", "combine", "format_of", "forward", "fp8_forward", "kvcache", "name"]
