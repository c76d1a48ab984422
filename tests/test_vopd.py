"""GFX11's VOPD hazard: which pairs break the rule, how they are rewritten, and that results stay the same."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from amdgpu_simulator.isa import dual, machine
from amdgpu_simulator.isa.assembly import Array, Kernel, parse_line
from amdgpu_simulator.isa.global_memory import Memory
from amdgpu_simulator.isa.lds import Shared
from amdgpu_simulator.isa.wave import VCC
from rocm_wheels.compile import sources, units
from rocm_wheels.compile.check import stage
from rocm_wheels.compile.triton import compiler, retarget
from rocm_wheels.errors import CompileFailed

pairing, targets, vopd = (sources.module(f"kernels.{name}") for name in ("pairing", "targets", "vopd"))


def pair(x: str, y: str) -> str:
    return f"\tv_dual_{x} :: v_dual_{y}"


@pytest.mark.parametrize(
    ("x", "y", "slot"),
    [
        ("mov_b32 v1, v3", "mov_b32 v2, v5", "SRC0"),
        ("mov_b32 v1, v4", "mov_b32 v2, v5", None),
        ("mov_b32 v1, s3", "mov_b32 v2, v5", None),
        ("mov_b32 v1, 0x3", "mov_b32 v2, v5", None),
        ("cndmask_b32 v1, v2, v3", "lshlrev_b32 v2, v4, v6", "SRC0"),
        ("mul_f32 v1, v2, v68", "mul_f32 v4, v5, v62", "SRC1"),
        ("mul_f32 v1, 2.0, v68", "and_b32 v4, 0xffff, v62", "SRC1"),
        ("mul_f32 v1, v2, v68", "add_nc_u32 v4, v5, v61", None),
        ("fmaak_f32 v1, v2, v4, 0x41000000", "sub_f32 v4, v5, v6", "SRC1"),
        # SRC2: an accumulator, and the addend of fmamk. Accumulators of one parity do not assemble.
        ("fmac_f32 v1, v2, v3", "fmac_f32 v4, v5, v6", None),
        ("fmamk_f32 v1, v2, 0x41000000, v4", "fmac_f32 v6, v5, v9", "SRC2"),
        ("dot2acc_f32_f16 v1, v2, v3", "fmamk_f32 v4, v5, 0x41000000, v7", "SRC2"),
        ("dot2acc_f32_bf16 v1, v2, v3", "fmamk_f32 v4, v5, 0x41000000, v6", None),
        ("fmamk_f32 v1, v2, 0x41000000, v4", "mul_f32 v6, v5, v8", None),
        ("add_f32 v1, v2, v3", "add_f32 v4, v6, v7", "SRC0"),  # the first of two slots
    ],
)
def test_the_rule(x: str, y: str, slot: str | None) -> None:
    for line in (pair(x, y), pair(y, x)):
        assert vopd.conflict(*vopd.parse(line)) == slot
        assert vopd.conflicts(f"\tv_nop ; ::\n{line}") == ([line.strip()] if slot else [])


def test_a_half_that_gfx11_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="v_dual_max_num_f32 v1, v2, v3: no half"):
        vopd.conflicts(pair("max_num_f32 v1, v2, v3", "mov_b32 v2, v5"))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # Another spelling of one half.
        ([pair("mul_f32 v1, v2, v5", "mul_f32 v4, v6, v9")], [pair("mul_f32 v1, v5, v2", "mul_f32 v4, v6, v9")]),
        ([pair("sub_f32 v1, v2, v5", "mov_b32 v4, v6")], [pair("subrev_f32 v1, v5, v2", "mov_b32 v4, v6")]),
        ([pair("mov_b32 v1, v3", "mov_b32 v2, v5")], [pair("mov_b32 v1, v3", "lshlrev_b32 v2, 0, v5")]),
        ([pair("mov_b32 v1, v3", "cndmask_b32 v2, v5, v8")], [pair("cndmask_b32 v2, v5, v8", "lshlrev_b32 v1, 0, v3")]),
        # Two instructions. A half that reads what the other one writes goes first.
        (
            [pair("max_f32 v8, v2, v2", "max_f32 v9, v4, v4")],
            ["\tv_max_f32_e32 v8, v2, v2", "\tv_max_f32_e32 v9, v4, v4"],
        ),
        (
            [pair("max_f32 v4, v2, v2", "max_f32 v9, v4, v4")],
            ["\tv_max_f32_e32 v9, v4, v4", "\tv_max_f32_e32 v4, v2, v2"],
        ),
        (
            [pair("cndmask_b32 v1, 0, v2", "and_b32 v2, 15, v4")],
            ["\tv_cndmask_b32_e32 v1, 0, v2, vcc_lo", "\tv_and_b32_e32 v2, 15, v4"],
        ),
        # A half joins a single instruction after it or before it.
        (
            [pair("max_f32 v8, v2, v2", "max_f32 v9, v4, v4"), "\tv_exp_f32_e32 v1, v1", "\tv_mul_f32_e32 v12, v3, v5"],
            [
                "\tv_max_f32_e32 v8, v2, v2",
                "\tv_exp_f32_e32 v1, v1",
                pair("max_f32 v9, v4, v4", "mul_f32 v12, v3, v5"),
            ],
        ),
        (
            ["\tv_mul_f32_e32 v12, v3, v5", "\tv_exp_f32_e32 v1, v1", pair("max_f32 v8, v2, v2", "max_f32 v9, v4, v4")],
            [
                "\tv_exp_f32_e32 v1, v1",
                pair("mul_f32 v12, v3, v5", "max_f32 v9, v4, v4"),
                "\tv_max_f32_e32 v8, v2, v2",
            ],
        ),
        # Two pairs exchange halves.
        (
            [pair("max_f32 v8, v2, v2", "max_f32 v9, v4, v4"), pair("max_f32 v10, v1, v1", "max_f32 v11, v3, v3")],
            [pair("max_f32 v8, v2, v2", "max_f32 v11, v3, v3"), pair("max_f32 v9, v4, v4", "max_f32 v10, v1, v1")],
        ),
    ],
)
def test_a_pair_that_breaks_the_rule(before: list[str], after: list[str]) -> None:
    assert pairing.repair("\n".join(before)).split("\n") == after


@pytest.mark.parametrize(
    "line",
    [
        "\ts_waitcnt lgkmcnt(0)",  # what a load brings is not there before
        ".LBB0_1:",
        "\ts_cbranch_vccz .LBB0_1",
        "\tv_cmpx_lt_u32_e32 v0, v1",  # other lanes
        "\tv_wmma_f32_16x16x16_f16 v[32:39], v[40:47], v[48:55], v[32:39]",
        "\tv_exp_f32_e32 v8, v9",  # reads the result of one half and writes that of the other
        "\tds_load_b128 v[2:5], v20",  # reads the result of one half and writes the result of the other half
        "\tds_store_b32 v20, v21",
    ],
)
def test_a_half_does_not_move_over(line: str) -> None:
    halves, single = pair("max_f32 v8, v2, v2", "max_f32 v9, v4, v4"), "\tv_mul_f32_e32 v12, v3, v5"
    split = ["\tv_max_f32_e32 v8, v2, v2", "\tv_max_f32_e32 v9, v4, v4"]
    assert pairing.repair(f"{halves}\n{line}\n{single}").split("\n") == [*split, line, single]
    if "v8" not in line and "v[2:5]" not in line:
        assert pairing.repair(f"{single}\n{line}\n{halves}").split("\n") == [single, line, *split]


def test_halves_that_read_each_others_results_are_refused() -> None:
    with pytest.raises(ValueError, match="each half reads what the other one writes"):
        pairing.repair(pair("add_f32 v2, v5, v7", "add_f32 v5, v2, v9"))


def test_every_instruction_of_its_own_assembles() -> None:
    from triton._C.libtriton import llvm

    llvm.init_targets()
    code = [
        vopd.Half(name, ("v1", *{"d0": ("v2",), "d0k2": ("v2", "0x41234567", "v3"), "d01k": ("v2", "v3", "0x41234567")}
                         .get(row.operands, ("v2", "v3")))).single()
        for name, row in vopd.OPERATIONS.items()
    ]  # fmt: skip
    assert retarget.assemble("\n".join(['\t.amdgcn_target "amdgcn-amd-amdhsa--gfx1100"', *code]), "gfx1100")


# Random programs over a few registers. The oracle runs them as gfx12's, which has no such hazard.
NAMES = [name for name in vopd.OPERATIONS if not name.startswith(("dot2acc", "mul_dx9"))]


def random_half(draw: random.Random, destination: int, *, is_y: bool) -> str:
    while True:
        name = draw.choice(NAMES)
        row = vopd.OPERATIONS[name]
        if is_y or not row.only_y:
            break
    operands = [f"v{destination}"]
    for kind in row.operands[1:]:
        literal = kind == "k" or (kind == "0" and draw.random() < 0.1)
        operands.append("0x40400000" if kind == "k" else "2.0" if literal else f"v{draw.randrange(8)}")
    return f"{name} {', '.join(operands)}"


def random_program(seed: int, length: int) -> str:
    draw = random.Random(seed)
    lines: list[str] = []
    while len(lines) < length:
        x, y = random_half(draw, destination := draw.randrange(8), is_y=False), ""
        if draw.random() < 0.3:
            lines.append("\t" + vopd.parse(pair(x, "mov_b32 v0, v0"))[0].single())
            continue
        y = random_half(draw, draw.choice([n for n in range(8) if (n - destination) % 2]), is_y=True)
        try:
            vopd.split(*vopd.parse(pair(x, y)))
        except ValueError:
            continue  # each half reads what the other one writes: LLVM makes no such pair
        lines.append(pair(x, y))
    return "\n".join(lines)


def executed(code: str, target: str) -> Array:
    """The registers after the code, from random ones."""
    lines = [line.strip().removesuffix(", vcc_lo") for line in code.splitlines()]
    instructions = [*(parse_line(line) for line in lines), parse_line("s_endpgm")]
    kernel = Kernel("kernel", target, instructions, {}, {"user_sgpr_count": 0}, [], {})
    program = machine.Program(kernel)
    wave = machine._wave(kernel, Memory([]), Shared(0), 0, (0, 0, 0), 0)
    wave.s[VCC] = 0x5A5A1234
    wave.v[:8] = np.random.default_rng(0).uniform(-2, 2, (8, 32)).astype(np.float32).view(np.uint32)
    with np.errstate(all="ignore"):
        program.run(wave)
    return wave.v[:8].copy()


@pytest.mark.parametrize("seed", range(40))
def test_a_rewritten_program_has_the_same_results(seed: int) -> None:
    program = random_program(seed, 12)
    rewritten = pairing.repair(program)
    assert not vopd.conflicts(rewritten)
    executed(rewritten, "gfx1100")  # which refuses pairs that break the rule
    before, after = executed(program, "gfx1201"), executed(rewritten, "gfx1201")
    nan = np.isnan(before.view(np.float32)) & np.isnan(after.view(np.float32))  # of any payload
    np.testing.assert_array_equal(np.where(nan, 0, before), np.where(nan, 0, after))
    assert len(rewritten.splitlines()) <= len(program.splitlines()) + len(vopd.conflicts(program))


def test_the_simulator_refuses_a_pair_that_breaks_the_rule() -> None:
    broken = pair("max_f32 v1, v2, v2", "max_f32 v4, v4, v4")
    with pytest.raises(NotImplementedError, match="SRC0: VOPD: X and Y read VGPRs of the same parity"):
        executed(broken, "gfx1100")
    executed(broken, "gfx1201")


@pytest.mark.parametrize("x", vopd.OPERATIONS)
def test_the_simulator_has_the_same_rule(x: str) -> None:
    """The simulator installs without flash_attn, so it has a table of its own."""
    places = {"d": "v1", "a": "v2", "k": "0x41234567"}
    for y, row in vopd.OPERATIONS.items():
        for registers in itertools.product(("v4", "v5", "s2"), repeat=2):
            first = [places.get(kind, registers[0]) for kind in vopd.OPERATIONS[x].operands]
            second = [places.get(kind, registers[1]) for kind in row.operands]
            line = pair(f"{x} {', '.join(first)}", f"{y} {', '.join(second)}")
            assert dual.conflict(parse_line(line.strip())) == vopd.conflict(*vopd.parse(line)), line
    with pytest.raises(NotImplementedError, match="v_dual_max_num_f32 v1, v2, v3 is not an operation"):
        dual.conflict(parse_line(pair("max_num_f32 v1, v2, v3", "mov_b32 v2, v5").strip()))


@pytest.mark.parametrize("target", ["gfx1150", "gfx11-generic"])
def test_a_kernel_of_gfx11_has_no_such_pair(target: str, tmp_path: Path) -> None:
    (unit,) = units.find([target], only="fwd-fp32-d64")
    spawn = multiprocessing.get_context("spawn")  # Triton may be set to interpret kernels in this process
    with ProcessPoolExecutor(1, spawn, initializer=compiler.prepare, initargs=(str(tmp_path),)) as process:
        _, entry, assembly = process.submit(compiler.translate, target, *unit.content).result()
    assert "v_dual_" in assembly
    assert not vopd.conflicts(assembly)
    assert entry["isa"]["valu"] > 1000


def test_a_pair_that_cannot_be_rewritten_fails_the_compilation() -> None:
    broken = pair("add_f32 v2, v5, v7", "add_f32 v5, v2, v9")
    with pytest.raises(CompileFailed, match=r"^fwd-bf16-d64 for gfx1100: .*each half reads what the other"):
        stage.checked(broken, "gfx1100", "fwd-bf16-d64 for gfx1100")
    assert stage.checked(broken, "gfx1201", "fwd-bf16-d64 for gfx1201")[0] == broken


def test_the_targets_with_the_hazard() -> None:
    assert {name for name, row in targets.TARGETS.items() if row.vopd_hazard} == {
        name for name in targets.TARGETS if name.startswith("gfx11")
    }


def translated_as_by_a_first_call(scratch: str, fields: tuple[object, ...]) -> list[str]:
    """What Triton makes of a kernel for gfx1150 while `repaired` is not open, open, and no longer open.

    The compile stage's own rewriting is off. Triton's cache on disk is one.
    """
    compiler.prepare(scratch)
    setattr(stage, "checked", lambda assembly, target, where: (assembly, None))  # noqa: ARG005, B010
    repaired = sources.module("core.jit_repair").repaired
    texts = [compiler.translate("gfx1150", fields)[2]]
    with repaired(), repaired():
        texts.append(compiler.translate("gfx1150", fields)[2])
    texts.append(compiler.translate("gfx1150", fields)[2])
    return texts


def test_triton_compiles_without_the_hazard_at_a_first_call(tmp_path: Path) -> None:
    (unit,) = units.find(["gfx1150"], only="norm-bwd-bf16-d1024")
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as process:
        before, inside, after = process.submit(translated_as_by_a_first_call, str(tmp_path), unit.content[0]).result()
    assert vopd.conflicts(before)
    assert inside == pairing.repair(before)
    assert after == before


def test_the_command_that_counts() -> None:
    command = [sys.executable, "-m", "rocm_wheels", "hazards", "gfx1150", "--only"]
    done = subprocess.run([*command, "norm-bwd-bf16-d1024"], capture_output=True, text=True, check=True)
    head, kernel, total = done.stdout.splitlines()
    assert head.split() == ["VOPD", "before", "after", "added", "not", "judged", "hazards"]
    name, before, after, *_ = kernel.split()
    assert (name, after) == ("norm-bwd-bf16-d1024", "0")
    assert int(before) > 0
    assert total.startswith("1 kernels")
    none = subprocess.run([*command, "nothing"], capture_output=True, text=True, check=False)
    assert none.returncode != 0
    assert "gfx1150 has no Triton kernel nothing" in none.stderr
