"""Floating-point arithmetic as the hardware rounds it: exact products and sums, NaN, signs of zero, MODE."""

from __future__ import annotations

import struct
from fractions import Fraction

import numpy as np
import pytest

from amdgpu_simulator.isa import assembly, floats, machine
from amdgpu_simulator.isa.mode import Mode
from amdgpu_simulator.isa.wave import Array
from amdgpu_simulator.tests.test_isa import KERNEL, LOAD, STORE, run

ONE, INF, QNAN, SNAN, TINY = 0x3F800000, 0x7F800000, 0x7FC00001, 0x7F800001, 0x00000001
MINUS = 0x80000000


def rounded(exact: Fraction, dtype: type[np.floating]) -> float:
    """Rounds an exact fraction to a floating-point type, to nearest even. Uses integers only."""
    facts = np.finfo(dtype)
    if exact == 0:
        return 0.0
    exponent = max(abs(exact).numerator.bit_length() - abs(exact).denominator.bit_length(), facts.minexp)
    exponent -= 2**exponent > abs(exact) and exponent > facts.minexp
    unit = Fraction(2) ** (exponent - facts.nmant)
    result = Fraction(round(exact / unit)) * unit
    return float(result) if abs(result) <= Fraction(float(facts.max)) else np.copysign(np.inf, float(exact > 0) - 0.5)


def numbers(generator: np.random.Generator, integer: type[np.unsignedinteger], dtype: type[np.floating]) -> Array:
    values = generator.integers(0, np.iinfo(integer).max, 3000, integer, endpoint=True).view(dtype)
    return np.where(np.isfinite(values), values, dtype(1))


@pytest.mark.parametrize(
    ("compute", "integer", "dtype"),
    [(floats.fma, np.uint32, np.float32), (floats.fma16, np.uint16, np.float16), (floats.fma64, np.uint64, np.float64)],
)
def test_products_and_sums_are_rounded_once(
    compute: object, integer: type[np.unsignedinteger], dtype: type[np.floating]
) -> None:
    assert callable(compute)
    generator = np.random.default_rng(0)
    a, b, c = (numbers(generator, integer, dtype) for _ in range(3))
    with np.errstate(all="ignore"):
        # Sums near a tie, and sums near the smallest numbers.
        b[1000:2000] = dtype(1) + np.ldexp(dtype(1), -generator.integers(1, 24, 1000)).astype(dtype)
        c[1000:2000] = a[1000:2000] * np.ldexp(dtype(1), -generator.integers(8, 60, 1000)).astype(dtype)
        b[2000:] = (np.finfo(dtype).tiny * generator.normal(size=1000) / a[2000:].astype(np.float64)).astype(dtype)
        c[2000:] = (np.finfo(dtype).smallest_subnormal * generator.integers(-9, 9, 1000)).astype(dtype)
        b = np.where(np.isfinite(b), b, dtype(1))
        c = np.where(np.isfinite(c), c, dtype(1))
        result = compute(a, b, c)
    exact = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)]
    expected = np.array([rounded(value, dtype) for value in exact])
    assert np.array_equal(result.astype(np.float64), expected)


def test_an_fma_that_float64_rounds_twice() -> None:
    """(1 + 2^-12)^2 + 2^-60 lies above a tie of float32 by less than float64 can tell."""
    code = "v_mov_b32_e32 v8, 0x3f800800\n v_mov_b32_e32 v7, 0x21800000\n v_fma_f32 v9, v8, v8, v7"
    assert set(run(code)) == {0x3F801001}
    code = "v_mov_b32_e32 v6, 0\n v_mov_b32_e32 v7, 0x3ff40000\n v_mov_b32_e32 v4, 0\n v_mov_b32_e32 v5, 0xbff90000\n"
    code += "v_fma_f64 v[8:9], v[6:7], v[6:7], v[4:5]"
    assert set(run(code)) == {0}


def two(name: str, a: int, b: int, target: str = "gfx942", more: str = "") -> int:
    code = f"v_mov_b32_e32 v7, {a:#x}\n v_mov_b32_e32 v8, {b:#x}\n v_{name} v9, v7, v8{more}"
    (result,) = set(run(code, target, threads=64 if target.startswith("gfx9") else 32))
    return int(result)


@pytest.mark.parametrize(
    ("name", "a", "b", "target", "expected"),
    [
        ("max_f32", 0, MINUS, "gfx942", 0),
        ("max_f32", MINUS, 0, "gfx942", 0),
        ("min_f32", 0, MINUS, "gfx942", MINUS),
        ("min_f32", MINUS, 0, "gfx942", MINUS),
        ("max_f32", QNAN, ONE, "gfx942", ONE),
        ("max_f32", ONE, QNAN, "gfx942", ONE),
        ("max_f32", SNAN, ONE, "gfx942", SNAN | 0x400000),  # IEEE mode: a signalling NaN is not lost
        ("max_f32", ONE, SNAN, "gfx1100", SNAN | 0x400000),
        ("min_f32", SNAN, ONE, "gfx942", SNAN | 0x400000),
        ("max_num_f32", SNAN, ONE, "gfx1201", ONE),  # gfx12 has no such mode
        ("min_num_f32", ONE, SNAN, "gfx1201", ONE),
        ("max_num_f32", MINUS, 0, "gfx1201", 0),
    ],
)  # fmt: skip
def test_maximum_and_minimum(name: str, a: int, b: int, target: str, expected: int) -> None:
    assert two(name, a, b, target) == expected


@pytest.mark.parametrize(("value", "bit"), [(SNAN, 0), (QNAN, 1), (MINUS | INF, 2), (MINUS, 5), (TINY, 7), (INF, 9)])
def test_classes(value: int, bit: int) -> None:
    for expected in range(10):
        code = (
            f"v_mov_b32_e32 v7, {value:#x}\n v_mov_b32_e32 v8, {1 << expected}\n v_cmp_class_f32_e64 s[6:7], v7, v8\n"
        )
        assert set(run(code + "v_cndmask_b32_e64 v9, 0, 1, s[6:7]")) == {int(expected == bit)}


def median(values: tuple[int, int, int], target: str = "gfx942") -> int:
    code = "".join(f"v_mov_b32_e32 v{6 + at}, {value:#x}\n " for at, value in enumerate(values))
    (result,) = set(run(code + "v_med3_f32 v9, v6, v7, v8", target))
    return int(result)


def test_a_median_with_nan_is_the_smallest_value() -> None:
    assert median((ONE, 0x40000000, 0x3F000000)) == ONE
    assert median((QNAN, 0x40000000, ONE)) == ONE
    assert median((0x40000000, ONE, QNAN)) == ONE
    assert median((0x40000000, QNAN, QNAN)) == 0x40000000
    assert median((MINUS, 0, ONE)) == 0


@pytest.mark.parametrize(
    ("value", "clamp", "expected"),
    [
        (QNAN, 1, 0),
        (QNAN, 0, QNAN),
        (MINUS, 1, 0),
        (0x40000000, 1, ONE),
        (MINUS | INF, 1, 0),
        (0x3F000000, 0, 0x3F000000),
    ],
)
def test_clamp(value: int, clamp: int, expected: int) -> None:
    code = f"v_mov_b32_e32 v8, {value:#x}\n v_mul_f32_e64 v9, 1.0, v8 clamp"
    assert set(moded(code, dx10_clamp=clamp)) == {expected}


def moded(code: str, target: str = "gfx942", **descriptor: int) -> Array:
    """Runs code in a kernel with additional descriptor directives. Returns the results of `run`."""
    lines = "".join(f"\t\t.amdhsa_{name} {value}\n" for name, value in descriptor.items())
    text = "\n".join("\t" + line.strip() for line in (LOAD + code + STORE).splitlines() if line.strip())
    text = KERNEL.format(target=target, code=text).replace("\t.end_amdhsa", lines + "\t.end_amdhsa")
    return run("", target, program=machine.Program(assembly.parse(text)))


@pytest.mark.parametrize(
    ("code", "value", "kept"),
    [
        ("v_add_f32_e32 v9, 0, v8", TINY, "inputs"),
        ("v_mul_f32_e32 v9, 1.0, v8", TINY, "inputs"),
        ("v_max_f32_e32 v9, v8, v8", TINY, "inputs"),
        ("v_fma_f32 v9, v8, 1.0, 0", TINY, "inputs"),
        ("v_fmac_f32_e32 v9, 1.0, v8", TINY, "inputs"),
        ("v_pk_mul_f32 v[8:9], v[8:9], 1.0 op_sel:[0,0] op_sel_hi:[0,1]", TINY, "inputs"),
        ("v_mul_f32_e32 v9, 0.5, v8", 0x00800000, "results"),
        ("v_mov_b32_e32 v9, v8", TINY, "always"),
        ("v_cndmask_b32_e64 v9, v8, v8, vcc", TINY, "always"),
    ],
)
def test_subnormals_of_fp32(code: str, value: int, kept: str) -> None:
    """float_denorm_mode_32: bit 0 keeps subnormal inputs, bit 1 subnormal results."""
    code = f"v_mov_b32_e32 v9, 0\n v_mov_b32_e32 v8, {value:#x}\n {code}"
    expected = value if kept != "results" else value >> 1
    for mode in range(4):
        keeps = {"inputs": mode == 3, "results": mode >> 1 == 1, "always": True}[kept]
        assert set(moded(code, float_denorm_mode_32=mode)) == {expected if keeps else 0}, mode


def test_fp16_subnormals_have_a_separate_mode() -> None:
    code = "v_mov_b32_e32 v8, 0x3ff\n v_add_f16_e32 v9, 0, v8"
    assert set(moded(code, float_denorm_mode_32=0)) == {0x3FF}
    assert set(moded(code, float_denorm_mode_32=3, float_denorm_mode_16_64=0)) == {0}
    code = "v_mov_b32_e32 v8, 0x3ff\n v_cvt_f32_f16_e32 v9, v8"
    assert set(moded(code, float_denorm_mode_16_64=0)) == {0}
    with pytest.raises(NotImplementedError, match="a MODE that flushes fp16 subnormals"):
        moded("v_mov_b32_e32 v8, 1.0\n v_cvt_pkrtz_f16_f32 v9, v8, v8", float_denorm_mode_16_64=0)


@pytest.mark.parametrize("name", ["rcp", "rsq", "log", "sqrt"])
def test_operations_that_always_flush_subnormals(name: str) -> None:
    code = f"v_mov_b32_e32 v8, 0x7fffff\n v_{name}_f32_e32 v9, {{}}"
    plain = moded(code.format("v8"), float_denorm_mode_32=3)
    assert np.array_equal(plain, moded(code.format("0"), float_denorm_mode_32=3))
    code = "v_mov_b32_e32 v8, 0xc2fe0000\n v_exp_f32_e32 v9, v8"  # 2^-127
    assert set(moded(code, float_denorm_mode_32=3)) == {0}


def test_code_changes_the_mode() -> None:
    value = "v_mov_b32_e32 v8, 1\n"
    add = "v_add_f32_e32 v9, 0, v8"
    assert set(moded(value + "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 3\n" + add)) == {1}
    assert set(moded(value + "s_denorm_mode 15\n" + add, "gfx1100")) == {1}
    assert set(moded(value + "s_denorm_mode 12\n" + add, "gfx1100", float_denorm_mode_32=3)) == {0}
    switched = "s_mov_b32 s6, 0\n s_setreg_b32 hwreg(HW_REG_MODE, 4, 2), s6\n"
    assert set(moded(value + switched + add, float_denorm_mode_32=3)) == {0}
    with pytest.raises(NotImplementedError, match="round mode 0x3: only rounding to nearest even"):
        moded("", float_round_mode_32=3)
    with pytest.raises(NotImplementedError, match="round mode 0x1"):
        moded("s_round_mode 1", "gfx1100")


def test_overflow_of_fp16() -> None:
    """FP16_OVFL gives the largest number instead of infinity, unless an operand is infinite. It applies to FP8 too."""
    on = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1\n"
    convert = "v_mov_b32_e32 v8, {:#x}\n {}v_cvt_f16_f32_e32 v9, v8"
    assert set(run(convert.format(0xC97423F0, on))) == {0xFBFF}
    assert set(run(convert.format(0xC97423F0, ""))) == {0xFC00}
    assert set(run(convert.format(INF, on))) == {0x7C00}
    # -1e6 overflows and is saturated. An infinite operand stays infinite, also where halves are only packed.
    code = "v_mov_b32_e32 v8, 0xc9742400\n v_mov_b32_e32 v10, 0x7f800000\n {}v_cvt_pk_f16_f32 v9, v8, v10"
    assert set(run(code.format(on), "gfx950")) == {0x7C00FBFF}
    assert set(run(code.format(""), "gfx950")) == {0x7C00FC00}
    code = "v_mov_b32_e32 v8, 0x7c00\n v_mov_b32_e32 v10, 0xbc00\n {}v_pack_b32_f16 v9, v8, v10"
    assert set(run(code.format(on))) == {0xBC007C00}
    code = "v_mov_b32_e32 v8, 0x49742400\n {}v_mov_b32_e32 v9, 0\n v_cvt_pk_fp8_f32 v9, v8, v8"
    assert set(run(code.format(on))) == {0x7F7F}
    assert set(run(code.format(""))) == {0x8080}  # NaN of e4m3fnuz


def constant(code: str, register: int) -> int:
    """Runs `code` and returns one of the two words of v[8:9]."""
    (result,) = set(run(f"{code}\n v_mov_b32_e32 v9, v{register}"))
    return int(result)


@pytest.mark.parametrize(
    ("code", "high", "low"),
    [
        ("v_mov_b64_e32 v[8:9], 1.0", 0x3FF00000, 0),
        ("v_mov_b64_e32 v[8:9], -1", 0xFFFFFFFF, 0xFFFFFFFF),
        ("v_mov_b64_e32 v[8:9], 0x80000000", 0, 0x80000000),
        ("v_ashrrev_i64 v[8:9], 0, 0x80000000", 0xFFFFFFFF, 0x80000000),
        ("v_add_f64 v[8:9], 0, 0x40080000", 0x40080000, 0),
        ("v_add_f64 v[8:9], 0.5, 0.5", 0x3FF00000, 0),
        ("v_add_f64 v[8:9], 1.0, 1", 0x3FF00000, 0),  # the integer is a subnormal
        ("v_add_f64 v[8:9], 0, 2", 0, 2),
        ("s_mov_b64 s[6:7], 2.0\n v_mov_b32_e32 v8, s6\n v_mov_b32_e32 v9, s7", 0x40000000, 0),
    ],
)
def test_constants_of_64_bits(code: str, high: int, low: int) -> None:
    assert (constant(code, 9), constant(code, 8)) == (high, low)


def pair(low: int, high: int) -> int:
    return low & 0xFFFF | (high & 0xFFFF) << 16


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("add_u16", (0x8003 + 5, 7 - 2)),
        ("sub_u16", (0x8003 - 5, 7 + 2)),
        ("sub_i16", (0x8003 - 5, 7 + 2)),
        ("mul_lo_u16", (0x8003 * 5, 7 * -2)),
        ("max_u16", (0x8003, -2)),
        ("min_u16", (5, 7)),
        ("max_i16", (5, 7)),
        ("min_i16", (0x8003, -2)),
        ("lshlrev_b16", (5 << 3, -2 << 7)),
    ],
)
def test_packed_integers(name: str, expected: tuple[int, int]) -> None:
    assert two(f"pk_{name}", pair(0x8003, 7), pair(5, -2)) == pair(*expected)


def test_packed_halves() -> None:
    assert two("pk_add_f16", 0x3C004000, 0x3C003C00) == 0x40004200
    assert two("pk_add_f16", 0x3C004000, 0x3C003C00, more=" neg_lo:[0,1] neg_hi:[1,0]") == 0x00003C00
    assert two("pk_mul_f16", 0x3C004000, 0x3C004400, more=" op_sel:[1,0] op_sel_hi:[0,1]") == 0x40004400


@pytest.mark.parametrize(
    ("code", "target", "expected"),
    [
        ("v_mov_b32_e32 v8, 0x38\n v_cvt_f32_fp8_e64 v9, v8 byte_sel:0", "gfx1201", ONE),
        ("v_mov_b32_e32 v8, 0x38000000\n v_cvt_f32_fp8_e64 v9, v8 byte_sel:3", "gfx1201", ONE),
        ("v_mov_b32_e32 v8, 0x380000\n v_cvt_f32_fp8_e64 v9, v8 byte_sel:2", "gfx1201", ONE),
        ("v_mov_b32_e32 v8, 0x4000\n v_cvt_f32_fp8_sdwa v9, v8 src0_sel:BYTE_1", "gfx942", ONE),
        ("s_mov_b32 s6, 0x30010\n s_wqm_b32 s6, s6\n v_mov_b32_e32 v9, s6", "gfx942", 0xF00F0),
        ("s_mov_b32 s6, 0x7fc00000\n s_cvt_u32_f32 s6, s6\n v_mov_b32_e32 v9, s6", "gfx1201", 0),
        ("s_mov_b32 s6, 0x7f800000\n s_cvt_i32_f32 s6, s6\n v_mov_b32_e32 v9, s6", "gfx1201", 0x7FFFFFFF),
        ("s_mov_b32 s6, 0xbf800000\n s_cvt_u32_f32 s6, s6\n v_mov_b32_e32 v9, s6", "gfx1201", 0),
        ("v_mov_b32_e32 v9, 0xaaaa0000\n v_add_u16_e32 v9, 1, v9", "gfx942", 1),
        ("v_mov_b32_e32 v9, 0xaaaa0000\n v_add_nc_u16 v9, 1, v9", "gfx1100", 0xAAAA0001),
        ("v_mov_b32_e32 v8, 0x70000\n v_add_nc_u16 v9, v8, 1 op_sel:[1,0,0]", "gfx1201", None),
        ("v_mov_b32_e32 v8, 0xb3000000\n v_fract_f32_e32 v9, v8", "gfx942", 0x3F7FFFFF),
    ],
)
def test_other_values(code: str, target: str, expected: int | None) -> None:
    result = set(run(code, target, threads=64 if target.startswith("gfx9") else 32))
    if expected is None:
        (value,) = result
        assert value & 0xFFFF == 8
    else:
        assert result == {expected}


def test_exponentials_are_rounded_correctly() -> None:
    values = np.random.default_rng(0).uniform(-100, 100, 64).astype(np.float32)
    exact = np.exp2(values.astype(np.longdouble)).astype(np.float32)
    for lane in range(0, 64, 8):
        raw = struct.unpack("<I", values[lane].tobytes())[0]
        result = run(f"v_mov_b32_e32 v8, {raw:#x}\n v_exp_f32_e32 v9, v8")
        assert set(result.view(np.float32)) == {exact[lane]}


def divide(numerator: float, denominator: float, *, keep: bool) -> float:
    """Divides two fp32 numbers by the instructions that LLVM emits."""
    a, b = (np.float32(x).view(np.uint32) for x in (numerator, denominator))
    code = f"""v_mov_b32_e32 v4, {a:#x}
    v_mov_b32_e32 v5, {b:#x}
    v_div_scale_f32 v6, s[6:7], v5, v5, v4
    v_div_scale_f32 v7, vcc, v4, v5, v4
    v_rcp_f32_e32 v8, v6
    s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 3
    v_fma_f32 v9, -v6, v8, 1.0
    v_fma_f32 v8, v9, v8, v8
    v_mul_f32_e32 v9, v7, v8
    v_fma_f32 v10, -v6, v9, v7
    v_fma_f32 v9, v10, v8, v9
    v_fma_f32 v10, -v6, v9, v7
    v_div_fmas_f32 v8, v10, v8, v9
    v_div_fixup_f32 v9, v8, v5, v4"""
    return float(moded(code, float_denorm_mode_32=3 if keep else 0).view(np.float32)[0])


@pytest.mark.parametrize(
    ("numerator", "denominator"),
    [(1, 3), (-7, 5), (2e38, 3e-10), (1e-37, 3.7), (3e-38, 1e-30), (1, 0), (0, 5), (-1, np.inf), (np.inf, 2),
     (1e-30, 1e30), (3.1e-36, 7.3), (5, -2.5e37), (1e-3, 9e34)],
)  # fmt: skip
def test_divisions_are_rounded_correctly(numerator: float, denominator: float) -> None:
    with np.errstate(all="ignore"):
        expected = np.float32(numerator) / np.float32(denominator)
    assert divide(numerator, denominator, keep=True) == expected


def test_divisions_with_unknown_scaling_are_refused() -> None:
    assert np.isnan(divide(0, 0, keep=True))
    assert np.isnan(divide(np.nan, 1, keep=True))
    with pytest.raises(NotImplementedError, match="v_div_scale of a denominator"):
        divide(1, 2.0**127, keep=True)


def test_modes_are_read_from_the_descriptor() -> None:
    assert Mode({}).value == 0x3C0  # LLVM's defaults: fp32 subnormals are flushed
    assert Mode({"float_denorm_mode_32": 3, "dx10_clamp": 0, "ieee_mode": 0, "fp16_overflow": 1}).value == 0x8000F0
