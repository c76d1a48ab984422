"""AMD's assembly kernels: what they serve, and calls that they serve."""

from __future__ import annotations

from flash_attn.backends.asm.attention import describe, forward, unsupported_reason
from flash_attn.backends.asm.gradients import backward

__all__ = ["backward", "describe", "forward", "unsupported_reason"]
