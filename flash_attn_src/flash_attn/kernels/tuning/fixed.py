"""Tiles that are no choice: their kernels wait for memory, or run rarely."""

from __future__ import annotations

from flash_attn.kernels.int8_rows import KEY_ROWS, QUERY_ROWS
from flash_attn.kernels.tuning.config import C

# (operation, kind) -> its configuration on every target.
CONFIGS: dict[tuple[str, str], C] = {
    ("probabilities", "any"): C(32, 32, 4, block_k=16),  # called when somebody debugs
    ("bwd-dbias", "bias"): C(32, 32, 4, block_k=16),
    ("bwd-ddiagonals", "bias"): C(64, 64, 4, block_k=16),
    ("bwd-norms", "plain"): C(128, 0, 4),
    ("sparse-lists", "plain"): C(0, 64, 1),
    ("block-lists", "plain"): C(0, 64, 1),
    ("narrow-ids", "plain"): C(0, 64, 1),
    ("probe", "plain"): C(16, 0, 1),
    ("probe", "wide"): C(32, 0, 4),
    ("append", "plain"): C(16, 0, 4),
    ("sum", "plain"): C(16, 0, 4),
    ("bwd-dsinks", "plain"): C(1024, 0, 4),
    ("combine", "plain"): C(1, 8, 1),
    ("combine", "wide"): C(1, 32, 4),
    # 128 rows: see fp8_cast.COLUMNS.
    ("fp8-amax", "plain"): C(128, 256, 4),
    ("fp8-cast", "plain"): C(128, 256, 4),
    ("fp8-cast-v", "plain"): C(128, 256, 4),
    ("int8-cast-q", "plain"): C(QUERY_ROWS, 0, 4),
    ("int8-cast-k", "plain"): C(KEY_ROWS, 0, 4),
}
