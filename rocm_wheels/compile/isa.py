"""The instruction mix of a kernel, from its assembly text."""

from __future__ import annotations

import collections
import re

# Class of an instruction, by the prefix of its mnemonic; the first match counts. AMD ISA, then PTX.
_CLASSES = (
    ("mfma", r"v_mfma|v_smfmac"),
    ("wmma", r"v_wmma|v_swmmac"),
    ("dot", r"v_dot\d"),
    ("lds", r"ds_"),
    ("memory", r"global_|buffer_|flat_"),
    ("scratch", r"scratch_"),
    ("valu", r"v_"),
    ("salu", r"s_"),
    ("wgmma", r"wgmma\.mma"),
    ("mma", r"mma\."),
)
_MNEMONIC = re.compile(r"^\s+(?:@!?%\w+\s+)?([a-z]\w*[\w.]*)", re.MULTILINE)


def instruction_mix(assembly: str) -> dict[str, int]:
    """Number of instructions of each class in an assembly text. Classes that do not occur are left out."""
    counts: collections.Counter[str] = collections.Counter()
    for mnemonic, number in collections.Counter(_MNEMONIC.findall(assembly)).items():
        for name, pattern in _CLASSES:
            if re.match(pattern, mnemonic):
                counts[name] += number
                break
    return {name: counts[name] for name, _ in _CLASSES if counts[name]}
