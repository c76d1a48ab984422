"""The registers that an instruction reads and writes, as rows: vector registers first, then scalar ones."""

from __future__ import annotations

import re

from amdgpu_simulator.isa.assembly import Instruction
from amdgpu_simulator.isa.wave import EXEC, VCC, place, register

Rows = tuple[int, ...]

# The row of s0, after 512 rows of vector registers and accumulators; the row of SCC, after the scalar registers.
_FIRST = 512
_SCC = _FIRST + 128
_EXEC, _VCC = (_FIRST + EXEC, _FIRST + EXEC + 1), (_FIRST + VCC, _FIRST + VCC + 1)

_ACCUMULATES = ("v_fmac", "v_mac", "v_dot2c", "v_pk_fmac", "v_swap", "v_dual_fmac", "v_dual_dot2acc")
# Vector instructions whose second operand is a mask that they write.
_CARRIES = re.compile(r"v_(add|sub|subrev)(c|b|brev)?_co_|v_div_scale|v_mad_(co_)?[iu]64_")
_NO_RESULT = re.compile(r"s_(cmp|bitcmp|c?branch|wait|nop|barrier|set|send|clause|delay|sleep|endpgm)")
_SETS_SCC = re.compile(
    r"s_(cmp|bitcmp|add|sub|and|or|xor|nand|nor|xnor|not|lshl|lshr|ashr|bfe|min|max|abs|bcnt|wqm|quadmask)"
)
_READS_SCC = re.compile(r"s_(addc|subb|add_co_ci|sub_co_ci|cselect|cmov|cbranch_scc)")
_ALSO_READS = re.compile(r"s_(addk|mulk|cmovk?|bitset|fmac)")


def vector_rows(instruction: Instruction) -> tuple[Rows, Rows]:
    """The rows of vector registers that an instruction reads and writes. A load writes none, because its wave waits."""
    name = instruction.mnemonic
    rows = [tuple(row for row in rows_of(text) if row < _FIRST) for text in instruction.operands]
    if not name.startswith("v_") or name.startswith(("v_cmp", "v_read")):
        return sum(rows, ()), ()
    return sum(rows[0 if name.startswith(_ACCUMULATES) else 1 :], ()), rows[0] if rows else ()


def all_rows(instruction: Instruction) -> tuple[Rows, Rows]:
    """The same with scalar registers, masks and SCC."""
    name = instruction.mnemonic
    rows = [rows_of(text) for text in instruction.operands]
    if name.startswith("s_"):
        return _scalar(name, rows)
    if not name.startswith("v_") or not rows:
        return sum(rows, ()), ()
    if name.startswith("v_cmpx"):
        return sum((row for row in rows if row not in (_EXEC, _EXEC[:1])), ()), _EXEC
    if _CARRIES.match(name):
        return sum(rows[2:], ()), rows[0] + rows[1]
    return sum(rows[0 if name.startswith(_ACCUMULATES) else 1 :], ()), rows[0]


def _scalar(name: str, rows: list[Rows]) -> tuple[Rows, Rows]:
    """Of a scalar instruction. A scalar load writes nothing, because its wave waits for it."""
    result: Rows = ()
    if rows and not _NO_RESULT.match(name):
        result = rows[0]
        rows = rows[0 if _ALSO_READS.match(name) else 1 :]
    reads, writes = sum(rows, ()), () if name.startswith(("s_load", "s_buffer")) else result
    if _READS_SCC.match(name):
        reads += (_SCC,)
    if _SETS_SCC.match(name):
        writes += (_SCC,)
    if "saveexec" in name or "wrexec" in name:
        reads, writes = reads + _EXEC, writes + _EXEC
    if "cbranch_exec" in name:
        reads += _EXEC
    if "cbranch_vcc" in name:
        reads += _VCC
    return reads, writes


def rows_of(text: str) -> Rows:
    """The rows of an operand, none for other text than a register."""
    text = text.strip("-|")
    span = register(text)
    if not span or text == "null" or text == "off":
        return ()
    if span[0] == "s":
        return tuple(range(_FIRST + span[1], _FIRST + span[1] + span[2]))
    return tuple(range(place(text), place(text) + span[2]))
