"""AMD's assembly kernels: which calls they support, and how a call is launched."""

from __future__ import annotations

from flash_attn.attention.backends.asm.attention import describe, forward, unsupported_reason
from flash_attn.attention.backends.asm.gradients import backward

__all__ = ["backward", "describe", "forward", "unsupported_reason"]
