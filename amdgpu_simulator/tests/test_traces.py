"""The facts that thread traces of GPUs show: how they are read from a trace, and what the clock does."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from amdgpu_simulator import thread_trace, traces
from amdgpu_simulator.clock import cost, registers, timeline
from amdgpu_simulator.clock.record import Executed, Record
from amdgpu_simulator.isa import assembly, machine
from amdgpu_simulator.tests.test_isa import kernel, run
from amdgpu_simulator.tests.test_timeline import END, PLAIN, WAIT, load
from amdgpu_simulator.thread_trace import Issue, issue

FACTS = {fact.name: fact for fact in traces.FACTS}
# Cycles that the clock takes on gfx1100 and gfx1200. What the GPUs take is in docs/notes/clock.md.
CLOCK = {
    "vector instruction needs the previous one": (5, 5),
    "64-bit shift, next vector instruction": (2, 2),
    "64-bit multiply-add, next vector instruction": (4, 4),
    "transcendental, next transcendental": (4, 4),
    "transcendental, next vector instruction": (1, 1),
    "LDS load of 4 bytes, end of the wait for it": (31, 31),
    "LDS load of 16 bytes, use": (35, 35),
    "vector result, address or data of LDS": (18, 18),
    "vector result, data of global memory": (18, 18),
    "scalar instruction needs the previous one": (2, 9),
    "branch that jumps, next instruction": (9, 9),
    "v_cmpx, branch": (17, 17),
    "last arrival at a barrier, next instruction": (14, 13),
    "fp16 product leaves a full queue": (32, 16),
    "int8 product leaves a full queue": (32, 8),
}


@pytest.mark.parametrize("name", FACTS)
@pytest.mark.parametrize("target", ["gfx1100", "gfx1200"])
def test_the_clock_takes_as_long_as_the_gpus(name: str, target: str) -> None:
    assert traces.clock(FACTS[name], target) == CLOCK[name][target == "gfx1200"]


def wave(*lines: tuple[int, str]) -> list[Issue]:
    return [issue(time, text) for time, text in lines]


def test_a_pair_that_needs_counts_from_the_newest_operand() -> None:
    fact = FACTS["vector instruction needs the previous one"]
    result = wave(
        (10, "v_add_f32_e32(v[1], v[2], v[3])"),
        (12, "v_add_f32_e32(v[4], v[2], v[3])"),
        (17, "v_add_f32_e32(v[5], v[1], v[4])"),
        (18, "v_add_f32_e32(v[6], v[2], v[3])"),
    )
    assert traces.gaps(fact, [result]) == [5]


def test_a_pair_of_neighbours_is_independent() -> None:
    fact = FACTS["64-bit shift, next vector instruction"]
    free = wave((10, "v_lshlrev_b64(v[1:2], 2, v[3:4])"), (12, "v_mov_b32_e32(v[5], v[6])"))
    bound = wave((10, "v_lshlrev_b64(v[1:2], 2, v[3:4])"), (16, "v_mov_b32_e32(v[5], v[2])"))
    assert traces.gaps(fact, [free, bound]) == [2]


def test_a_load_writes_its_first_operand() -> None:
    fact = FACTS["LDS load of 16 bytes, use"]
    result = wave(
        (10, "ds_load_b128(v[2:5], v[1])"), (12, "s_waitcnt(64519)"), (48, "v_add_f32_e32(v[0], 0, v[5])"),
        (50, "v_add_f32_e32(v[0], 0, v[1])"),
    )  # fmt: skip
    assert traces.gaps(fact, [result]) == [38]
    stored = wave((10, "v_mov_b32_e32(v[1], 0)"), (28, "ds_store_b32(v[0], v[1])"))
    assert traces.gaps(FACTS["vector result, address or data of LDS"], [stored]) == [18]


def test_only_branches_that_jump_count() -> None:
    fact = FACTS["branch that jumps, next instruction"]
    branch = issue(10, "s_cbranch_scc0(65443)")
    assert traces.gaps(fact, [[branch, issue(13, "s_nop(0)")]]) == []
    assert traces.gaps(fact, [[branch._replace(taken=True), issue(19, "s_nop(0)")]]) == [9]


def test_a_barrier_counts_from_the_last_arrival() -> None:
    fact = FACTS["last arrival at a barrier, next instruction"]
    first = wave((10, "s_barrier()"), (40, "v_mov_b32_e32(v[0], 0)"), (60, "s_barrier()"), (90, "s_nop(0)"))
    second = wave((25, "s_barrier()"), (42, "v_mov_b32_e32(v[0], 0)"), (75, "s_barrier()"), (91, "s_nop(0)"))
    assert traces.gaps(fact, [first, second]) == [15, 15]


def test_short_gaps_of_a_queue_do_not_count() -> None:
    fact = FACTS["int8 product leaves a full queue"]
    products = wave(
        (1, "v_wmma_f32_16x16x16_f16(v[8:15], v[0:3], v[4:7], v[8:15])"),
        (2, "v_wmma_i32_16x16x16_iu8(v[16:23], v[0:1], v[4:5], v[16:23])"),
        (20, "v_wmma_f32_16x16x16_f16(v[24:31], v[0:3], v[4:7], v[24:31])"),
        (28, "v_wmma_i32_16x16x16_iu8(v[32:39], v[0:1], v[4:5], v[32:39])"),
    )
    assert traces.gaps(fact, [products]) == [8]


@pytest.mark.parametrize(
    ("text", "reads", "writes"),
    [
        ("v_add_f32_e32 v1, v2, s3", {2, 515}, {1}),
        ("v_cmp_gt_u32_e32 vcc_lo, v2, v3", {2, 3}, {618}),
        ("v_cmpx_eq_u32_e64 v2, v3", {2, 3}, {638, 639}),
        ("v_add_co_u32 v1, vcc_lo, v2, v3", {2, 3}, {1, 618}),
        ("v_readfirstlane_b32 s4, v1", {1}, {516}),
        ("v_fmac_f32_e32 v1, v2, v3", {1, 2, 3}, {1}),
        ("s_add_u32 s1, s2, s3", {514, 515}, {513, 640}),
        ("s_addc_u32 s1, s2, s3", {514, 515, 640}, {513, 640}),
        ("s_cmp_eq_u32 s1, 0", {513}, {640}),
        ("s_cselect_b32 s1, s2, 0", {514, 640}, {513}),
        ("s_addk_i32 s1, 0x10", {513}, {513, 640}),
        ("s_and_saveexec_b32 s1, vcc_lo", {618, 638, 639}, {513, 638, 639, 640}),
        ("s_cbranch_vccnz .L1", {618, 619}, set()),
        ("s_load_b64 s[4:5], s[0:1], 0x0", {512, 513}, set()),
        ("global_load_b32 v1, v2, s[4:5]", {1, 2, 516, 517}, set()),
    ],
)
def test_registers_of_an_instruction(text: str, reads: set[int], writes: set[int]) -> None:
    (instruction,) = assembly.parse_line(text)
    result = registers.all_rows(instruction)
    assert (set(result[0]), set(result[1])) == (reads, writes)


@pytest.mark.parametrize(("third", "cycles"), [("v[22:29]", 32), ("v[24:31]", 34)])
def test_operands_of_a_product_in_one_bank_take_longer(third: str, cycles: int) -> None:
    """v4 and v24 are in the same of four banks, v4, v13 and v22 are not."""
    parts = assembly.parse_line(f"v_wmma_f32_16x16x16_f16 {third}, v[4:11], v[13:20], {third}")
    assert cost.fixed(parts, "gfx1151").cycles == cycles
    assert cost.fixed(parts, "gfx1201").cycles == 16


def test_products_that_accumulate_follow_each_other() -> None:
    product = "v_wmma_f32_16x16x16_f16 v[22:29], v[4:11], v[13:20], v[22:29]\n"
    ends = []
    for count in (2, 3):
        record = Record(kernel(product * count, "gfx1100"))
        run("", threads=32, program=machine.Program(record.kernel, record))
        issued: dict[int, list[float]] = {}
        timeline.play(record.groups[0], 1, "gfx1100", issued=issued)
        ends.append(issued[0][-3])
    assert ends[1] - ends[0] == 32


def test_an_invalidation_empties_the_cache_of_its_unit() -> None:
    """The same line is loaded twice, and a cached line takes 400 cycles less."""
    near = replace(PLAIN, cached=100)
    invalidate = WAIT._replace(unit=cost.INVALIDATE)

    def taken(*wave: Executed) -> float:
        return timeline.play([[*wave, WAIT, END]], 1, "gfx1100", near)

    nothing = WAIT._replace(unit="", cycles=0)
    assert taken(load(1), WAIT, invalidate, load(1)) - taken(load(1), WAIT, nothing, load(1)) == 400
    for target, text in (("gfx1100", "buffer_gl0_inv"), ("gfx1201", "global_inv scope:SCOPE_SE")):
        assert cost.fixed(assembly.parse_line(text), target).unit == cost.INVALIDATE


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_the_clock_of_lds_lies_in_the_traces_of_cdna(target: str) -> None:
    """The traces of gfx950: 40 to 52 cycles, and 32 to 60."""
    write, read = (traces.clock(fact, target) for fact in traces.CDNA_FACTS)
    assert (write, read) == (36, 40)


def test_traces_of_cdna_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A packet says the kind of an instruction. A trace without an instruction is named."""
    kinds = ["SMEM_RD", "LDS", "OTHER_MSG", "VALU_32", "LDS", "LDS", "LDS", "LDS", "SALU_32", "VALU_32", "VALU_32"]
    instruction = type("CDNA_INST", (), {"simd": 0, "wave": 3})
    packets = []
    for at, kind in enumerate(kinds):
        packets.append(instruction())
        packets[-1]._time, packets[-1].op = 10 * at, SimpleNamespace(name=kind)
    _decoder(monkeypatch, [])
    decoder = sys.modules["tinygrad.renderer.amd.sqtt"]
    monkeypatch.setattr(decoder, "decode", lambda blob: packets if blob else [], raising=False)
    for name, blob in (("full", b"x"), ("none", b"")):
        path = tmp_path / "gfx950" / f"{name}.pkl"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pickle.dumps([ProfileProgramEvent(), ProfileSQTTEvent(blob)]))
    lines = list(traces.table(tmp_path))
    assert "| LDS write of 4 bytes, end of the wait for it | gfx950 | 10 (1) | 36 | 0 of 1 |" in lines
    assert "| first of four LDS loads of 16 bytes, use of its result | gfx950 | 50 (1) | 40 | 0 of 1 |" in lines
    assert lines[-1] == "No instruction of a traced wave is in gfx950/none.pkl."


@pytest.mark.parametrize(("target", "said"), [("gfx906", "the instructions of gfx906"), ("gfx1030", "traces of RDNA2")])
def test_traces_that_cannot_be_read_are_refused(
    target: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _decoder(monkeypatch, [])
    path = tmp_path / target / "trace.pkl"
    path.parent.mkdir()
    path.write_bytes(pickle.dumps([]))
    with pytest.raises(ValueError, match=said):
        list(traces.table(tmp_path))


def test_a_directory_without_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no thread traces \(gfx1100/\*\.pkl\)"):
        thread_trace.files(tmp_path)


class _Harmful:
    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return print, ("executed",)


def test_a_file_cannot_run_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _decoder(monkeypatch, [])
    path = tmp_path / "gfx1100" / "trace.pkl"
    path.parent.mkdir()
    path.write_bytes(pickle.dumps([_Harmful()]))
    assert list(thread_trace.waves(path)) == []
    assert capsys.readouterr().out == ""
    path.write_bytes(b"no pickle")
    with pytest.raises(ValueError, match="is no thread trace of tinygrad"):
        list(thread_trace.waves(path))


class ProfileProgramEvent:
    def __init__(self) -> None:
        self.tag, self.lib = 7, b""


class ProfileSQTTEvent:
    def __init__(self, blob: bytes = b"") -> None:
        self.kern, self.blob, self.itrace = 7, blob, True


def test_a_wave_slot_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second wave in a slot is another wave, because instructions of the two are no pair."""
    start = type("WAVESTART", (), {"wave": 0})()
    packet = SimpleNamespace(_time=5, op=SimpleNamespace(name="JUMP"))
    where = SimpleNamespace(wave=0, inst="s_nop(0)")
    _decoder(monkeypatch, [(start, None), (packet, where), (start, None), (packet, where)])
    path = tmp_path / "gfx1100" / "trace.pkl"
    path.parent.mkdir()
    path.write_bytes(pickle.dumps([ProfileProgramEvent(), ProfileSQTTEvent()]))
    (waves,) = thread_trace.waves(path)
    assert [[(one.time, one.name, one.taken) for one in result] for result in waves] == [[(5, "s_nop", True)]] * 2


def _decoder(monkeypatch: pytest.MonkeyPatch, packets: list[tuple[object, object]]) -> None:
    """Installs a stand-in of tinygrad that decodes every trace to these packets."""
    module = ModuleType("tinygrad.renderer.amd.sqtt")
    module.map_insts = lambda *_: packets  # type: ignore[attr-defined]
    for name in ("tinygrad", "tinygrad.renderer", "tinygrad.renderer.amd"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
