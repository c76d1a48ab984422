"""The Triton backend: from validated tensors to launches. Kernels come from the wheel's store, else from the JIT.

Arguments are those of flash_attn.backends.torch.
"""

from flash_attn.backends.triton.attention import backward, forward
from flash_attn.backends.triton.decode import combine
from flash_attn.backends.triton.fp8 import format_of, fp8_forward
from flash_attn.backends.triton.kvcache import kvcache

name = "flash_attn.backends.triton"

__all__ = ["backward", "combine", "format_of", "forward", "fp8_forward", "kvcache", "name"]
