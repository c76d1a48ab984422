"""Launch parameters of every kernel per GPU family, operation, element size and head-dim bucket.

One table, read by the ahead-of-time compiler and by the JIT path.

cuda: measured on an H200 with code of Triton 3.7.1 (2026-11-21, bf16, dims 64 and 128, with and without causal
mask, the second column with ALiBi); the others follow by size.
cdna, rdna2, rdna3: no such GPU was at hand. Each row is the largest tile of a list whose compiled code spills no
vector register to memory, or spills least: `python -m rocm_wheels inspect` shows the few of rdna that do. Kernels
with softcap, ALiBi and dropout hold more values a score, so they have rows of their own. rdna2 has no matrix cores:
a thread keeps whole rows of its operands, so the head dim is taken in pieces of 16.
"""

from __future__ import annotations

from typing import NamedTuple

from flash_attn.runtime.variants import Variant


class Config(NamedTuple):
    """One launch configuration. depth: head-dim piece of the score products, 0 for the whole at once
    (see `common.deep_dot`). options: the compiler's own, beside warps and stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int = 1
    depth: int = 0
    options: tuple[tuple[str, int], ...] = ()


def family(target: str) -> str:
    """The tuning family of a target: targets of one family share their tiles."""
    for prefix, name in _FAMILIES:
        if target.startswith(prefix):
            return name
    raise ValueError(f"no tuning for target {target!r}: add its family to flash_attn/kernels/tuning.py")


def config(target: str, variant: Variant) -> Config:
    """The launch configuration of one variant on one target. Raises ValueError for an unknown target."""
    if variant.op == "bwd-delta":
        return Config(64 if variant.block_d <= 64 else 16, 0, 4)
    bits = 32 if variant.dtype == "fp32" else 16
    table = _TABLE[family(target)]
    if variant.op == "probabilities":
        return Config(32, 32, 4, depth=16)  # asked for when debugging; never worth a tile of its own
    row = (variant.op, bits, variant.block_d)
    if variant.op == "fwd-paged":
        return table.get(row, table["fwd", bits, variant.block_d])[1]
    plain, extra = table[row]
    return extra if variant.extra else plain


# gfx12 has gfx11's wavefronts and registers and a WMMA that holds less: what fits one fits the other.
_FAMILIES = (("sm_", "cuda"), ("gfx9", "cdna"), ("gfx10", "rdna2"), ("gfx11", "rdna3"), ("gfx12", "rdna3"))

C = Config
_TABLE: dict[str, dict[tuple[str, int, int], tuple[Config, Config]]] = {
    # (op, element bits, head-dim bucket): (plain, with softcap, ALiBi and dropout)
    "cuda": {
        ("fwd", 16, 32): (C(128, 64, 4, 3), C(64, 64, 4, 3)),
        ("fwd", 16, 64): (C(128, 64, 8, 3), C(64, 64, 4, 3)),
        ("fwd", 16, 128): (C(128, 128, 8, 3), C(64, 64, 4, 3)),
        ("fwd", 16, 256): (C(64, 32, 4, 2), C(64, 32, 4, 2)),
        ("fwd", 32, 32): (C(64, 32, 4, 2), C(32, 32, 4, 2)),
        ("fwd", 32, 64): (C(32, 32, 4, 2), C(32, 32, 4, 2)),
        ("fwd", 32, 128): (C(32, 32, 4, 2), C(32, 32, 4, 2)),
        ("fwd", 32, 256): (C(16, 16, 4), C(16, 16, 4)),
        ("bwd-dkdv", 16, 32): (C(64, 128, 8, 2), C(64, 64, 4, 2)),
        ("bwd-dkdv", 16, 64): (C(64, 64, 4, 3), C(64, 64, 4, 2)),
        ("bwd-dkdv", 16, 128): (C(64, 64, 4, 2), C(32, 64, 4, 2)),
        ("bwd-dkdv", 16, 256): (C(32, 32, 4, 2), C(32, 32, 4, 2)),
        ("bwd-dkdv", 32, 32): (C(32, 32, 4, 2), C(32, 32, 4, 2)),
        ("bwd-dkdv", 32, 64): (C(32, 32, 4, 2), C(32, 32, 4, 2)),
        ("bwd-dkdv", 32, 128): (C(32, 32, 4, 2), C(32, 32, 4, 2)),
        ("bwd-dkdv", 32, 256): (C(16, 16, 4), C(16, 16, 4)),
        ("bwd-dq", 16, 32): (C(128, 64, 8, 3), C(64, 64, 4, 2)),
        ("bwd-dq", 16, 64): (C(64, 64, 4, 3), C(64, 64, 4, 3)),
        ("bwd-dq", 16, 128): (C(128, 64, 8, 3), C(64, 64, 4, 2)),
        ("bwd-dq", 16, 256): (C(32, 32, 4, 2), C(32, 32, 4, 2)),
        ("bwd-dq", 32, 32): (C(32, 32, 4, 2), C(32, 32, 4, 2)),
        ("bwd-dq", 32, 64): (C(32, 32, 4, 2), C(32, 32, 4, 2)),
        ("bwd-dq", 32, 128): (C(32, 32, 4, 2), C(32, 32, 4, 2)),
        ("bwd-dq", 32, 256): (C(16, 16, 4), C(16, 16, 4)),
    },
    "cdna": {
        ("fwd", 16, 32): (C(128, 64, 4, options=(("waves_per_eu", 2),)), C(128, 64, 8)),
        ("fwd", 16, 64): (C(128, 64, 4, options=(("waves_per_eu", 2),)), C(128, 64, 8)),
        ("fwd", 16, 128): (C(128, 64, 8), C(128, 64, 8)),
        ("fwd", 16, 256): (C(128, 32, 4), C(128, 32, 4)),
        ("fwd", 32, 32): (C(128, 32, 4, options=(("waves_per_eu", 2),)), C(128, 32, 4, options=(("waves_per_eu", 2),))),
        ("fwd", 32, 64): (C(128, 32, 4, options=(("waves_per_eu", 2),)), C(128, 32, 4, options=(("waves_per_eu", 2),))),
        ("fwd", 32, 128): (C(128, 32, 8), C(128, 32, 4)),
        ("fwd", 32, 256): (C(64, 32, 4), C(64, 64, 4)),
        ("bwd-dkdv", 16, 32): (C(64, 128, 8), C(64, 64, 4)),
        ("bwd-dkdv", 16, 64): (C(32, 128, 8), C(32, 128, 4)),
        ("bwd-dkdv", 16, 128): (C(32, 64, 4), C(32, 64, 4)),
        ("bwd-dkdv", 16, 256): (C(16, 32, 4), C(16, 64, 4)),
        ("bwd-dkdv", 32, 32): (C(32, 128, 8), C(64, 64, 4)),
        ("bwd-dkdv", 32, 64): (C(64, 64, 4), C(64, 64, 4)),
        ("bwd-dkdv", 32, 128): (C(32, 32, 4), C(16, 64, 4)),
        ("bwd-dkdv", 32, 256): (C(16, 32, 4), C(16, 32, 4)),
        ("bwd-dq", 16, 32): (C(128, 64, 8), C(64, 64, 4)),
        ("bwd-dq", 16, 64): (C(128, 64, 8), C(64, 64, 4)),
        ("bwd-dq", 16, 128): (C(128, 32, 8), C(64, 64, 4)),
        ("bwd-dq", 16, 256): (C(64, 32, 4), C(64, 16, 4)),
        ("bwd-dq", 32, 32): (C(64, 64, 4), C(64, 64, 4)),
        ("bwd-dq", 32, 64): (C(64, 32, 4), C(64, 32, 4)),
        ("bwd-dq", 32, 128): (C(64, 32, 4), C(64, 32, 4)),
        ("bwd-dq", 32, 256): (C(32, 16, 4), C(32, 16, 4)),
    },
    "rdna2": {
        ("fwd", 16, 32): (C(64, 16, 8, depth=16), C(64, 16, 8, depth=16)),
        ("fwd", 16, 64): (C(64, 16, 8, depth=16), C(64, 16, 8, depth=16)),
        ("fwd", 16, 128): (C(64, 16, 8, depth=16), C(64, 16, 8, depth=16)),
        ("fwd", 16, 256): (C(32, 16, 8, depth=16), C(32, 16, 8, depth=16)),
        ("fwd", 32, 32): (C(32, 16, 8, depth=16), C(32, 16, 8, depth=16)),
        ("fwd", 32, 64): (C(32, 16, 8, depth=16), C(32, 16, 8, depth=16)),
        ("fwd", 32, 128): (C(32, 16, 8, depth=16), C(32, 16, 8, depth=16)),
        ("fwd", 32, 256): (C(32, 16, 8, depth=16), C(32, 16, 8, depth=16)),
        ("bwd-dkdv", 16, 32): (C(16, 32, 4, depth=16), C(16, 32, 8, depth=16)),
        ("bwd-dkdv", 16, 64): (C(16, 32, 4, depth=16), C(16, 16, 8, depth=16)),
        ("bwd-dkdv", 16, 128): (C(16, 32, 4, depth=16), C(16, 16, 16, depth=16)),
        ("bwd-dkdv", 16, 256): (C(16, 32, 8, depth=16), C(16, 16, 16, depth=16)),
        ("bwd-dkdv", 32, 32): (C(16, 16, 16, depth=16), C(16, 16, 16, depth=16)),
        ("bwd-dkdv", 32, 64): (C(16, 16, 16, depth=16), C(16, 16, 16, depth=16)),
        ("bwd-dkdv", 32, 128): (C(16, 16, 16, depth=16), C(16, 16, 16, depth=16)),
        ("bwd-dkdv", 32, 256): (C(16, 16, 16, depth=16), C(16, 16, 16, depth=16)),
        ("bwd-dq", 16, 32): (C(64, 16, 8, depth=16), C(32, 16, 4, depth=16)),
        ("bwd-dq", 16, 64): (C(64, 16, 8, depth=16), C(16, 16, 8, depth=16)),
        ("bwd-dq", 16, 128): (C(64, 16, 8, depth=16), C(16, 16, 8, depth=16)),
        ("bwd-dq", 16, 256): (C(32, 16, 8, depth=16), C(16, 16, 8, depth=16)),
        ("bwd-dq", 32, 32): (C(16, 16, 8, depth=16), C(16, 16, 8, depth=16)),
        ("bwd-dq", 32, 64): (C(16, 16, 8, depth=16), C(16, 16, 8, depth=16)),
        ("bwd-dq", 32, 128): (C(16, 16, 8, depth=16), C(16, 16, 8, depth=16)),
        ("bwd-dq", 32, 256): (C(16, 16, 8, depth=16), C(16, 16, 8, depth=16)),
    },
    "rdna3": {
        ("fwd", 16, 32): (C(128, 32, 8), C(128, 32, 8)),
        ("fwd", 16, 64): (C(128, 32, 8), C(128, 32, 8)),
        ("fwd", 16, 128): (C(128, 32, 8), C(128, 32, 8, depth=64)),
        ("fwd", 16, 256): (C(64, 16, 8), C(64, 16, 8, depth=64)),
        ("fwd-paged", 16, 128): (C(64, 32, 8, depth=32), C(64, 32, 8, depth=32)),
        ("fwd-paged", 16, 256): (C(32, 16, 8, depth=32), C(32, 16, 8, depth=32)),
        ("fwd", 32, 32): (C(128, 32, 8, depth=16), C(128, 32, 8, depth=16)),
        ("fwd", 32, 64): (C(128, 16, 8, depth=32), C(128, 16, 8, depth=32)),
        ("fwd", 32, 128): (C(64, 16, 8, depth=32), C(64, 16, 8, depth=32)),
        ("fwd", 32, 256): (C(32, 16, 8, depth=32), C(32, 16, 8, depth=32)),
        ("bwd-dkdv", 16, 32): (C(32, 32, 4), C(32, 32, 4)),
        ("bwd-dkdv", 16, 64): (C(32, 32, 4, depth=32), C(32, 32, 8)),
        ("bwd-dkdv", 16, 128): (C(16, 32, 8, depth=16), C(16, 32, 8, depth=16)),
        ("bwd-dkdv", 16, 256): (C(16, 16, 8, depth=32), C(16, 16, 8, depth=32)),
        ("bwd-dkdv", 32, 32): (C(32, 32, 8, depth=16), C(16, 32, 8, depth=16)),
        ("bwd-dkdv", 32, 64): (C(16, 32, 8, depth=16), C(16, 16, 8, depth=16)),
        ("bwd-dkdv", 32, 128): (C(16, 16, 8, depth=16), C(16, 16, 16, depth=16)),
        ("bwd-dkdv", 32, 256): (C(16, 16, 16, depth=16), C(16, 16, 16, depth=16)),
        ("bwd-dq", 16, 32): (C(64, 32, 4), C(64, 32, 8)),
        ("bwd-dq", 16, 64): (C(64, 32, 8), C(32, 32, 8, depth=32)),
        ("bwd-dq", 16, 128): (C(64, 32, 8, depth=32), C(16, 16, 8, depth=16)),
        ("bwd-dq", 16, 256): (C(32, 16, 8, depth=32), C(32, 16, 8, depth=32)),
        ("bwd-dq", 32, 32): (C(32, 32, 8, depth=16), C(32, 32, 8, depth=16)),
        ("bwd-dq", 32, 64): (C(32, 16, 8, depth=16), C(16, 16, 8, depth=16)),
        ("bwd-dq", 32, 128): (C(32, 16, 8, depth=16), C(16, 16, 8, depth=16)),
        ("bwd-dq", 32, 256): (C(16, 16, 8, depth=16), C(16, 16, 16, depth=16)),
    },
}
