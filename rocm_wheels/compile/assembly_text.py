"""The assembly text of AMD kernels as LLVM prints it: the code and the descriptor of each kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_DESCRIBED = re.compile(r"\.amdhsa_kernel\s+(\S+)(.*?)\.end_amdhsa_kernel", re.DOTALL)
_DIRECTIVE = re.compile(r"\.amdhsa_(\w+)[ \t]+(\d+|0x[0-9a-f]+)\s*(?:;.*)?$", re.MULTILINE)
_SYMBOL = re.compile(r"([A-Za-z_.$][\w.$]*):")


class KernelText(NamedTuple):
    """The text of a kernel.

    lines: (number of the line in the text, code). A code is an instruction or, with a colon at its end, a label.
    descriptor: the .amdhsa_ directives with a number.
    """

    symbol: str
    lines: list[tuple[int, str]]
    descriptor: dict[str, int]


def kernel_texts(assembly: str) -> Iterator[KernelText]:
    """The kernels of an assembly text. Raises ValueError for a kernel without code."""
    lines = assembly.splitlines()
    starts = {match[1]: number for number, line in enumerate(lines) if (match := _SYMBOL.match(line))}
    for symbol, directives in _DESCRIBED.findall(assembly):
        if symbol not in starts:
            raise ValueError(f"the text describes {symbol} and has no code of it")
        descriptor = {name: int(value, 0) for name, value in _DIRECTIVE.findall(directives)}
        yield KernelText(symbol, list(_body(lines, starts[symbol] + 1)), descriptor)


def _body(lines: list[str], start: int) -> Iterator[tuple[int, str]]:
    """The code of a function from its first line on."""
    for number in range(start, len(lines)):
        if lines[number].startswith((".Lfunc_end", "\t.section")):
            return
        code = code_of(lines[number])
        if code.endswith(":") or (code and code[0] != "."):
            yield number, code


def code_of(line: str) -> str:
    """A line without its comment and its indentation."""
    return line.partition(";")[0].partition("//")[0].strip()
