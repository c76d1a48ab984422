"""The Triton backend: from validated tensors to launches. Kernels come from the wheel's store, else from the JIT."""

from flash_attn.attention.backends.triton.attention import forward
from flash_attn.attention.backends.triton.cache import kvcache
from flash_attn.attention.backends.triton.decode import combine
from flash_attn.attention.backends.triton.fp8 import fp8_format, fp8_forward
from flash_attn.attention.backends.triton.gradients import backward
from flash_attn.attention.backends.triton.int8 import int8_forward

name = "flash_attn.attention.backends.triton"

__all__ = ["backward", "combine", "forward", "fp8_format", "fp8_forward", "int8_forward", "kvcache", "name"]
