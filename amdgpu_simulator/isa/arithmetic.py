"""What vector instructions compute, lane by lane.

Exponentials, logarithms, reciprocals and roots are rounded correctly here. Hardware may be one bit off.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from amdgpu_simulator.isa import floats
from amdgpu_simulator.isa.wave import Array

_U16, _U32, _U64 = np.uint16, np.uint32, np.uint64


def _u64(x: Array) -> Array:
    return x.astype(np.uint64)


def _low(x: Array) -> Array:
    return (x & _U64(0xFFFFFFFF)).astype(np.uint32)


def _field(x: Array, start: Array, width: Array) -> Array:
    return (x >> (start & _U32(31))) & ((_U32(1) << (width & _U32(31))) - _U32(1))


def _signed_field(x: Array, start: Array, width: Array) -> Array:
    wide = (width & _U32(31)).astype(np.int64)
    value = _field(x, start, width).astype(np.int64)
    return np.where(wide == 0, 0, value - ((value >> np.maximum(wide - 1, 0) & 1) << wide)).astype(np.int32)


def _permute(a: Array, b: Array, selector: Array) -> Array:
    """Each byte of the selector picks a byte of the result.

    0 to 3 pick a byte of b, 4 to 7 a byte of a, 12 the value 0, a larger number the value 255.
    """
    if selector.size == 1 and not (chosen := int(selector[0])) & 0xF8F8F8F8:
        both = np.empty((max(len(a), len(b)), 2), np.uint32)
        both[:, 0], both[:, 1] = b, a
        picked = [chosen >> shift & 7 for shift in (0, 8, 16, 24)]
        return both.view(np.uint8).take(picked, axis=1).view(np.uint32)[:, 0]
    whole = _u64(a) << _U64(32) | _u64(b)
    result = np.zeros(np.broadcast_shapes(whole.shape, selector.shape), np.uint32)
    for byte in range(4):
        chosen = selector >> _U32(8 * byte) & _U32(0xFF)
        plain = (whole >> (_u64(np.minimum(chosen, _U32(7))) * _U64(8)) & _U64(0xFF)).astype(np.uint32)
        sign = (whole >> (_u64(chosen - _U32(8)) % _U64(4) * _U64(16) + _U64(15)) & _U64(1)).astype(np.uint32) * _U32(
            255
        )
        value = np.where(chosen < 8, plain, np.where(chosen < 12, sign, np.where(chosen == 12, _U32(0), _U32(255))))
        result |= value.astype(np.uint32) << _U32(8 * byte)
    return result


def _to_int(x: Array, low: int, high: int) -> Array:
    return np.clip(np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0.0, posinf=high, neginf=low), low, high)


def _distance16(a: Array, b: Array) -> Array:
    """The sum of the absolute differences of the lower and of the upper halves."""
    return sum(
        abs((a >> _U32(s) & _U32(0xFFFF)).astype(np.int64) - (b >> _U32(s) & _U32(0xFFFF))) for s in (0, 16)
    ).astype(_U32)


def _reverse(x: Array) -> Array:
    turned = np.unpackbits(x.view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")[:, ::-1]
    return np.packbits(turned, axis=1, bitorder="little").view(np.uint32)[:, 0]


def _round_bf16(x: Array) -> Array:
    """Rounds float32 to bf16, to nearest even. Returns the upper 16 bits."""
    raw = x.astype(np.float32).view(np.uint32)
    rounded = (raw + _U32(0x7FFF) + (raw >> _U32(16) & _U32(1))) >> _U32(16)
    return np.where(np.isnan(x), raw >> _U32(16) | _U32(0x40), rounded).astype(np.uint32)


def half_bits(x: Array) -> Array:
    return x.astype(np.float16).view(np.uint16).astype(np.uint32)


def _toward_zero(x: Array) -> Array:
    near = x.astype(np.float16)
    beyond = np.abs(near.astype(np.float32)) > np.abs(x)
    return np.where(beyond, np.nextafter(near, np.float16(0)), near).view(np.uint16).astype(np.uint32)


def _med3(a: Array, b: Array, c: Array) -> Array:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def _fract(x: Array) -> Array:
    return np.minimum(x - np.floor(x), np.float32(1 - 2**-24))


def _in_float64(compute: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return lambda x: compute(x.astype(np.float64)).astype(np.float32)


def _dot2(a: Array, b: Array, c: Array) -> Array:
    def halves(x: Array) -> tuple[Array, Array]:
        return tuple((x >> _U32(s)).astype(np.uint16).view(np.float16).astype(np.float64) for s in (0, 16))

    (a0, a1), (b0, b1) = halves(a), halves(b)
    return (a0 * b0 + a1 * b1 + c).astype(np.float32)


# name -> (kinds, function). The kinds are letters of `wave.source`: the result's, then the operands'.
OPERATIONS: dict[str, tuple[str, Callable[..., Array]]] = {
    "mov_b32": ("uu", lambda a: a.copy()),
    "mov_b64": ("UU", lambda a: a.copy()),
    "accvgpr_read_b32": ("uu", lambda a: a.copy()),
    "accvgpr_write_b32": ("uu", lambda a: a.copy()),
    "accvgpr_mov_b32": ("uu", lambda a: a.copy()),
    "not_b32": ("uu", lambda a: ~a),
    "bfrev_b32": ("uu", _reverse),
    "add_u32": ("uuu", lambda a, b: a + b),
    "sub_u32": ("uuu", lambda a, b: a - b),
    "add_i32": ("uuu", lambda a, b: a + b),
    "sub_i32": ("uuu", lambda a, b: a - b),
    "subrev_u32": ("uuu", lambda a, b: b - a),
    "add_u16": ("www", lambda a, b: a + b),
    "sub_u16": ("www", lambda a, b: a - b),
    "lshlrev_b16": ("www", lambda a, b: b << (a & _U16(15))),
    "lshrrev_b16": ("www", lambda a, b: b >> (a & _U16(15))),
    "ashrrev_i16": ("sws", lambda a, b: b >> (a & _U16(15)).astype(np.int16)),
    "and_b32": ("uuu", lambda a, b: a & b),
    "or_b32": ("uuu", lambda a, b: a | b),
    "xor_b32": ("uuu", lambda a, b: a ^ b),
    "xnor_b32": ("uuu", lambda a, b: ~(a ^ b)),
    "lshlrev_b32": ("uuu", lambda a, b: b << (a & _U32(31))),
    "lshrrev_b32": ("uuu", lambda a, b: b >> (a & _U32(31))),
    "ashrrev_i32": ("iui", lambda a, b: b >> (a & _U32(31)).astype(np.int32)),
    "lshlrev_b64": ("UuU", lambda a, b: b << (_u64(a) & _U64(63))),
    "lshrrev_b64": ("UuU", lambda a, b: b >> (_u64(a) & _U64(63))),
    "ashrrev_i64": ("IuI", lambda a, b: b >> (a & _U32(63)).astype(np.int64)),
    "mul_lo_u32": ("uuu", lambda a, b: a * b),
    "mul_hi_u32": ("uuu", lambda a, b: (_u64(a) * b >> _U64(32)).astype(np.uint32)),
    "mul_hi_i32": ("iii", lambda a, b: (a.astype(np.int64) * b >> 32).astype(np.int32)),
    "mul_u32_u24": ("uuu", lambda a, b: (a & _U32(0xFFFFFF)) * (b & _U32(0xFFFFFF))),
    "mul_i32_i24": ("iii", lambda a, b: (a << 8 >> 8) * (b << 8 >> 8)),
    "mad_u32_u24": ("uuuu", lambda a, b, c: (a & _U32(0xFFFFFF)) * (b & _U32(0xFFFFFF)) + c),
    "mad_i32_i24": ("iiii", lambda a, b, c: (a << 8 >> 8) * (b << 8 >> 8) + c),
    "min_i32": ("iii", np.minimum),
    "max_i32": ("iii", np.maximum),
    "min_u32": ("uuu", np.minimum),
    "max_u32": ("uuu", np.maximum),
    "min3_i32": ("iiii", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "max3_i32": ("iiii", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "min3_u32": ("uuuu", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "max3_u32": ("uuuu", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "med3_i32": ("iiii", _med3),
    "add3_u32": ("uuuu", lambda a, b, c: a + b + c),
    "or3_b32": ("uuuu", lambda a, b, c: a | b | c),
    "xor3_b32": ("uuuu", lambda a, b, c: a ^ b ^ c),
    "and_or_b32": ("uuuu", lambda a, b, c: a & b | c),
    "xad_u32": ("uuuu", lambda a, b, c: (a ^ b) + c),
    "lshl_add_u32": ("uuuu", lambda a, b, c: (a << (b & _U32(31))) + c),
    "add_lshl_u32": ("uuuu", lambda a, b, c: (a + b) << (c & _U32(31))),
    "lshl_or_b32": ("uuuu", lambda a, b, c: a << (b & _U32(31)) | c),
    "lshl_add_u64": ("UUuU", lambda a, b, c: (a << (_u64(b) & _U64(7))) + c),
    "bfe_u32": ("uuuu", _field),
    "bfe_i32": ("iuuu", _signed_field),
    "bfi_b32": ("uuuu", lambda a, b, c: a & b | ~a & c),
    "bfm_b32": ("uuu", lambda a, b: ((_U32(1) << (a & _U32(31))) - _U32(1)) << (b & _U32(31))),
    "alignbit_b32": ("uuuu", lambda a, b, c: _low((_u64(a) << _U64(32) | _u64(b)) >> (_u64(c) & _U64(31)))),
    "alignbyte_b32": ("uuuu", lambda a, b, c: _low((_u64(a) << _U64(32) | _u64(b)) >> (_U64(8) * (_u64(c) & _U64(3))))),
    "perm_b32": ("uuuu", _permute),
    "sad_u32": ("uuuu", lambda a, b, c: np.maximum(a, b) - np.minimum(a, b) + c),
    "sad_u16": ("uuuu", lambda a, b, c: _distance16(a, b) + c),
    "bcnt_u32_b32": ("uuu", lambda a, b: np.bitwise_count(a).astype(np.uint32) + b),
    "add_f32": ("fff", lambda a, b: a + b),
    "sub_f32": ("fff", lambda a, b: a - b),
    "subrev_f32": ("fff", lambda a, b: b - a),
    "mul_f32": ("fff", lambda a, b: a * b),
    "fma_f32": ("ffff", floats.fma),
    "fmac_f32": ("fffd", floats.fma),
    # Before gfx942, these round the product before they add.
    "mac_f32": ("fffd", lambda a, b, c: a * b + c),
    "mad_f32": ("ffff", lambda a, b, c: a * b + c),
    "madmk_f32": ("ffff", lambda a, k, b: a * k + b),
    "madak_f32": ("ffff", lambda a, b, k: a * b + k),
    "fmamk_f32": ("ffff", lambda a, k, b: floats.fma(a, k, b)),
    "fmaak_f32": ("ffff", floats.fma),
    "exp_f32": ("ff", _in_float64(np.exp2)),
    "log_f32": ("ff", _in_float64(np.log2)),
    "rcp_f32": ("ff", lambda a: np.float32(1) / a),
    "rcp_iflag_f32": ("ff", lambda a: np.float32(1) / a),
    "rsq_f32": ("ff", lambda a: (1.0 / np.sqrt(a.astype(np.float64))).astype(np.float32)),
    "sqrt_f32": ("ff", np.sqrt),
    "sin_f32": ("ff", lambda a: np.sin(2 * np.pi * a.astype(np.float64)).astype(np.float32)),
    "cos_f32": ("ff", lambda a: np.cos(2 * np.pi * a.astype(np.float64)).astype(np.float32)),
    "fract_f32": ("ff", _fract),
    "floor_f32": ("ff", np.floor),
    "ceil_f32": ("ff", np.ceil),
    "trunc_f32": ("ff", np.trunc),
    "rndne_f32": ("ff", np.rint),
    "ldexp_f32": ("ffi", lambda a, b: np.ldexp(a, b)),
    "cvt_f32_i32": ("fi", lambda a: a.astype(np.float32)),
    "cvt_f32_u32": ("fu", lambda a: a.astype(np.float32)),
    "cvt_i32_f32": ("if", lambda a: _to_int(a, -(2**31), 2**31 - 1).astype(np.int64).astype(np.int32)),
    "cvt_u32_f32": ("uf", lambda a: _to_int(a, 0, 2**32 - 1).astype(np.int64).astype(np.uint32)),
    "cvt_f32_ubyte0": ("fu", lambda a: (a & _U32(255)).astype(np.float32)),
    "cvt_f16_f32": ("hf", lambda a: a.astype(np.float16)),
    "cvt_f32_f16": ("fh", lambda a: a.astype(np.float32)),
    "cvt_f64_f32": ("Ff", lambda a: a.astype(np.float64)),
    "cvt_f32_f64": ("fF", lambda a: a.astype(np.float32)),
    "cvt_pkrtz_f16_f32": ("uff", lambda a, b: _toward_zero(a) | _toward_zero(b) << _U32(16)),
    "cvt_pk_rtz_f16_f32": ("uff", lambda a, b: _toward_zero(a) | _toward_zero(b) << _U32(16)),
    "cvt_pk_bf16_f32": ("uff", lambda a, b: _round_bf16(a) | _round_bf16(b) << _U32(16)),
    "cvt_pk_f16_f32": ("uff", lambda a, b: half_bits(a) | half_bits(b) << _U32(16)),
    "pack_b32_f16": ("uhh", lambda a, b: half_bits(a) | half_bits(b) << _U32(16)),
    "mul_f16": ("hhh", lambda a, b: a * b),
    "add_f16": ("hhh", lambda a, b: a + b),
    "sub_f16": ("hhh", lambda a, b: a - b),
    "add_f64": ("FFF", lambda a, b: a + b),
    "mul_f64": ("FFF", lambda a, b: a * b),
    "fma_f64": ("FFFF", floats.fma64),
    "fmac_f64": ("FFFd", floats.fma64),
    "rcp_f64": ("FF", lambda a: 1.0 / a),
    "div_fixup_f32": ("ffff", floats.div_fixup),
    "div_fixup_f64": ("FFFF", floats.div_fixup),
    "dot2_f32_f16": ("fuuf", lambda a, b, c: _dot2(a, b, c)),
    "dot2acc_f32_f16": ("fuud", lambda a, b, c: _dot2(a, b, c)),
    "dot2c_f32_f16": ("fuud", lambda a, b, c: _dot2(a, b, c)),
}
# Operations that treat a signalling NaN as described in `floats.maximum`.
EXTREMES: dict[str, tuple[str, Callable[..., Array]]] = {
    "max_f32": ("fff", floats.maximum),
    "min_f32": ("fff", floats.minimum),
    "max3_f32": ("ffff", lambda a, b, c, ieee: floats.maximum(floats.maximum(a, b, ieee), c, ieee)),
    "min3_f32": ("ffff", lambda a, b, c, ieee: floats.minimum(floats.minimum(a, b, ieee), c, ieee)),
    "maxmin_f32": ("ffff", lambda a, b, c, ieee: floats.minimum(floats.maximum(a, b, ieee), c, ieee)),
    "minmax_f32": ("ffff", lambda a, b, c, ieee: floats.maximum(floats.minimum(a, b, ieee), c, ieee)),
    "med3_f32": ("ffff", floats.median),
    "max_f16": ("hhh", floats.maximum),
    "min_f16": ("hhh", floats.minimum),
    "max3_f16": ("hhhh", lambda a, b, c, ieee: floats.maximum(floats.maximum(a, b, ieee), c, ieee)),
}
# Operations that flush fp32 subnormals of inputs and results, whatever MODE says: LLVM's "do not support denormals".
FLUSHING = {"exp_f32", "log_f32", "rcp_f32", "rcp_iflag_f32", "rsq_f32", "sqrt_f32", "mac_f32", "mad_f32", "madmk_f32",
            "madak_f32"}  # fmt: skip
# Operations whose result or operands are a word of two fp16 numbers.
PAIRS_OF_HALVES = {"cvt_pkrtz_f16_f32", "cvt_pk_rtz_f16_f32", "cvt_pk_f16_f32", "pack_b32_f16"}
HALVES_IN_A_WORD = PAIRS_OF_HALVES | {"dot2_f32_f16", "dot2acc_f32_f16", "dot2c_f32_f16"}
COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lg": lambda a, b: (a < b) | (a > b),
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "o": lambda a, b: (a == a) & (b == b),
    "u": lambda a, b: (a != a) | (b != b),
    "neq": lambda a, b: a != b,
    "nlt": lambda a, b: ~(a < b),
    "nle": lambda a, b: ~(a <= b),
    "ngt": lambda a, b: ~(a > b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "t": lambda a, b: (a == a) | (b != b) | True,
}
