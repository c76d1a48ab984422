"""Tiles of RDNA 4 GPUs: the tiles of RDNA 3 (2026-11-21).

RDNA 4 has RDNA 3's wavefronts and registers, and its WMMA holds less. What fits RDNA 3 fits RDNA 4.
"""

from __future__ import annotations

from flash_attn.kernels.tuning.rdna3 import OPTIONS, ROWS

__all__ = ["OPTIONS", "ROWS"]
