"""Launches kernels through flash_attn's launcher and AMD's runtime, in a process of `process.py`. The simulator then
runs what the packets say.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from amdgpu_simulator.hip import packets, process
from amdgpu_simulator.isa import machine
from rocm_wheels.wheel import launcher


@cache
def launcher_module() -> ModuleType:
    """The launcher of these sources, bound to the runtime that this process has loaded."""
    packets.runtime()
    path = launcher.build(process.CACHE / "launcher", cache=process.CACHE.parent)
    spec = importlib.util.spec_from_file_location("_launcher", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.bind("hip")
    return module


def code_of(image: bytes, symbol: str) -> bytes:
    """The instructions of a kernel in its code object."""
    elf = ELFFile(io.BytesIO(image))
    text, symbols = elf.get_section_by_name(".text"), elf.get_section_by_name(".dynsym")
    assert text is not None
    assert isinstance(symbols, SymbolTableSection)
    (entry,) = (candidate for candidate in symbols.iter_symbols() if candidate.name == symbol)
    start = entry["st_value"] - text["sh_addr"]
    # The symbols of AMD's assembly kernels have no size: one kernel is all of the code.
    return bytes(text.data()[start : start + (entry["st_size"] or text["sh_size"])])


class Kernel:
    """A kernel of a code object, with its manifest entry."""

    def __init__(self, name: str, image: bytes, entry: dict[str, Any], program: machine.Program) -> None:
        self._name = name
        self._code = code_of(image, entry["symbol"])
        self._entry = entry
        self._program = program
        self._kernel = launcher_module().Kernel(
            image, entry["symbol"], entry["params"], entry["shared"], entry["threads"], name
        )

    def launch(
        self,
        grid: tuple[int, int, int],
        arguments: Sequence[Any],
        ranges: Sequence[tuple[int, int]],
        *,
        backwards: bool = False,
        in_step: bool = False,
    ) -> None:
        """Launches the kernel. ranges, backwards, in_step: as in `machine.launch`.

        Raises ValueError if the packet does not belong to this launch.
        """

        def run(packet: packets.Packet) -> None:
            asked = (grid, (self._entry["threads"], 1, 1), self._code)
            if (packet.blocks, packet.block, packet.code(len(self._code))) != asked:
                raise ValueError(f"{self._name}: {packet} is not the packet of the launch with blocks of {asked[:2]}")
            threads, shared = packet.block[0], packet.shared
            content = packet.content(len(arguments[0]) if self._entry["params"].startswith("K") else 0)
            machine.launch(
                self._program, grid, threads, content, ranges, shared=shared, backwards=backwards, complete=True,
                in_step=in_step,
            )  # fmt: skip

        runtime = packets.runtime()
        with runtime.serving(run, 0 if 0 in grid else 1):
            self._kernel.launch(0, 0, *grid, *arguments)
