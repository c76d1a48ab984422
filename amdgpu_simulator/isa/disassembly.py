"""Reads a kernel from a code object without its assembly text, in the form of `assembly`.

The text comes from llvm-objdump of LLVM 22, which knows every target here.
"""

from __future__ import annotations

import functools
import io
import re
import subprocess
import tempfile
from typing import Any

import msgpack
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import NoteSection, SymbolTableSection

from amdgpu_simulator import debian
from amdgpu_simulator.isa import targets
from amdgpu_simulator.isa.assembly import Instruction, Kernel, parse_line

CACHE = debian.cache("llvm-22")
_PACKAGE = debian.Package(("trixie",), "llvm-22")  # Debian stable

# Fields of the kernel descriptor that a launch needs: name -> (word, first bit, bits).
_FIELDS = {
    "group_segment_fixed_size": (0, 0, 32),
    "private_segment_fixed_size": (1, 0, 32),
    "kernarg_size": (2, 0, 32),
    "float_round_mode_32": (12, 12, 2),
    "float_round_mode_16_64": (12, 14, 2),
    "float_denorm_mode_32": (12, 16, 2),
    "float_denorm_mode_16_64": (12, 18, 2),
    "dx10_clamp": (12, 21, 1),
    "ieee_mode": (12, 23, 1),
    "fp16_overflow": (12, 26, 1),
    "user_sgpr_count": (13, 1, 5),
    "system_sgpr_workgroup_id_x": (13, 7, 1),
    "system_sgpr_workgroup_id_y": (13, 8, 1),
    "system_sgpr_workgroup_id_z": (13, 9, 1),
    "user_sgpr_private_segment_buffer": (14, 0, 1),
    "user_sgpr_dispatch_ptr": (14, 1, 1),
    "user_sgpr_queue_ptr": (14, 2, 1),
    "user_sgpr_kernarg_segment_ptr": (14, 3, 1),
    "wavefront_size32": (14, 10, 1),
    "user_sgpr_kernarg_preload_length": (14, 16, 7),
}
_LABEL = re.compile(r"(?:[0-9a-f]+ )?<([^>]+)>:$")


def kernel(image: bytes, symbol: str | None = None, *, target: str | None = None) -> Kernel:
    """The kernel with this symbol, or the only kernel of the code object.

    target: the GPU target, for a code object that does not name it, such as AMD's assembly kernels.

    Raises ValueError for another file, for a code object of another target, and for a kernel that reads data stored
    with its code, because the text does not contain the address of that data. Raises debian.UnavailableError.
    """
    elf = ELFFile(io.BytesIO(image))
    described, named = _metadata(elf, symbol)
    if named and target not in (None, named):
        raise ValueError(f"the code object is for {named}, not for {target}")
    if not (target := named or target):
        raise ValueError("the code object does not name its GPU target: pass `target`")
    targets.get(target)
    descriptor = _descriptor(elf, described[".symbol"])
    descriptor["kernarg_size"] = max(descriptor["kernarg_size"], described[".kernarg_segment_size"])
    instructions, labels = _code(image, described[".name"])
    if any(part.mnemonic == "s_getpc_b64" for parts in instructions for part in parts):
        raise ValueError(f"{described['.name']} reads data stored with its code: run it from its assembly text")
    arguments = [(arg[".offset"], arg[".size"], arg[".value_kind"]) for arg in described.get(".args", ())]
    return Kernel(described[".name"], target, instructions, labels, descriptor, arguments, {})


def _metadata(elf: ELFFile, symbol: str | None) -> tuple[dict[str, Any], str]:
    """The metadata of the kernel, and its target ("" if the code object names none)."""
    for section in elf.iter_sections():
        for note in section.iter_notes() if isinstance(section, NoteSection) else ():
            if note["n_name"] == "AMDGPU":
                described = msgpack.unpackb(note["n_descdata"])
                named = [entry for entry in described["amdhsa.kernels"] if symbol in (None, entry[".name"])]
                if len(named) == 1:
                    target = described.get("amdhsa.target", "").rpartition("--")[2].partition(":")[0]
                    return dict(named[0]), target
    raise ValueError(
        "the file holds no AMD kernel, or several kernels" if symbol is None else f"the file holds no {symbol}"
    )


def _descriptor(elf: ELFFile, symbol: str) -> dict[str, int]:
    """The fields of a kernel descriptor by LLVM's names for them."""
    table = elf.get_section_by_name(".dynsym")
    if not isinstance(table, SymbolTableSection):
        raise ValueError("the code object has no symbols")
    if not (symbols := table.get_symbol_by_name(symbol)):
        raise ValueError(f"the code object has no symbol {symbol}")
    (entry,) = symbols
    section = elf.get_section(entry["st_shndx"])
    start = entry["st_value"] - section["sh_addr"]
    words = [int.from_bytes(section.data()[at : at + 4], "little") for at in range(start, start + 64, 4)]
    return {name: words[word] >> first & (1 << bits) - 1 for name, (word, first, bits) in _FIELDS.items()}


def _code(image: bytes, symbol: str) -> tuple[list[tuple[Instruction, ...]], dict[str, int]]:
    with tempfile.NamedTemporaryFile(suffix=".co") as file:
        file.write(image)
        file.flush()
        options = ["--disassemble", "--symbolize-operands", "--no-show-raw-insn", "--no-leading-addr", file.name]
        done = subprocess.run([*objdump(), *options], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    start = lines.index(f"<{symbol}>:")
    instructions: list[tuple[Instruction, ...]] = []
    labels: dict[str, int] = {}
    for line in lines[start + 1 :]:
        if match := _LABEL.match(line):
            labels[match[1]] = len(instructions)
        elif code := line.partition("//")[0].strip():
            instructions.append(parse_line(code))
    return instructions, labels


@functools.cache
def objdump() -> tuple[str, ...]:
    """The command prefix that runs llvm-objdump. Raises debian.UnavailableError."""
    root = debian.unpack(_PACKAGE, CACHE)
    (program,) = root.glob("usr/lib/llvm-*/bin/llvm-objdump")
    return (*debian.loader(root), str(program))
