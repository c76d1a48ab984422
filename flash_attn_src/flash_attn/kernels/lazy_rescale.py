"""Lazy rescale: a wave scales its accumulator only when a row's maximum has grown by much.

A forward subtracts a maximum from the scores of a row. The result does not depend on which one, if the sum of weights
and the accumulator have the same. So a row keeps its maximum until a score is more than HEADROOM above it. Then its
weights are at most 2 ** HEADROOM, which fp16 and bf16 hold with the same relative error. Most blocks scale nothing.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

# In the units of exp2. Weights of a block are at most 2 ** 8.
HEADROOM = tl.constexpr(8.0)
# Triton's interpreter and Tritons before 3.5 lack the branch. They multiply by factors of 1, with the same result.
_HAS_BRANCH = tl.constexpr(hasattr(tl, "map_elementwise") and os.environ.get("TRITON_INTERPRET") != "1")
# Numbers of a thread that one branch skips.
_PACK = tl.constexpr(32)


@triton.jit
def grown(b_m, b_top, HEADROOM: tl.constexpr):
    """The maxima of rows after a block of scores with the maxima b_top: b_m, or b_top where it is far above b_m.

    The difference is compared, because a sum of a large b_m and the headroom may be rounded up. -inf - -inf is NaN,
    which is above nothing.
    """
    return tl.where(b_top - b_m > HEADROOM, b_top, b_m)


@triton.jit
def scale_rows(b_acc, b_alpha, THREADS: tl.constexpr):
    """b_acc [rows, columns] times b_alpha [rows]. A wave skips 32 numbers of each thread where their
    factors are 1. THREADS: of a program.
    """
    if _HAS_BRANCH and b_acc.numel % (THREADS * _PACK) == 0:
        (b_acc,) = tl.map_elementwise(_scale, b_acc, b_alpha[:, None], pack=_PACK)
    else:
        b_acc = b_acc * b_alpha[:, None]
    return b_acc


@triton.jit
def _scale(
    x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15, x16, x17, x18, x19, x20, x21, x22, x23,
    x24, x25, x26, x27, x28, x29, x30, x31,
    f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19, f20, f21, f22, f23,
    f24, f25, f26, f27, f28, f29, f30, f31,
):  # fmt: skip
    """32 numbers times their factors f. The compiler sees which factors are equal, and compares a row's factor once."""
    if (
        (f0 != 1.0) | (f1 != 1.0) | (f2 != 1.0) | (f3 != 1.0) | (f4 != 1.0) | (f5 != 1.0) | (f6 != 1.0) |
        (f7 != 1.0) | (f8 != 1.0) | (f9 != 1.0) | (f10 != 1.0) | (f11 != 1.0) | (f12 != 1.0) | (f13 != 1.0) |
        (f14 != 1.0) | (f15 != 1.0) | (f16 != 1.0) | (f17 != 1.0) | (f18 != 1.0) | (f19 != 1.0) | (f20 != 1.0) |
        (f21 != 1.0) | (f22 != 1.0) | (f23 != 1.0) | (f24 != 1.0) | (f25 != 1.0) | (f26 != 1.0) | (f27 != 1.0) |
        (f28 != 1.0) | (f29 != 1.0) | (f30 != 1.0) | (f31 != 1.0)
    ):  # fmt: skip
        x0, x1, x2, x3 = x0 * f0, x1 * f1, x2 * f2, x3 * f3
        x4, x5, x6, x7 = x4 * f4, x5 * f5, x6 * f6, x7 * f7
        x8, x9, x10, x11 = x8 * f8, x9 * f9, x10 * f10, x11 * f11
        x12, x13, x14, x15 = x12 * f12, x13 * f13, x14 * f14, x15 * f15
        x16, x17, x18, x19 = x16 * f16, x17 * f17, x18 * f18, x19 * f19
        x20, x21, x22, x23 = x20 * f20, x21 * f21, x22 * f22, x23 * f23
        x24, x25, x26, x27 = x24 * f24, x25 * f25, x26 * f26, x27 * f27
        x28, x29, x30, x31 = x28 * f28, x29 * f29, x30 * f30, x31 * f31
    return (
        x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15, x16, x17, x18, x19, x20, x21, x22,
        x23, x24, x25, x26, x27, x28, x29, x30, x31,
    )  # fmt: skip
