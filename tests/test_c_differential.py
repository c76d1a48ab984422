"""Random calls of libflash_attn_rocm launch what flash_attn's Python backend launches for the same call.

The library runs above a HIP runtime that records, over a store whose kernels are made up, so nothing is compiled. More
calls: `C_CALLS=1000 pytest tests/test_c_differential.py`; the long tests run 3,000.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import recorded
from flash_attn.attention.backends import split_kv
from flash_attn.attention.backends.triton import inputs
from flash_attn.core import device
from flash_attn.kernels import flags, modifiers, operations, planning, splits
from interface import Library
from random_calls import HOST_COST, Drawn, draw, draw_int8, is_padded

from rocm_wheels.paths import ROOT

sys.path[:0] = [str(ROOT / "candle-flash-rocm/tests")]
Gpu: Any = importlib.import_module("record_launches").Gpu

CALLS = int(os.environ.get("C_CALLS", "150"))
LONG = range(CALLS, 3000)
SCRATCH = 1 << 50  # an address of memory that nobody touches


class Peer:
    """The library above the runtime that records, beside Python's backend."""

    def __init__(self, library: Path, runtime: Path, directory: Path, target: str = recorded.TARGET) -> None:
        self.directory = directory
        self.signatures = recorded.write_store(directory, target=target)
        self.library = Library(library)
        self.opened = self.library.open(directory)
        self.recorder = recorded.Recorder(runtime, self.signatures)
        self.gpu = Gpu(target)

    def open(self, directory: Path) -> None:
        """Plans by the store in another directory from now on, in both languages without what was planned before."""
        self.opened = self.library.open(directory)
        self.gpu = Gpu(recorded.TARGET)
        for remembered in (split_kv.are_faster, splits.profitable_splits):
            remembered.cache_clear()

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
            turned = drawn.appends.get("q_turned")
            if turned is not None:
                turned["data"] = SCRATCH - 4096
                drawn.struct["q"] = turned
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


@pytest.mark.parametrize(
    "seeds",
    [*(range(start, CALLS, 10) for start in range(10)), pytest.param(LONG, marks=pytest.mark.long)],
    ids=lambda seeds: str(seeds.start),
)
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


def test_calls_in_int8_launch_what_python_launches(
    c_library: Path, stub_hip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANDLE_FLASH_ROCM_HIP", str(stub_hip))
    monkeypatch.setenv("STUB_TARGET", "gfx1100")
    peer = Peer(c_library, stub_hip, tmp_path, "gfx1100")
    for seed in range(CALLS // 4):
        drawn = draw_int8(seed)
        expected = peer.python(drawn)
        for by_plan in (False, True):
            assert peer.c(drawn, by_plan=by_plan) == expected, (seed, by_plan)


# Numbers of the table that no call of the library reads.
OF_PYTHON_ALONE = {
    "HAS_OFFSETS", "HAS_BITS", "LOSS_HAS_LSE", "LOSS_IS_SPLIT", "NORM_HAS_BIAS", "NORM_HAS_RESIDUAL",
    "NORM_STORE_Z", "NORM_IS_RMS", "CHUNK_BITS", "CHUNK_MASK", "PAGE_PER_KEY", "PAGE_PER_BLOCK",
    "PARTIAL_BLOCK", "WHOLE_BLOCK", "HIDDEN_BLOCK",
}  # fmt: skip
# Limits, which refuse a call and change none.
OF_THE_CRATE = {"MAX_ROW_STRIDE", "MAX_BIAS_ROW", "max_page_units", "latent_dim"}
SEEDS = range(600)
ENOUGH = 2  # calls that another number changes
MANY = 1000  # A cost that is so many times larger or smaller decides alone.

Place = tuple[str | int, ...]


def numbers(value: Any, place: Place = ()) -> Iterator[Place]:
    """The places of all numbers."""
    if isinstance(value, dict | list | tuple):
        names = value if isinstance(value, dict) else range(len(value))
        for name in names:
            yield from numbers(value[name], (*place, name))
    else:
        yield place


def changed(value: Any, place: Place, number: float) -> Any:
    """A named tuple or a tuple with another number at a place."""
    if not place:
        return number
    first, *rest = place
    if isinstance(value, Mapping):
        return {**value, first: number}
    part = getattr(value, first) if isinstance(first, str) else value[first]
    part = changed(part, tuple(rest), number)
    if isinstance(first, str):
        return value._replace(**{first: part})
    parts = (*value[:first], part, *value[first + 1 :])
    return type(value)(*parts) if hasattr(value, "_fields") else parts


def change_python(patch: pytest.MonkeyPatch, place: Place, number: float) -> None:
    """Gives Python's planner another number. A flag is in every module that imports it."""
    table, *rest = place
    if table in ("split_kv", "grid", "fp8"):
        name = str(table).upper()
        value = changed(getattr(planning, name), tuple(rest), number)
        if rest[-1] == "head_dim":  # Costs of head dims that are next to each other are much alike.
            _, *others = value.whole[rest[1]] if rest[0] == "whole" else value.split[rest[1]]
            for index, cost in enumerate(others, 1):
                value = changed(value, (*rest[:2], index), cost * MANY)
        patch.setattr(planning, name, value)
        return
    flag = str(rest[0])
    old = (vars(flags) | modifiers.BITS)[flag]
    if flag in modifiers.BITS:
        patch.setitem(modifiers.BITS, flag, number)
    for name, module in list(sys.modules.items()):
        if name.startswith(("flash_attn.", "recorded")) and getattr(module, flag, None) == old:
            patch.setattr(module, flag, number)
    per_head = tuple(row._replace(flag=int(number)) if row.flag == old else row for row in inputs.PER_HEAD)
    patch.setattr(inputs, "PER_HEAD", per_head)


def other_numbers(place: Place, number: float) -> list[float]:
    if place[0] == "flags":
        return [1 << 25]
    if isinstance(number, float):
        return [MANY * number, number / MANY]
    return [max(number // 64, 1), 2 * number, max(number // 2, 1)]


def places() -> list[Place]:
    facts = planning.facts(recorded.TARGET)
    of_fp8 = {"columns": facts["fp8"]["columns"], "largest": {"fp8e4b8": facts["fp8"]["largest"]["fp8e4b8"]}}
    result = numbers({name: facts[name] for name in ("flags", "split_kv", "grid")} | {"fp8": of_fp8})
    # No call has a larger head dim than the last row of a cost table.
    largest = {("split_kv", name, len(getattr(planning.SPLIT_KV, name)) - 1, "head_dim") for name in ("whole", "split")}
    return [place for place in result if place not in largest and not {*place} & (OF_PYTHON_ALONE | OF_THE_CRATE)]


@pytest.fixture(autouse=True, scope="module")
def _host_cost() -> Iterator[None]:
    with mock.patch.object(split_kv, "_HOST", HOST_COST):
        yield


@pytest.fixture(scope="module")
def expected(peer: Peer) -> dict[int, list[recorded.Launch]]:
    """What Python launches, by the seed of the call. Calls that the two languages split differently are left out."""
    launched = {}
    for seed in SEEDS:
        drawn = draw(seed)
        if not is_padded(drawn):
            launches = peer.python(drawn)
            if not is_split_by_python_alone(drawn, launches):
                launched[seed] = launches
    return launched


def assert_both_follow(peer: Peer, expected: dict[int, list[recorded.Launch]], directory: Path) -> bool:
    """Whether Python plans a call otherwise than before. Raises AssertionError if C does not plan it likewise."""
    recorded.change_planning(peer.directory, directory, planning.facts(recorded.TARGET))
    peer.open(directory)
    differing = 0
    for seed, before in expected.items():
        drawn = draw(seed)
        launches = peer.python(drawn)
        if launches != before and not is_split_by_python_alone(drawn, launches):
            assert peer.c(drawn, by_plan=False) == launches, seed
            differing += 1
            if differing == ENOUGH:
                break
    return differing > 0


@pytest.mark.parametrize("place", places(), ids=lambda place: "-".join(map(str, place)))
def test_both_languages_follow_a_number_of_planning(
    peer: Peer,
    expected: dict[int, list[recorded.Launch]],
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    number: Any = planning.facts(recorded.TARGET)
    for name in place:
        number = number[name]
    for other in other_numbers(place, number):
        with monkeypatch.context() as patch:
            change_python(patch, place, other)
            if assert_both_follow(peer, expected, tmp_path):
                return
    pytest.fail(f"no call of {len(expected)} is planned otherwise with another number")


@pytest.mark.parametrize("operation", ["fwd", "bwd-dq", "bwd-dkdv", "decode", "extend", "sparse-fwd"])
def test_both_languages_follow_the_sizes_and_kinds_of_kernels(
    peer: Peer,
    expected: dict[int, list[recorded.Launch]],
    operation: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = operations.OPERATIONS[operation]
    sizes = tuple(size for size in row.sizes if size != 128)
    of_kind = {kind: tuple(size for size in of if size != 128) for kind, of in dict(row.sizes_of_kind).items()}
    fewer = [dataclasses.replace(row, sizes=sizes, sizes_of_kind=of_kind)]
    if len(row.kinds) > 2:
        fewer.append(dataclasses.replace(row, kinds=(row.kinds[0], row.kinds[-1]), sizes_of_kind={}))
    for other in fewer:
        with monkeypatch.context() as patch:
            patch.setitem(operations.OPERATIONS, operation, other)
            assert assert_both_follow(peer, expected, tmp_path)
