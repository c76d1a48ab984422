"""Score modifiers: the options of a call for which kernels have a kind of their own. Standard library only.

A row here, the formula in `scores` and the derivative of the formula beside it are what kernels need of a new modifier.
"""

from __future__ import annotations

from typing import NamedTuple

from flash_attn.kernels.flags import HAS_ALIBI


class Modifier(NamedTuple):
    """option: its name in `flash_attn.options`. kind: of the kernels that have this modifier alone.

    flag: of a modifier with a number for each head, which takes the slot `alibi_slopes`; 0 for other modifiers.
    """

    option: str
    kind: str
    flag: int = 0


MODIFIERS = (
    Modifier("alibi_slopes", "alibi", HAS_ALIBI),
    Modifier("dropout_p", "dropout"),
    Modifier("softcap", "softcap"),
)
# Those of which a call may have one: they share a slot.
PER_HEAD = tuple(row for row in MODIFIERS if row.flag)
