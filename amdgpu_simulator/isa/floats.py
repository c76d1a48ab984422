"""Floating-point arithmetic that numpy lacks: products and sums rounded once, minimum and maximum, division. The
formulas are the pseudocode of AMD's instruction set guides.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from amdgpu_simulator.isa.assembly import Array

_TINY32 = np.finfo(np.float32).tiny
# Mask of the mantissa bits that float64 has and float32 has not, and their pattern at a tie between two float32.
_BEYOND, _TIE = np.int64((1 << 29) - 1), np.int64(1 << 28)
_INTEGERS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of float32 (or of values that convert to it exactly), rounded once."""
    product = a.astype(np.float64) * b  # exact
    total = product + c
    result = total.astype(np.float32)
    # A rounded sum may be rounded wrongly again if it is on a tie, or if the result is subnormal.
    ties = np.count_nonzero(total.view(np.int64) & _BEYOND == _TIE)
    small = np.count_nonzero(np.abs(result) < _TINY32)
    if ties or (small and small != np.count_nonzero(total == 0)):
        return _odd_sum(product, np.asarray(c, np.float64)).astype(np.float32)
    return result


def fma16(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of float16, rounded once."""
    return _odd_sum(a.astype(np.float64) * b, c.astype(np.float64)).astype(np.float16)


def fma64(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of float64, rounded once."""
    plain = a * b + c
    parts = np.broadcast_arrays(a, b, c, plain)
    exact = [_exact_sum(*map(float, values)) for values in zip(*(part.ravel() for part in parts), strict=True)]
    return np.array(exact, np.float64).reshape(parts[0].shape)


def _exact_sum(a: float, b: float, c: float, plain: float) -> float:
    if not all(map(math.isfinite, (a, b, c))):
        return plain
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if not exact:
        return plain  # has the correct sign
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def _odd_sum(left: Array, right: Array) -> Array:
    """The sum of float64, rounded to odd: a later rounding to fewer bits is then correct."""
    total = left + right
    part = total - left
    rest = (left - (total - part)) + (right - part)
    even = total.view(np.int64) & 1 == 0
    move = even & (rest != 0) & np.isfinite(total)
    return np.where(move, np.nextafter(total, np.where(rest > 0, np.inf, -np.inf)), total)


def maximum(a: Array, b: Array, ieee: bool | None) -> Array:
    """The larger value. Prefers a number to NaN and +0 to -0.

    ieee: whether a signalling NaN gives a quiet NaN (MODE.IEEE before gfx12); None for gfx12, which treats it as any
    NaN.
    """
    result = np.maximum(a, b)
    return result if _ordinary(result) else _extreme(a, b, ieee, larger=True)


def minimum(a: Array, b: Array, ieee: bool | None) -> Array:
    """The smaller value, with the rules of `maximum`. Prefers -0 to +0."""
    result = np.minimum(a, b)
    return result if _ordinary(result) else _extreme(a, b, ieee, larger=False)


def median(a: Array, b: Array, c: Array, ieee: bool | None) -> Array:
    """The middle value of three; the smallest one if one of them is NaN."""
    result = np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))
    if _ordinary(result):
        return result
    a, b, c = np.broadcast_arrays(a, b, c)
    largest = maximum(maximum(a, b, ieee), c, ieee)
    others = [maximum(b, c, ieee), maximum(a, c, ieee), maximum(a, b, ieee)]
    result = np.where(largest == a, others[0], np.where(largest == b, others[1], others[2]))
    return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), minimum(minimum(a, b, ieee), c, ieee), result)


def _ordinary(values: Array) -> bool:
    """Whether no value is zero or NaN."""
    return bool(np.count_nonzero(np.abs(values) > 0) == values.size)


def _extreme(a: Array, b: Array, ieee: bool | None, *, larger: bool) -> Array:
    a, b = np.broadcast_arrays(a, b)
    integers = _INTEGERS[a.itemsize]
    raw_a, raw_b = a.view(integers), b.view(integers)
    zero = (raw_a & raw_b if larger else raw_a | raw_b).view(a.dtype)
    result = np.where((a == 0) & (b == 0), zero, np.fmax(a, b) if larger else np.fmin(a, b))
    result = np.where(np.isnan(a), np.where(np.isnan(b), quiet(a), b), np.where(np.isnan(b), a, result))
    if ieee:
        result = np.where(is_signalling(b) & ~is_signalling(a), quiet(b), result)
        result = np.where(is_signalling(a), quiet(a), result)
    return result


def _quiet_bit(x: Array) -> Array:
    return _INTEGERS[x.itemsize](1 << np.finfo(x.dtype).nmant - 1)


def quiet(x: Array) -> Array:
    """Quiets NaN. All values must be NaN."""
    return (np.ascontiguousarray(x).view(_INTEGERS[x.itemsize]) | _quiet_bit(x)).view(x.dtype)


def is_signalling(x: Array) -> Array:
    """Which values are signalling NaN."""
    return np.isnan(x) & (np.ascontiguousarray(x).view(_INTEGERS[x.itemsize]) & _quiet_bit(x) == 0)


def clamp(x: Array, keeps_nan: bool) -> Array:
    """Values clamped to 0 to 1; NaN becomes 0 unless MODE.DX10_CLAMP is off."""
    dtype = x.dtype.type
    low = np.maximum(x, dtype(0)) if keeps_nan else np.fmax(x, dtype(0))
    return np.minimum(low, dtype(1)) + dtype(0)  # -0 becomes +0


def classes(x: Array, wanted: Array) -> Array:
    """v_cmp_class: whether a value is of a wanted class. From bit 0 on: signalling NaN, quiet NaN, negative infinity,
    normal, subnormal, zero, then positive zero, subnormal, normal, infinity."""
    tiny = np.finfo(x.dtype).tiny
    negative, absolute, signalling = np.signbit(x), np.abs(x), is_signalling(x)
    kinds = [signalling, np.isnan(x) & ~signalling]
    for sign in (True, False):
        parts = [np.isinf(x), np.isfinite(x) & (absolute >= tiny), (absolute > 0) & (absolute < tiny), absolute == 0]
        kinds += [part & (negative == sign) for part in (parts if sign else parts[::-1])]
    result = np.zeros(np.broadcast_shapes(x.shape, wanted.shape), bool)
    for bit, kind in enumerate(kinds):
        result = result | (kind & ((wanted >> np.uint32(bit) & np.uint32(1)) > 0))
    return result


# A division is v_div_scale of both operands, steps with products, v_div_fmas, v_div_fixup. Key: bytes of the type.
# Values: the exponent by which operands are scaled, and the differences of exponents from which on an operand is scaled
# or the quotient underflows.
_SCALES = {4: (64, 96, 23, 150), 8: (128, 768, 53, 1075)}


def exponent(x: Array) -> Array:
    """The biased exponent, as it is stored: 0 for zeros and subnormals."""
    bits = np.finfo(x.dtype).nmant
    mask = (1 << 8 * x.itemsize - 1 - bits) - 1
    return (np.ascontiguousarray(x).view(_INTEGERS[x.itemsize]) >> _INTEGERS[x.itemsize](bits)).astype(np.int64) & mask


def div_scale(which: Array, denominator: Array, numerator: Array) -> tuple[Array, Array]:
    """Scales one operand of a division if a step would overflow or underflow. Returns it, and whether v_div_fmas must
    scale back.

    The guides leave gaps that tinygrad's tests, which ran on RDNA3, fill: a zero operand requests scaling back, and the
    exponents decide whether a quotient counts as subnormal. Raises NotImplementedError for cases that neither covers.
    """
    which, denominator, numerator = np.broadcast_arrays(which, denominator, numerator)
    scale, far, small, _ = _SCALES[which.itemsize]
    up, down = np.ldexp(which, scale), np.ldexp(which, -scale)
    is_denominator, is_numerator = which == denominator, which == numerator

    def subnormal(x: Array) -> Array:
        return (x != 0) & (np.abs(x) < np.finfo(x.dtype).tiny)

    # Judged by the exponents alone, the quotient may be subnormal.
    quotient = exponent(numerator) - exponent(denominator) <= np.finfo(which.dtype).minexp
    inverse = subnormal(which.dtype.type(1) / denominator)
    special = (numerator == 0) | (denominator == 0) | ~np.isfinite(numerator) | ~np.isfinite(denominator)
    if (inverse & quotient & is_denominator & ~special).any():
        raise NotImplementedError("v_div_scale of a denominator whose reciprocal and quotient are subnormal")
    cases = [
        ((numerator == 0) | (denominator == 0), np.full_like(which, np.nan), True),
        (exponent(numerator) - exponent(denominator) >= far, np.where(is_denominator, up, which), True),
        (subnormal(denominator), up, False),
        (inverse & quotient, which, True),
        (inverse, down, False),
        (quotient, np.where(is_numerator, up, which), True),
        (exponent(numerator) <= small, up, False),
    ]
    chosen = [case for case, _, _ in cases]
    result = np.select(chosen, [value for _, value, _ in cases], which)
    return result.astype(which.dtype), np.select(chosen, [np.full(which.shape, flag) for *_, flag in cases], False)


def div_fmas(a: Array, b: Array, c: Array, scaled: Array) -> Array:
    """The last step of a division: a product and sum, scaled back if v_div_scale requested it."""
    result = fma(a, b, c) if a.itemsize == 4 else fma64(a, b, c)
    scale = _SCALES[a.itemsize][0]
    bias = np.finfo(a.dtype).maxexp - 1  # the exponent of 1.0
    return np.where(scaled, np.ldexp(result, np.where(exponent(c) > bias, scale, -scale)), result)


def div_fixup(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """Sets the sign of the quotient. For NaN, zero and infinite operands, returns their quotient."""
    quotient, denominator, numerator = np.broadcast_arrays(quotient, denominator, numerator)
    dtype = quotient.dtype.type
    sign = np.where(np.signbit(denominator) ^ np.signbit(numerator), dtype(-1), dtype(1))
    below = -_SCALES[quotient.itemsize][3]
    cases = [
        (np.isnan(numerator), quiet(numerator)),
        (np.isnan(denominator), quiet(denominator)),
        ((denominator == 0) & (numerator == 0), np.full_like(quotient, -np.nan)),
        (np.isinf(denominator) & np.isinf(numerator), np.full_like(quotient, -np.nan)),
        ((denominator == 0) | np.isinf(numerator), sign * dtype(np.inf)),
        (np.isinf(denominator) | (numerator == 0), sign * dtype(0)),
        (exponent(numerator) - exponent(denominator) < below, sign * dtype(0)),
    ]
    return np.select([case for case, _ in cases], [value for _, value in cases], sign * np.abs(quotient)).astype(dtype)
