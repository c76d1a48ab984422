"""What RDNA 3 hardware computes, as data: `rdna3_values.txt`.

Instructions and results are those of tinygrad's tests (tinygrad/tinygrad, test/amd/hw, commit a9069c177a, MIT licence),
which pass on RDNA 3 GPUs. Cases with instructions that the simulator refuses are left out.

A line is a case: lanes | instructions | results. A result is REGISTER[FIRST:LAST], lanes of a register, then a shift
and a mask, then = bits or ~ a float / its tolerance (~h: of fp16). At the start, v255 holds the lane number and all
other registers are 0.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest

from amdgpu_simulator.isa import assembly, machine
from amdgpu_simulator.isa.wave import Array

CASES = [
    line.split(" | ")
    for line in Path(__file__).with_name("rdna3_values.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]
KERNEL = """
\t.amdgcn_target "amdgcn-amd-amdhsa--gfx1100"
kernel:
{code}
\ts_endpgm
.Lfunc_end0:
\t.amdhsa_kernel kernel
\t\t.amdhsa_kernarg_size 8
\t\t.amdhsa_user_sgpr_count 2
\t\t.amdhsa_user_sgpr_kernarg_segment_ptr 1
\t\t.amdhsa_next_free_vgpr 256
\t\t.amdhsa_next_free_sgpr 100
\t\t.amdhsa_float_denorm_mode_32 0
\t\t.amdhsa_float_denorm_mode_16_64 3
\t\t.amdhsa_ieee_mode 1
\t\t.amdhsa_dx10_clamp 1
\t.end_amdhsa_kernel
"""
RESULT = re.compile(r"(\w+)\[(\d+):(\d+)\](?:>>(\d+))?(?:&(\w+))?(=|~h|~)([^~=\s/]+)(?:/(\S+))?$")


def registers(results: list[str]) -> list[str]:
    return list(dict.fromkeys(result.partition("[")[0] for result in results))


def run(lanes: int, code: list[str], names: list[str]) -> dict[str, Array]:
    """The values of registers in each lane after the code."""
    ranges = re.findall(r"\b([vs])(?:(\d+)|\[(\d+):(\d+)\])", "; ".join([*code, *names]))
    used = {(kind, at) for kind, one, first, last in ranges for at in range(int(one or first), int(one or last) + 1)}
    before = ["v_mov_b32_e32 v255, v0", "s_mov_b64 s[80:81], s[0:1]", "s_mov_b32 vcc_lo, 0"]
    before += [f"s_mov_b32 exec_lo, {2**lanes - 1:#x}", "s_cmp_lg_u32 0, 0"]
    before += [f"{'v_mov_b32_e32' if kind == 'v' else 's_mov_b32'} {kind}{at}, 0" for kind, at in used if at < 80]
    after = ["s_cselect_b32 s91, 1, 0", "s_mov_b32 s90, vcc_lo", "s_mov_b32 s95, exec_lo", "s_mov_b32 exec_lo, -1"]
    after += ["s_load_b64 s[92:93], s[80:81], 0x0", "s_waitcnt lgkmcnt(0)", "v_lshlrev_b32_e32 v240, 2, v255"]
    held = {"scc": "s91", "vcc_lo": "s90", "exec_lo": "s95"}
    for index, name in enumerate(names):
        after += [f"v_mov_b32_e32 v241, {held.get(name, name)}"]
        after += [f"global_store_b32 v240, v241, s[92:93] offset:{128 * index}"]
    text = "\n".join(f"\t{line}" for line in [*before, *code, *after])
    out = np.zeros((len(names), 32), np.uint32)
    program = machine.Program(assembly.parse(KERNEL.format(code=text)))
    argument = struct.pack("<Q", out.ctypes.data)
    machine.launch(program, (1, 1, 1), 32, argument, [(out.ctypes.data, out.nbytes)])
    return dict(zip(names, out, strict=True))


@pytest.mark.parametrize(("lanes", "code", "expected"), CASES, ids=[f"{i}" for i in range(len(CASES))])
def test_the_simulator_computes_what_the_hardware_does(lanes: str, code: str, expected: str) -> None:
    results = expected.split()
    actual = run(int(lanes), code.split("; "), registers(results))
    for result in results:
        parts = RESULT.fullmatch(result)
        assert parts, result
        name, first, last, shift, mask, kind, value, tolerance = parts.groups()
        for bits in actual[name][int(first) : int(last)]:
            got = int(bits) >> int(shift or 0) & int(mask or "0xffffffff", 0)
            if kind == "=":
                assert got == int(value, 0), f"{code}: {result}, not {got:#x}"
            else:
                half = kind == "~h"
                number = struct.unpack("<e" if half else "<f", got.to_bytes(4, "little")[: 2 if half else 4])[0]
                assert number == pytest.approx(float(value), rel=0, abs=float(tolerance)), f"{code}: {result}"
