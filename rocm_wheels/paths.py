"""The paths of the parts of a checkout."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FLASH_ATTN_SRC = ROOT / "flash_attn_src"
