"""The groups of hazards of a GPU target. The target's row in flash_attn/kernels/targets.py names them."""

from __future__ import annotations

from functools import cache

from rocm_wheels.compile import sources


@cache
def of(target: str) -> frozenset[str]:
    """The groups of a target of AMD. Raises ValueError for an unknown target, and for a target that has none.

    A target without hazards is refused, because the check would pass all of its code unread.
    """
    row = sources.module("kernels.targets").get(target)
    if not row.hazards:
        raise ValueError(
            f"{target} has no hazard rules: name the groups of its rules in `hazards` of its row in "
            "flash_attn_src/flash_attn/kernels/targets.py, and write rules that no group has in "
            "rocm_wheels/compile/check/rules.py"
        )
    return frozenset(row.hazards)
