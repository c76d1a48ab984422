"""Reads GPU code objects (ELF files of AMD and NVIDIA): target, symbol, resources, argument count."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgpack
from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import NoteSection, SymbolTableSection

from rocm_wheels.compile import sources
from rocm_wheels.errors import CompileFailed

_EM_AMDGPU, _EM_CUDA = 224, 190

# Attributes in a cubin's .nv.info, under the names that cuobjdump prints.
_KPARAM_INFO, _FRAME_SIZE, _REGCOUNT = 0x17, 0x11, 0x2F


@dataclass(frozen=True, kw_only=True)
class CodeObject:
    """The resources of one kernel in a code object: numbers of registers, bytes of memory.

    The code uses `vgprs`. The kernel descriptor reserves registers for each wave in `granules`, 0 for NVIDIA.
    `argument_bytes` covers the explicit arguments, `threads` is the largest block. NVIDIA's cubins have
    neither, nor sgprs, agprs and spills: these fields are 0, and `private` includes spilled registers.
    """

    target: str
    symbol: str
    arguments: int
    vgprs: int
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    private: int
    lds: int
    argument_bytes: int = 0
    threads: int = 0
    granules: int = 0

    def resources(self) -> dict[str, int]:
        """The values that belong in a manifest."""
        names = ("vgprs", "agprs", "sgprs", "vgpr_spills", "sgpr_spills", "private", "lds")
        return {**{name: getattr(self, name) for name in names}, "reserved_vgprs": self.reserved_vgprs}

    @property
    def reserved_vgprs(self) -> int:
        """Vector registers that each wave takes from its SIMD. Raises ValueError for a target without a row."""
        if not self.granules:
            return self.vgprs
        granule: int = sources.module("kernels.targets").get(self.target).descriptor_granule
        return self.granules * granule


def read(image: bytes) -> CodeObject:
    """Reads an image that holds one kernel. Raises CompileFailed for anything else."""
    kernels = read_all(image)
    if len(kernels) != 1:
        raise CompileFailed(f"the code object holds {len(kernels)} kernels, expected one")
    return next(iter(kernels.values()))


def read_all(image: bytes) -> dict[str, CodeObject]:
    """The kernels of an image by symbol; a cubin has one. Raises CompileFailed for anything but a code object."""
    try:
        elf = ELFFile(io.BytesIO(image))
        machine = elf.header["e_machine"]
    except (ELFError, struct.error) as error:
        raise CompileFailed(f"not a code object: {error}") from error
    if machine in ("EM_AMDGPU", _EM_AMDGPU):
        return {kernel.symbol: kernel for kernel in _read_amd(elf)}
    if machine in ("EM_CUDA", _EM_CUDA):
        kernel = _read_nvidia(elf)
        return {kernel.symbol: kernel}
    raise CompileFailed(f"not a GPU code object: ELF machine {machine}")


def _read_amd(elf: ELFFile) -> Iterator[CodeObject]:
    for section in elf.iter_sections():
        if not isinstance(section, NoteSection):
            continue
        for note in section.iter_notes():
            if note["n_name"] == "AMDGPU":
                described = msgpack.unpackb(note["n_descdata"])
                # "amdgcn-amd-amdhsa--gfx90a:sramecc+". wheel_tests compares it with the flags in the ELF header. AMD's
                # assembly kernels have only the flags.
                named = described.get("amdhsa.target", "").rpartition("--")[2].partition(":")[0]
                target = named or _target(elf.header["e_flags"] & 0xFF)
                for kernel in described["amdhsa.kernels"]:
                    yield _amd_kernel(target, kernel, _granules(elf, kernel[".symbol"]))


def _target(elf_machine: int) -> str:
    """The target of a code object that does not name its target, from the low byte of e_flags."""
    return sources.module("kernels.targets").by_elf_machine(elf_machine) or f"the unknown machine {elf_machine:#x}"


# The kernel descriptor: its bytes, and the place of COMPUTE_PGM_RSRC1, whose lowest six bits count vector registers.
_DESCRIPTOR, _RSRC1 = 64, 48


def _granules(elf: ELFFile, symbol: str) -> int:
    """The granules of vector registers that the descriptor of a kernel reserves for a wave. Raises CompileFailed
    without one.
    """
    tables = [section for section in elf.iter_sections() if isinstance(section, SymbolTableSection)]
    place = next((place for table in tables for place in table.get_symbol_by_name(symbol) or ()), None)
    if place is None:
        raise CompileFailed(f"the code object has no kernel descriptor {symbol}")
    section = elf.get_section(place["st_shndx"])
    start = place["st_value"] - section["sh_addr"]
    (rsrc1,) = struct.unpack_from("<I", section.data()[start : start + _DESCRIPTOR], _RSRC1)
    return int(rsrc1 & 0x3F) + 1


def _amd_kernel(target: str, kernel: dict[str, Any], granules: int) -> CodeObject:
    explicit = [argument for argument in kernel[".args"] if not argument[".value_kind"].startswith("hidden_")]
    return CodeObject(
        target=target,
        symbol=kernel[".name"],
        arguments=len(explicit),
        vgprs=kernel[".vgpr_count"],
        agprs=kernel.get(".agpr_count", 0),
        sgprs=kernel[".sgpr_count"],
        vgpr_spills=kernel.get(".vgpr_spill_count", 0),
        sgpr_spills=kernel.get(".sgpr_spill_count", 0),
        private=kernel[".private_segment_fixed_size"],
        lds=kernel[".group_segment_fixed_size"],
        argument_bytes=max((argument[".offset"] + argument[".size"] for argument in explicit), default=0),
        threads=kernel[".max_flat_workgroup_size"],
        granules=granules,
    )


def _read_nvidia(elf: ELFFile) -> CodeObject:
    texts = [section for section in elf.iter_sections() if section.name.startswith(".text.")]
    if len(texts) != 1:
        raise CompileFailed(f"the cubin holds {len(texts)} kernels, expected one")
    symbol = texts[0].name.removeprefix(".text.")
    sections = {section.name: section for section in elf.iter_sections()}
    info, common = (sections[name].data() for name in (f".nv.info.{symbol}", ".nv.info"))

    def figure(attribute: int) -> int:
        """The largest value of a (symbol, value) attribute; the file has one kernel."""
        values = [struct.unpack_from("<II", value)[1] for value in _attributes(common, attribute)]
        return max(values, default=0)

    shared = sections.get(f".nv.shared.{symbol}")
    # The ELF ABI of CUDA 13 has the architecture in the second byte of e_flags, earlier ones in the first byte.
    flags = elf.header["e_flags"]
    architecture = (flags >> 8) & 0xFF if elf.header["e_ident"]["EI_ABIVERSION"] >= 8 else flags & 0xFF
    return CodeObject(
        target=f"sm_{architecture}",
        symbol=symbol,
        arguments=len(_attributes(info, _KPARAM_INFO)),
        vgprs=figure(_REGCOUNT),
        agprs=0,
        sgprs=0,
        vgpr_spills=0,
        sgpr_spills=0,
        private=figure(_FRAME_SIZE),
        lds=shared["sh_size"] if shared is not None else 0,
    )


def _attributes(data: bytes, number: int) -> list[bytes]:
    """The values of one attribute in a .nv.info section, whose records are (format, attribute, size or value)."""
    values = []
    position = 0
    while position + 4 <= len(data):
        kind, attribute, size = struct.unpack_from("<BBH", data, position)
        position += 4
        if kind == 4:  # A value of `size` bytes follows. In the other formats, `size` is the value.
            if attribute == number:
                values.append(data[position : position + size])
            position += size
    return values
