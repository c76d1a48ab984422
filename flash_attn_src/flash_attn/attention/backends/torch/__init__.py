"""The pure PyTorch backend: serves CPU tensors, runs on any device, and is the oracle of the others.

Calls come checked by the interface, except the values inside index tensors. Those are checked here (ValueError), on the
host: it synchronises with a GPU.
"""

from flash_attn.attention.backends.torch.attention import backward, forward
from flash_attn.attention.backends.torch.cache import combine, kvcache, rotate
from flash_attn.attention.backends.torch.fp8 import fp8_format, fp8_forward
from flash_attn.attention.backends.torch.int8 import int8_forward

name = "flash_attn.attention.backends.torch"

__all__ = ["backward", "combine", "forward", "fp8_format", "fp8_forward", "int8_forward", "kvcache", "name", "rotate"]
