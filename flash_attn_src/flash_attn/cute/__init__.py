"""FlashAttention-4's module by name and signature, on the kernels of flash_attn: the distribution flash-attn-4."""

from flash_attn import __version__
from flash_attn.cute.interface import flash_attn_combine, flash_attn_func, flash_attn_varlen_func

__all__ = ["__version__", "flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func"]
