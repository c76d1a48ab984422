"""Random calls of libflash_attn_rocm launch what flash_attn's Python backend launches for the same call.

The library runs above a HIP runtime that records, over a store whose kernels are made up, so nothing is compiled. More
calls: `C_CALLS=1000 pytest tests/test_c_differential.py`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import recorded
from flash_attn.runtime import device
from interface import Library
from random_calls import Drawn, draw, is_padded

from rocm_wheels.paths import ROOT

sys.path[:0] = [str(ROOT / "candle-flash-rocm/tests")]
Gpu: Any = importlib.import_module("record_launches").Gpu

CALLS = int(os.environ.get("C_CALLS", "150"))
SCRATCH = 1 << 50  # an address of memory that nobody touches


class Peer:
    """The library above the runtime that records, beside Python's backend."""

    def __init__(self, library: Path, runtime: Path, directory: Path) -> None:
        self.signatures = recorded.write_store(directory)
        self.library = Library(library)
        self.opened = self.library.open(directory)
        self.recorder = recorded.Recorder(runtime, self.signatures)
        self.gpu = Gpu(recorded.TARGET)

    def python(self, drawn: Drawn) -> list[recorded.Launch]:
        self.gpu.kept.clear()
        with device.using(self.gpu):
            drawn.run(self.gpu.kept.clear)  # the forward of a backward is a call of its own in C
        return recorded.by_python(self.gpu.kept, self.known(drawn), self.signatures)

    def known(self, drawn: Drawn) -> list[int]:
        return [tensor.data_ptr() for tensor in (*drawn.tensors.values(), *drawn.results.values())]

    def c(self, drawn: Drawn, *, by_plan: bool) -> list[recorded.Launch]:
        library, kind = self.library, "backward" if drawn.kind == "backward" else "forward"
        self.recorder.clear()
        if drawn.appends is not None:
            turned = drawn.appends.get("q")
            if turned is not None:
                drawn.appends["q_turned"] = {**turned, "data": SCRATCH - 4096}
                drawn.struct["q"] = drawn.appends["q_turned"]
            library.append(self.opened, library.call("append", drawn.appends | cache_of(drawn)))
        call = library.call(kind, drawn.struct)
        size = library.scratch_bytes(self.opened, kind, call)
        scratch = SCRATCH if size else 0
        if by_plan:
            library.launch_plan(library.plan(self.opened, kind, call), kind, call, scratch, size)
        else:
            library.launch(self.opened, kind, call, scratch, size)
        return self.recorder.launched(self.known(drawn))


def cache_of(drawn: Drawn) -> dict[str, Any]:
    """The fields of an append that say where the cache is."""
    struct, options = drawn.struct, drawn.struct["options"]
    names = ("block_table", "block_table_stride", "block_table_columns", "page_size", "seqlens_k")
    fields = {name: struct[name] for name in names if name in struct}
    more = {name: options[name] for name in ("cache_lines", "attention_chunk") if name in options}
    return fields | more


def is_split_by_python_alone(drawn: Drawn, launched: list[recorded.Launch]) -> bool:
    """Whether Python computed the lengths of packed keys on the GPU to split them. In C the caller gives them."""
    is_packed = drawn.struct["shape"].get("cu_seqlens_k") is not None
    has_lengths = "seqlens_k" in drawn.struct
    return drawn.kind == "forward" and is_packed and not has_lengths and not launched[0][0].startswith("fwd")


@pytest.fixture(scope="module")
def peer(c_library: Path, stub_hip: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CANDLE_FLASH_ROCM_HIP", str(stub_hip))
        yield Peer(c_library, stub_hip, tmp_path_factory.mktemp("recorded"))


@pytest.mark.parametrize("seeds", [range(start, CALLS, 10) for start in range(10)], ids=lambda seeds: str(seeds.start))
def test_random_calls_launch_what_python_launches(peer: Peer, seeds: range) -> None:
    for seed in seeds:
        drawn = draw(seed)
        if is_padded(drawn):
            continue
        expected = peer.python(drawn)
        if is_split_by_python_alone(drawn, expected):
            continue
        for by_plan in (False, True):
            assert peer.c(drawn, by_plan=by_plan) == expected, (seed, drawn.kind, by_plan)
